"""The calls of a rank: which, at which line, how often. Noted at each call, reported if ranks are stuck."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from .buffers import buffer_of

if TYPE_CHECKING:
    from types import TracebackType

    from ..trace import Trace
    from .buffers import Array

Facts: TypeAlias = dict[str, Any]  # fields of errors.Wait, by their names
FunctionT = TypeVar("FunctionT", bound=Callable[..., object])

MOST_TOLD = 16  # lines, of those in which a rank has called something


class Call(NamedTuple):
    """A call of Comm: `count` elements of `dtype`, the `nth` collective on the communicator named `comm`.

    count and root are -1, dtype is "" if there is none; nth is 0 if it is no collective (sendrecv).
    """

    op: str
    line: str = ""
    count: int = -1  # type: ignore[assignment]
    dtype: str = ""
    root: int = -1
    comm: str = ""
    nth: int = 0

    def facts(self) -> Facts:
        """Return the fields of errors.Wait that are about the call, whatever part of it the rank is in."""
        return {name: getattr(self, name) for name in ("count", "dtype", "root", "comm", "nth")}


SENDRECV = Call("sendrecv")


class Calls:
    """The calls of one rank in a run, on all its communicators."""

    __slots__ = ("counts", "last")

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}  # (op, line) -> times
        self.last: Call | tuple[str, str] | None = None  # (op, line): of a message

    def note(self, call: Call | tuple[str, str]) -> None:
        """Count a Call, or the (op, line) of a message, that begins."""
        self.last = call
        key = call[0], call[1]
        self.counts[key] = self.counts.get(key, 0) + 1

    def times(self, op: str, line: str) -> tuple[tuple[str, str, int], ...]:
        """Return ((op, line, times),), how often this has begun, for a rank that waits in it."""
        return ((op, line, self.counts.get((op, line), 1)),)

    def facts(self) -> Facts:
        """Return the fields of errors.Wait that say how far this rank has come."""
        counts = tuple((op, line, n) for (op, line), n in self.counts.items())[-MOST_TOLD:]
        if self.last is None:
            return {"counts": counts}
        call = self.last.facts() if isinstance(self.last, Call) else {}
        return {**call, "op": self.last[0], "line": self.last[1], "counts": counts}


def only_calls(method: str) -> Callable[[FunctionT], FunctionT]:
    """Mark a function f(comm, x) that does nothing but call `comm.all_reduce(x)` and return it: method "all_reduce".

    Real ranks can then do it in the background without Python (comm/background.py).
    """

    def mark(function: FunctionT) -> FunctionT:
        function.only_calls = method  # type: ignore[attr-defined]
        return function

    return mark


class Caller(Protocol):
    """A communicator, as far as it counts calls."""

    calling: Call | None
    collectives: int
    name: str

    @property
    def calls(self) -> Calls: ...

    @property
    def trace(self) -> Trace: ...


class PartOf:
    """`with PartOf(comm, "broadcast", x, root):` what `comm` does meanwhile is a part of that collective."""

    __slots__ = ("comm", "outer")

    def __init__(self, comm: Caller, op: str, x: Array | None = None, root: int = -1) -> None:
        self.comm, self.outer = comm, comm.calling
        if self.outer is None:  # otherwise it is itself a part of a collective
            comm.calling = begin(comm, op, x, root)

    def __enter__(self) -> Call | None:
        return self.comm.calling

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.comm.calling = self.outer


def begin(comm: Caller, op: str, x: Array | None = None, root: int = -1, line: str | None = None) -> Call:
    """Count the collective `op` that `comm` begins, and return its Call."""
    comm.collectives += 1
    if line is None:
        line = comm.trace.line() if comm.trace.enabled else ""
    count, dtype = (-1, "") if x is None else buffer_of(x, op)[1:3]
    call = Call(op, line, count, dtype, root, comm.name, comm.collectives)
    comm.calls.note(call)
    return call

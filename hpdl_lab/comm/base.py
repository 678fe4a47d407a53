"""The one interface that every back end keeps: what a distributed function may ask of its communicator."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, overload

from ..trace import Event, Trace
from .buffers import ArrayT, buffer_of, copy_into, copy_of, is_tensor, new_like
from .calls import SENDRECV, Call, Calls, PartOf, only_calls

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .buffers import Array


Row: TypeAlias = dict[str, Any]  # of numbers and words that a rank reports
OnRow: TypeAlias = Callable[[Row], object]


class PerRank(list[Any]):
    """An argument that gives rank i item i: `sim.run(3, f, PerRank([a, b, c]))`, and likewise for `lab.run`."""


class Results(list[Any]):
    """The return values of the ranks, in rank order, with the record of the run.

    events: list[trace.Event] of all ranks, made at first use; rows: list of dicts that ranks reported;
    seconds: makespan (virtual on simulated ranks).
    """

    def __init__(
        self,
        values: Iterable[Any] = (),
        events: Iterable[Event] = (),
        rows: Iterable[Row] = (),
        seconds: float = 0.0,
    ) -> None:
        super().__init__(values)
        self._events: Iterable[Event] = events
        self.rows = list(rows)
        self.seconds = seconds

    @property
    def events(self) -> list[Event]:
        if not isinstance(self._events, list):
            self._events = list(self._events)
        return self._events

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_events": self.events}


class Work(ABC):
    """A message under way."""

    @abstractmethod
    def wait(self) -> Any:
        """Block until the message has been sent or received. Until then its tensor must not be touched."""

    @abstractmethod
    def test(self) -> bool:
        """True when `wait` would return at once."""


class Done(Work):
    """Work that has ended: `wait` returns the value, or raises the error, that it ended with."""

    def __init__(self, value: object = None, error: BaseException | None = None) -> None:
        self.value, self.error = value, error

    @classmethod
    def of(cls, fn: Callable[..., object], *args: object) -> Done:
        """Call `fn(*args)` here and now; what it raises is kept for `wait`."""
        try:
            return cls(fn(*args))
        except Exception as error:
            return cls(error=error)

    def wait(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value

    def test(self) -> bool:
        return True


class Comm(ABC):
    """A group of ranks, seen from one of them.

    Messages between two ranks arrive in the order in which they were sent. Tensors and arrays are contiguous; a message
    carries its dtype and count, and both ends must agree. The collectives below are the plainest that are right, with
    rank 0 as the hub. A back end replaces them with its best.
    """

    rank: int
    size: int
    node_rank = 0  # rank among the ranks of the same host
    node_size = 1
    device = "cpu"
    simulated = False  # whether the ranks are simulated, and share a process
    name = ""  # "" of the run's, "split 1 color 0" of a part: how the report of a stuck run calls it

    def __init__(
        self,
        rank: int,
        size: int,
        trace: Trace,
        on_row: OnRow | None = None,
        calls: Calls | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.trace = trace
        self.calls = Calls() if calls is None else calls
        self.collectives = 0  # called here so far: the nth of one rank meets the nth of the others
        self.splits = 0
        self.calling: Call | None = None  # the one that messages are now a part of
        self.rows: list[Row] = []
        self.on_row = on_row  # called with each row as it is reported; None keeps rows for the end of the run

    @property
    def has_background(self) -> bool:
        """True if `background` is asynchronous; else it runs at once."""
        return False

    # -- messages ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def isend(self, x: Array, dst: int) -> Work:
        """Start sending `x` to rank `dst`; returns Work."""

    @abstractmethod
    def irecv(self, x: Array, src: int) -> Work:
        """Start receiving into `x` from rank `src`; returns Work."""

    def send(self, x: Array, dst: int) -> None:
        """Send `x` to rank `dst`; returns when `x` may be changed."""
        self.isend(x, dst).wait()

    def recv(self, x: ArrayT, src: int) -> ArrayT:
        """Receive into `x` from rank `src`; returns `x`."""
        self.irecv(x, src).wait()
        return x

    def sendrecv(self, x: Array, dst: int, y: ArrayT, src: int) -> ArrayT:
        """Send `x` to rank `dst` while receiving into `y` from rank `src`; returns `y`."""
        outer = self.calling
        self.calling = outer or SENDRECV
        try:
            received = self.irecv(y, src)
            sent = self.isend(x, dst)
            received.wait()
            sent.wait()
        finally:
            self.calling = outer
        return y

    # -- ranks ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def split(self, color: object, key: object = 0) -> Comm:
        """Return the communicator of the ranks that gave the same `color`, ordered by (key, rank). Collective."""

    def name_of_part(self, color: object) -> str:
        """Return the name of the next part that is split from this communicator."""
        self.splits += 1
        return f"{self.name}{' ' if self.name else ''}split {self.splits} color {color!r:.20}"

    @abstractmethod
    def allocate(self, shape: int | Sequence[int], dtype: str | torch.dtype = "float32") -> Tensor:
        """Return a zeroed tensor, in memory that the ranks of a node share if they can: all_reduce copies nothing.

        Collective: every rank calls it with the same shape and dtype.
        """

    def views(self, x: ArrayT) -> list[ArrayT]:
        """Return the tensors of all ranks, in rank order; `x` is this rank's. It is their memory, nothing is copied.

        `x` is a tensor of `allocate`, or a part of one, the same part on every rank. To read what another rank has
        written, or to overwrite what it has read, first meet it in a barrier.

        Raises:  ValueError if the ranks do not share the memory of `x`.
        """
        raise ValueError("this tensor is not in memory that the ranks share: make it with comm.allocate")

    def background(self, fn: Callable[..., object], *args: Any, after: Sequence[Work] = ()) -> Work:
        """Start `fn(comm, *args)` asynchronously and return at once; `comm` has the same ranks, but other messages.

        What a communicator is given runs one after the other, in the order given, which is the same on every rank (as
        in a CUDA stream). It may be called inside autograd's hooks, and the tensors in `args` are not to be touched
        until `wait`. If nothing is asynchronous, `fn` runs at once, in the foreground.

        after:   Works that `background` of this rank's communicators returned, and that have to end before `fn` begins.
        Returns: Work, whose wait() returns what `fn` returned or raises what it raised.
        Raises:  TypeError if `fn` cannot be called.
        """
        require_callable(fn)
        return Done.of(fn, self, *args)

    def compute(self, seconds: float = 0.0, flops: float = 0.0) -> None:
        """Spend virtual time on simulated ranks, whose arithmetic is free; nothing on real ranks."""
        return None

    def report(self, **row: object) -> None:
        """Stream one row (loss, samples/s, ...) to the watcher of this run; rows also end up in `Results.rows`."""
        row = {"rank": self.rank, **row}
        self.rows.append(row)
        if self.on_row is not None:
            self.on_row(row)

    def check_peer(self, peer: object, word: str) -> None:
        """Raise ValueError unless `peer` is another rank of this communicator."""
        if not isinstance(peer, int):
            where = "first comes the tensor, then the rank, an int: comm.send(x, dst), comm.recv(x, src)"
            raise ValueError(f"rank {self.rank} {word} something of type {type(peer).__name__}: {where}")
        if not 0 <= peer < self.size:
            raise ValueError(f"rank {self.rank} {word} rank {peer}: ranks here are 0 to {self.size - 1}")
        if peer == self.rank:
            raise ValueError(f"rank {self.rank} {word} itself: copy the tensor instead")

    # -- collectives: naive and right ---------------------------------------------------------------------------------

    def broadcast(self, x: ArrayT, root: int = 0) -> ArrayT:
        """Copy `x` of rank `root` into `x` of every rank; returns `x`."""
        with PartOf(self, "broadcast", x, root):
            if self.rank == root:
                for work in [self.isend(x, to) for to in range(self.size) if to != root]:
                    work.wait()
            else:
                self.recv(x, root)
        return x

    def gather(self, x: ArrayT, root: int = 0) -> ArrayT | None:
        """Return, on `root`, the (size, *x.shape) stack of every rank's `x`; None elsewhere."""
        with PartOf(self, "gather", x, root):
            if self.rank != root:
                return self.send(x, root)
            out = new_like(x, (self.size, *x.shape))
            copy_into(out[root], x)
            for work in [self.irecv(out[source], source) for source in range(self.size) if source != root]:
                work.wait()
            return out

    def scatter(self, x: Array | None, out: ArrayT, root: int = 0) -> ArrayT:
        """Copy `x[r]` of rank `root` into `out` of rank r; returns `out`. `x` may be None elsewhere."""
        with PartOf(self, "scatter", out, root):
            if self.rank != root:
                return self.recv(out, root)
            rows = cast("Array", x)
            copy_into(out, rows[root])
            for work in [self.isend(rows[to], to) for to in range(self.size) if to != root]:
                work.wait()
            return out

    def all_gather(self, x: ArrayT) -> ArrayT:
        """Return the (size, *x.shape) stack of every rank's `x`, on every rank."""
        with PartOf(self, "all_gather", x):
            out = self.gather(x)
            return self.broadcast(new_like(x, (self.size, *x.shape)) if out is None else out)

    def reduce(self, x: ArrayT, root: int = 0) -> ArrayT | None:
        """Return, on `root`, the sum of every rank's `x`, added in rank order; None elsewhere."""
        with PartOf(self, "reduce", x, root):
            stack = self.gather(x, root)
            return None if stack is None else sum_in_rank_order(stack)

    @overload
    def all_reduce(self, x: ArrayT, async_op: Literal[False] = False) -> ArrayT: ...

    @overload
    def all_reduce(self, x: ArrayT, async_op: Literal[True]) -> Work: ...

    def all_reduce(self, x: ArrayT, async_op: bool = False) -> ArrayT | Work:
        """Replace `x` by its sum over ranks, bitwise the same on every rank; returns `x`.

        async_op: as in torch: begin it in the background, and return Work at once (see `background`).
        """
        if async_op:
            return self.background(best_all_reduce, x)
        with PartOf(self, "all_reduce", x):
            total = self.reduce(x)
            if total is not None:
                copy_into(x, total)
            return self.broadcast(x)

    def reduce_scatter(self, x: ArrayT) -> ArrayT:
        """Return row r, on rank r, of the sum over ranks of `x`, whose first dimension is the number of ranks."""
        if len(x) != self.size:
            raise ValueError(f"reduce_scatter on {self.size} ranks needs {self.size} rows, got {len(x)}")
        with PartOf(self, "reduce_scatter", x):
            total = self.reduce(x)
            return self.scatter(total, new_like(x, x.shape[1:]))

    def all_to_all(self, x: ArrayT) -> ArrayT:
        """Return a tensor whose row s is row `rank` of rank s's `x`, whose first dimension is the number of ranks."""
        if len(x) != self.size:
            raise ValueError(f"all_to_all on {self.size} ranks needs {self.size} rows, got {len(x)}")
        with PartOf(self, "all_to_all", x):
            out = new_like(x, x.shape)
            copy_into(out[self.rank], x[self.rank])
            others = [r for r in range(self.size) if r != self.rank]
            works = [self.irecv(out[r], r) for r in others] + [self.isend(x[r], r) for r in others]
            for work in works:
                work.wait()
            return out


@only_calls("all_reduce")
def best_all_reduce(comm: Comm, x: ArrayT) -> ArrayT:
    """Add `x` over ranks by the communicator's own all-reduce: the best that its back end has."""
    return comm.all_reduce(x)


def require_callable(fn: object) -> None:
    """Raise TypeError unless `fn` is what comm.background can call."""
    if not callable(fn):
        kind = type(fn).__name__
        raise TypeError(f"comm.background got something of type {kind}: first comes a function, which is given comm")


def sum_in_rank_order(stack: ArrayT) -> ArrayT:
    """Sum over the first dimension, always in the same order; 16-bit floats add in float32 and are rounded once."""
    rows: Any = stack
    if buffer_of(stack).dtype in ("bfloat16", "float16"):
        rows = rows.float() if is_tensor(rows) else rows.astype("float32")
    total: Any = copy_of(rows[0])
    for row in rows[1:]:
        total += row
    return total.to(stack.dtype) if is_tensor(stack) else total.astype(stack.dtype, copy=False)


# -- who belongs together after a split: decided by every rank for all of them, so that all raise or none -----------


def split_group_of(notes: list[bytes], rank: int) -> list[int]:
    """Return the part to which `rank` belongs. notes: pickled (color, key) of every rank, in rank order."""
    return next(part for part in split_groups([pickle.loads(note) for note in notes]) if rank in part)


def split_groups(answers: list[tuple[Any, Any]]) -> list[list[int]]:
    """Return the ranks of each color, ordered by (key, rank). answers: (color, key) of every rank, in rank order.

    Raises ValueError, the same for every rank.
    """
    parts: list[list[int]] = []
    for r, (color, _) in enumerate(answers):
        if not color == color:  # as nan, which would belong to no part
            raise ValueError(f"color {color!r} of rank {r} does not equal itself")
        part = next((part for part in parts if answers[part[0]][0] == color), None)
        if part is None:
            parts.append([r])
        else:
            part.append(r)
    return [_in_order(part, answers) for part in parts]


def _in_order(part: list[int], answers: list[tuple[Any, Any]]) -> list[int]:
    """Return `part` sorted by (key, rank)."""
    keys = [(answers[r][1], r) for r in part]
    try:
        return [r for _, r in sorted(keys)]
    except TypeError:
        text = ", ".join(f"{key!r} of rank {r}" for key, r in keys)
        raise ValueError(f"keys of one color that cannot be compared: {text}") from None

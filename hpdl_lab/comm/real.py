"""Communicators of real ranks: a transport for messages, shared memory for collectives, a status that others read."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, overload

from ..features import compiled_module
from ..trace import Trace
from .background import Background
from .base import Comm, best_all_reduce, require_callable, split_group_of
from .buffers import DTYPES, ITEMSIZE, ArrayT, buffer_of, is_tensor, new_like
from .calls import Facts, PartOf, begin
from .errors import CommError, ForgottenWait, Mismatch
from .shm import SharedRanks
from .status.report import describe_mismatch
from .status.waiting import SPIN, DeferredInterrupt
from .transport import NUMBERS, CommSession, Meant, Pending, Transport
from .work import RealWork

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from torch import Tensor

    from .. import _core
    from .base import OnRow, Work
    from .buffers import Array
    from .status.operation import Waitable
    from .status.waiting import Peers, Waiting

FLUSH = 0.2  # s: for all messages that were sent without waiting for them, when a communicator is closed
NUMBER_NBYTES = 4

Shape: TypeAlias = tuple[int, ...]
INTO_NEW: dict[str, tuple[Callable[..., Any], Callable[[int, Shape], Shape]]] = {
    # collectives that return a new tensor: how to do it by messages, its shape for (ranks, shape of x)
    "all_gather": (Comm.all_gather, lambda size, shape: (size, *shape)),
    "reduce_scatter": (Comm.reduce_scatter, lambda size, shape: shape[1:]),
    "all_to_all": (Comm.all_to_all, lambda size, shape: shape),
    "reduce": (Comm.reduce, lambda size, shape: shape),
    "gather": (Comm.gather, lambda size, shape: (size, *shape)),
}


class _Session(CommSession, Protocol):
    """The session in which a communicator was made: this process's rank, the hosts of all ranks, what is kept."""

    def forget(self, comm: RealComm) -> None:
        """Note that `comm` has been closed."""


class RealComm(Comm):
    """Collectives in shared memory if all ranks are on one machine. Use it as a context manager, or close it.

    session: where it was made. members[i]: the rank there of this communicator's rank i. waiting: how this rank waits,
    and what it publishes meanwhile.
    """

    def __init__(
        self,
        session: _Session,
        transport: Transport,
        members: tuple[int, ...],
        waiting: Waiting,
        on_row: OnRow | None = None,
        trace: Trace | bool = True,
    ) -> None:
        rank = members.index(session.rank)
        log = trace if isinstance(trace, Trace) else Trace(rank, enabled=trace)
        super().__init__(rank, len(members), log, on_row, waiting.calls)
        self.session, self.core, self.members, self.waiting = session, compiled_module(), members, waiting
        self.transport = transport
        self.oversubscribed = waiting.oversubscribed
        self.others = tuple(r for r in members if r != session.rank)
        self.names = [waiting.members.index(r) for r in members]  # how events and reports call our ranks
        hosts = [session.hosts[r] for r in members]
        self.node_rank, self.node_size = hosts[: self.rank].count(hosts[self.rank]), hosts.count(hosts[self.rank])
        self.pending: dict[int, Pending] = {}  # by id: their tensors may still be touched, held or not
        self.parts: list[RealComm] = []  # communicators split from this one
        self._background: Background | None = None  # from its first use on
        self._shared: SharedRanks | None = None
        self._asked = False  # whether the ranks share memory
        self.broken = ""  # the collective that did not complete
        self.is_part = False
        self.gloo: torch.distributed.ProcessGroup | None = (
            None  # a process group of these ranks, once somebody has raced it (collectives/native.py)
        )
        self.closed = False

    def connect(self) -> None:
        """Whatever else all ranks have to do before the first message: nothing. Collective."""

    # -- messages ---------------------------------------------------------------------------------------------------

    def isend(self, x: Array, dst: int) -> RealWork:
        self._require_open()
        self.check_peer(dst, "sends to")
        self.waiting.require_reachable(dst)
        if self.waiting.inject is not None:
            self.waiting.inject.before(self)
        return RealWork(self, "send", x, dst)

    def irecv(self, x: Array, src: int) -> RealWork:
        self._require_open()
        self.check_peer(src, "receives from")
        return RealWork(self, "recv", x, src)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        shared = self.shared("barrier")
        if shared is not None:
            self._in_memory(shared, "barrier", self.core.Call("barrier", 0, 0, -1))
            return
        step, t0, line = self.begun()
        begin(self, "barrier", line=line)
        self.agree("barrier")
        self.trace.add(step, "barrier", t0, self.trace.clock(), line=line)

    def split(self, color: object, key: object = 0) -> RealComm:
        """See Comm.split. color, key: anything that pickles to fewer than 100 bytes; keys can be compared."""
        step, t0, line = self.begun()
        begin(self, "split", line=line)
        number = (1 + secrets.randbelow(NUMBERS - 2)).to_bytes(NUMBER_NBYTES, "little")
        notes = self.agree("split", note=number + pickle.dumps((color, key)))
        with DeferredInterrupt() as interrupt:
            chosen, reason = [self.rank], ""
            try:
                chosen = split_group_of([note[NUMBER_NBYTES:] for note in notes], self.rank)
            except Exception as error:
                reason = str(error) or type(error).__name__
            # Making a part may block: no rank begins before all are on their way, and only a death can stop them.
            for rank, why in enumerate(self.agree("split", note=reason.encode()[:120])):
                if why:
                    raise ValueError(f"rank {rank} cannot split: {why.decode(errors='replace')}")
            transport = self.transport.part(self, chosen, int.from_bytes(notes[chosen[0]][:NUMBER_NBYTES], "little"))
        part = self._of_these(transport, tuple(self.members[r] for r in chosen), self.waiting, self.trace)
        part.rows, part.name, part.is_part = self.rows, self.name_of_part(color), True
        self.parts.append(part)
        if interrupt.came:
            raise KeyboardInterrupt
        part.connect()
        self.trace.add(step, "split", t0, self.trace.clock(), line=line)
        return part

    def _of_these(self, transport: Transport, members: tuple[int, ...], waiting: Waiting, trace: Trace) -> RealComm:
        """Return a communicator of `members`, of the same kind as this one."""
        return RealComm(self.session, transport, members, waiting, self.on_row, trace)

    def allocate(self, shape: int | Sequence[int], dtype: str | torch.dtype = "float32") -> Tensor:
        """See Comm.allocate. Shared if all ranks are on one machine, until the communicator is closed."""
        sizes, name = shape_and_dtype(shape, dtype)
        begin(self, "allocate")
        shared = self.shared("allocate")
        if shared is not None:
            return shared.allocate(sizes, name)
        import torch

        return torch.zeros(sizes, dtype=getattr(torch, name))

    def views(self, x: ArrayT) -> list[ArrayT]:
        shared = self.shared("views")
        if shared is None or not is_tensor(x):
            return super().views(x)
        return shared.everybodys(x)  # pyrefly: ignore[bad-return]

    def agree(self, op: str, count: int = 0, dtype: int = 0, root: int = -1, note: bytes = b"") -> list[bytes]:
        """Wait until all ranks are here and call the same; return the note of every rank, in rank order.

        dtype: index in buffers.DTYPES. note: at most 120 bytes. Raises Mismatch with all numbers on every rank.
        """
        self._require_whole()
        consensus = self.transport.consensus(self.rank, (op, count, dtype, root), note)
        peers = self.waiting.missing(self.members, op, self._shared_facts)
        self.complete(consensus, op, peers, facts=lambda: self._facts(op, count, DTYPES[dtype], root))
        return consensus.notes()

    # -- background -------------------------------------------------------------------------------------------------

    @property
    def has_background(self) -> bool:
        return not self.waiting.in_background and self.can_double

    @property
    def can_double(self) -> bool:
        """True if `double` can be called."""
        return self.transport.can_double

    @property
    def shares_memory(self) -> bool:
        """True if collectives go through shared memory, as far as that has been found out."""
        return self._shared is not None

    def background(self, fn: Callable[..., object], *args: Any, after: Sequence[Work] = ()) -> Work:
        """See Comm.background. What is itself in the background, and calls this there, has it run at once."""
        self._require_open()
        require_callable(fn)
        if not self.has_background:
            return super().background(fn, *args, after=after)
        if self._background is None:
            self._background = Background(self)
        return self._background.start(fn, args, after)

    def double(self, waiting: Waiting, trace: Trace) -> RealComm:
        """Return a communicator of the same ranks, for the background, that waits by `waiting` and records in `trace`.

        Collective, in a thread of every rank, while the foreground does whatever it does.
        """
        transport = self.transport.double(self, waiting)
        double = self._of_these(transport, self.members, waiting, trace)
        double.rows, double.name = self.rows, f"{self.name} background".strip()
        double.connect()
        double.shared("background")
        return double

    def begin_all_reduce(self, progress: _core.Progress, x: Array) -> _core.Task | None:
        """Append the all_reduce of `x` to `progress`; return None if only Python can do it."""
        if self._shared is not None:
            return progress.all_reduce_in_memory(self._shared.group, x)
        return self.transport.begin_all_reduce(progress, x, self.trace.enabled)

    # -- collectives ------------------------------------------------------------------------------------------------

    @overload
    def all_reduce(self, x: ArrayT, async_op: Literal[False] = False) -> ArrayT: ...

    @overload
    def all_reduce(self, x: ArrayT, async_op: Literal[True]) -> Work: ...

    def all_reduce(self, x: ArrayT, async_op: bool = False) -> ArrayT | Work:
        if async_op:
            return self.background(best_all_reduce, x)
        shared = self._shared
        if shared is not None and not self.trace.enabled and not self.broken and self.waiting.inject is None:
            self.collectives += 1  # as `_in_memory`, in half its time: more than a small sum takes
            try:
                if not shared.group.all_reduce(x, SPIN, self.oversubscribed):
                    self._go_on(shared.group, "all_reduce", lambda: self.facts_of("all_reduce", (x,)))
            except ValueError:
                self.require_same(shared.group)
                raise
        elif (shared := self.shared("all_reduce")) is not None:
            self._in_memory(shared, "all_reduce", x)
        else:
            self.transport.all_reduce(self, "all_reduce", x)
        return x

    def all_reduce_by_gather(self, x: ArrayT) -> ArrayT:
        """Add `x` over ranks as base.Comm does, by messages through rank 0."""
        return super().all_reduce(x)

    def ring_all_reduce(self, x: ArrayT) -> ArrayT:
        """Add `x` over ranks by messages around a ring: the same sum, in another order of adding."""
        self.transport.all_reduce(self, "ring_all_reduce", x)
        return x

    def mpi_all_reduce(self, x: ArrayT) -> ArrayT:
        """Add `x` over ranks by the MPI library's own all_reduce, of the dtypes that it has."""
        self.transport.mpi_all_reduce(self, x)
        return x

    def broadcast(self, x: ArrayT, root: int = 0) -> ArrayT:
        self._check_root("broadcast", root)
        shared = self.shared("broadcast")
        if shared is not None:
            self._in_memory(shared, "broadcast", x, root)
            return x
        with self.agreed("broadcast", x, root):
            return super().broadcast(x, root)

    def scatter(self, x: Array | None, out: ArrayT, root: int = 0) -> ArrayT:
        self._check_root("scatter", root)
        if self.rank == root:
            self._check_rows("scatter", x)
        shared = self.shared("scatter")
        if shared is not None:
            self._in_memory(shared, "scatter", x if self.rank == root else None, out, root)
            return out
        with self.agreed("scatter", out, root):
            return super().scatter(x, out, root)

    def all_gather(self, x: ArrayT) -> ArrayT:
        return self._into_new("all_gather", x)

    def reduce_scatter(self, x: ArrayT) -> ArrayT:
        self._check_rows("reduce_scatter", x)
        return self._into_new("reduce_scatter", x)

    def all_to_all(self, x: ArrayT) -> ArrayT:
        self._check_rows("all_to_all", x)
        return self._into_new("all_to_all", x)

    def reduce(self, x: ArrayT, root: int = 0) -> ArrayT | None:
        self._check_root("reduce", root)
        return self._into_new("reduce", x, root)

    def gather(self, x: ArrayT, root: int = 0) -> ArrayT | None:
        self._check_root("gather", root)
        return self._into_new("gather", x, root)

    def _into_new(self, op: str, x: ArrayT, *root: int) -> Any:
        """Do a collective of INTO_NEW, in shared memory or else by messages."""
        by_messages, shape = INTO_NEW[op]
        shared = self.shared(op)
        if shared is None:
            with self.agreed(op, x, *root):
                return by_messages(self, x, *root)
        out = new_like(x, shape(self.size, x.shape)) if root in ((), (self.rank,)) else None
        self._in_memory(shared, op, x, out, *root)
        return out

    def shared(self, op: str) -> SharedRanks | None:
        """Return what the ranks share if all are on one machine and can share memory, else None.

        Collective at its first call, which is made on behalf of `op`.
        """
        if not self._asked:
            self._require_whole()
            self._asked = True
            if self.node_size == self.size:
                self.collectives += 1  # what it is on behalf of is counted later
                try:
                    self._shared = SharedRanks(self, op)
                except MemoryError:  # on every rank alike: messages will do
                    pass
                finally:
                    self.collectives -= 1
        return self._shared

    @contextmanager
    def agreed(self, op: str, x: Array, root: int = -1) -> Generator[None]:
        """Within it, `op` is done by messages: all ranks have agreed on it first, as those in shared memory do."""
        outermost = self.calling is None
        with PartOf(self, op, x, root) as call:
            if outermost and call is not None:
                self._meet((op, call.count, DTYPES.index(call.dtype), root), call.line)
            yield

    @contextmanager
    def together(self, op: str, x: Array) -> Generator[str]:
        """Agree on what all ranks are about to do with `x`, then record it as one event; yields its line."""
        buffer = buffer_of(x, op)
        if self.waiting.inject is not None:
            self.waiting.inject.before(self)
        step, t0, line = self.begun()
        begin(self, op, x, line=line)
        self._meet((op, buffer.count, DTYPES.index(buffer.dtype), -1), line)
        yield line
        self.trace.add(step, "all_reduce", t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)

    def _in_memory(self, shared: SharedRanks, op: str, x: object, *rest: object) -> None:
        """Do the collective `op` of the ranks that share memory, as one event."""
        group, trace = shared.group, self.trace
        self.collectives += 1
        if self.broken:
            self._require_whole()
        if self.waiting.inject is not None:
            self.waiting.inject.before(self)
        run = shared.collectives[op]
        try:
            if not trace.enabled:  # the way of a few hundred ns: a call with *rest takes 150 of them
                if not (run(x, *rest, SPIN, self.oversubscribed) if rest else run(x, SPIN, self.oversubscribed)):
                    self._go_on(group, op, partial(self.facts_of, op, (x, *rest)))
                return
            step, t0, line = self.begun()
            self.calls.note((op, line))
            if not run(x, *rest, SPIN, self.oversubscribed):
                self._go_on(group, op, partial(self.facts_of, op, (x, *rest)), line)
        except ValueError:
            self.require_same(group)
            raise
        trace.add(step, op, t0, trace.clock(), nbytes=group.nbytes, line=line)

    def _meet(self, call: Meant, line: str = "") -> None:
        """Wait until all ranks are here and call the same."""
        op, count, dtype, root = call
        shared = self.shared(op)
        self._require_whole()
        if shared is None:
            self.agree(*call)
            return
        try:
            if not shared.group.barrier(self.core.Call(*call), SPIN, self.oversubscribed):
                self._go_on(shared.group, op, lambda: self._facts(op, count, DTYPES[dtype], root), line)
        except ValueError:
            self.require_same(shared.group)
            raise

    def complete(
        self, operation: Waitable, op: str, peers: Peers, nbytes: int = 0, facts: Callable[[], Facts] = dict
    ) -> None:
        """Wait for `operation`, a part of the collective `op`: see Waiting.finish."""
        with self._breaking(op, operation):
            try:
                self.waiting.finish(operation, op, peers, nbytes, facts=facts)
            except ValueError:
                self.require_same(operation)
                raise

    def _go_on(self, group: _core.ShmGroup, op: str, facts: Callable[[], Facts], line: str = "") -> None:
        def missing() -> tuple[int, ...]:
            return tuple(self.members[r] for r in group.missing())

        with self._breaking(op, group):
            self.waiting.go_on(group, op, missing, group.nbytes, line, facts=facts)

    def facts_of(self, op: str, args: tuple[Any, ...]) -> Facts:
        """Return the fields of errors.Wait for a wait in the collective `op` that was called with `args`."""
        x = args[1] if op == "scatter" else args[0]
        count, dtype = (-1, "") if op == "barrier" else buffer_of(x, op)[1:3]
        return self._facts(op, count, dtype, args[-1] if isinstance(args[-1], int) else -1)

    def _facts(self, op: str, count: int = -1, dtype: str = "", root: int = -1) -> Facts:
        """Return the fields of errors.Wait that say how far this rank has come, which waits in the collective `op`."""
        line, numbers = self.trace.line(), {"count": count or -1, "dtype": dtype if count > 0 else "", "root": root}
        return {**numbers, **self._shared_facts(), "counts": self.calls.times(op, line)}

    def _shared_facts(self) -> Facts:
        """Return which collective this is: the nth on which communicator."""
        return {"comm": self.name, "nth": self.collectives}

    def require_same(self, operation: Waitable) -> None:
        """Raise Mismatch if the ranks have made different calls."""
        calls = [(name, count, DTYPES[dtype] if count else "", root) for name, count, dtype, root in operation.calls()]
        if len(set(calls)) > 1:
            raise Mismatch(describe_mismatch({self.names[r]: call for r, call in enumerate(calls)})) from None

    @contextmanager
    def _breaking(self, op: str, operation: Waitable) -> Generator[None]:
        """Note if `op` does not complete: the ranks are out of step then, unless all of them see why."""
        try:
            yield
        except ValueError:
            raise
        except BaseException:
            self.broken = op
            self.session.cancelled.append(operation)  # MPI, or another rank, may still write to its memory
            raise

    def begun(self) -> tuple[int, int, str]:
        """Return (step, time, line) of a call that begins now, for its event."""
        trace = self.trace
        return trace.step(), trace.clock(), trace.line() if trace.enabled else ""

    def _check_root(self, op: str, root: object) -> None:
        if not isinstance(root, int) or not 0 <= root < self.size:
            raise ValueError(f"rank {self.rank} calls {op} with root rank {root}: ranks here are 0 to {self.size - 1}")

    def _check_rows(self, op: str, x: Array | None) -> None:
        if x is None or len(x) != self.size:
            raise ValueError(f"{op} on {self.size} ranks needs {self.size} rows, got {'none' if x is None else len(x)}")

    def _require_open(self) -> None:
        if self.closed:
            raise CommError("this communicator is closed: its run has ended")

    def _require_whole(self) -> None:
        self._require_open()
        if self.broken:
            raise CommError(
                f"an earlier {self.broken} did not complete: the ranks of this communicator are out of step"
            )

    # -- end --------------------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None, line: str = "") -> None:
        """Leave the communicator; what is under way is cancelled or, if that cannot be, kept. A part ends no run.

        error, line: what this rank raised and where: other ranks then do not wait for it until their deadline.
        """
        if self.closed:
            return
        self.session.keep(self.release(), FLUSH)
        if not self.is_part:
            self.waiting.end(error, line)
            self.session.forget(self)

    def require_no_forgotten_wait(self) -> None:
        """Raise ForgottenWait if this rank has not waited for what it receives."""
        for work in self.pending.values():
            if isinstance(work, RealWork) and work.op == "recv":
                raise ForgottenWait.of(self.names[self.rank], self.names[work.peer], work.line)
        if self._background is not None:
            self._background.require_no_forgotten_wait()
        for part in self.parts:
            part.require_no_forgotten_wait()

    def release(self) -> list[Pending]:
        """Close this communicator and its parts; return the messages that are under way there."""
        if self.closed:
            return []
        background: list[Pending] = self._background.close() if self._background is not None else []
        self.closed, self._shared, self._asked = True, None, False
        return [*self.pending.values(), *background, *(work for part in self.parts for work in part.release())]

    def __enter__(self) -> RealComm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)


def shape_and_dtype(shape: int | Sequence[int], dtype: str | torch.dtype) -> tuple[Shape, str]:
    """Return (tuple, name) of what `allocate` was given. Raises ValueError for a dtype that no message carries."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise ValueError(f"cannot allocate dtype {name}: one of {', '.join(DTYPES)} is needed")
    return (shape,) if isinstance(shape, int) else tuple(shape), name

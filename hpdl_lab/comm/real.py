"""Communicators of real ranks: a transport for messages, shared memory for collectives, a status that others read."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ..trace import Trace
from .background import Background
from .base import Comm, best_all_reduce, part_of, require_function
from .buffers import DTYPES, ITEMSIZE, buffer_of, new_like
from .calls import PartOf, begin
from .errors import CommError, ForgottenWait, Mismatch
from .shm import SharedRanks
from .status.report import disagreement
from .status.waiting import SPIN, DeferredInterrupt
from .transport import NUMBERS
from .work import RealWork

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

FLUSH = 0.2  # s: for all messages that were sent without waiting for them, when a communicator is closed
NUMBER_NBYTES = 4


class RealComm(Comm):
    """Collectives in shared memory where all ranks are on one machine. Use it as a context manager, or close it.

    place: where it was made: this process's rank, the hosts of all ranks, the compiled module, what is kept when a
    communicator is closed. members[i]: the rank there of this communicator's rank i. waiting: how this rank waits, and
    what it tells meanwhile.
    """

    def __init__(
        self,
        place: Any,
        transport: Any,
        members: tuple[int, ...],
        waiting: Any,
        on_row: Any = None,
        trace: Trace | bool = True,
    ) -> None:
        rank = members.index(place.rank)
        log = trace if isinstance(trace, Trace) else Trace(rank, enabled=trace)
        super().__init__(rank, len(members), log, on_row, waiting.calls)
        self.place, self.core, self.members, self.waiting = place, place.core, members, waiting
        self.transport = transport
        self.oversubscribed = waiting.oversubscribed
        self.others = tuple(r for r in members if r != place.rank)
        self.names = [waiting.members.index(r) for r in members]  # how events and reports call our ranks
        hosts = [place.hosts[r] for r in members]
        self.node_rank, self.node_size = hosts[: self.rank].count(hosts[self.rank]), hosts.count(hosts[self.rank])
        self.pending = {}  # id: Work, whose tensor may still be touched, whether or not somebody holds the Work
        self.parts = []  # communicators split from this one
        self._background: Any = None  # the Background of this communicator, from its first use on
        self._shared: Any = None  # SharedRanks; False where the ranks cannot share memory
        self.broken = ""  # the collective that did not complete
        self.is_part = False
        self.gloo = None  # a process group of these ranks, once somebody has raced it (collectives/native.py)
        self.closed = False

    def connect(self) -> None:
        """Whatever else all ranks have to do before the first message: nothing. Collective."""

    # -- messages ---------------------------------------------------------------------------------------------------

    def isend(self, x: Tensor, dst: int) -> RealWork:
        self._require_open()
        self.check_peer(dst, "sends to")
        self.waiting.require_reachable(dst)
        if self.waiting.inject is not None:
            self.waiting.inject.before(self)
        return RealWork(self, "send", x, dst)

    def irecv(self, x: Tensor, src: int) -> RealWork:
        self._require_open()
        self.check_peer(src, "receives from")
        return RealWork(self, "recv", x, src)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        call = self.core.Call("barrier", 0, 0, -1)
        if not self._in_memory("barrier", "barrier", call):
            step, t0, line = self._begin()
            begin(self, "barrier", line=line)
            self.agree("barrier")
            self.trace.add(step, "barrier", t0, self.trace.clock(), line=line)

    def split(self, color: Any, key: Any = 0) -> RealComm:
        """See Comm.split. color, key: anything that pickles to fewer than 100 bytes; keys can be compared."""
        step, t0, line = self._begin()
        begin(self, "split", line=line)
        number = (1 + secrets.randbelow(NUMBERS - 2)).to_bytes(NUMBER_NBYTES, "little")
        notes = self.agree("split", note=number + pickle.dumps((color, key)))
        with DeferredInterrupt() as interrupt:
            try:
                chosen, reason = part_of([note[NUMBER_NBYTES:] for note in notes], self.rank), ""
            except Exception as error:
                chosen, reason = (), str(error) or type(error).__name__
            # To make a part may block: nobody begins before all are on their way, and only a death can stop them.
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

    def _of_these(self, transport: Any, members: tuple[int, ...], waiting: Any, trace: Trace) -> RealComm:
        """A communicator of `members`, of the same kind as this one."""
        return RealComm(self.place, transport, members, waiting, self.on_row, trace)

    def allocate(self, shape: Any, dtype: Any = "float32") -> Tensor:
        """See Comm.allocate. Shared where all ranks are on one machine, until the communicator is closed."""
        shape, dtype = shape_and_dtype(shape, dtype)
        begin(self, "allocate")
        shared = self.shared("allocate")
        if shared:
            return shared.allocate(shape, dtype)
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype))

    def views(self, x: Tensor) -> list[Tensor]:
        shared = self.shared("views")
        return shared.everybodys(x) if shared else super().views(x)

    def agree(self, op: str, count: int = 0, dtype: Any = 0, root: int = -1, note: bytes = b"") -> list[bytes]:
        """Wait until all ranks are here and mean the same; returns the note of every rank, in rank order.

        dtype: index in buffers.DTYPES. note: at most 120 bytes. Raises Mismatch with all numbers on every rank.
        """
        self._require_whole()
        consensus = self.transport.consensus(self.rank, (op, count, dtype, root), note)
        peers = self.waiting.missing(self.members, op, self._place)
        self.complete(consensus, op, peers, facts=lambda: self._facts(op, count, DTYPES[dtype], root))
        return consensus.notes()

    # -- background -------------------------------------------------------------------------------------------------

    @property
    def has_background(self) -> bool:
        return not self.waiting.in_background and self.can_double

    @property
    def can_double(self) -> bool:
        """Can `double` be called?"""
        return self.transport.can_double

    def background(self, fn: Callable, *args: Any, after: Sequence[Any] = ()) -> Any:
        """See Comm.background. What is itself in the background, and calls this there, has it run at once."""
        self._require_open()
        require_function(fn)
        if not self.has_background:
            return super().background(fn, *args, after=after)
        if self._background is None:
            self._background = Background(self)
        return self._background.start(fn, args, after)

    def double(self, waiting: Any, trace: Trace) -> RealComm:
        """A communicator of the same ranks, for the background, that waits by `waiting` and records in `trace`.

        Collective, in a thread of every rank, while the foreground does whatever it does.
        """
        transport = self.transport.double(self, waiting)
        double = self._of_these(transport, self.members, waiting, trace)
        double.rows, double.name = self.rows, f"{self.name} background".strip()
        double.connect()
        double.shared("background")
        return double

    def begin_all_reduce(self, progress: Any, x: Tensor) -> Any:
        """Append the all_reduce of `x` to `progress`: its core.Task; None where only Python can do it."""
        if self._shared:
            return progress.all_reduce_in_memory(self._shared.group, x)
        return self.transport.begin_all_reduce(progress, x, self.trace.enabled)

    # -- collectives ------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, async_op: bool = False) -> Tensor:
        if async_op:
            return self.background(best_all_reduce, x)
        shared = self._shared
        if shared and not self.trace.enabled and not self.broken and self.waiting.inject is None:
            self.collectives += 1  # as `_in_memory`, in half its time: more than a small sum takes
            try:
                if not shared.group.all_reduce(x, SPIN, self.oversubscribed):
                    self._go_on(shared.group, "all_reduce", lambda: self._facts_of("all_reduce", (x,)))
            except ValueError:
                self.require_same(shared.group)
                raise
        elif not self._in_memory("all_reduce", "all_reduce", x):
            self.transport.all_reduce(self, "all_reduce", x)
        return x

    def ring_all_reduce(self, x: Tensor) -> Tensor:
        """all_reduce by messages around a ring. The same sum, in another order of adding."""
        self.transport.all_reduce(self, "ring_all_reduce", x)
        return x

    def mpi_all_reduce(self, x: Tensor) -> Tensor:
        """The MPI library's own all_reduce, of the dtypes that it knows."""
        self.transport.mpi_all_reduce(self, x)
        return x

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        self._check_root("broadcast", root)
        if not self._in_memory("broadcast", "broadcast", x, root):
            with self.agreed("broadcast", x, root):
                super().broadcast(x, root)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if not self.shared("all_gather"):
            with self.agreed("all_gather", x):
                return super().all_gather(x)
        out = new_like(x, (self.size, *x.shape))
        self._in_memory("all_gather", "all_gather", x, out)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._check_rows("reduce_scatter", x)
        if not self.shared("reduce_scatter"):
            with self.agreed("reduce_scatter", x):
                return super().reduce_scatter(x)
        out = new_like(x, x.shape[1:])
        self._in_memory("reduce_scatter", "reduce_scatter", x, out)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        self._check_rows("all_to_all", x)
        if not self.shared("all_to_all"):
            with self.agreed("all_to_all", x):
                return super().all_to_all(x)
        out = new_like(x, x.shape)
        self._in_memory("all_to_all", "all_to_all", x, out)
        return out

    def reduce(self, x: Tensor, root: int = 0) -> Tensor:
        self._check_root("reduce", root)
        if not self.shared("reduce"):
            with self.agreed("reduce", x, root):
                return super().reduce(x, root)
        out = new_like(x, x.shape) if self.rank == root else None
        self._in_memory("reduce", "reduce", x, out, root)
        return out

    def gather(self, x: Tensor, root: int = 0) -> Any:
        self._check_root("gather", root)
        if not self.shared("gather"):
            with self.agreed("gather", x, root):
                return super().gather(x, root)
        out = new_like(x, (self.size, *x.shape)) if self.rank == root else None
        self._in_memory("gather", "gather", x, out, root)
        return out

    def scatter(self, x: Any, out: Tensor, root: int = 0) -> Tensor:
        self._check_root("scatter", root)
        if self.rank == root:
            self._check_rows("scatter", x)
        if not self._in_memory("scatter", "scatter", x if self.rank == root else None, out, root):
            with self.agreed("scatter", out, root):
                super().scatter(x, out, root)
        return out

    def shared(self, op: str) -> SharedRanks | bool:
        """SharedRanks where all ranks are on one machine and can share memory, else False.

        Collective at its first call, which is made on behalf of `op`.
        """
        if self._shared is None:
            self._require_whole()
            self._shared = False
            if self.node_size == self.size:
                self.collectives += 1  # what it is on behalf of is counted later
                try:
                    self._shared = SharedRanks(self, self.core, op)
                except MemoryError:  # on every rank alike: messages will do
                    pass
                finally:
                    self.collectives -= 1
        return self._shared

    @contextmanager
    def agreed(self, op: str, x: np.ndarray, root: int = -1) -> Iterator[Any]:
        """Within it, `op` is done by messages: all ranks have agreed on it first, as those in shared memory do."""
        outermost = self.calling is None
        with PartOf(self, op, x, root) as call:
            if outermost:
                self._meet((op, call.count, DTYPES.index(call.dtype), root), call.line)
            yield

    @contextmanager
    def together(self, op: str, x: Tensor) -> Iterator[Any]:
        """Agree on what all ranks are about to do with `x`, then record it as one event; gives its line."""
        buffer = buffer_of(x, op)
        if self.waiting.inject is not None:
            self.waiting.inject.before(self)
        step, t0, line = self._begin()
        begin(self, op, x, line=line)
        self._meet((op, buffer.count, DTYPES.index(buffer.dtype), -1), line)
        yield line
        self.trace.add(step, "all_reduce", t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)

    def _in_memory(self, op: str, name: str, x: Any, *rest: Any) -> bool:
        """Do collective `name` of the ranks that share memory, as one event; False where they do not."""
        shared = self._shared or self.shared(op)
        if not shared:
            return False
        group, trace = shared.group, self.trace
        self.collectives += 1
        if self.broken:
            self._require_whole()
        if self.waiting.inject is not None:
            self.waiting.inject.before(self)
        run = getattr(group, name)
        try:
            if not trace.enabled:  # the way of a few hundred ns, of which a call with *rest takes 150
                if not (run(x, *rest, SPIN, self.oversubscribed) if rest else run(x, SPIN, self.oversubscribed)):
                    self._go_on(group, op, partial(self._facts_of, op, (x, *rest)))
                return True
            step, t0, line = self._begin()
            self.calls.note((op, line))
            if not run(x, *rest, SPIN, self.oversubscribed):
                self._go_on(group, op, partial(self._facts_of, op, (x, *rest)), line)
        except ValueError:
            self.require_same(group)
            raise
        trace.add(step, op, t0, trace.clock(), nbytes=group.nbytes, line=line)
        return True

    def _meet(self, call: tuple[str, int, int, int], line: str = "") -> None:
        """Wait until all ranks are here and mean the same. call: op, count, index of the dtype, root or -1."""
        op, count, dtype, root = call
        shared = self.shared(op)
        self._require_whole()
        if not shared:
            self.agree(*call)
            return
        try:
            if not shared.group.barrier(self.core.Call(*call), SPIN, self.oversubscribed):
                self._go_on(shared.group, op, lambda: self._facts(op, count, DTYPES[dtype], root), line)
        except ValueError:
            self.require_same(shared.group)
            raise

    def complete(
        self, operation: Any, op: str, peers: Callable | tuple[int, ...], nbytes: int = 0, facts: Callable = dict
    ) -> None:
        """Wait for `operation`, a part of the collective `op`: see Waiting.finish."""
        with self._breaking(op, operation):
            try:
                self.waiting.finish(operation, op, peers, nbytes, facts=facts)
            except ValueError:
                self.require_same(operation)
                raise

    def _go_on(self, group: Any, op: str, facts: Callable, line: str = "") -> None:
        def missing() -> tuple[int, ...]:
            return tuple(self.members[r] for r in group.missing())

        with self._breaking(op, group):
            self.waiting.go_on(group, op, missing, group.nbytes, line, facts=facts)

    def _facts_of(self, op: str, args: tuple[Any, ...]) -> dict[str, Any]:
        """`_facts` of the collective `op` in shared memory that was called with `args`."""
        x = args[1] if op == "scatter" else args[0]
        count, dtype = (-1, "") if op == "barrier" else buffer_of(x, op)[1:3]
        return self._facts(op, count, dtype, args[-1] if isinstance(args[-1], int) else -1)

    def _facts(self, op: str, count: int = -1, dtype: Any = "", root: int = -1) -> dict[str, Any]:
        """The fields of errors.Wait that say how far this rank has come, which waits in the collective `op`."""
        line, numbers = self.trace.line(), {"count": count or -1, "dtype": dtype if count > 0 else "", "root": root}
        return {**numbers, **self._place(), "counts": self.calls.times(op, line)}

    def _place(self) -> dict[str, int | str]:
        """Which collective this is: the nth on which communicator."""
        return {"comm": self.name, "nth": self.collectives}

    def require_same(self, operation: Any) -> None:
        """Raise Mismatch where the ranks have made different calls."""
        calls = [
            (name, count, DTYPES[dtype] if count else "", root)
            for name, count, dtype, root in getattr(operation, "calls", list)()
        ]
        if len(set(calls)) > 1:
            raise Mismatch(disagreement({self.names[r]: call for r, call in enumerate(calls)})) from None

    @contextmanager
    def _breaking(self, op: str, operation: Any) -> Iterator[Any]:
        """A collective that does not complete leaves the ranks out of step, unless all of them see why."""
        try:
            yield
        except ValueError:
            raise
        except BaseException:
            self.broken = op
            self.place.cancelled.append(operation)  # MPI, or another rank, may still write to its memory
            raise

    def _begin(self) -> tuple[int, int, str]:
        trace = self.trace
        return trace.step(), trace.clock(), trace.line() if trace.enabled else ""

    def _check_root(self, op: str, root: int) -> None:
        if not isinstance(root, int) or not 0 <= root < self.size:
            raise ValueError(f"rank {self.rank} calls {op} with root rank {root}: ranks here are 0 to {self.size - 1}")

    def _check_rows(self, op: str, x: Tensor) -> None:
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
        """Leave the communicator; what is under way is cancelled or, where that cannot be, kept. A part ends no run.

        error, line: what this rank raised and where: other ranks then do not wait for it until their deadline.
        """
        if self.closed:
            return
        self.place.keep(self._release(), FLUSH)
        if not self.is_part:
            self.waiting.end(error, line)
            self.place.forget(self)

    def require_no_forgotten_wait(self) -> None:
        """Raise ForgottenWait where this rank has not waited for what it receives."""
        for work in self.pending.values():
            if work.op == "recv":
                raise ForgottenWait.of(self.names[self.rank], self.names[work.peer], work.line)
        if self._background is not None:
            self._background.require_no_forgotten_wait()
        for part in self.parts:
            part.require_no_forgotten_wait()

    def _release(self) -> list:
        """Close this communicator and its parts; returns the messages that are under way there."""
        if self.closed:
            return []
        background = self._background.close() if self._background is not None else []
        self.closed, self._shared = True, None
        return [*self.pending.values(), *background, *(work for part in self.parts for work in part._release())]

    def __enter__(self) -> RealComm:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.close(error)


def shape_and_dtype(shape: Any, dtype: Any) -> tuple[tuple[int, ...], str]:
    """(tuple, name) of what `allocate` was given. Raises ValueError for a dtype that no message carries."""
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        raise ValueError(f"cannot allocate dtype {dtype}: one of {', '.join(DTYPES)} is needed")
    return (shape,) if isinstance(shape, int) else tuple(shape), dtype

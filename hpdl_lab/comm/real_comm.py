"""What communicators of real ranks have in common, whatever carries their messages: MPI, or torch.distributed."""

from abc import abstractmethod
from contextlib import contextmanager

from ..trace import Trace
from .background import Background
from .base import require_function
from .buffers import DTYPES, ITEMSIZE, buffer_of
from .calls import begin
from .errors import CommError, ForgottenWait, Mismatch
from .in_memory import InMemory
from .status.reasons import disagreement
from .status.waiting import SPIN

FLUSH = 0.2  # s: for all messages that were sent without waiting for them, when a communicator is closed


class RealComm(InMemory):
    """Collectives in shared memory where all ranks are on one machine. Use it as a context manager, or close it.

    place: where it was made: this process's rank, the hosts of all ranks, the compiled module, what is kept when a
    communicator is closed. members[i]: the rank there of this communicator's rank i.
    """

    def __init__(self, place, members, waiting, on_row=None, trace=True):
        rank = members.index(place.rank)
        log = trace if isinstance(trace, Trace) else Trace(rank, enabled=trace)
        super().__init__(rank, len(members), log, on_row, waiting.calls)
        self.place, self.core, self.members, self.waiting = place, place.core, members, waiting
        self.crowded = waiting.crowded
        self.others = tuple(r for r in members if r != place.rank)
        self.names = [waiting.members.index(r) for r in members]  # how events and reports call our ranks
        hosts = [place.hosts[r] for r in members]
        self.node_rank, self.node_size = hosts[: self.rank].count(hosts[self.rank]), hosts.count(hosts[self.rank])
        self.pending = {}  # id: Work, whose tensor may still be touched, whether or not somebody holds the Work
        self.parts = []  # communicators split from this one
        self.beside = None  # the Background of this communicator, from its first use on
        self.broken = ""  # the collective that did not complete
        self.is_part = False
        self.gloo = None  # a process group of these ranks, once somebody has raced it (collectives/native.py)
        self.closed = False

    # -- ranks ------------------------------------------------------------------------------------------------------

    def barrier(self):
        call = self.core.Call("barrier", 0, 0, -1)
        if not self._in_memory("barrier", "barrier", call):
            step, t0, line = self._begin()
            begin(self, "barrier", line=line)
            self.agree("barrier")
            self.trace.add(step, "barrier", t0, self.trace.clock(), line=line)

    def _adopt(self, part, color):
        """`part` was split from this communicator, which is closed after it at the latest."""
        part.rows, part.name, part.is_part = self.rows, self.name_of_part(color), True
        self.parts.append(part)

    def connect(self):
        """Whatever else all ranks have to do before the first message: nothing. Collective."""

    def allocate(self, shape, dtype="float32"):
        """See Comm.allocate. Shared where all ranks are on one machine, until the communicator is closed."""
        dtype = str(dtype).removeprefix("torch.")
        if dtype not in ITEMSIZE:
            raise ValueError(f"cannot allocate dtype {dtype}: one of {', '.join(DTYPES)} is needed")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        begin(self, "allocate")
        shared = self.shared("allocate")
        if shared:
            return shared.allocate(shape, dtype)
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype))

    def agree(self, op, count=0, dtype=0, root=-1, note=b""):
        """Wait until all ranks are here and mean the same; returns the note of every rank, in rank order.

        dtype: index in buffers.DTYPES. note: at most 120 bytes. Raises Mismatch with all numbers on every rank.
        """
        self._require_whole()
        agreement = self._agreement((op, count, dtype, root), note)
        peers = self.waiting.missing(self.members, op, self._place)
        self._finish(agreement, op, peers, facts=lambda: self._facts(op, count, DTYPES[dtype], root))
        return agreement.notes()

    @abstractmethod
    def _agreement(self, call, note):
        """What `agree` waits for: an operation with the `notes()` and the `calls()` of all ranks. call: as of _meet."""

    # -- background -------------------------------------------------------------------------------------------------

    @property
    def runs_beside(self):
        return not self.waiting.beside and self.can_double()

    def background(self, fn, *args):
        """See Comm.background. What is itself in the background, and calls this there, has it run at once."""
        self._require_open()
        require_function(fn)
        if not self.runs_beside:
            return super().background(fn, *args)
        if self.beside is None:
            self.beside = Background(self)
        return self.beside.start(fn, args)

    @abstractmethod
    def can_double(self):
        """Can `make_double`, and can two threads communicate at the same time?"""

    @abstractmethod
    def make_double(self, waiting, trace):
        """A communicator of the same ranks, for the background, that waits by `waiting` and records in `trace`.

        Collective, in a thread of every rank, while the foreground does whatever it does.
        """

    def begin_beside(self, progress, x):
        """Append the all_reduce of `x` to `progress`: its core.Task; None where only Python can do it."""
        return progress.all_reduce_in_memory(self._shared.group, x) if self._shared else None

    # -- collectives ------------------------------------------------------------------------------------------------

    @contextmanager
    def together(self, op, x):
        """Agree on what all ranks are about to do with `x`, then record it as one event; gives its line."""
        buffer = buffer_of(x, op)
        if self.waiting.inject is not None:
            self.waiting.inject.before(self)
        step, t0, line = self._begin()
        begin(self, op, x, line=line)
        self._meet((op, buffer.count, DTYPES.index(buffer.dtype), -1), line)
        yield line
        self.trace.add(step, "all_reduce", t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)

    def _meet(self, call, line=""):
        """Wait until all ranks are here and mean the same. call: op, count, index of the dtype, root or -1."""
        op, count, dtype, root = call
        shared = self.shared(op)
        self._require_whole()
        if not shared:
            self.agree(*call)
            return
        try:
            if not shared.group.barrier(self.core.Call(*call), SPIN, self.crowded):
                self._go_on(shared.group, op, lambda: self._facts(op, count, DTYPES[dtype], root), line)
        except ValueError:
            self._require_same(shared.group)
            raise

    def _finish(self, operation, op, peers, nbytes=0, facts=dict):
        with self._breaking(op, operation):
            try:
                self.waiting.finish(operation, op, peers, nbytes, facts=facts)
            except ValueError:
                self._require_same(operation)
                raise

    def _go_on(self, group, op, facts, line=""):
        def missing():
            return tuple(self.members[r] for r in group.missing())

        with self._breaking(op, group):
            self.waiting.go_on(group, op, missing, group.nbytes, line, facts=facts)

    def _facts(self, op, count=-1, dtype="", root=-1):
        """The fields of errors.Wait that say how far this rank has come, which waits in the collective `op`."""
        line, numbers = self.trace.line(), {"count": count or -1, "dtype": dtype if count > 0 else "", "root": root}
        return {**numbers, **self._place(), "counts": self.calls.times(op, line)}

    def _place(self):
        """Which collective this is: the nth on which communicator."""
        return {"comm": self.name, "nth": self.collectives}

    def _require_same(self, operation):
        """Raise Mismatch where the ranks have told each other different calls."""
        calls = getattr(operation, "calls", list)()
        told = [(name, count, DTYPES[dtype] if count else "", root) for name, count, dtype, root in calls]
        if len(set(told)) > 1:
            raise Mismatch(disagreement({self.names[r]: call for r, call in enumerate(told)})) from None

    @contextmanager
    def _breaking(self, op, operation):
        """A collective that does not complete leaves the ranks out of step, unless all of them see why."""
        try:
            yield
        except ValueError:
            raise
        except BaseException:
            self.broken = op
            self.place.abandoned.append(operation)  # MPI, or another rank, may still write to its memory
            raise

    def _begin(self):
        trace = self.trace
        return trace.step(), trace.clock(), trace.line() if trace.enabled else ""

    def _require_open(self):
        if self.closed:
            raise CommError("this communicator is closed: its run has ended")

    def _require_whole(self):
        self._require_open()
        if self.broken:
            raise CommError(
                f"an earlier {self.broken} did not complete: the ranks of this communicator are out of step"
            )

    # -- end --------------------------------------------------------------------------------------------------------

    def close(self, error=None, line=""):
        """Leave the communicator; what is under way is cancelled or, where that cannot be, kept. A part ends no run.

        error, line: what this rank raised and where: other ranks then do not wait for it until their deadline.
        """
        if self.closed:
            return
        self.place.keep(self._release(), FLUSH)
        if not self.is_part:
            self.waiting.end(error, line)
            self.place.forget(self)

    def require_no_forgotten_wait(self):
        """Raise ForgottenWait where this rank has not waited for what it receives."""
        for work in self.pending.values():
            if work.op == "recv":
                raise ForgottenWait.of(self.names[self.rank], self.names[work.peer], work.line)
        if self.beside is not None:
            self.beside.require_no_forgotten_wait()
        for part in self.parts:
            part.require_no_forgotten_wait()

    def _release(self):
        """Close this communicator and its parts; returns the messages that are under way there."""
        if self.closed:
            return []
        beside = self.beside.close() if self.beside is not None else []
        self.closed, self._shared = True, None
        return [*self.pending.values(), *beside, *(work for part in self.parts for work in part._release())]

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.close(error)

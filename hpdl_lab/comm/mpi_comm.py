"""The communicator of one run on real ranks."""

import pickle
from contextlib import contextmanager

from ..trace import Trace, caller_line
from .buffers import DTYPES, ITEMSIZE, buffer_of
from .calls import begin
from .errors import CommError, ForgottenWait, Mismatch
from .in_memory import InMemory
from .in_thread import InThread
from .interrupts import DeferredInterrupt
from .parts import part_of
from .reasons import disagreement
from .waiting import SPIN
from .work import MpiWork

SEGMENT = 256 * 1024  # bytes, of the compiled ring; 16 to 512 KiB were tried
FLUSH = 0.2  # s: for all messages that were sent without waiting for them, when a communicator is closed


class MpiComm(InMemory):
    """Messages through MPI; collectives in shared memory where all ranks are on one machine.

    members[i]: rank in MPI_COMM_WORLD of this communicator's rank i. Use it as a context manager, or close it.
    """

    def __init__(self, session, handles, members, waiting, on_row=None, trace=True):
        rank = members.index(session.rank)
        log = trace if isinstance(trace, Trace) else Trace(rank, enabled=trace)
        super().__init__(rank, len(members), log, on_row, waiting.calls)
        self.session, self.core, self.members, self.waiting = session, session.core, members, waiting
        self.crowded = waiting.crowded
        self.group = self.core.Group(session.mpi, *handles, self.rank, self.size)
        self.others = tuple(r for r in members if r != session.rank)
        self.names = [waiting.members.index(r) for r in members]  # how events and reports call our ranks
        hosts = [session.hosts[r] for r in members]
        self.node_rank, self.node_size = hosts[: self.rank].count(hosts[self.rank]), hosts.count(hosts[self.rank])
        self.pending = {}  # id: MpiWork, whose tensors MPI may touch, whether or not somebody holds the Work
        self.parts = []  # communicators split from this one
        self.broken = ""  # the collective that did not complete
        self.closed = False

    # -- messages ---------------------------------------------------------------------------------------------------

    def isend(self, x, to):
        self._require_open()
        self.check_peer(to, "sends to")
        if self.waiting.inject is not None:
            self.waiting.inject.before(self)
        return MpiWork(self, "send", self.core.send, x, to)

    def irecv(self, x, source):
        self._require_open()
        self.check_peer(source, "receives from")
        return MpiWork(self, "recv", self.core.receive, x, source)

    # -- ranks ------------------------------------------------------------------------------------------------------

    def barrier(self):
        call = self.core.Call("barrier", 0, 0, -1)
        if not self._in_memory("barrier", "meet", call):
            step, t0, line = self._begin()
            begin(self, "barrier", line=line)
            self.agree("barrier")
            self.trace.add(step, "barrier", t0, self.trace.clock(), line=line)

    def split(self, color, key=0):
        """See Comm.split. color, key: anything that pickles to fewer than 100 bytes; keys can be compared."""
        step, t0, line = self._begin()
        begin(self, "split", line=line)
        notes = self.agree("split", note=pickle.dumps((color, key)))
        with DeferredInterrupt() as interrupt:
            try:
                chosen, reason = part_of(notes, self.rank), ""
            except Exception as error:
                chosen, reason = (), str(error) or type(error).__name__
            # MPI_Comm_split blocks: nobody enters it before all are on their way, and only a death can stop them.
            for rank, why in enumerate(self.agree("split", note=reason.encode()[:120])):
                if why:
                    raise ValueError(f"rank {rank} cannot split: {why.decode(errors='replace')}")
            parent = self.handle()
            place = min(chosen), chosen.index(self.rank)
            split = InThread(lambda: [parent.Split(*place).handle for _ in range(2)])
            self._finish(split, "split", ())  # nobody in particular: who has left has done his part before
        members = tuple(self.members[r] for r in chosen)
        part = self._part(split.result, members)
        part.rows, part.name = self.rows, self.name_of_part(color)
        self.parts.append(part)
        if interrupt.came:
            raise KeyboardInterrupt
        part.connect()
        self.trace.add(step, "split", t0, self.trace.clock(), line=line)
        return part

    def handle(self):
        """This communicator as mpi4py's."""
        return self.session.MPI.Comm.fromhandle(self.group.comm)

    def _part(self, handles, members):
        """The communicator of `members`, of the same kind as this one."""
        return MpiComm(self.session, handles, members, self.waiting, self.on_row, self.trace)

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
        agreement = self.core.Agreement(self.group, self.core.Call(op, count, dtype, root), note)
        peers = self.waiting.missing(self.members, op, self._place)
        self._finish(agreement, op, peers, facts=lambda: self._facts(op, count, DTYPES[dtype], root))
        return agreement.notes()

    # -- collectives ------------------------------------------------------------------------------------------------

    def ring_all_reduce(self, x):
        """all_reduce by messages around a ring, in segments, compiled. The same sum, in another order of adding."""
        return self._around_the_ring("ring_all_reduce", x)

    def _around_the_ring(self, op, x):
        """`ring_all_reduce`, called `op` in reports."""
        trace = self.trace
        with self.together(op, x) as line:
            ring = self.core.Ring(self.group, x, SEGMENT, trace.enabled)
            self._finish(ring, op, self.others, ring.nbytes, lambda: self._facts_of(op, (x,)))
            for end, peer, nbytes, t0, t1 in ring.transfers():
                trace.add(trace.step(), end, t0, t1, self.names[peer], nbytes, line)
        return x

    def mpi_all_reduce(self, x):
        """The MPI library's own all_reduce, of the dtypes that it knows."""
        with self.together("mpi_all_reduce", x):
            self.core.mpi.all_reduce(self.group, x, x)  # blocks, but everybody is on the way into it
        return x

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
            if not shared.group.meet(self.core.Call(*call), SPIN, self.crowded):
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
        line, numbers = caller_line(), {"count": count or -1, "dtype": dtype if count > 0 else "", "root": root}
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
            self.session.abandoned.append(operation)  # MPI, or another rank, may still write to its memory
            raise

    def _begin(self):
        trace = self.trace
        return trace.step(), trace.clock(), caller_line() if trace.enabled else ""

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
        """Leave the communicator; what is under way is cancelled or, where that cannot be, kept.

        error, line: what this rank raised and where: other ranks then do not wait for it until their deadline.
        """
        if self.closed:
            return
        self.session.keep(self._release(), FLUSH)
        self.waiting.end(error, line)
        self.session.forget(self)

    def require_no_forgotten_wait(self):
        """Raise ForgottenWait where this rank has not waited for what it receives."""
        for work in self.pending.values():
            if work.op == "recv":
                raise ForgottenWait.of(self.names[self.rank], self.names[work.peer], work.line)
        for part in self.parts:
            part.require_no_forgotten_wait()

    def _release(self):
        """Close this communicator and its parts; returns the messages that are under way there."""
        self.closed, self._shared = True, None
        return [*self.pending.values(), *(work for part in self.parts for work in part._release())]

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.close(error)

"""The communicator of one run on MPI ranks."""

import pickle

from ..buffers import DTYPES, buffer_of
from ..calls import begin
from ..parts import part_of
from ..real_comm import RealComm
from ..status.interrupts import DeferredInterrupt
from ..work import MpiWork
from .in_thread import InThread

SEGMENT = 256 * 1024  # bytes, of the compiled ring; 16 to 512 KiB were tried


class MpiComm(RealComm):
    """Messages through MPI; collectives in shared memory where all ranks are on one machine.

    session: this process's place in the job. members[i]: rank in MPI_COMM_WORLD of this communicator's rank i.
    """

    def __init__(self, session, handles, members, waiting, on_row=None, trace=True):
        super().__init__(session, members, waiting, on_row, trace)
        self.session = session
        self.doubles = None  # the handles of comm' (background.py); () while they are being made
        self.group = self.core.Group(session.mpi, *handles, self.rank, self.size)

    # -- messages ---------------------------------------------------------------------------------------------------

    def isend(self, x, dst):
        self._require_open()
        self.check_peer(dst, "sends to")
        self.waiting.require_reachable(dst)
        if self.waiting.inject is not None:
            self.waiting.inject.before(self)
        return MpiWork(self, "send", self.core.send, x, dst)

    def irecv(self, x, src):
        self._require_open()
        self.check_peer(src, "receives from")
        return MpiWork(self, "recv", self.core.receive, x, src)

    # -- ranks ------------------------------------------------------------------------------------------------------

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
        self._adopt(part, color)
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

    def can_double(self):
        return self.session.threads

    def make_double(self, waiting, trace):
        # Nobody calls anything collective on the inner communicator: the ranks may come at any time.
        session, duplicates = self.session, self.core.Duplicates(self.session.mpi, self.group.inner)
        self.doubles = ()  # under way
        session.abandoned.append(duplicates)
        waiting.finish(duplicates, "background", waiting.missing(self.members, "background"))
        session.abandoned.remove(duplicates)
        self.doubles = (duplicates.first, duplicates.second)
        return MpiComm(session, self.doubles, self.members, waiting, self.on_row, trace)

    def begin_beside(self, progress, x):
        if self._shared:
            return super().begin_beside(progress, x)
        _, count, dtype, _ = buffer_of(x, "all_reduce")
        call = self.core.Call("all_reduce", count, DTYPES.index(dtype), -1)
        return progress.all_reduce_by_messages(self.group, call, x, SEGMENT, self.trace.enabled)

    def _agreement(self, call, note):
        return self.core.Consensus(self.group, self.core.Call(*call), note)

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

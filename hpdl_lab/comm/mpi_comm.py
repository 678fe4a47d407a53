"""The communicator of one run on real ranks."""

import pickle
from contextlib import contextmanager

from ..trace import Trace, caller_line
from .base import Comm
from .buffers import DTYPES, ITEMSIZE, buffer_of, new_like
from .errors import CommError
from .interrupts import DeferredInterrupt
from .parts import part_of
from .shm import SharedRanks
from .waiting import SPIN
from .work import MpiWork

SEGMENT = 256 * 1024  # bytes, of the compiled ring; 16 to 512 KiB were tried
FLUSH = 0.2  # s: for all messages that were sent without waiting for them, when a communicator is closed


class MpiComm(Comm):
    """Messages through MPI; collectives in shared memory where all ranks are on one machine.

    members[i]: rank in MPI_COMM_WORLD of this communicator's rank i. Use it as a context manager, or close it.
    """

    def __init__(self, session, handles, members, waiting, on_row=None, trace=True):
        rank = members.index(session.rank)
        log = trace if isinstance(trace, Trace) else Trace(rank, enabled=trace)
        super().__init__(rank, len(members), log, on_row)
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
        self._shared = None  # SharedRanks; False where the ranks cannot share memory

    # -- messages ---------------------------------------------------------------------------------------------------

    def isend(self, x, to):
        self._require_open()
        self.check_peer(to, "sends to")
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
            self.agree("barrier")
            self.trace.add(step, "barrier", t0, self.trace.clock(), line=line)

    def split(self, color, key=0):
        """See Comm.split. color, key: anything that pickles to fewer than 100 bytes; keys can be compared."""
        step, t0, line = self._begin()
        notes = self.agree("split", note=pickle.dumps((color, key)))
        with DeferredInterrupt() as interrupt:
            try:
                chosen, reason = part_of(notes, self.rank), ""
            except Exception as error:
                chosen, reason = (), str(error) or type(error).__name__
            # MPI_Comm_split blocks: nobody enters it before all are on their way, with nothing that could stop them.
            for rank, why in enumerate(self.agree("split", note=reason.encode()[:120])):
                if why:
                    raise ValueError(f"rank {rank} cannot split: {why.decode(errors='replace')}")
            parent = self.session.MPI.Comm.fromhandle(self.group.comm)
            handles = [parent.Split(min(chosen), chosen.index(self.rank)).handle for _ in range(2)]
        members = tuple(self.members[r] for r in chosen)
        part = self._part(handles, members)
        part.rows = self.rows
        self.parts.append(part)
        if interrupt.came:
            raise KeyboardInterrupt
        part.connect()
        self.trace.add(step, "split", t0, self.trace.clock(), line=line)
        return part

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
        shared = self.shared("allocate")
        if shared:
            return shared.allocate(shape, dtype)
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype))

    def agree(self, op, count=0, dtype=0, root=-1, note=b""):
        """Wait until all ranks are here and mean the same; returns the note of every rank, in rank order.

        dtype: index in buffers.DTYPES. note: at most 120 bytes. Raises ValueError with all numbers on every rank.
        """
        self._require_whole()
        agreement = self.core.Agreement(self.group, self.core.Call(op, count, dtype, root), note)
        self._finish(agreement, op, self.waiting.missing(self.members, op))
        return agreement.notes()

    # -- collectives ------------------------------------------------------------------------------------------------

    def all_reduce(self, x):
        if not self._in_memory("all_reduce", "all_reduce", x):
            self.ring_all_reduce(x)
        return x

    def ring_all_reduce(self, x):
        """all_reduce by messages around a ring, in segments, compiled. The same sum, in another order of adding."""
        trace = self.trace
        with self.together("ring_all_reduce", x) as line:
            ring = self.core.Ring(self.group, x, SEGMENT, trace.enabled)
            self._finish(ring, "ring_all_reduce", self.others, ring.nbytes)
            for op, peer, nbytes, t0, t1 in ring.transfers():
                trace.add(trace.step(), op, t0, t1, self.names[peer], nbytes, line)
        return x

    def mpi_all_reduce(self, x):
        """The MPI library's own all_reduce, of the dtypes that it knows."""
        with self.together("mpi_all_reduce", x):
            self.core.mpi.all_reduce(self.group, x, x)  # blocks, but everybody is on the way into it
        return x

    def broadcast(self, x, root=0):
        self._check_root("broadcast", root)
        if not self._in_memory("broadcast", "broadcast", x, root):
            super().broadcast(x, root)
        return x

    def all_gather(self, x):
        if not self.shared("all_gather"):
            return super().all_gather(x)
        out = new_like(x, (self.size, *x.shape))
        self._in_memory("all_gather", "all_gather", x, out)
        return out

    def reduce_scatter(self, x):
        if len(x) != self.size:
            raise ValueError(f"reduce_scatter on {self.size} ranks needs {self.size} rows, got {len(x)}")
        if not self.shared("reduce_scatter"):
            return super().reduce_scatter(x)
        out = new_like(x, x.shape[1:])
        self._in_memory("reduce_scatter", "reduce_scatter", x, out)
        return out

    def all_to_all(self, x):
        if len(x) != self.size:
            raise ValueError(f"all_to_all on {self.size} ranks needs {self.size} rows, got {len(x)}")
        if not self.shared("all_to_all"):
            return super().all_to_all(x)
        out = new_like(x, x.shape)
        self._in_memory("all_to_all", "all_to_all", x, out)
        return out

    def reduce(self, x, root=0):
        self._check_root("reduce", root)
        if not self.shared("reduce"):
            return super().reduce(x, root)
        out = new_like(x, x.shape) if self.rank == root else None
        self._in_memory("reduce", "reduce", x, out, root)
        return out

    def gather(self, x, root=0):
        self._check_root("gather", root)
        if not self.shared("gather"):
            return super().gather(x, root)
        out = new_like(x, (self.size, *x.shape)) if self.rank == root else None
        self._in_memory("gather", "gather", x, out, root)
        return out

    def scatter(self, x, out, root=0):
        self._check_root("scatter", root)
        if self.rank == root and (x is None or len(x) != self.size):
            raise ValueError(f"scatter needs {self.size} rows on its root, got {'none' if x is None else len(x)}")
        if not self._in_memory("scatter", "scatter", x if self.rank == root else None, out, root):
            super().scatter(x, out, root)
        return out

    def shared(self, op):
        """SharedRanks where all ranks are on one machine and can share memory, else False.

        Collective at its first call, which is made on behalf of `op`.
        """
        if self._shared is None:
            self._require_whole()
            self._shared = False
            if self.node_size == self.size:
                try:
                    self._shared = SharedRanks(self, self.core, op)
                except MemoryError:  # on every rank alike: messages will do
                    pass
        return self._shared

    def _in_memory(self, op, name, *args):
        """Do collective `name` of the ranks that share memory, as one event; False where they do not."""
        shared = self._shared or self.shared(op)
        if not shared:
            return False
        group, trace = shared.group, self.trace
        if self.broken:
            self._require_whole()
        if not trace.enabled:  # the way of a few hundred ns
            if not getattr(group, name)(*args, SPIN, self.crowded):
                self._go_on(group, op)
            return True
        step, t0, line = self._begin()
        if not getattr(group, name)(*args, SPIN, self.crowded):
            self._go_on(group, op, line)
        trace.add(step, op, t0, trace.clock(), nbytes=group.nbytes, line=line)
        return True

    @contextmanager
    def together(self, op, x):
        """Agree on what all ranks are about to do with `x`, then record it as one event; gives its line."""
        buffer = buffer_of(x, op)
        step, t0, line = self._begin()
        self._meet((op, buffer.count, DTYPES.index(buffer.dtype), -1), line)
        yield line
        self.trace.add(step, "all_reduce", t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)

    def _meet(self, call, line=""):
        """Wait until all ranks are here and mean the same. call: op, count, index of the dtype, root or -1."""
        shared = self.shared(call[0])
        self._require_whole()
        if not shared:
            self.agree(*call)
        elif not shared.group.meet(self.core.Call(*call), SPIN, self.crowded):
            self._go_on(shared.group, call[0], line)

    def _finish(self, operation, op, peers, nbytes=0):
        with self._breaking(op, operation):
            self.waiting.finish(operation, op, peers, nbytes)

    def _go_on(self, group, op, line=""):
        with self._breaking(op, group):
            self.waiting.go_on(group, op, lambda: tuple(self.members[r] for r in group.missing()), group.nbytes, line)

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

    def _check_root(self, op, root):
        if not isinstance(root, int) or not 0 <= root < self.size:
            raise ValueError(f"rank {self.rank} calls {op} with root rank {root}: ranks here are 0 to {self.size - 1}")

    # -- end --------------------------------------------------------------------------------------------------------

    def close(self, error=None, line=""):
        """Leave the communicator; what is under way is cancelled or, where that cannot be, kept.

        error, line: what this rank raised and where: other ranks then do not wait for it until their deadline.
        """
        if self.closed:
            return
        self.session.keep(self._release(), FLUSH)
        board, rank = self.waiting.board, self.session.rank
        if board.slot(rank).state != "waiting":  # what a rank waited for when it gave up stays to be read
            board.publish(rank, "finished" if error is None else "failed", self.waiting.run, line=line)
        self.session.forget(self)

    def _release(self):
        """Close this communicator and its parts; returns the messages that are under way there."""
        self.closed, self._shared = True, None
        return [*self.pending.values(), *(work for part in self.parts for work in part._release())]

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        self.close(error)

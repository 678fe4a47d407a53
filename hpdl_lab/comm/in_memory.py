"""The collectives of ranks that share memory, each one compiled call and one event of the trace."""

from contextlib import contextmanager

from .base import Comm, best_all_reduce
from .buffers import DTYPES, buffer_of, new_like
from .calls import PartOf
from .shm import SharedRanks
from .status.waiting import SPIN


class InMemory(Comm):
    """Comm's collectives in shared memory where all ranks are on one machine, by messages elsewhere.

    The communicator of real ranks (mpi_comm.py) is made on it, and knows how to wait and what to say of a wait.
    """

    _shared = None  # SharedRanks; False where the ranks cannot share memory

    def all_reduce(self, x, async_op=False):
        if async_op:
            return self.background(best_all_reduce, x)
        if not self._in_memory("all_reduce", "all_reduce", x):
            self._around_the_ring("all_reduce", x)
        return x

    def broadcast(self, x, root=0):
        self._check_root("broadcast", root)
        if not self._in_memory("broadcast", "broadcast", x, root):
            with self._agreed("broadcast", x, root):
                super().broadcast(x, root)
        return x

    def all_gather(self, x):
        if not self.shared("all_gather"):
            with self._agreed("all_gather", x):
                return super().all_gather(x)
        out = new_like(x, (self.size, *x.shape))
        self._in_memory("all_gather", "all_gather", x, out)
        return out

    def reduce_scatter(self, x):
        if len(x) != self.size:
            raise ValueError(f"reduce_scatter on {self.size} ranks needs {self.size} rows, got {len(x)}")
        if not self.shared("reduce_scatter"):
            with self._agreed("reduce_scatter", x):
                return super().reduce_scatter(x)
        out = new_like(x, x.shape[1:])
        self._in_memory("reduce_scatter", "reduce_scatter", x, out)
        return out

    def all_to_all(self, x):
        if len(x) != self.size:
            raise ValueError(f"all_to_all on {self.size} ranks needs {self.size} rows, got {len(x)}")
        if not self.shared("all_to_all"):
            with self._agreed("all_to_all", x):
                return super().all_to_all(x)
        out = new_like(x, x.shape)
        self._in_memory("all_to_all", "all_to_all", x, out)
        return out

    def reduce(self, x, root=0):
        self._check_root("reduce", root)
        if not self.shared("reduce"):
            with self._agreed("reduce", x, root):
                return super().reduce(x, root)
        out = new_like(x, x.shape) if self.rank == root else None
        self._in_memory("reduce", "reduce", x, out, root)
        return out

    def gather(self, x, root=0):
        self._check_root("gather", root)
        if not self.shared("gather"):
            with self._agreed("gather", x, root):
                return super().gather(x, root)
        out = new_like(x, (self.size, *x.shape)) if self.rank == root else None
        self._in_memory("gather", "gather", x, out, root)
        return out

    def scatter(self, x, out, root=0):
        self._check_root("scatter", root)
        if self.rank == root and (x is None or len(x) != self.size):
            raise ValueError(f"scatter needs {self.size} rows on its root, got {'none' if x is None else len(x)}")
        if not self._in_memory("scatter", "scatter", x if self.rank == root else None, out, root):
            with self._agreed("scatter", out, root):
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
                self.collectives += 1  # what it is on behalf of is counted later
                try:
                    self._shared = SharedRanks(self, self.core, op)
                except MemoryError:  # on every rank alike: messages will do
                    pass
                finally:
                    self.collectives -= 1
        return self._shared

    @contextmanager
    def _agreed(self, op, x, root=-1):
        """Within it, `op` is done by messages: all ranks have agreed on it first, as those in shared memory do."""
        outermost = self.calling is None
        with PartOf(self, op, x, root) as call:
            if outermost:
                self._meet((op, call.count, DTYPES.index(call.dtype), root), call.line)
            yield

    def _in_memory(self, op, name, *args):
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
        try:
            if not trace.enabled:  # the way of a few hundred ns
                if not getattr(group, name)(*args, SPIN, self.crowded):
                    self._go_on(group, op, lambda: self._facts_of(op, args))
                return True
            step, t0, line = self._begin()
            self.calls.note((op, line))
            if not getattr(group, name)(*args, SPIN, self.crowded):
                self._go_on(group, op, lambda: self._facts_of(op, args), line)
        except ValueError:
            self._require_same(group)
            raise
        trace.add(step, op, t0, trace.clock(), nbytes=group.nbytes, line=line)
        return True

    def _facts_of(self, op, args):
        """`_facts` of the collective `op` in shared memory that was called with `args`."""
        x = args[1] if op == "scatter" else args[0]
        count, dtype = (-1, "") if op == "barrier" else buffer_of(x, op)[1:3]
        return self._facts(op, count, dtype, args[-1] if isinstance(args[-1], int) else -1)

    def _check_root(self, op, root):
        if not isinstance(root, int) or not 0 <= root < self.size:
            raise ValueError(f"rank {self.rank} calls {op} with root rank {root}: ranks here are 0 to {self.size - 1}")

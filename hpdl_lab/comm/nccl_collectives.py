"""The collectives of ranks with GPUs: through NCCL, in one pass over shared GPU memory, or staged through the host.

`clique` is None where NCCL refuses these ranks, because they share a GPU: then everything is staged.
"""

from contextlib import contextmanager

from . import gpu_memory
from .buffers import DTYPES, buffer_of, copy_into
from .calls import Call
from .errors import CommError
from .mpi_comm import MpiComm
from .nccl_api import DTYPE, SUM

WIDENED = ("bfloat16", "float16")  # added as float32 and rounded once


class NcclCollectives(MpiComm):
    """The part of NcclComm (comm/nccl.py) that its collectives are. Tensors of the CPU go to MpiComm's own."""

    def all_reduce(self, x):
        if not self._on_gpu("all_reduce", x):
            return super().all_reduce(x)
        if self.segments and self._one_pass(x):
            return x
        return self._staged(super().all_reduce, x) if self.clique is None else self.nccl_all_reduce(x)

    def broadcast(self, x, root=0):
        if not self._on_gpu("broadcast", x):
            return super().broadcast(x, root)
        if self.clique is None:
            return self._staged(super().broadcast, x, root)
        self._collective("broadcast", x, [("ncclBroadcast", *both(x, x), root)], root=root)
        return x

    def reduce(self, x, root=0):
        if not self._on_gpu("reduce", x):
            return super().reduce(x, root)
        if self.clique is None:
            return self._fetched(super().reduce, x, root)
        source = x.detach().float() if dtype_of(x) in WIDENED else x
        out = source.new_empty(source.shape) if self.rank == root else source
        self._collective("reduce", x, [("ncclReduce", *both(source, out), SUM, root)], [source, out], root)
        return out.to(x.dtype) if self.rank == root else None

    def all_gather(self, x):
        if not self._on_gpu("all_gather", x):
            return super().all_gather(x)
        if self.clique is None:
            return self._fetched(super().all_gather, x)
        out = x.new_empty((self.size, *x.shape))
        self._collective("all_gather", x, [("ncclAllGather", *both(x, out))], [out])
        return out

    def reduce_scatter(self, x):
        if not self._on_gpu("reduce_scatter", x):
            return super().reduce_scatter(x)
        if self.clique is None:
            return self._fetched(super().reduce_scatter, x)
        self._require_rows("reduce_scatter", x)
        source = x.detach().float() if dtype_of(x) in WIDENED else x
        out = source.new_empty(source.shape[1:])
        calls = [("ncclReduceScatter", *both(source, out, out.numel()), SUM)]
        self._collective("reduce_scatter", x, calls, [source, out])
        return out.to(x.dtype)

    def gather(self, x, root=0):
        if not self._on_gpu("gather", x):
            return super().gather(x, root)
        if self.clique is None:
            return self._fetched(super().gather, x, root)
        out = x.new_empty((self.size, *x.shape)) if self.rank == root else None
        others = [r for r in range(self.size) if r != root]
        calls = [move("ncclRecv", out[r], r) for r in others] if out is not None else [move("ncclSend", x, root)]
        if out is not None:
            copy_into(out[root], x)
        self._collective("gather", x, calls, [out], root)
        return out

    def scatter(self, x, out, root=0):
        if not self._on_gpu("scatter", out):
            return super().scatter(x, out, root)
        if self.clique is None:
            copy_into(out, super().scatter(None if x is None else x.detach().cpu(), out.detach().cpu(), root))
            return out
        calls = [move("ncclRecv", out, root)]
        if self.rank == root:
            self._require_rows("scatter", x)
            buffer_of(x, "scatter", self.device)
            copy_into(out, x[root])
            calls = [move("ncclSend", x[r], r) for r in range(self.size) if r != root]
        self._collective("scatter", out, calls, [x], root)
        return out

    def all_to_all(self, x):
        if not self._on_gpu("all_to_all", x):
            return super().all_to_all(x)
        if self.clique is None:
            return self._fetched(super().all_to_all, x)
        self._require_rows("all_to_all", x)
        out = x.new_empty(x.shape)
        copy_into(out[self.rank], x[self.rank])
        others = [r for r in range(self.size) if r != self.rank]
        calls = [move("ncclSend", x[r], r) for r in others] + [move("ncclRecv", out[r], r) for r in others]
        self._collective("all_to_all", x, calls, [out])
        return out

    def _one_pass(self, x):
        """all_reduce of `x` where it lies in memory that all ranks reach, at one place on all of them; else False."""
        buffer = buffer_of(x, "all_reduce", self.device)
        count, dtype = buffer.count, DTYPES.index(buffer.dtype)
        step, t0, line = self._begin_collective("all_reduce", buffer)
        self.waiting.finish(gpu_memory.Computed(self.gpu.mark_computed()), "all_reduce", (), line=line)
        number, offset = gpu_memory.place_of(self.segments, self.rank, x)
        places = self.agree("all_reduce", count, dtype, note=f"{number},{offset}".encode())
        if number < 0 or len(set(places)) > 1:
            return False
        first, mine = gpu_memory.slice_of(count, self.rank, self.size)
        with self.gpu.current():
            tensors = [address + offset for address in self.segments[number].addresses]
            self.ranks.cuda.one_pass(tensors, first, mine, dtype, self.gpu.handle)
        self.waiting.finish(gpu_memory.Computed(self.gpu.mark()), "all_reduce", (), line=line)
        self._meet(("all_reduce", count, dtype, -1), line)
        self.trace.add(step, "all_reduce", t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)
        return True

    def nccl_all_reduce(self, x):
        """all_reduce by NCCL alone, wherever `x` lies on the GPU. Raises CommError where NCCL refuses these ranks."""
        if self.clique is None:
            raise CommError(self.ranks.refusal)
        buffer_of(x, "all_reduce", self.device)
        sums = x.detach().float() if dtype_of(x) in WIDENED else x
        self._collective("all_reduce", x, [("ncclAllReduce", *both(sums, sums), SUM)], [sums])
        if sums is not x:
            copy_into(x, sums)
        return x

    def ring_all_reduce(self, x):
        return self._staged(super().ring_all_reduce, x)

    def mpi_all_reduce(self, x):
        return self._staged(super().mpi_all_reduce, x)

    def _staged(self, function, x, *more):
        """function(x), which works in place on CPU memory: a tensor on the GPU goes to the host and back."""
        if not self.gpu.owns(x):
            return function(x, *more)
        copy_into(x, function(x.detach().cpu(), *more))
        return x

    def _fetched(self, function, x, *more):
        """What function(x) returns, which works on CPU memory, on the GPU."""
        out = function(x.detach().cpu(), *more)
        return None if out is None else out.to(x.device)

    @contextmanager
    def together(self, op, x):
        if not self.gpu.owns(x):
            with super().together(op, x) as line:
                yield line
            return
        buffer = buffer_of(x, op, self.device)
        step, t0, line = self._begin_collective(op, buffer)
        self._meet((op, buffer.count, DTYPES.index(buffer.dtype), -1), line)
        yield line
        self.trace.add(step, "all_reduce", t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)

    def _collective(self, op, x, calls, keep=(), root=-1):
        """Agree on `op` of `x` with all ranks, then run `calls` as one group and one event."""
        buffer = buffer_of(x, op, self.device)
        if root != -1:
            self._check_root(op, root)
        step, t0, line = self._begin_collective(op, buffer, root)
        self._meet((op, buffer.count, DTYPES.index(buffer.dtype), root), line)
        self._issue_last()
        with self.aborting(op):
            launch = self.clique.submit(calls if buffer.count else [], [x, *keep])
            self.waiting.finish(launch, op, self.others, buffer.nbytes, line)
        self.trace.add(step, op, t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)

    def _begin_collective(self, op, buffer, root=-1):
        """Let what has been posted start, and note that `op` begins; returns its step, time and line."""
        self.launch_posted()
        step, t0, line = self._begin()
        self.collectives += 1
        self.calls.note(Call(op, line, buffer.count, buffer.dtype, root, self.name, self.collectives))
        return step, t0, line

    def _on_gpu(self, op, x):
        """Is `x` on a GPU? Raises ValueError where it is on another one than this rank's, or `op` cannot take it."""
        if self.gpu.owns(x):
            buffer_of(x, op, self.device)
            return True
        return False

    def _require_rows(self, op, x):
        rows = "none" if x is None else len(x)
        if rows != self.size:
            raise ValueError(f"{op} on {self.size} ranks needs {self.size} rows, got {rows}")


def dtype_of(x):
    return str(x.dtype).removeprefix("torch.")


def both(source, out, count=None):
    """The arguments of a collective: from where, to where, how many, of what."""
    return source.data_ptr(), out.data_ptr(), source.numel() if count is None else count, DTYPE[dtype_of(source)]


def move(name, x, peer):
    """ncclSend or ncclRecv of all of `x`."""
    return name, x.data_ptr(), x.numel(), DTYPE[dtype_of(x)], peer

"""A process group that moves no CPU tensors, such as nccl alone, as a communicator: GPUs under torchrun.

    tensors of the GPU      messages and collectives of the group
    everything else         a group of gloo beside it, and shared memory: agreement, notes, deadlines, CPU tensors

As between MPI ranks with GPUs (nccl.py), the ranks agree on the host before each collective, and a note of count and
dtype goes ahead of each message, because the group's carry neither. Messages are collected until somebody waits, and
start as one batch, in which none waits for another, as nccl wants it: two ranks that send to each other one after the
other would wait for ever on their GPUs. A receive whose note does not come holds up the others for PATIENCE only. It
starts when its rank next waits for a message of the group, or begins a collective.
"""

import time
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from .buffers import DTYPES, ITEMSIZE, buffer_of, copy_into, is_tensor
from .calls import Call
from .errors import CommError
from .nccl_collectives import WIDENED, dtype_of
from .torch import TorchComm
from .torch_device_work import Batch, DeviceWork

PATIENCE = 0.2  # s: notes are faster, so of two ranks that send to each other one at most starts without the other
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # as torch called them before 2.13
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class DeviceComm(TorchComm):
    """device: that of the tensors which `device_group` moves, a group of these ranks alone."""

    def __init__(self, place, number, members, waiting, on_row=None, trace=True, device_group=None, device="cuda"):
        super().__init__(place, number, members, waiting, on_row, trace)
        self.device_group, self.device = device_group, str(device)
        self.posted, self.posted_at = [], 0.0  # DeviceWorks that have not started, and since when (s) there are some

    def can_double(self):
        """No: as of NcclComm."""
        return False

    def _part(self, number, members):
        whole = dist.get_process_group_ranks(self.device_group)
        ranks = [whole[self.members.index(member)] for member in members]
        config = str(dist.get_backend_config(self.device_group))
        order = {} if ranks == sorted(ranks) else {"sort_ranks": False}  # which older versions of torch do not know
        group = dist.new_group(ranks, backend=config, use_local_synchronization=True, **order)
        told = self.waiting, self.on_row, self.trace
        return DeviceComm(self.place, number, members, *told, device_group=group, device=self.device)

    def allocate(self, shape, dtype="float32"):
        """See Comm.allocate: a tensor on this rank's device, which no other reaches."""
        dtype = str(dtype).removeprefix("torch.")
        if dtype not in ITEMSIZE:
            raise ValueError(f"cannot allocate dtype {dtype}: one of {', '.join(DTYPES)} is needed")
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    # -- messages ---------------------------------------------------------------------------------------------------

    def isend(self, x, to):
        return self._message("send", super().isend, self._post_send, x, to, "sends to")

    def irecv(self, x, source):
        return self._message("recv", super().irecv, self._post_receive, x, source, "receives from")

    def _message(self, op, of_cpu, post, x, peer, words):
        if not self._on_device(op, x):
            return of_cpu(x, peer)
        self._require_open()
        self.check_peer(peer, words)
        if self.waiting.inject is not None and op == "send":
            self.waiting.inject.before(self)
        if not self.posted:
            self.posted_at = time.monotonic()
        return DeviceWork(self, op, post, x, peer)

    def start_posted(self):
        """Start what has been posted, as one batch: when all of it may start, or after PATIENCE what may."""
        ready = [work for work in self.posted if work.is_ready()]
        if ready and (len(ready) == len(self.posted) or time.monotonic() > self.posted_at + PATIENCE):
            self.posted = [work for work in self.posted if work not in ready]
            self._start(ready)

    def _start(self, works):
        operations = [work.start() for work in works if work.buffer.count]
        batch = Batch(dist.batch_isend_irecv(operations) if operations else [])
        for work in works:
            work.launch = batch

    def launch_posted(self):
        """Before a collective: what has been posted starts, but for receives that nobody has sent anything for."""
        end = time.monotonic() + PATIENCE
        while self.posted and time.monotonic() < end and any(work.op == "send" for work in self.posted):
            self.start_posted()
        self.start_posted()

    # -- collectives ------------------------------------------------------------------------------------------------

    def all_reduce(self, x):
        if not self._on_device("all_reduce", x):
            return super().all_reduce(x)
        total = widened(x)
        self._collective("all_reduce", x, lambda **how: dist.all_reduce(total, **how))
        if total is not x:
            copy_into(x, total)
        return x

    def ring_all_reduce(self, x):
        return self.all_reduce(x) if self._on_device("all_reduce", x) else super().ring_all_reduce(x)

    def broadcast(self, x, root=0):
        if not self._on_device("broadcast", x):
            return super().broadcast(x, root)
        data = x.detach()
        self._collective("broadcast", x, lambda **how: dist.broadcast(data, group_src=root, **how), root)
        return x

    def reduce(self, x, root=0):
        if not self._on_device("reduce", x):
            return super().reduce(x, root)
        total = widened(x).clone()
        self._collective("reduce", x, lambda **how: dist.reduce(total, group_dst=root, **how), root)
        return total.to(x.dtype) if self.rank == root else None

    def all_gather(self, x):
        if not self._on_device("all_gather", x):
            return super().all_gather(x)
        out, data = x.new_empty((self.size, *x.shape)), x.detach().reshape(-1)
        self._collective("all_gather", x, lambda **how: ALL_GATHER(out.view(-1), data, **how))
        return out

    def reduce_scatter(self, x):
        if not self._on_device("reduce_scatter", x):
            return super().reduce_scatter(x)
        self._require_rows("reduce_scatter", x)
        rows = widened(x)
        out = rows.new_empty(rows.shape[1:])
        start = lambda **how: REDUCE_SCATTER(out.view(-1), rows.reshape(-1), **how)  # noqa: E731
        self._collective("reduce_scatter", x, start)
        return out.to(x.dtype)

    def gather(self, x, root=0):
        if not self._on_device("gather", x):
            return super().gather(x, root)
        out = x.new_empty((self.size, *x.shape)) if self.rank == root else None
        rows = None if out is None else list(out)
        self._collective("gather", x, lambda **how: dist.gather(x.detach(), rows, group_dst=root, **how), root)
        return out

    def scatter(self, x, out, root=0):
        if not self._on_device("scatter", out):
            return super().scatter(x, out, root)
        if self.rank == root:
            self._require_rows("scatter", x)
            buffer_of(x, "scatter", self.device)
        rows = list(x.detach()) if self.rank == root else None
        self._collective("scatter", out, lambda **how: dist.scatter(out.detach(), rows, group_src=root, **how), root)
        return out

    def all_to_all(self, x):
        if not self._on_device("all_to_all", x):
            return super().all_to_all(x)
        self._require_rows("all_to_all", x)
        out = x.new_empty(x.shape)
        self._collective("all_to_all", x, lambda **how: dist.all_to_all_single(out, x.detach(), **how))
        return out

    @contextmanager
    def together(self, op, x):
        if not self._on_device(op, x):
            with super().together(op, x) as line:
                yield line
            return
        step, t0, line, buffer = self._agree_on(op, x)
        yield line
        self.trace.add(step, "all_reduce", t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)

    def _collective(self, op, x, start, root=-1):
        """Agree on `op` of `x` with all ranks, then let the group do it, as one event. start(group=, async_op=)."""
        if root != -1:
            self._check_root(op, root)
        step, t0, line, buffer = self._agree_on(op, x, root)
        if buffer.count:
            with self.aborting(op):
                batch = Batch([start(group=self.device_group, async_op=True)])
                self.waiting.finish(batch, op, self.others, buffer.nbytes, line)
        self.trace.add(step, op, t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)

    def _agree_on(self, op, x, root=-1):
        """Let what has been posted start, and meet; returns the step, time, line and Buffer of `op`."""
        self.launch_posted()
        buffer = buffer_of(x, op, self.device)
        step, t0, line = self._begin()
        self.collectives += 1
        self.calls.note(Call(op, line, buffer.count, buffer.dtype, root, self.name, self.collectives))
        self._meet((op, buffer.count, DTYPES.index(buffer.dtype), root), line)
        return step, t0, line, buffer

    def _on_device(self, op, x):
        """Is `x` a tensor of the group's device? Raises ValueError where it is, and `op` cannot take it."""
        mine = is_tensor(x) and str(x.device) == self.device
        if mine:
            buffer_of(x, op, self.device)
        return mine

    def _require_rows(self, op, x):
        rows = "none" if x is None else len(x)
        if rows != self.size:
            raise ValueError(f"{op} on {self.size} ranks needs {self.size} rows, got {rows}")

    # -- what does not end well -------------------------------------------------------------------------------------

    @contextmanager
    def aborting(self, op):
        """What does not complete here is ended on the device: nothing of it may run on beside what comes next."""
        self._require_open()
        try:
            yield
        except BaseException:
            self.abort(op)
            raise

    def abort(self, op):
        """End the group: nothing else ends what waits on a GPU. It is of no more use then, and says so."""
        with suppress(RuntimeError):
            self.device_group.abort()
        self.broken = self.broken or op

    def _release(self):
        with suppress(CommError, ValueError, RuntimeError):
            self.launch_posted()
        return super()._release()


def widened(x):
    """`x`, or a copy in float32 where it has 16 bits: sums are rounded once."""
    return x.detach().float() if dtype_of(x) in WIDENED else x.detach()

"""Tensors on a GPU: they travel through a process group of torch (NCCL), everything else through the host.

    tensors of the GPU      messages and collectives of the group
    everything else         MPI or gloo, and shared memory: consensus, notes, deadlines, tensors of the CPU

The ranks agree on the host before each collective, and a note of count and dtype goes ahead of each message, because
NCCL's carry neither and would hang if the ends disagree. Messages are collected until somebody waits, and start as one
batch, in which none waits for another: two ranks that send to each other one after the other would wait forever on
their GPUs. A receive whose note does not come holds up the others for PATIENCE only. It starts when its rank next waits
for a message of the group, or begins a collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..base import best_all_reduce
from ..buffers import DTYPES, ITEMSIZE, buffer_of, copy_into, dtype_name, is_tensor
from ..calls import Call
from ..errors import CommError, Mismatch
from ..real import RealComm, shape_and_dtype
from ..shm import attempt
from ..status.operation import Operation
from ..status.report import mismatch
from ..torch.messages import GroupWork
from ..work import RealWork
from .host import HostGroup

PATIENCE = 0.2  # s: notes are faster, so of two ranks that send to each other one at most starts without the other
MOST_TENSORS = 16  # kMaxTensors of csrc/cuda/one_pass.h
WIDENED = {"bfloat16": torch.float32, "float16": torch.float32, "int16": torch.int32}  # added so, and rounded once
MOVED = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "int8")  # else as bytes


class DeviceWork(RealWork):
    """One end of a message of the group; its `message` is the note, which the host carries.

    launch: the GroupWork in which it has started, or None.
    """

    __slots__ = ("buffer", "launch", "note")
    progress = 0

    def __init__(self, comm: DeviceComm, op: str, x: Tensor, peer: int) -> None:
        self.buffer = buffer_of(x, op, comm.device)
        self.launch: GroupWork | None = None
        mine = (self.buffer.count, DTYPES.index(self.buffer.dtype))
        self.note = np.array(mine if op == "send" else (-1, -1), np.int64)
        super().__init__(comm, op, x, peer, sent=self.note)
        comm.posted.append(self)

    def is_ready(self) -> bool:
        """May it start? A receive may when its note has come. Raises Mismatch if that says something else."""
        return self.op == "send" or self.has_come()

    def has_come(self) -> bool:
        """True when the note has come and says what this rank expects. Raises Mismatch if it says something else."""
        expected = (self.buffer.count, self.buffer.dtype)
        try:
            if not self.message.wait(0.0, 0.0, False):
                return False
            sent = (int(self.note[0]), DTYPES[self.note[1]])
        except ValueError:  # no note came, but a message of CPU memory
            count, dtype = self.message.sent
            sent = (count, f"{DTYPES[dtype]} of the CPU")
        if sent != expected:
            names = self.comm.names
            raise Mismatch(mismatch(names[self.peer], names[self.comm.rank], sent, expected))
        return True

    def start(self) -> Any:
        """Hand it to the group; returns its torch.distributed.Work, or None within a batch that NCCL coalesces."""
        act = self.comm.device_group.send if self.op == "send" else self.comm.device_group.recv
        return act([moved(self.x)], self.peer, 0)

    def wait(self) -> None:
        if self.message is not None:
            comm = self.comm
            with comm.aborting(self.op):
                whom = (comm.members[self.peer],)
                comm.waiting.finish(Arrival(self), self.op, whom, self.buffer.nbytes, self.line, facts=self._facts)
            self._arrived()

    def test(self) -> bool:
        if self.message is not None:
            with self.comm.aborting(self.op):
                arrived = Arrival(self).advance()
            if arrived:
                self._arrived()
        return self.message is None

    def let_go(self, seconds: float) -> bool:
        """See RealWork.let_go: what is still on the device after `seconds` is ended there."""
        if self.message is not None and self.launch is not None:
            with suppress(CommError, ValueError):  # nobody waits for it any more
                self.launch.wait(seconds, 1e-3, self.comm.oversubscribed)
            if not self.launch.done:
                self.comm.abort(self.op)
        return super().let_go(0.0)

    def _facts(self) -> dict[str, Any]:
        """See RealWork._facts."""
        counts = self.comm.calls.times(self.op, self.line)
        return {"count": self.buffer.count, "dtype": self.buffer.dtype, "comm": self.comm.name, "counts": counts}

    def _arrived(self) -> None:
        inject = self.comm.waiting.inject
        self._done()
        if inject is not None:
            inject.after(self.comm, self.peer, self.buffer.nbytes)

    def _done(self) -> None:
        comm, trace = self.comm, self.comm.trace
        self._forget()
        trace.add(self.step, self.op, self.t0_ns, trace.clock(), comm.names[self.peer], self.buffer.nbytes, self.line)
        self.message = self.x = None


class Arrival(Operation):
    """The end of a DeviceWork, as an operation: whoever waits for it lets the messages start that have been posted."""

    def __init__(self, work: DeviceWork) -> None:
        self.work = work

    def advance(self) -> bool:
        self.work.comm.start_posted()
        return self.work.launch is not None and self.work.launch.advance()


class DeviceComm(RealComm):
    """A communicator whose tensors are on `device` and travel through `device_group`, a process group of its ranks.

    groups: what makes that group (groups.py), for MPI ranks or for those of torchrun. Operations have ended when they
    return: the host waits for the GPU.
    """

    can_double = False  # what is given to `background` runs at once

    def __init__(self, groups: Any, *arguments: Any) -> None:
        """arguments: of RealComm."""
        super().__init__(*arguments)
        self.groups, self.device = groups, str(groups.device)
        self.device_group: Any = None
        self.posted, self.posted_at = [], 0.0  # works that have not started, and since when (s) there are some
        self.segments = []  # Segment, in the order of `allocate`, the same everywhere

    def connect(self) -> None:
        self.device_group = self.groups.connect(self)

    @property
    def goes_through_host(self) -> bool:
        """Does the host carry tensors of the device, since NCCL does not serve these ranks?"""
        return isinstance(self.device_group, HostGroup)

    def _of_these(self, transport: Any, members: tuple[int, ...], waiting: Any, trace: Any) -> DeviceComm:
        return DeviceComm(self.groups, self.place, transport, members, waiting, self.on_row, trace)

    def barrier(self) -> None:
        self.launch_posted()
        super().barrier()

    def split(self, color: Any, key: Any = 0) -> Any:
        self.launch_posted()
        return super().split(color, key)

    def allocate(self, shape: Any, dtype: Any = "float32") -> Tensor:
        """See Comm.allocate: a tensor on this rank's GPU, which all ranks reach if they are on one machine."""
        shape, dtype = shape_and_dtype(shape, dtype)
        if self.groups.shares_memory and 1 < self.size == self.node_size and self.size <= MOST_TENSORS:
            self.launch_posted()
            if shared := allocate(self, self.groups.cuda, math.prod(shape), dtype):
                mine, segment = shared
                self.segments.append(segment)
                return mine[: math.prod(shape) * ITEMSIZE[dtype]].view(getattr(torch, dtype)).reshape(shape)
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    # -- messages ---------------------------------------------------------------------------------------------------

    def isend(self, x: Tensor, dst: int) -> RealWork:
        return self._message("send", super().isend, x, dst, "sends to")

    def irecv(self, x: Tensor, src: int) -> RealWork:
        return self._message("recv", super().irecv, x, src, "receives from")

    def _message(self, op: str, of_host: Callable, x: Tensor, peer: int, words: str) -> RealWork:
        if not self._on_device(op, x):
            return of_host(x, peer)
        self._require_open()
        self.check_peer(peer, words)
        if self.waiting.inject is not None and op == "send":
            self.waiting.inject.before(self)
        if not self.posted:
            self.posted_at = time.monotonic()
        return DeviceWork(self, op, x, peer)

    def start_posted(self) -> None:
        """Start what has been posted, as one batch: when all of it may start, or after PATIENCE what may."""
        ready = [work for work in self.posted if work.is_ready()]
        if ready and (len(ready) == len(self.posted) or time.monotonic() > self.posted_at + PATIENCE):
            self.posted = [work for work in self.posted if work not in ready]
            self._start(ready)

    def _start(self, works: list[DeviceWork]) -> None:
        moving = [work for work in works if work.buffer.count]
        device, group = torch.device(self.device), self.device_group
        coalesces = moving and device.type == "cuda"
        if coalesces:  # one group of NCCL
            group._start_coalescing(device)
        started = [work.start() for work in moving]
        batch = GroupWork([group._end_coalescing(device)] if coalesces else started, nap_s=0)
        for work in works:
            work.launch = batch

    def launch_posted(self) -> None:
        """Before a collective: what has been posted starts, but for receives that nobody has sent anything for."""
        end = time.monotonic() + PATIENCE
        while self.posted and time.monotonic() < end and any(work.op == "send" for work in self.posted):
            self.start_posted()
        self.start_posted()

    # -- collectives ------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, async_op: bool = False) -> Tensor:
        if async_op:
            return self.background(best_all_reduce, x)
        if not self._on_device("all_reduce", x):
            return super().all_reduce(x)
        return x if self.segments and self._one_pass(x) else self.nccl_all_reduce(x)

    def _one_pass(self, x: Tensor) -> Any:
        """all_reduce of `x` if it lies in memory that all ranks reach, at one place on all of them; else False."""
        buffer = buffer_of(x, "all_reduce", self.device)
        count, dtype = buffer.count, DTYPES.index(buffer.dtype)
        self.launch_posted()
        step, t0, line = self._begin()
        self.waiting.finish(Computed(), "all_reduce", (), line=line)
        number, offset = place_of(self.segments, self.rank, x)
        places = self.agree("all_reduce", count, dtype, note=f"{number},{offset}".encode())
        if number < 0 or len(set(places)) > 1:
            return False
        first, mine = slice_of(count, self.rank, self.size)
        tensors = [address + offset for address in self.segments[number].addresses]
        self.groups.cuda.one_pass(tensors, first, mine, dtype, torch.cuda.current_stream().cuda_stream)
        self.waiting.finish(Computed(), "all_reduce", (), line=line)
        self._meet(("all_reduce", count, dtype, -1), line)
        self.trace.add(step, "all_reduce", t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)
        return True

    def nccl_all_reduce(self, x: Tensor) -> Tensor:
        """all_reduce by the process group, or by the host in its place, wherever `x` lies on the device."""
        total = widened(x)
        self._collective("all_reduce", x, lambda group: group.allreduce([total]))
        if total.data_ptr() != x.data_ptr():
            copy_into(x, narrowed(total, x.dtype))
        return x

    def ring_all_reduce(self, x: Tensor) -> Any:
        return self._staged(super().ring_all_reduce, x)

    def mpi_all_reduce(self, x: Tensor) -> Any:
        return self._staged(super().mpi_all_reduce, x)

    def _staged(self, function: Callable, x: Tensor) -> Any:
        """function(x), which works in place on CPU memory: a tensor on the device goes to the host and back."""
        if not (is_tensor(x) and str(x.device) == self.device != "cpu"):
            return function(x)
        copy_into(x, function(x.detach().cpu()))
        return x

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        if not self._on_device("broadcast", x):
            return super().broadcast(x, root)
        data = moved(x)
        self._collective("broadcast", x, lambda group: group.broadcast(data, root), root)
        return x

    def reduce(self, x: Tensor, root: int = 0) -> Tensor | None:
        if not self._on_device("reduce", x):
            return super().reduce(x, root)
        total = widened(x).clone()
        self._collective("reduce", x, lambda group: group.reduce(total, root), root)
        return narrowed(total, x.dtype) if self.rank == root else None

    def all_gather(self, x: Tensor) -> Tensor:
        if not self._on_device("all_gather", x):
            return super().all_gather(x)
        out = x.new_empty((self.size, *x.shape))
        self._collective("all_gather", x, lambda group: group._allgather_base(moved(out), moved(x)))
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        if not self._on_device("reduce_scatter", x):
            return super().reduce_scatter(x)
        self._check_rows("reduce_scatter", x)
        rows = widened(x)
        out = rows.new_empty(rows.shape[1:])
        self._collective("reduce_scatter", x, lambda group: group._reduce_scatter_base(out.view(-1), rows.reshape(-1)))
        return narrowed(out, x.dtype)

    def gather(self, x: Tensor, root: int = 0) -> Any:
        if not self._on_device("gather", x):
            return super().gather(x, root)
        out = x.new_empty((self.size, *x.shape)) if self.rank == root else None
        rows = [] if out is None else [moved(row) for row in out]
        self._collective("gather", x, lambda group: group.gather(rows, moved(x), root), root)
        return out

    def scatter(self, x: Any, out: Tensor, root: int = 0) -> Tensor:
        if not self._on_device("scatter", out):
            return super().scatter(x, out, root)
        if self.rank == root:
            self._check_rows("scatter", x)
            buffer_of(x, "scatter", self.device)
        rows = [moved(row) for row in x] if self.rank == root else []
        self._collective("scatter", out, lambda group: group.scatter(moved(out), rows, root), root)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        if not self._on_device("all_to_all", x):
            return super().all_to_all(x)
        self._check_rows("all_to_all", x)
        out = x.new_empty(x.shape)
        self._collective("all_to_all", x, lambda group: group.alltoall_base(moved(out), moved(x), [], []))
        return out

    @contextmanager
    def together(self, op: str, x: Tensor) -> Iterator[Any]:
        if not self._on_device(op, x):
            with super().together(op, x) as line:
                yield line
            return
        step, t0, line, buffer = self._agree_on(op, x)
        yield line
        self.trace.add(step, "all_reduce", t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)

    def _collective(self, op: str, x: Tensor, start: Callable, root: int = -1) -> None:
        """Agree on `op` of `x` with all ranks, then let the group do it, as one event. start(group): its Work."""
        if root != -1:
            self._check_root(op, root)
        step, t0, line, buffer = self._agree_on(op, x, root)
        if buffer.count:
            with self.aborting(op):
                batch = GroupWork([start(self.device_group)], nap_s=0)
                self.waiting.finish(batch, op, self.others, buffer.nbytes, line)
        self.trace.add(step, op, t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)

    def _agree_on(self, op: str, x: Tensor, root: int = -1) -> tuple[int, int, str, Any]:
        """Let what has been posted start, and meet; returns the step, time, line and Buffer of `op`."""
        self.launch_posted()
        buffer = buffer_of(x, op, self.device)
        step, t0, line = self._begin()
        self.collectives += 1
        self.calls.note(Call(op, line, buffer.count, buffer.dtype, root, self.name, self.collectives))
        self._meet((op, buffer.count, DTYPES.index(buffer.dtype), root), line)
        return step, t0, line, buffer

    def _on_device(self, op: str, x: Tensor) -> bool:
        """Is `x` a tensor of the group's device? Raises ValueError if it is, and `op` cannot take it."""
        mine = is_tensor(x) and str(x.device) == self.device
        if mine:
            buffer_of(x, op, self.device)
        return mine

    # -- what does not end well -------------------------------------------------------------------------------------

    @contextmanager
    def aborting(self, op: str) -> Iterator[Any]:
        """What does not complete here is ended on the device: nothing of it may run on during what comes next."""
        self._require_open()
        try:
            yield
        except BaseException:
            self.abort(op)
            raise

    def abort(self, op: str) -> None:
        """End the group: nothing else ends what waits on a GPU. It is of no more use then, and says so."""
        with suppress(RuntimeError):
            self.device_group.abort()
        self.broken = self.broken or op

    def close(self, error: BaseException | None = None, line: str = "") -> None:
        if not self.closed:
            super().close(error, line)
            for comm in self._family():
                comm.groups.release(comm)
                comm.segments, comm.device_group = [], None

    def _family(self) -> list[DeviceComm]:
        """This communicator and all that were split from it, or from those."""
        return [self, *(comm for part in self.parts for comm in part._family())]

    def _release(self) -> list[DeviceWork]:
        with suppress(CommError, ValueError, RuntimeError):
            self.launch_posted()
        return super()._release()


def moved(x: Tensor) -> Tensor:
    """The memory of `x`, flat, in a dtype that every process group moves: in bytes where it has another."""
    flat = x.detach().reshape(-1)
    return flat if dtype_name(x.dtype) in MOVED else flat.view(torch.uint8)


def widened(x: Tensor) -> Tensor:
    """`x` as a process group adds it: a copy of twice the bits if it has 16, real and imaginary parts if it has two."""
    x = x.detach()
    if x.is_complex():
        return torch.view_as_real(x)
    return x.to(WIDENED.get(dtype_name(x.dtype), x.dtype))


def narrowed(total: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of what `widened` made of tensors of `dtype`, in that dtype."""
    return torch.view_as_complex(total) if dtype.is_complex else total.to(dtype)


ALIGNED = 64  # elements: slices begin at multiples, so that all but the last are whole packets of 16 bytes
LEAST = 256  # bytes of an allocation


class Segment(NamedTuple):
    """One tensor of `allocate`: where it begins on every rank, as this process reaches it; `keep` holds it open."""

    addresses: tuple
    nbytes: int
    keep: tuple


class View:
    """A uint8 tensor over `memory`, of the compiled module. Ref: CUDA Array Interface, version 3."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "data": (memory.address, False),
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class Computed(Operation):
    """Until all that this rank has given the GPU so far is done."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()

    def advance(self) -> Any:
        return self.event.query()


def allocate(comm: Any, cuda: Any, count: int, dtype: Any) -> Any:
    """(uint8 tensor of this rank, Segment), or None where one rank cannot reach another's memory. Collective.

    cuda: the compiled module hpdl_lab._cuda, or None where this rank has none.
    """
    device = torch.device(comm.device).index
    nbytes = max(LEAST, count * ITEMSIZE[dtype])
    mine, reason = attempt(cuda.DeviceMemory, device, nbytes) if cuda else (None, "no csrc/cuda here")
    handle = b""
    if mine is not None:
        handle, reason = attempt(mine.handle)
    handles = comm.agree("allocate", count, DTYPES.index(dtype), note=handle or b"")
    opened = {comm.rank: mine}
    for rank, theirs in enumerate(handles):
        if rank != comm.rank and not reason:
            opened[rank], reason = attempt(cuda.PeerMemory, device, theirs) if theirs else (None, "no handle")
    if any(comm.agree("allocate", note=reason.encode()[:120])):
        return None
    memory = tuple(opened[rank] for rank in range(comm.size))
    return torch.as_tensor(View(mine), device=comm.device), Segment(tuple(m.address for m in memory), nbytes, memory)


def place_of(segments: Any, rank: int, x: Tensor) -> Any:
    """(number of the segment, byte offset) where tensor `x` of this rank lies; (-1, 0) where in none."""
    for number, segment in enumerate(segments):
        offset = x.data_ptr() - segment.addresses[rank]
        if 0 <= offset and offset + x.numel() * x.element_size() <= segment.nbytes:
            return number, offset
    return -1, 0


def slice_of(count: int, rank: int, size: int) -> Any:
    """(first element, number of elements) that `rank` adds."""
    each = -(-count // size // ALIGNED) * ALIGNED if count else 0
    first, last = min(count, each * rank), min(count, each * (rank + 1))
    return first, last - first

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
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from ..base import best_all_reduce
from ..buffers import DTYPES, ITEMSIZE, ArrayT, Buffer, buffer_of, copy_into, dtype_name, is_tensor, new_like
from ..calls import Call, Facts
from ..errors import CommError, Mismatch
from ..real import RealComm, shape_and_dtype
from ..shm import attempt
from ..status.operation import PolledOperation
from ..status.report import mismatch
from ..torch.messages import Completing, GroupWork
from ..work import RealWork
from .host import HostGroup

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from ...trace import Trace
    from ..base import Work
    from ..buffers import Array
    from ..status.waiting import Waiting
    from ..transport import Pending, Transport

PATIENCE = 0.2  # s: notes are faster, so of two ranks that send to each other one at most starts without the other
MOST_TENSORS = 16  # kMaxTensors of csrc/cuda/one_pass.h
WIDENED = {"bfloat16": torch.float32, "float16": torch.float32, "int16": torch.int32}  # added so, and rounded once
MOVED = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "int8")  # else as bytes


class _DeviceWork(RealWork):
    """An end of a message of the group; its `message` is the note, which the host carries.

    launch: the GroupWork in which it has started, or None.
    """

    __slots__ = ("buffer", "device_comm", "flat", "launch", "note")
    progress = 0

    def __init__(self, comm: DeviceComm, op: str, x: Tensor, peer: int) -> None:
        self.device_comm, self.flat = comm, _moved(x)
        self.buffer = buffer_of(x, op, comm.device)
        self.launch: GroupWork | None = None
        mine = (self.buffer.count, DTYPES.index(self.buffer.dtype))
        self.note = np.array(mine if op == "send" else (-1, -1), np.int64)
        super().__init__(comm, op, x, peer, sent=self.note)
        comm.posted.append(self)

    def is_ready(self) -> bool:
        """Return True if it may start: a receive if its note has come. Raises Mismatch if that says something else."""
        return self.op == "send" or self.has_come()

    def has_come(self) -> bool:
        """Return True if the note has come and says what this rank expects. Raises Mismatch if it says otherwise."""
        expected, note = (self.buffer.count, self.buffer.dtype), self.message
        if note is None:
            return True
        try:
            if not note.wait(0.0, 0.0, False):
                return False
            sent = (int(self.note[0]), DTYPES[self.note[1]])
        except ValueError:  # no note came, but a message of CPU memory
            count, dtype = note.sent
            sent = (count, f"{DTYPES[dtype]} of the CPU")
        if sent != expected:
            names = self.comm.names
            raise Mismatch(mismatch(names[self.peer], names[self.comm.rank], sent, expected))
        return True

    def start(self) -> Completing | None:
        """Give it to the group; return its Work, or None within a batch that NCCL coalesces."""
        group = self.device_comm.device_group
        return (group.send if self.op == "send" else group.recv)([self.flat], self.peer, 0)

    def wait(self) -> None:
        if self.message is not None:
            comm = self.device_comm
            with comm.aborting(self.op):
                whom = (comm.members[self.peer],)
                comm.waiting.finish(_Arrival(self), self.op, whom, self.buffer.nbytes, self.line, facts=self._facts)
            self._arrived(self.buffer.nbytes)

    def test(self) -> bool:
        if self.message is not None:
            with self.device_comm.aborting(self.op):
                arrived = _Arrival(self).advance()
            if arrived:
                self._arrived(self.buffer.nbytes)
        return self.message is None

    def let_go(self, seconds: float) -> bool:
        """See RealWork.let_go: what is still on the device after `seconds` is ended there."""
        if self.message is not None and self.launch is not None:
            with suppress(CommError, ValueError):  # no caller waits for it any more
                self.launch.wait(seconds, 1e-3, self.comm.oversubscribed)
            if not self.launch.done:
                self.device_comm.abort(self.op)
        return super().let_go(0.0)

    def _facts(self) -> Facts:
        """See RealWork._facts."""
        counts = self.comm.calls.times(self.op, self.line)
        return {"count": self.buffer.count, "dtype": self.buffer.dtype, "comm": self.comm.name, "counts": counts}

    def _expected(self) -> tuple[int, str]:
        return self.buffer.count, self.buffer.dtype

    def _done(self, nbytes: int) -> None:
        super()._done(nbytes)
        del self.flat


class _Arrival(PolledOperation):
    """The end of a DeviceWork, as an operation: waiting for it lets posted messages start."""

    def __init__(self, work: _DeviceWork) -> None:
        self.work = work

    def advance(self) -> bool:
        self.work.device_comm.start_posted()
        return self.work.launch is not None and self.work.launch.advance()


class DeviceComm(RealComm):
    """A communicator whose tensors are on `device` and travel through `device_group`, a process group of its ranks.

    groups: make that group, for MPI ranks (groups.py) or for ranks of torchrun. Operations have ended when they return:
    the host waits for the GPU.
    """

    can_double = False  # what is given to `background` runs at once

    def __init__(self, groups: _GroupMaker, *arguments: Any) -> None:
        """arguments: of RealComm."""
        super().__init__(*arguments)
        self.groups, self.device = groups, str(groups.device)
        self.device_group: Any = None  # torch's ProcessGroup, or HostGroup, from `connect` on
        self.posted: list[_DeviceWork] = []  # that have not started
        self.posted_at = 0.0  # s: since when there are some
        self.segments: list[Segment] = []  # in the order of `allocate`, the same everywhere

    def connect(self) -> None:
        self.device_group = self.groups.connect(self)

    @property
    def goes_through_host(self) -> bool:
        """True if the host carries tensors of the device, since NCCL does not serve these ranks."""
        return isinstance(self.device_group, HostGroup)

    def _of_these(self, transport: Transport, members: tuple[int, ...], waiting: Waiting, trace: Trace) -> DeviceComm:
        return DeviceComm(self.groups, self.session, transport, members, waiting, self.on_row, trace)

    def barrier(self) -> None:
        self.launch_posted()
        super().barrier()

    def split(self, color: object, key: object = 0) -> RealComm:
        self.launch_posted()
        return super().split(color, key)

    def allocate(self, shape: int | Sequence[int], dtype: str | torch.dtype = "float32") -> Tensor:
        """See Comm.allocate: a tensor on this rank's GPU, which all ranks reach if they are on one machine."""
        sizes, name = shape_and_dtype(shape, dtype)
        if self.groups.shares_memory and 1 < self.size == self.node_size and self.size <= MOST_TENSORS:
            self.launch_posted()
            if shared := allocate(self, self.groups.cuda, math.prod(sizes), name):
                mine, segment = shared
                self.segments.append(segment)
                return mine[: math.prod(sizes) * ITEMSIZE[name]].view(getattr(torch, name)).reshape(sizes)
        return torch.zeros(sizes, dtype=getattr(torch, name), device=self.device)

    # -- messages ---------------------------------------------------------------------------------------------------

    def isend(self, x: Array, dst: int) -> RealWork:
        return self._message("send", super().isend, x, dst, "sends to")

    def irecv(self, x: Array, src: int) -> RealWork:
        return self._message("recv", super().irecv, x, src, "receives from")

    def _message(self, op: str, of_host: Callable[[Array, int], RealWork], x: Array, peer: int, words: str) -> RealWork:
        if not self._on_device(x, op):
            return of_host(x, peer)
        self._require_open()
        self.check_peer(peer, words)
        if self.waiting.inject is not None and op == "send":
            self.waiting.inject.before(self)
        if not self.posted:
            self.posted_at = time.monotonic()
        return _DeviceWork(self, op, x, peer)

    def start_posted(self) -> None:
        """Start what has been posted, as one batch: when all of it may start, or after PATIENCE what may."""
        ready = [work for work in self.posted if work.is_ready()]
        if ready and (len(ready) == len(self.posted) or time.monotonic() > self.posted_at + PATIENCE):
            self.posted = [work for work in self.posted if work not in ready]
            self._start(ready)

    def _start(self, works: list[_DeviceWork]) -> None:
        moving = [work for work in works if work.buffer.count]
        device, group = torch.device(self.device), self.device_group
        coalesces = bool(moving) and device.type == "cuda"
        if coalesces:  # one group of NCCL
            group._start_coalescing(device)
        started = [work.start() for work in moving]
        batch = GroupWork([group._end_coalescing(device)] if coalesces else started, nap_s=0)
        for work in works:
            work.launch = batch

    def launch_posted(self) -> None:
        """Before a collective: what has been posted starts, but for receives of messages that were not sent."""
        end = time.monotonic() + PATIENCE
        while self.posted and time.monotonic() < end and any(work.op == "send" for work in self.posted):
            self.start_posted()
        self.start_posted()

    # -- collectives ------------------------------------------------------------------------------------------------

    @overload
    def all_reduce(self, x: ArrayT, async_op: Literal[False] = False) -> ArrayT: ...

    @overload
    def all_reduce(self, x: ArrayT, async_op: Literal[True]) -> Work: ...

    def all_reduce(self, x: ArrayT, async_op: bool = False) -> ArrayT | Work:
        if async_op:
            return self.background(best_all_reduce, x)
        if not self._on_device(x, "all_reduce"):
            return super().all_reduce(x)
        if not (self.segments and self._one_pass(x)):
            self.nccl_all_reduce(x)
        return x

    def _one_pass(self, x: Tensor) -> bool:
        """Add `x` over ranks if it lies in memory that all reach, at one place on all of them; else return False."""
        buffer = buffer_of(x, "all_reduce", self.device)
        count, dtype = buffer.count, DTYPES.index(buffer.dtype)
        self.launch_posted()
        step, t0, line = self.begun()
        self.waiting.finish(_Computed(), "all_reduce", (), line=line)
        number, offset = _place_of(self.segments, self.rank, x)
        places = self.agree("all_reduce", count, dtype, note=f"{number},{offset}".encode())
        if number < 0 or len(set(places)) > 1 or self.groups.cuda is None:
            return False
        first, mine = slice_of(count, self.rank, self.size)
        tensors = [address + offset for address in self.segments[number].addresses]
        self.groups.cuda.one_pass(tensors, first, mine, dtype, torch.cuda.current_stream().cuda_stream)
        self.waiting.finish(_Computed(), "all_reduce", (), line=line)
        self._meet(("all_reduce", count, dtype, -1), line)
        self.trace.add(step, "all_reduce", t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)
        return True

    def nccl_all_reduce(self, x: Tensor) -> Tensor:
        """Add `x` over ranks by the process group, or by the host in its place, wherever `x` lies on the device."""
        total = _widened(x)
        self._collective("all_reduce", x, lambda group: group.allreduce([total]))
        if total.data_ptr() != x.data_ptr():
            copy_into(x, _narrowed(total, x.dtype))
        return x

    def ring_all_reduce(self, x: ArrayT) -> ArrayT:
        return self._staged(super().ring_all_reduce, x)

    def mpi_all_reduce(self, x: ArrayT) -> ArrayT:
        return self._staged(super().mpi_all_reduce, x)

    def _staged(self, function: Callable[[Any], Array], x: ArrayT) -> ArrayT:
        """Call function(x), which works in place on CPU memory: a tensor on the device goes to the host and back."""
        if not (is_tensor(x) and str(x.device) == self.device != "cpu"):
            function(x)
            return x
        copy_into(x, function(x.detach().cpu()))
        return x

    def broadcast(self, x: ArrayT, root: int = 0) -> ArrayT:
        if not self._on_device(x, "broadcast"):
            return super().broadcast(x, root)
        data = _moved(x)
        self._collective("broadcast", x, lambda group: group.broadcast(data, root), root)
        return x

    def reduce(self, x: ArrayT, root: int = 0) -> ArrayT | None:
        if not self._on_device(x, "reduce"):
            return super().reduce(x, root)
        total = _widened(x).clone()
        self._collective("reduce", x, lambda group: group.reduce(total, root), root)
        return _narrowed(total, x.dtype) if self.rank == root else None  # pyrefly: ignore[bad-return]

    def all_gather(self, x: ArrayT) -> ArrayT:
        if not self._on_device(x, "all_gather"):
            return super().all_gather(x)
        out = new_like(x, (self.size, *x.shape))
        self._collective("all_gather", x, lambda group: group._allgather_base(_moved(out), _moved(x)))
        return out

    def reduce_scatter(self, x: ArrayT) -> ArrayT:
        if not self._on_device(x, "reduce_scatter"):
            return super().reduce_scatter(x)
        self._check_rows("reduce_scatter", x)
        rows = _widened(x)
        out = rows.new_empty(rows.shape[1:])
        self._collective("reduce_scatter", x, lambda group: group._reduce_scatter_base(out.view(-1), rows.reshape(-1)))
        return _narrowed(out, x.dtype)  # pyrefly: ignore[bad-return]

    def gather(self, x: ArrayT, root: int = 0) -> ArrayT | None:
        if not self._on_device(x, "gather"):
            return super().gather(x, root)
        out = new_like(x, (self.size, *x.shape)) if self.rank == root else None
        rows = [] if out is None else [_moved(row) for row in out]
        self._collective("gather", x, lambda group: group.gather(rows, _moved(x), root), root)
        return out

    def scatter(self, x: Array | None, out: ArrayT, root: int = 0) -> ArrayT:
        if not self._on_device(out, "scatter"):
            return super().scatter(x, out, root)
        rows: list[Tensor] = []
        if self.rank == root:
            parts: Any = x
            self._check_rows("scatter", parts)
            buffer_of(parts, "scatter", self.device)
            rows = [_moved(row) for row in parts]
        self._collective("scatter", out, lambda group: group.scatter(_moved(out), rows, root), root)
        return out

    def all_to_all(self, x: ArrayT) -> ArrayT:
        if not self._on_device(x, "all_to_all"):
            return super().all_to_all(x)
        self._check_rows("all_to_all", x)
        out = new_like(x, x.shape)
        self._collective("all_to_all", x, lambda group: group.alltoall_base(_moved(out), _moved(x), [], []))
        return out

    @contextmanager
    def together(self, op: str, x: Array) -> Generator[str]:
        if not self._on_device(x, op):
            with super().together(op, x) as line:
                yield line
            return
        step, t0, line, buffer = self._agree_on(op, x)
        yield line
        self.trace.add(step, "all_reduce", t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)

    def _collective(self, op: str, x: Tensor, start: Callable[[Any], Completing], root: int = -1) -> None:
        """Agree on `op` of `x` with all ranks, then let the group do it, as one event. start(group): its Work."""
        if root != -1:
            self._check_root(op, root)
        step, t0, line, buffer = self._agree_on(op, x, root)
        if buffer.count:
            with self.aborting(op):
                batch = GroupWork([start(self.device_group)], nap_s=0)
                self.waiting.finish(batch, op, self.others, buffer.nbytes, line)
        self.trace.add(step, op, t0, self.trace.clock(), nbytes=buffer.nbytes, line=line)

    def _agree_on(self, op: str, x: Tensor, root: int = -1) -> tuple[int, int, str, Buffer]:
        """Let what has been posted start, and meet; return the step, time, line and Buffer of `op`."""
        self.launch_posted()
        buffer = buffer_of(x, op, self.device)
        step, t0, line = self.begun()
        self.collectives += 1
        self.calls.note(Call(op, line, buffer.count, buffer.dtype, root, self.name, self.collectives))
        self._meet((op, buffer.count, DTYPES.index(buffer.dtype), root), line)
        return step, t0, line, buffer

    def _on_device(self, x: Array, op: str) -> TypeIs[Tensor]:
        """Return True if `x` is a tensor of the group's device. Raises ValueError if it is, and `op` cannot take it."""
        mine = is_tensor(x) and str(x.device) == self.device
        if mine:
            buffer_of(x, op, self.device)
        return mine

    # -- what does not end well -------------------------------------------------------------------------------------

    @contextmanager
    def aborting(self, op: str) -> Generator[None]:
        """End on the device what does not complete here: nothing of it may run on during what comes next."""
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
        """Return this communicator and all that were split from it, or from those."""
        return [self, *(c for part in self.parts if isinstance(part, DeviceComm) for c in part._family())]

    def release(self) -> list[Pending]:
        with suppress(CommError, ValueError, RuntimeError):
            self.launch_posted()
        return super().release()


def _moved(x: Tensor) -> Tensor:
    """Return the memory of `x`, flat, in a dtype that every process group moves: in bytes if it has another."""
    flat = x.detach().reshape(-1)
    return flat if dtype_name(x.dtype) in MOVED else flat.view(torch.uint8)


def _widened(x: Tensor) -> Tensor:
    """Return `x` as a process group adds it: a copy of twice the bits if it has 16, real numbers if it is complex."""
    x = x.detach()
    if x.is_complex():
        return torch.view_as_real(x)
    return x.to(WIDENED.get(dtype_name(x.dtype), x.dtype))


def _narrowed(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of what `_widened` made of tensors of `dtype`, in that dtype."""
    return torch.view_as_complex(total) if dtype.is_complex else total.to(dtype)


ALIGNED = 64  # elements: slices begin at multiples, so that all but the last are whole packets of 16 bytes
LEAST = 256  # bytes of an allocation


class Reached(Protocol):
    """GPU memory of this process, or of another that this one has opened (_cuda.DeviceMemory, PeerMemory)."""

    @property
    def address(self) -> int: ...


class _Allocated(Reached, Protocol):
    """GPU memory of this process."""

    @property
    def nbytes(self) -> int: ...


class _GroupMaker(Protocol):
    """A maker of the process groups of DeviceComm. cuda: the module _cuda, or None if this rank has none."""

    device: torch.device

    @property
    def cuda(self) -> ModuleType | None: ...

    @property
    def shares_memory(self) -> bool: ...

    def connect(self, comm: DeviceComm) -> object: ...

    def release(self, comm: DeviceComm) -> None: ...


class Segment(NamedTuple):
    """A tensor of `allocate`: where it begins on every rank, as this process reaches it; `keep` holds it open."""

    addresses: tuple[int, ...]
    nbytes: int
    keep: tuple[Reached, ...]


class View:
    """A uint8 tensor over `memory`, of the compiled module. Ref: CUDA Array Interface, version 3."""

    def __init__(self, memory: _Allocated) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "data": (memory.address, False),
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class _Computed(PolledOperation):
    """The end of all that this rank has given the GPU so far."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()

    def advance(self) -> bool:
        return self.event.query()


def allocate(comm: DeviceComm, cuda: ModuleType | None, count: int, dtype: str) -> tuple[Tensor, Segment] | None:
    """Return (uint8 tensor of this rank, Segment), or None if one rank cannot reach another's memory. Collective.

    cuda: the compiled module hpdl_lab._cuda, or None if this rank has none.
    """
    device = torch.device(comm.device).index
    nbytes = max(LEAST, count * ITEMSIZE[dtype])
    mine, reason, handle = None, "no csrc/cuda here", b""
    if cuda:
        mine, reason = attempt(cuda.DeviceMemory, device, nbytes)
    if mine is not None:
        handle, reason = attempt(mine.handle)
    handles = comm.agree("allocate", count, DTYPES.index(dtype), note=handle or b"")
    opened: dict[int, Any] = {comm.rank: mine}
    for rank, theirs in enumerate(handles):
        if rank != comm.rank and not reason and cuda:
            opened[rank], reason = attempt(cuda.PeerMemory, device, theirs) if theirs else (None, "no handle")
    if any(comm.agree("allocate", note=reason.encode()[:120])):
        return None
    memory: tuple[Reached, ...] = tuple(opened[rank] for rank in range(comm.size))
    segment = Segment(tuple(m.address for m in memory), nbytes, memory)
    return torch.as_tensor(View(opened[comm.rank]), device=comm.device), segment


def _place_of(segments: Sequence[Segment], rank: int, x: Tensor) -> tuple[int, int]:
    """Return (number of the segment, byte offset) where tensor `x` of this rank lies; (-1, 0) if in none."""
    for number, segment in enumerate(segments):
        offset = x.data_ptr() - segment.addresses[rank]
        if 0 <= offset and offset + x.numel() * x.element_size() <= segment.nbytes:
            return number, offset
    return -1, 0


def slice_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return (first element, number of elements) that `rank` adds."""
    each = -(-count // size // ALIGNED) * ALIGNED if count else 0
    first, last = min(count, each * rank), min(count, each * (rank + 1))
    return first, last - first

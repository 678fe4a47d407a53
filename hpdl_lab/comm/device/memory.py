"""GPU memory that all ranks of a communicator reach, by CUDA IPC, and the sum of what lies there in one pass.

    1 this rank's tensor is computed        the host waits for the event
    2 all ranks are here, with one place    MPI
    3 this rank adds its slice of all       csrc/cuda/one_pass.cu, which waits for nobody
    4 all ranks have added theirs           MPI

Ranks that share a GPU take turns on it, so that they never wait for each other there.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..buffers import DTYPES, ITEMSIZE
from ..shm import attempt
from ..status.operation import Operation

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

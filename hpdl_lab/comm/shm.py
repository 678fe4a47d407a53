"""Memory that all ranks of a communicator map, where they are on one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .buffers import DTYPES, ITEMSIZE

if TYPE_CHECKING:
    from torch import Tensor

PAGE = 4096  # bytes
WORTH_ASKING = 1 << 26  # bytes


class SharedRanks:
    """The compiled collectives of ranks that share memory, and the tensors that they have allocated there."""

    def __init__(self, comm: Any, core: Any, op: str) -> None:
        """Collective, on behalf of `op`. Raises MemoryError on every rank where one of them cannot take part."""
        self.comm, self.core = comm, core
        nbytes, seats = core.ShmGroup.nbytes_for(comm.size), core.ShmGroup.seats_nbytes_for(comm.size)
        memory = share(comm, core, nbytes, op, taken=seats)
        self.group = core.ShmGroup(memory, comm.rank, comm.size, comm.oversubscribed)
        self.segments = []  # (SharedMemory, bytes from one rank's part to the next)

    def allocate(self, shape: Any, dtype: Any) -> Tensor:
        """A zeroed torch tensor in shared memory. Collective; the memory stays until the communicator is closed."""
        import torch

        count = 1
        for n in shape:
            count *= n
        nbytes = count * ITEMSIZE[dtype]
        part = part_nbytes(nbytes)
        memory = share(self.comm, self.core, part * self.comm.size, "allocate", count, dtype)
        self.group.add(memory, part)
        self.segments.append((memory, part))
        mine = memory.array(self.comm.rank * part, nbytes)
        return torch.from_numpy(mine).view(getattr(torch, dtype)).reshape(shape)

    def everybodys(self, x: Tensor) -> list[Tensor]:
        """See Comm.views."""
        import torch

        address = x.untyped_storage().data_ptr() + x.storage_offset() * x.element_size()  # of an empty one, too
        for memory, part in self.segments:
            offset = address - memory.address - self.comm.rank * part
            if 0 <= offset <= part - x.nbytes:
                arrays = [memory.array(r * part + offset, x.nbytes) for r in range(self.comm.size)]
                return [torch.from_numpy(a).view(x.dtype).reshape(x.shape) for a in arrays]
        raise ValueError("this tensor is not in memory that the ranks share: make it with comm.allocate")


def part_nbytes(nbytes: int) -> int:
    """Bytes from one rank's part to the next, where each has `nbytes`: whole pages, at least one."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


def share(
    comm: Any, core: Any, nbytes: int, op: str, count: int = 0, dtype: Any = "uint8", taken: int | None = None
) -> Any:
    """Memory of `nbytes` that all ranks map, one equal part of it taken by each: core.SharedMemory. Collective.

    taken: only so many bytes, from the beginning, where the rest is hardly used: that comes when it is written.
    Raises: ValueError where the ranks mean different things; MemoryError with the first rank's reason where one cannot.
    """
    memory, reason = None, ""
    if comm.rank == 0:
        reason = too_large(nbytes)
        if not reason:
            memory, reason = attempt(core.SharedMemory.create, nbytes)
    names = comm.agree(op, count, DTYPES.index(dtype), note=memory.name.encode() if memory else b"")
    if comm.rank != 0 and names[0]:
        memory, reason = attempt(core.SharedMemory.open, names[0].decode(), nbytes)
    if memory is not None:
        part = (nbytes if taken is None else taken) // comm.size
        _, reason = attempt(memory.reserve, comm.rank * part, part)
    # Nobody can open it after this: rank 0 lets go of the name when all have said how it went.
    reasons = comm.agree(op, note=reason.encode()[:100])
    if memory is not None:
        memory.seal()
    for rank, reason in enumerate(reasons):
        if reason:
            raise MemoryError(f"{op} of {nbytes:,} bytes for {comm.size} ranks: rank {rank} {reason.decode()}")
    return memory


def too_large(nbytes: int) -> str:
    """Why `nbytes` cannot be had, or "": the system would kill a rank that takes pages which are not there."""
    if nbytes < WORTH_ASKING:
        return ""
    import psutil

    available = psutil.virtual_memory().available
    return "" if nbytes < available else f"cannot take it: {available:,} bytes of memory are available"


def attempt(function: Callable, *args: Any) -> tuple[Any, str]:
    """(what function(*args) returns, "") or (None, why it could not)."""
    try:
        return function(*args), ""
    except RuntimeError as error:
        return None, str(error)

"""Memory that all ranks of a communicator map if they are on one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from ..features import compiled_module
from .buffers import DTYPES, ITEMSIZE

if TYPE_CHECKING:
    from torch import Tensor

    from .. import _core
    from .transport import Ranks

P = ParamSpec("P")
T = TypeVar("T")

PAGE = 4096  # bytes
WORTH_ASKING = 1 << 26  # bytes


class SharedRanks:
    """The compiled collectives of ranks that share memory, and the tensors that they have allocated there."""

    def __init__(self, comm: Ranks, op: str) -> None:
        """Collective, on behalf of `op`. Raises MemoryError on every rank if one of them cannot take part."""
        self.comm, shm = comm, compiled_module().ShmGroup
        memory = share(comm, shm.nbytes_for(comm.size), op, taken=shm.seats_nbytes_for(comm.size))
        self.group = shm(memory, comm.rank, comm.size, comm.oversubscribed)
        self.collectives: dict[str, Callable[..., bool]] = {
            "barrier": self.group.barrier,
            "all_reduce": self.group.all_reduce,
            "broadcast": self.group.broadcast,
            "scatter": self.group.scatter,
            "all_gather": self.group.all_gather,
            "reduce_scatter": self.group.reduce_scatter,
            "all_to_all": self.group.all_to_all,
            "reduce": self.group.reduce,
            "gather": self.group.gather,
        }
        self.segments: list[tuple[_core.SharedMemory, int]] = []  # with the bytes from one rank's part to the next

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return a zeroed torch tensor in shared memory. Collective; the memory stays until the communicator closes."""
        import torch

        count = 1
        for n in shape:
            count *= n
        nbytes = count * ITEMSIZE[dtype]
        part = _part_nbytes(nbytes)
        memory = share(self.comm, part * self.comm.size, "allocate", count, dtype)
        self.group.add(memory, part)
        self.segments.append((memory, part))
        mine = memory.array(self.comm.rank * part, nbytes)
        return torch.from_numpy(mine).view(getattr(torch, dtype)).reshape(shape)

    def everybodys(self, x: Tensor) -> list[Tensor]:
        """See Comm.views."""
        import torch

        address = x.untyped_storage().data_ptr() + int(x.storage_offset()) * x.element_size()  # of an empty one, too
        for memory, part in self.segments:
            offset = address - memory.address - self.comm.rank * part
            if 0 <= offset <= part - x.nbytes:
                arrays = [memory.array(r * part + offset, x.nbytes) for r in range(self.comm.size)]
                return [torch.from_numpy(a).view(x.dtype).reshape(x.shape) for a in arrays]
        raise ValueError("this tensor is not in memory that the ranks share: make it with comm.allocate")


def _part_nbytes(nbytes: int) -> int:
    """Return the bytes from one rank's part to the next if each has `nbytes`: whole pages, at least one."""
    return max(PAGE, -(-nbytes // PAGE) * PAGE)


def share(
    comm: Ranks, nbytes: int, op: str, count: int = 0, dtype: str = "uint8", taken: int | None = None
) -> _core.SharedMemory:
    """Return memory of `nbytes` that all ranks map, one equal part of it taken by each. Collective.

    taken: only so many bytes, from the beginning, if the rest is hardly used: that comes when it is written.
    Raises: ValueError if the ranks call different things; MemoryError with the first rank's reason if one cannot.
    """
    shared = compiled_module().SharedMemory
    memory: _core.SharedMemory | None = None
    reason = ""
    if comm.rank == 0:
        reason = _too_large(nbytes)
        if not reason:
            memory, reason = attempt(shared.create, nbytes)
    names = comm.agree(op, count, DTYPES.index(dtype), note=memory.name.encode() if memory else b"")
    if comm.rank != 0 and names[0]:
        memory, reason = attempt(shared.open, names[0].decode(), nbytes)
    if memory is not None:
        part = (nbytes if taken is None else taken) // comm.size
        _, reason = attempt(memory.reserve, comm.rank * part, part)
    # No process can open it after this: rank 0 removes the name when all have answered.
    reasons = comm.agree(op, note=reason.encode()[:100])
    if memory is not None:
        memory.seal()
    for rank, why in enumerate(reasons):
        if why:
            raise MemoryError(f"{op} of {nbytes:,} bytes for {comm.size} ranks: rank {rank} {why.decode()}")
    return cast("_core.SharedMemory", memory)


def _too_large(nbytes: int) -> str:
    """Return why `nbytes` cannot be had, or "": the system would kill a rank that takes pages which are not there."""
    if nbytes < WORTH_ASKING:
        return ""
    import psutil

    available = psutil.virtual_memory().available
    return "" if nbytes < available else f"cannot take it: {available:,} bytes of memory are available"


def attempt(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> tuple[T | None, str]:
    """Return (what function(*args) returns, "") or (None, why it could not)."""
    try:
        return function(*args, **named), ""
    except RuntimeError as error:
        return None, str(error)

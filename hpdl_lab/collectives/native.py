"""All-reduces that somebody else has written, as `f(comm, x)`: what an attendee's own is raced against.

Each replaces `x` by its sum over ranks and returns it. They need real ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..comm.base import Comm
from ..comm.buffers import is_tensor
from ..comm.calls import only_calls

if TYPE_CHECKING:
    from torch import Tensor


@only_calls("all_reduce")
def shm_all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """The communicator's best: one pass over shared memory, for tensors of `comm.allocate` without copies.

    Steps: 1 or 2 meetings.   Bytes per rank: N read and N written of every rank's tensor, over p ranks.
    """
    return comm.all_reduce(x)


def ring_all_reduce(comm: Comm, x: Tensor) -> Tensor | None:
    """The ring of collectives/ring.py in compiled code, cut into segments: one is added while the next is on its way.

    Steps: 2(p - 1).   Bytes per rank: 2(p - 1)/p * N * itemsize.   Ref: Patarasuk & Yuan 2009.
    """
    return comm.ring_all_reduce(x)


def mpi_all_reduce(comm: Comm, x: Tensor) -> Tensor | None:
    """MPI_Allreduce of the loaded library, in place. Raises ValueError for 16-bit floats, which MPI does not know."""
    return comm.mpi_all_reduce(x)


def nccl_all_reduce(comm: Comm, x: Any) -> Any:
    """NCCL's all_reduce. Raises ValueError where the ranks have no GPUs."""
    if comm.device == "cpu":
        raise ValueError('NCCL adds tensors on GPUs, and these ranks have none: lab.start(2, device="cuda")')
    if not hasattr(comm, "nccl_all_reduce") or comm.goes_through_host:
        raise ValueError("NCCL does not serve ranks that share a GPU: lab.start with a rank for each GPU")
    return comm.nccl_all_reduce(x)


def gloo_all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """all_reduce of torch.distributed's gloo, over TCP. Raises ValueError for arrays."""
    if not is_tensor(x):
        raise ValueError(f"gloo adds torch tensors, not a {type(x).__name__}")
    group = gloo_group(comm)
    with comm.together("gloo_all_reduce", x):
        group.allreduce([x]).wait()
    return x


def gloo_group(comm: Any) -> Any:
    """The gloo group of this communicator's ranks, made at the first call and kept with it. Collective."""
    if comm.gloo is None:
        import torch.distributed as dist

        from ..comm.torch.group import loopback, store_of

        timeout = timedelta(seconds=comm.waiting.deadline)
        with loopback(comm.node_size == comm.size):
            comm.gloo = dist.ProcessGroupGloo(store_of(comm), comm.rank, comm.size, timeout)
    return comm.gloo

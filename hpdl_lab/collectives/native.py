"""All-reduces of other libraries as `f(comm, x)`: an attendee's own is raced against them.

Each replaces `x` by its sum over ranks and returns it. They need real ranks.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, cast

from ..comm.base import Comm
from ..comm.buffers import is_tensor
from ..comm.calls import only_calls
from ..comm.real import RealComm

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


@only_calls("all_reduce")
def shm_all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """Add by the communicator's best: one pass over shared memory, for tensors of `comm.allocate` without copies.

    Steps: 1 or 2 meetings.   Bytes per rank: N read and N written of every rank's tensor, over p ranks.
    """
    return comm.all_reduce(x)


def ring_all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """Add by the ring of collectives/ring.py, compiled, in segments: one is added while the next is on its way.

    Steps: 2(p - 1).   Bytes per rank: 2(p - 1)/p * N * itemsize.   Ref: Patarasuk & Yuan 2009.
    """
    return require_real(comm).ring_all_reduce(x)


def mpi_all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """Call MPI_Allreduce of the loaded library, in place. Raises ValueError for 16-bit floats, which MPI has not."""
    return require_real(comm).mpi_all_reduce(x)


def nccl_all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """Add by NCCL. Raises ValueError if the ranks have no GPUs."""
    if comm.device == "cpu":
        raise ValueError('NCCL adds tensors on GPUs, and these ranks have none: lab.start(2, device="cuda")')
    from ..comm.device.comm import DeviceComm

    if not isinstance(comm, DeviceComm) or comm.goes_through_host:
        raise ValueError("NCCL does not serve ranks that share a GPU: lab.start with a rank for each GPU")
    return comm.nccl_all_reduce(x)


def gloo_all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """Add by torch.distributed's gloo, over TCP. Raises ValueError for arrays."""
    if not is_tensor(x):
        raise ValueError(f"gloo adds torch tensors, not a {type(x).__name__}")
    group = gloo_group(comm)
    with require_real(comm).together("gloo_all_reduce", x):
        group.allreduce([x]).wait()
    return x


def require_real(comm: Comm) -> RealComm:
    """Return `comm`. Raises ValueError for simulated ranks."""
    if not isinstance(comm, RealComm):
        raise ValueError("simulated ranks have no library to call: use lab.run")
    return comm


def gloo_group(ranks: Comm) -> dist.ProcessGroup:
    """Return the gloo group of this communicator's ranks, made at the first call and kept with it. Collective."""
    comm = require_real(ranks)
    if comm.gloo is None:
        import torch.distributed as dist  # noqa: F811

        from ..comm.torch.group import loopback, store_of

        timeout = timedelta(seconds=comm.waiting.deadline)
        with loopback(comm.node_size == comm.size):
            gloo = dist.ProcessGroupGloo(store_of(comm), comm.rank, comm.size, timeout)
            comm.gloo = cast("dist.ProcessGroup", gloo)
    return comm.gloo

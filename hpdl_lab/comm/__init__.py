"""Communicators with one interface (`base.Comm`): `sim.run` for simulated ranks, `world()` for real ones."""

from typing import TYPE_CHECKING

from .errors import CommError, CommTimeout, Deadlock, RankFailed, Wait
from .launcher import started_by

if TYPE_CHECKING:
    from .base import Comm, PerRank, Results, Work
    from .real import RealComm

__all__ = [
    "Comm",
    "CommError",
    "CommTimeout",
    "Deadlock",
    "PerRank",
    "RankFailed",
    "Results",
    "Wait",
    "Work",
    "world",
]


def __getattr__(name: str) -> object:
    """Return what `base` defines; with numpy its import takes longer than all else that a small process imports.

    Such a process (each engine of a Slurm job has one) imports the errors.
    """
    if name not in ("Comm", "PerRank", "Results", "Work"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import base

    return getattr(base, name)


def world(deadline: float = 10.0, device: str = "cpu") -> "RealComm":
    """Return the communicator of all ranks of this job, started by mpiexec or torchrun; of one rank if by neither.

    Args:    deadline: bounds every single wait, in seconds.
             device: "cpu", or "cuda" if every MPI rank shall work on a GPU, `comm.device`, and send by NCCL.
    """
    if started_by() == "torchrun":
        from .torch.transport import world as torch_world

        if device != "cpu":
            raise ValueError(f'device={device!r} under torchrun, which has "cpu" only: start the ranks with mpiexec')
        return torch_world(deadline)
    from .device import comm_class
    from .mpi.session import world

    return world(deadline, comm_class(device))

"""Communicators with one interface (`base.Comm`): `sim.run` for simulated ranks, `world()` for real ones."""

from .base import Comm, PerRank, Results, Work
from .errors import CommError, CommTimeout, Deadlock, RankFailed, Wait
from .launcher import started_by

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


def world(deadline=10.0, device="cpu"):
    """The communicator of all ranks of this job, which mpiexec or torchrun has started; of one rank where neither has.

    Args:    deadline: bounds every single wait, in seconds.
             device: "cpu", or "cuda" where every MPI rank shall work on a GPU, `comm.device`, and send by NCCL.
    """
    if started_by() == "torchrun":
        from .torch import world as torch_world

        if device != "cpu":
            raise ValueError(f'device={device!r} under torchrun, which has "cpu" only: start the ranks with mpiexec')
        return torch_world(deadline)
    from .mpi import world

    return world(deadline, device)

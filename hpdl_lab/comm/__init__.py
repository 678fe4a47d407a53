"""Communicators with one interface (`base.Comm`): `sim.run` for simulated ranks, `world()` for MPI ranks."""

from .base import Comm, PerRank, Results, Work
from .errors import CommError, CommTimeout, Deadlock, RankFailed, Wait

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
    """The communicator of all ranks of this MPI job; `deadline` bounds every single wait, in seconds.

    device: "cpu", or "cuda" where every rank shall work on a GPU, `comm.device`, and send its tensors by NCCL.
    """
    from .mpi import world

    return world(deadline, device)

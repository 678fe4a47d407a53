"""The table of `hpdl doctor`: one function per row."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple

from . import (
    Missing,
    ask_libraries,
    compiled_module,
    cores,
    gpu,
    installed_mpi_wheels,
    mpiexec,
    nccl,
    network_commands,
    require_one_mpi,
)
from .home import require_home
from .launcher import require_launcher_of as require_launcher

if TYPE_CHECKING:
    from .probe import Answers

STAGING = 10.0  # s: at most, of a few ms
SHM_NEEDED = 32 << 20  # bytes: the MPI library's own segments for a few ranks
SHM_WANTED = 256 << 20  # bytes: the same for as many ranks as a laptop starts


class Feature(NamedTuple):
    """A row of the table: `text` is the version or number if `ok`, else the reason and the remedy."""

    name: str
    ok: bool
    text: str
    needed: bool = True  # False: the laboratory works without it


class FeatureTable(list[Feature]):
    """Features as a table. `ok` is true when nothing that is needed is missing."""

    @property
    def ok(self) -> bool:
        return all(feature.ok for feature in self if feature.needed)

    def __str__(self) -> str:
        return f"{self.rows()}\n\n{self.end()}"

    def rows(self) -> str:
        width = max(60, shutil.get_terminal_size((120, 24)).columns)
        return "\n".join(self.row(feature, width) for feature in self)

    def end(self) -> str:
        return "Ready." if self.ok else "Not ready: each row with NO is needed, and says how to get it."

    __repr__ = __str__

    @staticmethod
    def row(feature: Feature, width: int) -> str:
        word = "yes" if feature.ok else "NO" if feature.needed else "no"
        text = f"{feature.name:<16} {word:<4} {feature.text}"
        return textwrap.fill(text, width, subsequent_indent=" " * 22, break_long_words=False, break_on_hyphens=False)


def all_features() -> FeatureTable:
    """Return every row, in the order in which a person would mend them."""
    answers = ask_libraries()
    return FeatureTable(
        [
            _python(),
            _module(),
            one_mpi(),
            mpi_library(answers),
            launcher(answers),
            dev_shm_room(),
            _emulated_hosts(),
            _simd(),
            staging_transfer(),
            Feature("cores", True, f"{cores()} usable of {os.cpu_count()}; more ranks than cores take turns"),
            torch(answers),
            gloo(answers),
            cuda(answers),
            nccl_library(answers),
            cuda_kernels(),
            _jupyter(),
            _compiler(),
            home_folder(),
        ]
    )


def staging_transfer() -> Feature:
    """Measure how tensors of any origin would go from rank to rank of this machine: two threads play the ranks."""
    import numpy as np

    try:
        core, takes_turns = compiled_module(), cores() < 2
        memory = core.SharedMemory.create(core.ShmGroup.nbytes_for(2))

        def add(rank: int) -> None:
            core.ShmGroup(memory, rank, 2, takes_turns).all_reduce(np.ones(1 << 18, np.float32), STAGING, takes_turns)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(add, range(2)))
    except (ImportError, RuntimeError) as error:
        return Feature("staging", False, str(error), needed=False)
    return Feature("staging", True, core.ShmGroup.path(2, takes_turns))


def _short(path: str) -> str:
    """Return a path as seen from here, if that is shorter."""
    return min(path, os.path.relpath(path), key=len)


def _python() -> Feature:
    what = f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.machine()}"
    return Feature("Python", True, what)


def _module() -> Feature:
    try:
        return Feature("compiled module", True, _short(compiled_module().__file__))
    except ImportError as error:
        return Feature("compiled module", False, str(error))


def one_mpi() -> Feature:
    try:
        require_one_mpi()
    except Missing as error:
        return Feature("one MPI only", False, str(error))
    wheels = [f"wheel {name} {number}" for name, number in installed_mpi_wheels().items()]
    return Feature("one MPI only", True, wheels[0] if wheels else "no wheel: the system's MPI is used")


def mpi_library(answers: Answers) -> Feature:
    if "mpi" not in answers:
        return Feature("MPI library", False, f"{answers['mpi_error']}: pip install mpich mpi4py")
    return Feature("MPI library", True, f"{answers['mpi']} at {_short(answers['mpi_path'])}")


def launcher(answers: Answers) -> Feature:
    """Find the launcher, which has to belong to the library."""
    library = answers.get("mpi", "an unknown MPI")
    try:
        path = mpiexec()
        if "mpi" in answers:
            require_launcher(path, library)
    except Missing as error:
        return Feature("mpiexec", False, str(error))
    return Feature("mpiexec", True, f"{_short(path)} starts ranks of {library}")


def dev_shm_room() -> Feature:
    """Measure /dev/shm, through which the MPI library's ranks talk; in a container it may have only 64 MiB.

    Tensors of `comm.allocate` are not there: they take memory without a name.
    """
    path = "/dev/shm"
    if not os.path.isdir(path):
        return Feature("shared memory", platform.system() == "Darwin", "POSIX shared memory without /dev/shm")
    free = shutil.disk_usage(path).free
    text = f"{free / 2**20:,.0f} MiB free in {path}"
    if free < SHM_WANTED:
        text += f", {SHM_WANTED / 2**20:,.0f} MiB wanted: many ranks may not start (a container: --shm-size=1g)"
    return Feature("shared memory", free >= SHM_NEEDED, text)


def _emulated_hosts() -> Feature:
    """Make one host, which vanishes at once."""
    try:
        commands = network_commands()
        command = [sys.executable, "-m", "hpdl_lab.engines.hosts", "-", "1", "1000000000", *commands]
        tried = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (Missing, subprocess.TimeoutExpired) as error:
        return Feature("emulated hosts", False, str(error), needed=False)
    if tried.returncode:
        return Feature("emulated hosts", False, tried.stderr.strip().rpartition("\n")[2], needed=False)
    return Feature("emulated hosts", True, f"made with {' and '.join(commands)}", needed=False)


def _simd() -> Feature:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return Feature("SIMD kernels", False, f"{platform.machine()}: the portable kernel is used", needed=False)
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith("flags")), "").split()
    except OSError:
        flags = []
    kinds = [name for flag, name in (("avx2", "AVX2"), ("avx512f", "AVX-512")) if flag in flags]
    text = ", ".join(kinds) or "this processor shows neither AVX2 nor AVX-512: the portable kernel is used"
    return Feature("SIMD kernels", bool(kinds), text, needed=False)


def torch(answers: Answers) -> Feature:
    if "torch" not in answers:
        return Feature("torch", False, f"{answers['torch_error']}: make install")
    return Feature("torch", True, answers["torch"])


def gloo(answers: Answers) -> Feature:
    has = answers.get("gloo", False)
    return Feature("gloo", has, "in torch" if has else "not in this torch", needed=False)


def cuda(answers: Answers) -> Feature:
    gpus = answers.get("gpus")
    if gpus:
        return Feature("CUDA", True, f"{answers['cuda']}, {len(gpus)} GPU(s): {', '.join(gpus)}", needed=False)
    why = gpu.why_no_gpu() or f"torch has CUDA {answers.get('cuda')}, but finds no GPU"
    return Feature("CUDA", False, f"{why}: ranks use CPU cores", needed=False)


def nccl_library(answers: Answers) -> Feature:
    if version := answers.get("nccl"):
        return Feature("NCCL", True, f"{nccl.text_of(tuple(version))} in torch", needed=False)
    return Feature("NCCL", False, "not in this torch; of use with GPUs only", needed=False)


def cuda_kernels() -> Feature:
    try:
        return Feature("CUDA kernels", True, _short(str(gpu.cuda_module().__file__)), needed=False)
    except Missing as error:
        return Feature("CUDA kernels", False, str(error), needed=False)


def _jupyter() -> Feature:
    try:
        text = ", ".join(f"{name} {version(name)}" for name in ("jupyterlab", "ipyparallel", "ipykernel"))
    except PackageNotFoundError as error:
        return Feature("JupyterLab", False, f"{error.name} is not installed: make install")
    return Feature("JupyterLab", True, text)


def _compiler() -> Feature:
    path = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    return Feature("C++ compiler", path is not None, path or "needed only to build csrc/: make install says how", False)


def home_folder() -> Feature:
    try:
        return Feature("home", True, f"{require_home()} can be written")
    except Missing as error:
        return Feature("home", False, str(error), needed=False)

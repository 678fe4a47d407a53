"""Everything that needs a GPU, in one command: `make test-gpu`. The last line counts the tests.

    python tests/gpu/run.py .venv-gpu build/gpu               what make test-gpu does
    python tests/gpu/run.py .venv-gpu build/gpu rehearse      the same where there is no GPU: each test is skipped

Run by a Python that has a torch with CUDA; nothing else is expected. It makes an environment beside that Python's
packages, builds csrc/ with nvcc, adds what is missing where a package index can be reached, runs tests/gpu on one GPU
and tests/gpu/ranks on two ranks, climbs the reduction ladder, leaves its table in the folder `report`, and records what
lab.replay shows on machines without a GPU in hpdl_lab/data/recorded, to be committed. What cannot run is skipped with
the reason. Exit code 0 also where there is no GPU: then nothing has been tested, and it says so.

GPUs are lent by the minute: all of it ends within TOGETHER seconds, and what has been found until then is in the folder
`report` and in hpdl_lab/data/recorded at any moment.
"""

import glob
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TOGETHER = 540  # s, from the first line on
BUILD = ("scikit_build_core", "nanobind", "cmake", "ninja")
NEEDED = ("numpy", "psutil", "cloudpickle", "pytest", "pytest_timeout")  # by csrc/, comm and the tests
FOR_RANKS = ("mpi4py", "mpich")  # without them one rank can be tested, two cannot
FOR_ENGINES = ("greenlet", "ipyparallel", "ipykernel", "matplotlib", "sklearn", "PIL")
FOR_KERNELS = ("numba", "numba_cuda")  # those of notebook 05
# what pip calls them, where it is not the name with dashes
NAMES = {"sklearn": "scikit-learn", "PIL": "pillow", "numba_cuda": "numba-cuda[cu13]"}


def why_not(python):
    """Why nothing can be tested on this machine, or ""."""
    if not glob.glob("/dev/nvidia[0-9]*") and not os.path.exists("/dev/dxg"):
        return "no NVIDIA driver: /dev/nvidia0 does not exist"
    asked = "import torch; print(torch.version.cuda, torch.cuda.is_available())"
    done = subprocess.run([python, "-c", asked], capture_output=True, text=True, timeout=300)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return f"{python} cannot import torch: {last}"
    version, available = done.stdout.split()[-2:]
    if version == "None":
        return f"the torch of {python} was built without CUDA"
    return "" if available == "True" else f"the torch of {python} has CUDA {version}, but finds no GPU"


def make_environment(folder, until):
    """An environment that sees this Python's packages; returns its python."""
    python = folder / "bin" / "python"
    if not python.exists():
        run([sys.executable, "-m", "venv", "--without-pip", folder], until)
    here = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    there = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    lines = [f"import site; site.addsitedir({path!r})\n" for path in dict.fromkeys(here)]
    (there / "packages_of_the_machine.pth").write_text("".join(lines))
    return python


def missing(python, modules):
    """Those of `modules` that `python` does not find. mpich has no module, but a program."""
    asked = "import importlib.util, sys; print(*[m for m in sys.argv[1:] if not importlib.util.find_spec(m)])"
    found = subprocess.run([python, "-c", asked, *modules], capture_output=True, text=True, check=True, timeout=60)
    absent = set(found.stdout.split())
    if "mpich" in absent and (python.parent / "mpiexec").exists():
        absent.discard("mpich")
    return [m for m in modules if m in absent]


def install(python, modules, until):
    """Install what is missing, one by one: an index that lacks one, or no network, costs only what needs it."""
    for module in missing(python, modules):
        name = NAMES.get(module, module.replace("_", "-"))
        # A program of the machine's own packages is not where this environment looks for it.
        here = ["--ignore-installed", "--no-deps"] if module == "mpich" else []
        patience = ["--retries=1", "--timeout=5"]
        if not run(
            [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *patience, *here, name],
            until,
            check=False,
        ):
            print(f"{name} could not be installed: what needs it is skipped", flush=True)


def run(command, until, check=True):
    """True when the command succeeds before time.time() is `until`; it is killed then."""
    print("+", *command, flush=True)
    seconds = max(0.0, until - time.time())
    try:
        done = subprocess.run([str(part) for part in command], cwd=ROOT, stdin=subprocess.DEVNULL, timeout=seconds)
        ended = f"with exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        ended = "not before the time for all of it was up"
    if ended and check:
        raise SystemExit(f"make test-gpu: {command[0]} ended {ended}: see above")
    return not ended


def main(folder, report, rehearses=""):
    until = time.time() + TOGETHER
    if not rehearses and (reason := why_not(sys.executable)):
        print(f"make test-gpu: nothing was tested: {reason}")
        return 0
    python = make_environment(Path(folder).resolve(), until)
    install(python, BUILD + NEEDED + FOR_RANKS + FOR_ENGINES + FOR_KERNELS, until)
    if absent := missing(python, BUILD + NEEDED):
        raise SystemExit(f"make test-gpu: without {', '.join(absent)} nothing can be built or tested")
    own_build = "build-dir=build/test-gpu"  # that of `make install` is for another Python
    settings = ["-C", own_build]
    if not rehearses:  # of these GPUs alone: half the time
        settings += ["-C", "cmake.define.CMAKE_CUDA_ARCHITECTURES=native"]
    run([python, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", *settings, "-e", "."], until)
    command = [python, "tests/gpu/steps.py", report, str(until), rehearses]
    return subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

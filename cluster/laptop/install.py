"""Install the laboratory into this environment: its packages, while its compiled module is being compiled.

    python cluster/laptop/install.py [EXTRA]       as `make` does, in the repository, with the build tools installed

Two runs of pip side by side: packages are fetched and unpacked on one core, csrc/ is compiled on the others. What the
second says is shown when it has ended. Then what a class uses is imported once: Python compiles it, a third of all the
packages, and matplotlib looks for its fonts. The first cell of a notebook would do that otherwise. Exits with 1 where
a pip fails.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", "-c", "constraints.txt"]
MODULE = ["--no-build-isolation", "--no-deps", "-e", "."]
FIRST_IMPORTS = (  # by engines and notebooks; by servers. hpdl_lab puts off `torch._dynamo`, which DDP imports
    "import torch._dynamo, numba.cuda; from hpdl_lab.lab import *",
    "import ipykernel.kernelapp, ipyparallel, ipywidgets, jupyterlab.labapp",
)


def requirements(extra=""):
    """What pyproject.toml asks for, with what it asks for in addition under the name `extra`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(project["optional-dependencies"][extra] if extra else [])]


def main(extra=""):
    with tempfile.TemporaryFile() as said:
        module = subprocess.Popen([*PIP, *MODULE], cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        try:
            packages = subprocess.call([*PIP, *requirements(extra)], cwd=ROOT)
        finally:
            compiled = module.wait()
        said.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(said.read())
        sys.stdout.flush()
    if packages or compiled:
        return 1
    import_once()
    return 0


def import_once():
    """Have Python compile what a class uses. One that fails shows its traceback; `make lab` says what is missing."""
    keeping = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # of containers
    commands = [[sys.executable, "-c", imports] for imports in FIRST_IMPORTS]
    for process in [subprocess.Popen(command, cwd=ROOT, env=keeping) for command in commands]:
        process.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

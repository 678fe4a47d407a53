"""Install the laboratory into this environment: its packages, while its compiled module is being compiled.

    python cluster/laptop/install.py [EXTRA]       as `make` does, in the repository, with the build tools installed

Two runs of pip side by side: packages are fetched and unpacked on one core, csrc/ is compiled on the others. What the
second says is shown when it has ended. Then Python's files are compiled on all cores, where pip would use one. Exits
with 1 where either pip fails.
"""

import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", "-c", "constraints.txt"]
MODULE = ["--no-build-isolation", "--no-deps", "-e", "."]


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
    # Files for other versions of Python, and templates, do not compile, here as under pip.
    everything = [sys.executable, "-m", "compileall", "-qq", "-j0", sysconfig.get_path("purelib")]
    subprocess.call(everything, stdout=subprocess.DEVNULL)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Symptoms of Jupyter: the kernel "python3" of every notebook must start this environment's Python."""

import os
import subprocess
import sys

from ..features import Missing
from .record import Symptom

KERNEL = "python3"  # of the notebooks' metadata
ASK = "import sys; print(sys.prefix)"


def _require_own_kernel() -> None:
    """Raise Missing if Jupyter would start another environment than this one for the kernel "python3"."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_core.paths import jupyter_path

    ipython = os.environ.get("IPYTHONDIR") or os.path.expanduser("~/.ipython")  # IPython, if asked, would make it
    specs = KernelSpecManager(kernel_dirs=[*jupyter_path("kernels"), os.path.join(ipython, "kernels")])
    folder = specs.find_kernel_specs().get(KERNEL)
    if folder is None:
        raise Missing(f'there is no kernel "{KERNEL}" in {sys.prefix}', "pip install ipykernel")
    python = specs.get_kernel_spec(KERNEL).argv[0]
    if python in (sys.executable, "python", "python3", f"python3.{sys.version_info.minor}"):
        return  # for a name without a path, Jupyter takes its own
    starts = _environment_of(python)
    if starts is None or not os.path.samefile(starts, sys.prefix):
        where = f"the environment {starts}" if starts else f"{python}, which is no Python that runs"
        raise Missing(
            f'the kernel "{KERNEL}" of {folder} starts {where}, not {sys.prefix}: notebooks would not find hpdl_lab',
            f"mv {folder} {folder}-other, which keeps it under another name",
        )


def _environment_of(python: str) -> str | None:
    """Return the prefix of that Python; None if it does not run."""
    try:
        asked = subprocess.run([python, "-I", "-c", ASK], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() if asked.returncode == 0 and os.path.isdir(asked.stdout.strip()) else None


SYMPTOMS = (
    Symptom(
        "ipykernel mismatch",
        look=_require_own_kernel,
        said=r"No module named '?hpdl_lab'?|No module named ipykernel",
        fix=f"start Jupyter in {sys.prefix}, for its kernel; `hpdl doctor` shows a kernel that shadows it",
    ),
)

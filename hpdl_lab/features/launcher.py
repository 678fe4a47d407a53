"""The launcher, which has to belong to the MPI that Python loads: otherwise every rank is rank 0 of 1."""

import os
import shutil
import subprocess

from . import Missing, ask_libraries, mpiexec


def require_launcher_of(path: str, library: str) -> None:
    """Raise Missing unless the launcher at `path` belongs to `library`, such as "MPICH 5.0.2".

    There are two families: Open MPI, and MPICH with Intel MPI, MVAPICH and Cray MPICH.
    """
    try:
        says = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(str(error)) from None
    if ("Open MPI" in says) != ("Open MPI" in library):
        kind = "Open MPI" if "Open MPI" in says else "MPICH"
        raise Missing(
            f"{path} starts ranks of {kind}, but mpi4py loads {library}",
            "put the launcher of the same MPI first on PATH, or pip install mpich",
        )


def require_on_path() -> None:
    """Raise Missing if `mpiexec`, as typed, starts ranks of another MPI than Python loads."""
    library, own, typed = ask_libraries().get("mpi"), mpiexec(), shutil.which("mpiexec")
    if library is None:
        return  # then nothing of MPI works, which other symptoms say
    require_launcher_of(own, library)
    if typed is None or os.path.samefile(typed, own):
        return
    try:
        require_launcher_of(typed, library)
    except Missing as error:
        what = f"{error.what}: four ranks of it would each be rank 0 of 1, or refuse to start"
        raise Missing(what, f"type {own}, or: export PATH={os.path.dirname(own)}:$PATH") from None

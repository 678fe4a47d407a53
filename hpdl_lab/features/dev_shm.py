"""The room in /dev/shm for MPI: without any, MPICH ends with a SIGBUS and not one word of why."""

import collections
import contextlib
import glob
import os
import sys
import time
from collections.abc import Iterable

from . import Missing, installed_mpi_wheels

PATH = "/dev/shm"
MIB = 1 << 20
LEAST = 24 * MIB  # for several ranks: MPICH 5.0.2 crashes in 16 MiB, which would be enough for two
PER_RANK = 6 * MIB  # measured: 5.2 MiB for each of 1 to 16 ranks
ABANDONED = 60.0  # s that no process may map a file of ranks: they map it when they make it
FIX = f"`mount -o remount,size=1g {PATH}` as root, remove files from it, or start the container with --shm-size=1g"


def require_room(ranks: int) -> None:
    """Raise Missing, with the remedy, if the shared memory of `ranks` more ranks of this MPI does not fit."""
    needed, what = ranks * PER_RANK if ranks == 1 else max(LEAST, ranks * PER_RANK), _lack()
    if what is None and (free := room()) < needed:
        what = f"has {free / MIB:.1f} MiB free, and {ranks} MPI rank{'s' * (ranks > 1)} need {needed / MIB:.0f} MiB"
    # Open MPI takes other files instead; other systems have shared memory without names in a folder.
    if what is None or "mpich" not in installed_mpi_wheels() or not sys.platform.startswith("linux"):
        return
    raise Missing(f"{PATH} {what}", FIX)


def _lack() -> str | None:
    """Return why nothing can be written there, or None."""
    if not os.path.isdir(PATH):
        return "does not exist, and MPI needs it"
    if os.statvfs(PATH).f_flag & os.ST_RDONLY or not os.access(PATH, os.W_OK):
        return "cannot be written, and MPI needs it"
    return None


def room() -> int:
    """Return the bytes that are free there."""
    found = os.statvfs(PATH)
    return found.f_bavail * found.f_frsize


def of_others() -> str:
    """Return a sentence on files there that other accounts have named like MPICH's own; "" if there are none."""
    owners: collections.Counter[int] = collections.Counter()
    for path in glob.glob(f"{PATH}/mpich_shm_*"):
        with contextlib.suppress(OSError):
            owners[os.lstat(path).st_uid] += 1
    del owners[os.geteuid()]
    found = ", ".join(f"{n:,} of user {owner}" for owner, n in owners.items())
    return (
        f"Other accounts have files like {PATH}/mpich_shm_* ({found}): they may keep MPICH from starting"
        if found
        else ""
    )


def remove_abandoned() -> None:
    """Remove what ranks of this user have left that were killed with their mpiexec.

    mpiexec.gforker of MPICH has files there named after its own process number, which the system gives again one day:
    ranks that then find the file of others end with "Out of memory", or wait for each other for good.
    """
    for path in abandoned(("mpich_shm_",)):
        with contextlib.suppress(OSError):
            os.unlink(path)


def abandoned(prefixes: tuple[str, ...], folder: str = PATH) -> dict[str, int]:
    """Return {path: bytes} of this user's files in `folder` that begin so, are not new, and no process has mapped."""
    found: dict[str, int] = {}
    old = time.time() - ABANDONED
    for prefix in prefixes:
        for path in glob.glob(f"{glob.escape(folder)}/{prefix}*"):
            with contextlib.suppress(OSError):
                about = os.lstat(path)
                if about.st_uid == os.getuid() and about.st_mtime < old:
                    found[path] = about.st_blocks * 512
    in_use = mapped() if found else set()
    return {path: nbytes for path, nbytes in found.items() if path not in in_use}


def mapped(pids: Iterable[int] | None = None) -> set[str]:
    """Return the paths of the files there that processes have mapped: these, or all of this user."""
    paths: set[str] = set()
    for process in glob.glob("/proc/[0-9]*") if pids is None else [f"/proc/{pid}" for pid in pids]:
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            with open(f"{process}/maps") as file:
                paths |= {line[line.index(PATH) :].rstrip("\n") for line in file if f" {PATH}/" in line}
    return paths

"""Memory that MPI shares between processes: it must be this user's own, and open to nobody else.

MPI libraries name such files after numbers of processes, and use what they find under the name, whoever has put it
there: an account that prepares files for the next numbers would read, and write, all messages of another.
"""

import contextlib
import os
import stat
import sys
from typing import Any

from ..errors import CommError


def shared() -> Any:
    """What this process has mapped to share and to write: {(device, inode): path, as /proc/self/maps has it}."""
    found = {}
    if sys.platform.startswith("linux"):
        with open("/proc/self/maps", errors="surrogateescape") as file:
            for line in file:
                _, access, _, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
                if access[1] == "w" and access[3] == "s" and path:
                    found[device, int(inode)] = path[0]
    return found


def require_own(segments: Any, unknown: bool = True) -> None:
    """Raise CommError where one of `segments`, as of `shared`, is another user's, or others may open it.

    unknown: also where no file can be found of which that could be asked, as it is removed, and closed everywhere.
    """
    modes = {}  # (device, inode): (user id, permissions) or None
    for (device, inode), path in segments.items():
        if path.startswith("/SYSV"):
            modes[device, inode] = system_v(inode)
        elif path.startswith("/") and os.path.dirname(path.removesuffix(" (deleted)")) not in ("/", "/dev"):
            modes[device, inode] = by_path(path, inode)  # else without a name that could be opened: memfd, /dev/zero
    missing = {key for key, found in modes.items() if found is None}
    modes |= by_open_files(missing)
    for key, found in modes.items():
        if found is None and not unknown:
            continue
        owner, mode = found or ("nobody who could be asked", 0)
        path = segments[key].removesuffix(" (deleted)")
        if owner != os.geteuid():
            raise CommError(
                f"shared memory {path} belongs to {owner if found is None else f'user {owner}'}: another account of "
                "this machine prepared it; nothing was sent. The next start takes another name"
            )
        if mode & 0o077:
            raise CommError(f"shared memory {path} is open to other accounts (mode {mode:o}): nothing was sent")


def by_path(path: Any, inode: Any) -> Any:
    """(user id, permissions) of the file at `path`; None where that is not the one that was mapped."""
    with contextlib.suppress(OSError):
        about = os.stat(path)
        if about.st_ino == inode:  # not its device: an overlay has another than the files in it
            return (os.geteuid(), 0) if stat.S_ISCHR(about.st_mode) else (about.st_uid, stat.S_IMODE(about.st_mode))
    return None


def system_v(number: Any) -> Any:
    """(user id, permissions) of a segment of System V; None where there is none of that number."""
    with open("/proc/sysvipc/shm") as file:
        for line in file:
            _, found, mode, _, _, _, _, owner, *_ = line.split()
            if found == str(number):
                return int(owner), int(mode, 8) & 0o777
    return None


def by_open_files(missing: Any) -> Any:
    """{(device, inode): (user id, permissions)} of those that this process, or another of this user, holds open."""
    found, me = {}, os.getpid()
    for pid in sorted(map(int, filter(str.isdigit, os.listdir("/proc"))), key=lambda pid: abs(pid - me)):
        if len(found) == len(missing):
            break
        with contextlib.suppress(OSError):  # somebody else's, or it has ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    about = os.stat(f"/proc/{pid}/fd/{name}")
                    key = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}", about.st_ino
                    if key in missing:
                        found[key] = about.st_uid, stat.S_IMODE(about.st_mode)
    return found

"""The numbers that the compiled module needs of the MPI library that mpi4py has loaded: what mpi.h would have said."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import sys
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from ...features import Missing, compiled_module, dev_shm
from ..buffers import DTYPES
from ..errors import CommError

if TYPE_CHECKING:
    from ... import _core

Key: TypeAlias = tuple[str, int]  # device and inode
Access: TypeAlias = tuple[int, int]  # user id and permissions

PROBE = 0x1234567  # a tag that no other field of a status holds


def load_mpi() -> tuple[ModuleType, _core.Mpi]:
    """Start MPI unless it has been, and give its functions to the compiled module; return (mpi4py.MPI, _core.Mpi)."""
    import mpi4py

    try:
        dev_shm.require_room(1)  # the launcher of the ranks may not have asked
    except Missing as error:
        raise CommError(str(error)) from None
    # A rank that failed must be able to end: MPI_Finalize would wait for it, or for its peers. See Session.leave.
    mpi4py.rc.finalize = False
    os.environ.setdefault("UCX_TLS", "^sysv")  # whose memory is open to the user's group
    earlier = None if "mpi4py.MPI" in sys.modules else shared()
    from mpi4py import MPI

    _require_own_memory(MPI, earlier)
    return MPI, compiled_module().Mpi(MPI.__file__, MPI.COMM_WORLD.rank, mpi_constants(MPI))


def _require_own_memory(MPI: ModuleType, earlier: Collection[Key] | None) -> None:
    """Raise CommError if another account may read what ranks of this machine send each other.

    earlier: what was shared before MPI was started; None if the program has started it by itself.
    """
    by_chance = MPI.Get_library_version().startswith("Intel")  # its names cannot be foreseen, and it removes them
    mapped = shared()
    new = {key: path for key, path in mapped.items() if key not in (earlier or ())}
    require_own(new, unknown=earlier is not None and not by_chance)


def mpi_constants(MPI: ModuleType) -> dict[str, int]:
    """Return the numbers that differ from one MPI to the next, as 64-bit words."""
    names = {  # what MPI adds; the rest it moves as bytes
        "float32": MPI.FLOAT,
        "float64": MPI.DOUBLE,
        "int32": MPI.INT32_T,
        "int64": MPI.INT64_T,
        "uint8": MPI.UINT8_T,
        "int8": MPI.INT8_T,
        "int16": MPI.INT16_T,
        "complex64": MPI.C_FLOAT_COMPLEX,
        "complex128": MPI.C_DOUBLE_COMPLEX,
    }
    info = {
        "any_tag": MPI.ANY_TAG,
        "error_truncate": MPI.ERR_TRUNCATE,
        "in_place": int(MPI.IN_PLACE),
        "request_null": MPI.REQUEST_NULL.handle,
        "byte": MPI.BYTE.handle,
        "sum": MPI.SUM.handle,
        "status_nbytes": MPI._sizeof(MPI.Status),
        "tag_offset": tag_offset(MPI),
        **{name: names[name].handle for name in DTYPES if name in names},
    }
    return {name: value & (1 << 64) - 1 for name, value in info.items()}


def tag_offset(MPI: ModuleType) -> int:
    """Return the offset of the tag in an MPI_Status, in bytes: each MPI has another, so a marked tag is searched."""
    status = MPI.Status()
    status.Set_tag(PROBE)
    raw = ctypes.string_at(MPI._addressof(status), MPI._sizeof(MPI.Status))
    return raw.index(PROBE.to_bytes(4, "little"))


def shared() -> dict[Key, str]:
    """Return what this process has mapped to share and to write: {(device, inode): path, as /proc/self/maps has it}."""
    found: dict[Key, str] = {}
    if sys.platform.startswith("linux"):
        with open("/proc/self/maps", errors="surrogateescape") as file:
            for line in file:
                _, access, _, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
                if access[1] == "w" and access[3] == "s" and path:
                    found[device, int(inode)] = path[0]
    return found


def require_own(segments: Mapping[Key, str], unknown: bool = True) -> None:
    """Raise CommError if one of `segments`, as of `shared`, is another user's, or others may open it.

    unknown: also if no file can be found that says so, as it is removed, and closed everywhere.
    """
    modes: dict[Key, Access | None] = {}
    for (device, inode), path in segments.items():
        if path.startswith("/SYSV"):
            modes[device, inode] = _system_v(inode)
        elif path.startswith("/") and os.path.dirname(path.removesuffix(" (deleted)")) not in ("/", "/dev"):
            modes[device, inode] = _by_path(path, inode)  # else without a name that could be opened: memfd, /dev/zero
    missing = {key for key, found in modes.items() if found is None}
    modes |= _by_open_files(missing)
    for key, found in modes.items():
        if found is None and not unknown:
            continue
        owner, mode = found or ("an unknown user", 0)
        path = segments[key].removesuffix(" (deleted)")
        if owner != os.geteuid():
            raise CommError(
                f"shared memory {path} belongs to {owner if found is None else f'user {owner}'}: another account of "
                "this machine prepared it; nothing was sent. The next start takes another name"
            )
        if mode & 0o077:
            raise CommError(f"shared memory {path} is open to other accounts (mode {mode:o}): nothing was sent")


def _by_path(path: str, inode: int) -> Access | None:
    """Return (user id, permissions) of the file at `path`; None if that is not the one that was mapped."""
    with contextlib.suppress(OSError):
        about = os.stat(path)
        if about.st_ino == inode:  # not its device: an overlay has another than the files in it
            return (os.geteuid(), 0) if stat.S_ISCHR(about.st_mode) else (about.st_uid, stat.S_IMODE(about.st_mode))
    return None


def _system_v(number: int) -> Access | None:
    """Return (user id, permissions) of a segment of System V; None if there is none of that number."""
    with open("/proc/sysvipc/shm") as file:
        for line in file:
            _, found, mode, _, _, _, _, owner, *_ = line.split()
            if found == str(number):
                return int(owner), int(mode, 8) & 0o777
    return None


def _by_open_files(missing: Collection[Key]) -> dict[Key, Access]:
    """Return {(device, inode): (user id, permissions)} of what a process of this user holds open."""
    found: dict[Key, Access] = {}
    me = os.getpid()
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

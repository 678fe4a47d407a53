"""System calls for Linux namespaces, which Python itself has from 3.12 on."""

import ctypes
import os
import signal

MOUNTS, NAMES, USERS, NETWORK = 0x00020000, 0x04000000, 0x10000000, 0x40000000  # CLONE_NEW... of linux/sched.h
BIND, RECURSIVE, PRIVATE = 1 << 12, 1 << 14, 1 << 18  # MS_... of linux/mount.h
SET_PDEATHSIG = 1  # linux/prctl.h

SYSTEM = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    """Call `name` of the C library. Raises OSError that names the call."""
    if getattr(SYSTEM, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def unshare(kinds):
    """Put this process into new namespaces of `kinds`."""
    call("unshare", kinds)


def join(handle):
    """Enter the namespace that is open as `handle`."""
    call("setns", handle, 0)


def join_path(path):
    """Enter the namespace at `path`."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        join(handle)
    finally:
        os.close(handle)


def mount(source, target, kind=None, flags=0):
    """Mount `source` on `target`, for this mount namespace."""
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    call("mount", *encoded, ctypes.c_ulong(flags), None)


def die_with_parent():
    """Be killed when the parent process ends."""
    call("prctl", SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))

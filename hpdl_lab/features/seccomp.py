"""Filters of system calls, as the kernel of Linux takes them: seccomp(2)."""

import os
import struct

CALLS = {"x86_64": (0xC000003E, 272, 56), "aarch64": (0xC00000B7, 97, 220)}  # architecture, unshare, clone
CLONE3, CLONE_NEWUSER, X32 = 435, 0x10000000, 0x40000000
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # linux/filter.h: of 32-bit words, with constants
ALLOW, REFUSE, NO_SUCH_CALL = 0x7FFF0000, 0x00050001, 0x00050026  # linux/seccomp.h, with EPERM and ENOSYS


def without_user_namespaces() -> bytes:
    """Make the filter with which programs, and what they start, make no user namespaces; 32-bit programs do not run.

    clone3 does not exist for them, as a filter cannot see its arguments; the C library then calls clone.
    Returns: a program of classic BPF, as bubblewrap's --seccomp reads it.
    Raises:  RuntimeError on a processor that is not known here.
    """
    if (machine := os.uname().machine) not in CALLS:
        raise RuntimeError(f"user namespaces cannot be refused on {machine}, whose system calls are not known here")
    architecture, unshare, clone = CALLS[machine]
    program = [  # instruction, constant, how many to skip if true and if false
        (LOAD, 4, 0, 0),  # seccomp_data.arch
        (EQUAL, architecture, 0, 9),
        (LOAD, 0, 0, 0),  # .nr
        (AT_LEAST, X32, 7, 0),
        (EQUAL, CLONE3, 5, 0),
        (EQUAL, unshare, 1, 0),
        (EQUAL, clone, 0, 2),
        (LOAD, 16, 0, 0),  # .args[0], the flags
        (ANY_BIT, CLONE_NEWUSER, 2, 0),
        (RETURN, ALLOW, 0, 0),
        (RETURN, NO_SUCH_CALL, 0, 0),
        (RETURN, REFUSE, 0, 0),
    ]
    return b"".join(struct.pack("=HBBI", code, true, false, value) for code, value, true, false in program)

"""Become an attendee: `python -I -S enter.py JSON COMMAND...` runs the command as that account, within its limits.

Started by root, before anything of the attendee's runs. It imports the standard library only, and has no way back. The
JSON object is made by spawner.py:

    {"uid", "gid", "home",                 the account; the command starts in its home
     "groups": [path],                     cgroup.procs files that this process joins
     "limits": {"RLIMIT_DATA": bytes},     no process of the attendee can raise them again
     "cores": [number], "nice": number,
     "log": path or null,                  where what it prints is added, as a file of the account
     "view": [[wall, [[path, writable]]]]} folders to replace by what is needed of them: reach.py
"""

import ctypes
import json
import os
import resource
import sys

CLONE_NEWNS = 0x00020000  # linux/sched.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 0x1, 0x2, 0x4, 0x20  # linux/mount.h
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h

LONGEST_LOG = 1_000_000  # bytes: then the next server begins anew

libc = ctypes.CDLL(None, use_errno=True)


def main():
    who, command = json.loads(sys.argv[1]), sys.argv[2:]
    for group in who["groups"]:
        with open(group, "w") as file:
            file.write("0")
    for name, most in who["limits"].items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most))
    if who["cores"]:
        os.sched_setaffinity(0, who["cores"])
    os.nice(who["nice"])
    if who["view"]:
        make_view(who["view"])
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(who["gid"])
        os.setuid(who["uid"])
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # no setuid program gives an attendee rights
    os.umask(0o077)
    os.chdir(who["home"])
    if who["log"]:
        write_to(who["log"])
    os.execvp(command[0], command)


def write_to(log):
    """Have the command print into the attendee's own file: the hub's, which it would inherit, it could change."""
    too_long = os.path.exists(log) and os.path.getsize(log) > LONGEST_LOG
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if too_long else 0), 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def make_view(view):
    """Replace each wall by an empty folder that holds what is needed, for this process and its children only."""
    try:
        call("unshare", CLONE_NEWNS)
        mount("none", "/", MS_REC | MS_PRIVATE)
        for wall, behind in view:
            opened = [(path, writable, os.open(path, os.O_PATH | os.O_DIRECTORY)) for path, writable in behind]
            mount("tmpfs", wall, MS_NOSUID | MS_NODEV, b"mode=0755,size=1m")
            for path, writable, fd in opened:
                os.makedirs(path, 0o755, exist_ok=True)
                mount(f"/proc/self/fd/{fd}", path, MS_BIND | MS_REC)
                if not writable:
                    mount("none", path, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID)
                os.close(fd)
    except OSError as error:
        walls = ", ".join(wall for wall, _ in view)
        sys.exit(
            f"attendees' accounts cannot enter {walls}, and this machine allows them no view of the file system of "
            f"their own ({error.strerror}): put the clone, its Python and --state where all can read, such as /opt"
        )


def mount(source, target, flags, data=None):
    kind = b"tmpfs" if source == "tmpfs" else None
    call("mount", source.encode(), os.fsencode(target), kind, flags, data)


def call(name, *arguments):
    """One function of the C library. Raises OSError."""
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


if __name__ == "__main__":
    main()

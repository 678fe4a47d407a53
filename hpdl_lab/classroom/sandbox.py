"""Programs of attendees, each attendee's in a sandbox by bubblewrap: processes, memory, sockets and files of their own.

    the attendee sees     /home/ada                  their files, the only ones that they can change for good
                          /tmp /run /dev/shm         theirs, empty at first, of bounded size, in memory
                          /usr /etc ... , this Python and of this clone what servers need, read-only
                          their own processes        the sandbox ends with its first process, and nothing outlives it

Root makes the sandbox and has no rights in it: setpriv gives up all of them before anything of the attendee's runs.
"""

import contextlib
import ctypes
import glob
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

import psutil

from ..features.seccomp import without_user_namespaces
from . import bounds
from .settings import PACKAGE, Settings, write_whole

SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # links into /usr, or folders of their own
DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/infiniband")
CLONE = ("hpdl_lab", "cluster", "csrc", "notebooks/hints", "notebooks/scripts")  # what servers and exercises read
TORCHRUN = ("cluster/hub/torchrun", "bin/torchrun")  # in the clone: it listens on 127.0.0.1 only; the one it replaces
GIVEN = "/run/hpdl"  # where the sandbox has what the hub gives: certificate, notebooks
PROFILE = "profile"  # there, the files of the site's profile
TERMINALS = 64  # of one attendee: the machine has 3,000 for all
KEYCTL = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine)  # number of the system call
KEYCTL_JOIN_SESSION_KEYRING = 1  # linux/keyctl.h
END_SECONDS = 20  # for processes that were killed to be gone
ENTER = 'umask 077; [ -z "$0" ] || { mkdir -p "$XDG_RUNTIME_DIR" && exec >"$0" 2>&1; }; "$@"; exit $?'
JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit; shift; done; shift; exec "$@"'  # groups, "--", command
FILTER = 'exec 9<"$0" || exit; exec "$@"'  # file of the filter, command
BOUND = f'mount -o remount,max={TERMINALS} /dev/pts || exit; exec "$@"'


class UnixAccount(NamedTuple):
    """An attendee as a user of this machine."""

    name: str
    uid: int  # group id as well
    home: str
    given: str  # the folder of what root gives to their sandbox
    ip: str  # the address of the loopback network on which their server listens


def command(
    given: Settings,
    account: UnixAccount,
    argv: Sequence[str],
    log: str = "",
    groups: Sequence[str] = (),
    readable: Sequence[str] = (),
    info: int | None = None,
) -> list[str]:
    """Return the command line that runs `argv` as the attendee `account`, in a sandbox if the hub has one.

    log: file in the home that what it prints replaces; groups: cgroup.procs files that it joins; readable: more folders
    that it may read; info: file descriptor to which bubblewrap writes the number of the first process, as JSON.
    """
    inner = ["sh", "-c", ENTER, log, *argv]
    if os.geteuid() == 0:
        rights = ["--clear-groups", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
        inner = ["setpriv", f"--reuid={account.uid}", f"--regid={account.uid}", *rights, *inner]
    if given.sandbox:
        fd = ["--info-fd", str(info)] if info is not None else []
        inner = [*_walls(given, account, readable), "sh", "-c", BOUND, "sh", *inner]
        if given.emulated:
            inner = ["bwrap", *fd, *inner]
        else:
            program = os.path.join(account.given, "filter")
            write_whole(program, without_user_namespaces())
            inner = ["sh", "-c", FILTER, program, "bwrap", *fd, "--seccomp", "9", *inner]
    else:
        inner = ["env", "-C", account.home, *inner]
    return ["sh", "-c", JOIN, "sh", *groups, "--", *inner]


def _walls(given: Settings, account: UnixAccount, readable: Sequence[str] = ()) -> Iterator[str]:
    """Yield the arguments of bubblewrap: what the sandbox of `account` has."""
    yield from ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--new-session", "--as-pid-1")
    for path in SYSTEM:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.isdir(path):
            yield from ("--ro-bind", path, path)
    yield from ("--ro-bind", "/usr", "/usr", "--ro-bind", "/etc", "/etc", "--ro-bind", "/sys", "/sys")
    yield from ("--proc", "/proc", "--dev", "/dev", "--ro-bind-try", "/opt", "/opt")
    for path in ("/tmp", "/run", "/dev/shm"):
        yield from ("--perms", "1777", "--size", str(given.memory_limit // 2), "--tmpfs", path)
    yield from ("--ro-bind-try", "/run/systemd/resolve", "/run/systemd/resolve")  # where /etc/resolv.conf may lead
    for path in (path for pattern in DEVICES for path in glob.glob(pattern)):
        yield from ("--dev-bind", path, path)
    needed = [sys.prefix, sys.base_prefix, *(str(path) for part in CLONE if (path := PACKAGE / part).exists())]
    if PACKAGE.parts[1] in ("opt", "usr", "etc"):  # they are shown: not the rest of a clone in them
        yield from ("--tmpfs", str(PACKAGE))
    for path in sorted({*needed, *map(os.path.realpath, needed), *readable}):
        parents = path.split("/")[1:-1]
        for depth in range(len(parents)):  # folders above, which may be closed outside, as /root is
            yield from ("--perms", "0755", "--dir", "/" + "/".join(parents[: depth + 1]))
        yield from ("--ro-bind", path, path)
    if os.path.exists(theirs := os.path.join(sys.prefix, TORCHRUN[1])):
        yield from ("--ro-bind-try", str(PACKAGE / TORCHRUN[0]), theirs)
    for name in ("passwd", "group"):
        yield from ("--ro-bind-try", os.path.join(account.given, name), f"/etc/{name}")
    yield from ("--perms", "0755", "--dir", GIVEN, "--ro-bind", account.given, f"{GIVEN}/own")
    yield from ("--ro-bind-try", str(given.notebooks), f"{GIVEN}/notebooks")
    yield from ("--perms", "0755", "--dir", "/home", "--bind", account.home, attendee_home(given, account))
    yield from ("--remount-ro", "/", "--chdir", attendee_home(given, account), "--")


def attendee_home(given: Settings, account: UnixAccount) -> str:
    """Return the path at which the attendee finds their home."""
    return f"/home/{account.name}" if given.sandbox else account.home


def attendee_environment(given: Settings, account: UnixAccount) -> dict[str, str]:
    """Return the environment of the attendee's processes."""
    run = f"{GIVEN}-{account.uid}" if given.sandbox else f"/tmp/hpdl-hub-{account.uid}-{account.name}"
    own = f"{GIVEN}/own" if given.sandbox else account.given
    profile = {"HPDL_PROFILE": name_of_profile(given), "HPDL_PROFILE_FILES": f"{own}/{PROFILE}"}
    return (profile if given.profile else {}) | {
        "HOME": attendee_home(given, account),
        "USER": account.name,
        "LOGNAME": account.name,
        "SHELL": "/bin/bash",
        "XDG_RUNTIME_DIR": run,  # short, as paths of sockets must be
        "JUPYTER_RUNTIME_DIR": f"{run}/jupyter",
        "JUPYTER_PREFER_ENV_PATH": "1",  # the kernel "python3" is this environment's, not one in the home
        "PATH": os.pathsep.join([os.path.join(sys.prefix, "bin"), "/usr/local/bin", "/usr/bin", "/bin"]),
        "HPDL_MOST_ENGINES": str(given.engines),
        "HPDL_NOTEBOOKS": f"{GIVEN}/notebooks" if given.sandbox else str(given.notebooks),
    }


def write_names(account: UnixAccount) -> None:
    """Write the user database that the sandbox sees, in which the attendee has a name."""
    entry = f"{account.name}:x:{account.uid}:"
    texts = {
        "passwd": f"root:x:0:0::/root:/bin/false\n{entry}{account.uid}::/home/{account.name}:/bin/bash\n",
        "group": f"root:x:0:\n{entry}\n",
    }
    for name, text in texts.items():
        write_whole(path := os.path.join(account.given, name), text)
        os.chmod(path, 0o644)


def name_of_profile(given: Settings) -> str:
    """Return the name of the site's profile of ipyparallel."""
    return os.path.basename(given.profile).removeprefix("profile_")


def write_profile(given: Settings, account: UnixAccount) -> None:
    """Copy the configuration of the site's profile of ipyparallel, without its keys, to where servers find it."""
    folder = os.path.join(account.given, PROFILE)
    shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(folder)
    os.chmod(folder, 0o755)
    for path in glob.glob(os.path.join(glob.escape(given.profile), "*.py")):
        write_whole(copy := os.path.join(folder, os.path.basename(path)), Path(path).read_bytes())
        os.chmod(copy, 0o644)


def before_start() -> None:
    """Give the process that is about to start the limit of open files that this one began with, no key of root's."""
    resource.setrlimit(resource.RLIMIT_NOFILE, bounds.FILES)
    if KEYCTL is not None:  # the kernel hands down the keyring of a session forever
        ctypes.CDLL(None).syscall(KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None)  # if it fails there are no keyrings


def run_as(given: Settings, account: UnixAccount, argv: Sequence[str], seconds: float, most: int = 65536) -> bytes:
    """Run a short program as the attendee; return the first `most` bytes that it prints.

    Raises: RuntimeError with the last line of what it said, or that it took longer than `seconds`.
    """
    limited = ["sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh", *argv]  # kB of address space
    env = {"LANG": "C.UTF-8", **attendee_environment(given, account)}
    with subprocess.Popen(
        command(given, account, limited),
        env=env,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        output = cast("IO[bytes]", process.stdout)
        os.set_blocking(output.fileno(), False)
        said, give_up = b"", time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < give_up and len(said) < most:
            said += output.read(most - len(said)) or b""
            time.sleep(0.01)
        late = process.poll() is None
        if late:
            kill_tree(process.pid)
        said += output.read(most - len(said)) or b""
    if late and len(said) < most:
        raise RuntimeError(f"it took longer than {seconds:g} s")
    if process.returncode and not late:
        raise RuntimeError(ascii(said.decode(errors="replace").strip().rpartition("\n")[2][-300:]))
    return said


def kill_tree(pid: int) -> None:
    """Kill a process and all below it; a sandbox whose first process is among them ends as a whole."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def processes() -> Iterator[psutil.Process]:
    """Yield all processes that are not dead; one whose first thread has ended may go on in others."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1:
                yield process


def remaining_processes(account: UnixAccount) -> list[psutil.Process]:
    """Return what runs as the attendee; [] without root, when everything runs as one user."""
    if os.geteuid() != 0:
        return []
    found: list[psutil.Process] = []
    for process in processes():
        with contextlib.suppress(psutil.Error):
            if account.uid in process.uids():
                found.append(process)
    return found


def end_all(account: UnixAccount) -> None:
    """Kill whatever runs as the attendee. Raises RuntimeError if something stays."""
    give_up = time.monotonic() + END_SECONDS
    while running := remaining_processes(account):
        if time.monotonic() > give_up:
            raise RuntimeError(f"process {running[0].pid} of {account.name} (user {account.uid}) cannot be ended")
        become = ["setpriv", f"--reuid={account.uid}", f"--regid={account.uid}", "--clear-groups"]
        subprocess.run([*become, "kill", "-KILL", "--", "-1"], capture_output=True)  # all at once: none can fork anew
        with contextlib.suppress(psutil.Error):
            running[0].send_signal(signal.SIGKILL)
        time.sleep(0.02)

"""One Unix account for each attendee: the system itself keeps their files, processes and sockets apart.

The account of attendee "ada" is "hpdl-ada", so that no name of a users file can ever mean an account of the site. It
has no password and its home is in the hub's state folder. Without isolation there are only homes, all of this user.
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PREFIX = "hpdl-"
COMMENT = "attendee of a JupyterHub of hpdl_lab"
RUN = "/run/hpdl-hub"  # short, as paths of sockets must be, and emptied by a reboot
SHARED_MEMORY = "/dev/shm"
GRACE_SECONDS, KILL_SECONDS = 3, 20  # for processes that were asked to end, or killed, to be gone


class Account(NamedTuple):
    """Where one attendee lives."""

    name: str  # the attendee's, on the hub
    uid: int
    gid: int
    home: str
    run: str  # sockets of kernels and engines, as long as the server runs


def of(settings, name):
    """The Account of attendee `name`; on an isolated hub it must exist. Raises ValueError where it does not."""
    home = os.path.join(settings.state, "homes", name)
    if not settings.isolated:
        folder = os.path.join(tempfile.gettempdir(), f"hpdl-hub-{os.getuid()}")
        return Account(name, os.getuid(), os.getgid(), home, os.path.join(folder, name))
    try:
        entry = pwd.getpwnam(PREFIX + name)
    except KeyError:
        raise ValueError(f"{name} has no account {PREFIX}{name} on this machine") from None
    return Account(name, entry.pw_uid, entry.pw_gid, home, os.path.join(RUN, name))


def ensure(settings, name):
    """Make the account and the home of `name` where they are not there; returns the Account.

    Raises: ValueError where an account of this name is not this hub's; RuntimeError where the system refuses.
    """
    home = os.path.join(settings.state, "homes", name)
    if settings.isolated:
        try:
            there = pwd.getpwnam(PREFIX + name)
        except KeyError:
            there = add(PREFIX + name, home)
        if there.pw_dir != home or there.pw_uid == 0:
            raise ValueError(
                f"the account {PREFIX}{name} lives in {there.pw_dir}, not in {home}: it is of another hub: "
                f"hpdl hub --remove --state of that one, or take another name than {name}"
            )
    account = of(settings, name)
    with contextlib.suppress(FileExistsError):
        os.mkdir(home, 0o700)
        os.chown(home, account.uid, account.gid)
    return account


def add(account, home):
    """`useradd`; returns the new entry of the password database."""
    command = ["useradd", "--no-create-home", "--home-dir", home, "--shell", "/bin/bash", "--user-group"]
    run([*command, "--no-log-init", "--comment", COMMENT, account])
    return pwd.getpwnam(account)


def run(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise RuntimeError(f"{command[0]} is not on this machine: Debian has it in the package passwd") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


def open_run(account):
    """Make the attendee's empty folder for sockets, which nobody else can enter."""
    parent = os.path.dirname(account.run)
    os.makedirs(parent, 0o711, exist_ok=True)
    if os.stat(parent).st_uid != os.geteuid():
        raise RuntimeError(f"{parent} belongs to somebody else, who could take its sockets: remove it")
    close_run(account)
    os.mkdir(account.run, 0o700)
    os.chown(account.run, account.uid, account.gid)


def close_run(account):
    """Remove that folder."""
    shutil.rmtree(account.run, ignore_errors=True)


def processes(uid):
    """Process ids of one Unix account."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid and state(entry.name) not in "ZX":
                    found.append(int(entry.name))
    return found


def state(pid):
    """The state letter of a process."""
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


def end_processes(settings, account):
    """End whatever an isolated attendee has left running, also what was meant to outlive the server, and its memory."""
    if not settings.isolated:
        return
    for signum, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, KILL_SECONDS)):  # keepers tidy up first
        give_up = time.monotonic() + seconds
        while (left := processes(account.uid)) and time.monotonic() < give_up:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            time.sleep(0.05)
    for entry in os.scandir(SHARED_MEMORY):
        with contextlib.suppress(FileNotFoundError):
            if entry.stat(follow_symlinks=False).st_uid == account.uid and not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)


def remove(settings, name):
    """End the attendee's processes and remove account, home and sockets, with everything in them."""
    try:
        account = of(settings, name)
    except ValueError:
        account = None
    if account:
        end_processes(settings, account)
        close_run(account)
    if account and settings.isolated:
        run(["userdel", PREFIX + name])
    shutil.rmtree(os.path.join(settings.state, "homes", name), ignore_errors=True)

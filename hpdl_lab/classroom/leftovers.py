"""What is left when a hub has ended, in order or not: proxy, processes, sockets, groups; and all of a hub, removed."""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

from . import accounts, limits, settings
from .preparation import is_state_folder, locked

PROXY_SECONDS = 5  # for a proxy to end


def end_proxy(given):
    """End the proxy of a JupyterHub that was killed: it holds the port. Its number may be another process's by now."""
    file = given.private / "proxy.pid"
    with contextlib.suppress(OSError, ValueError):  # there is none, or it has ended
        pid = int(file.read_text())
        if b"configurable" in Path("/proc", str(pid), "cmdline").read_bytes():
            give_up = time.monotonic() + PROXY_SECONDS
            while accounts.state(pid) not in "ZX":  # not before then has it let go of the port
                os.kill(pid, signal.SIGTERM if time.monotonic() < give_up else signal.SIGKILL)
                time.sleep(0.05)
    file.unlink(missing_ok=True)


def clear(given):
    """End what is left of servers, and remove their sockets and groups."""
    group = limits.of(given)
    homes = Path(given.state, "homes")
    for name in sorted({*given.users, *(os.listdir(homes) if homes.is_dir() else ())}):
        with contextlib.suppress(ValueError):
            account = accounts.of(given, name)
            accounts.end_processes(given, account)
            accounts.close_run(account)
        if group:
            group.remove(name)
    if group:
        group.close()


def remove(state, names=()):
    """Remove a hub that has been stopped: accounts, files of attendees, passwords. What no hub has laid there stays.

    Raises: RuntimeError where it still runs, or where this is no state folder.
    """
    if not is_state_folder(state):
        raise RuntimeError(f"{state} is no state folder of a hub: nothing is removed")
    lock = locked(settings.Settings(state=state))
    try:
        with contextlib.suppress(OSError, json.JSONDecodeError):
            given = settings.read(state)
            clear(given)
            for name in sorted({*names, *given.users, *os.listdir(os.path.join(state, "homes"))}):
                accounts.remove(given, name)
    finally:
        os.close(lock)
    for part in settings.PARTS:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(os.path.join(state, part))
    if not os.listdir(state):
        os.rmdir(state)

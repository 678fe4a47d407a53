"""Control groups (version 2 or 1) that bound the memory, processor time and processes of each attendee as a whole."""

import contextlib
import os
import time
from pathlib import Path

from .settings import Settings

PROCESSES = 1024  # of one attendee, threads included: JupyterLab, two kernels and 8 engines take about 200
HUB = "-hub-"  # the group of JupyterHub and its proxy: no attendee has this name
HUB_MEMORY = 2 * 10**9  # bytes: with a class of thirty they take 0.3e9; beyond, they are started again
PERIOD = 100_000  # microseconds in which a group's share of processor time is counted
CONTROLLERS = ("memory", "cpu", "pids")
EMPTY_SECONDS = 10  # for a group to be empty after its processes were killed


def make_cgroups(name: str, root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> tuple[str, ...]:
    """Make folders `name` below which each attendee gets a group, one per hierarchy, below this process's own group.

    Raises: RuntimeError with the reason why there can be none.
    """
    mine = dict(line.split(":", 2)[1:] for line in Path(own).read_text().splitlines())  # {"cpu,cpuacct": "/path"}
    try:
        if os.path.exists(os.path.join(root, "cgroup.controllers")):
            return (_delegated(Path(root + mine[""]), name),)
        folders = {
            controller: f"{root}/{controller}{path.rstrip('/')}/{name}"
            for names, path in mine.items()
            for controller in set(names.split(",")) & set(CONTROLLERS)
        }
        if missing := [controller for controller in CONTROLLERS if controller not in folders]:
            raise RuntimeError(f"this system has no control groups for {', '.join(missing)}")
        for folder in folders.values():
            os.makedirs(folder, exist_ok=True)
        return tuple(folders.values())
    except OSError as error:
        raise RuntimeError(f"control groups cannot be made here ({error.strerror}: {error.filename})") from None


def _delegated(mine: Path, name: str) -> str:
    """Move the hub into a child group: in version 2 only a group without processes of its own can limit children."""
    (mine / "hpdl-hub").mkdir(exist_ok=True)
    (mine / "hpdl-hub" / "cgroup.procs").write_text("0")
    (mine / name).mkdir(exist_ok=True)
    for folder in (mine, mine / name):
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in CONTROLLERS))
    return str(mine / name)


def make(given: Settings, name: str) -> list[str]:
    """Make the groups of an attendee, or of the HUB, and set their limits; return the files by which one joins."""
    hub = name == HUB  # which has as many cores as it wants, before any attendee
    memory, quota = HUB_MEMORY if hub else given.memory_limit, int(given.core_limit * PERIOD)
    limits = {  # files of both versions, in the order in which they can be written; missing ones are skipped
        "memory.max": memory,
        "memory.swap.max": 0,
        "cpu.max": f"{'max' if hub else quota} {PERIOD}",
        "cpu.weight": 10_000 if hub else max(1, int(given.core_limit * 100)),
        "memory.limit_in_bytes": memory,
        "memory.memsw.limit_in_bytes": memory,
        "cpu.cfs_period_us": PERIOD,
        "cpu.cfs_quota_us": -1 if hub else quota,
        "cpu.shares": 2**18 if hub else max(2, int(given.core_limit * 1024)),
        "pids.max": PROCESSES,
    }
    for folder in given.groups:
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        for file, value in limits.items():
            if (path := Path(folder, name, file)).exists():
                path.write_text(str(value))
    return [os.path.join(folder, name, "cgroup.procs") for folder in given.groups]


def remove(given: Settings, name: str = "") -> None:
    """Remove the groups of one attendee, or those above them, as soon as what was killed in them is gone."""
    give_up = time.monotonic() + EMPTY_SECONDS * bool(name)
    for path in (Path(folder, name) for folder in given.groups):
        while path.is_dir():
            with contextlib.suppress(OSError):
                path.rmdir()
            if time.monotonic() > give_up:
                break
            time.sleep(0.02)

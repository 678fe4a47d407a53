"""What keeps one attendee from taking the whole machine, and what of it this system really enforces.

| means | memory | CPU | who gets round it |
|---|---|---|---|
| control groups (version 2 or 1), root | all processes together, and /dev/shm | time, number of processes | nobody |
| limits of processes | each process for itself (RLIMIT_DATA) | number of processes; nice | many small processes |
| affinity | | which cores engines start on | who asks for other cores |

Groups are used where this process may make them below its own; else limits of processes, and `said` tells why.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

NICE = 5  # where no group shares out the CPU: the hub and its proxy go first
PROCESSES = 1024  # of one attendee, threads included: JupyterLab, two kernels and 8 engines take about 200
PERIOD = 100_000  # microseconds in which a group's share of CPU time is counted
SECONDS = 10  # for a group to be empty after its processes were killed
CONTROLLERS = ("memory", "cpu", "pids")


class Group(NamedTuple):
    """Where control groups of attendees are made: a folder in each hierarchy of version 1, just one for version 2."""

    version: int
    folders: dict  # {controller, or "all" in version 2: folder below which each attendee gets one}

    def make(self, name, memory, cores):
        """Make the attendee's groups and set their limits; returns the files that a process joins them by."""
        most = values(self.version, memory, cores)
        for kind, folder in self.folders.items():
            os.makedirs(os.path.join(folder, name), exist_ok=True)
            for file, value in most[kind]:
                Path(folder, name, file).write_text(str(value))
        return [os.path.join(folder, name, "cgroup.procs") for folder in self.folders.values()]

    def remove(self, name):
        """Remove the attendee's groups, as soon as their killed processes are gone."""
        for folder in self.folders.values():
            give_up = time.monotonic() + SECONDS
            while os.path.isdir(path := Path(folder, name)):
                try:
                    path.rmdir()
                except OSError:
                    if time.monotonic() > give_up:
                        break
                    time.sleep(0.02)

    def close(self):
        """Remove what `find` has made, where no attendee is left in it."""
        for folder in self.folders.values():
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def values(version, memory, cores):
    """{controller, or "all": [(file, value)]} of one attendee."""
    quota = int(cores * PERIOD)
    if version == 2:
        weight = max(1, int(cores * 100))  # a group that waits for a core weighs as much as so many processes
        cpu = [("cpu.max", f"{quota} {PERIOD}"), ("cpu.weight", weight)]
        return {"all": [("memory.max", memory), *cpu, ("pids.max", PROCESSES)]}
    return {
        "memory": [("memory.limit_in_bytes", memory)],
        "cpu": [("cpu.cfs_period_us", PERIOD), ("cpu.cfs_quota_us", quota), ("cpu.shares", max(2, int(cores * 1024)))],
        "pids": [("pids.max", PROCESSES)],
    }


def find(settings, root="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """(Group or None, why not): where this hub may make groups for its attendees, below the group that it is in."""
    if not settings.isolated:
        return None, "control groups need root"
    name = f"hpdl-hub-{settings.port}"
    with open(own) as file:
        mine = dict(line.rstrip("\n").split(":", 2)[1:] for line in file)  # {"cpu,cpuacct": "/path"}; "" is version 2
    try:
        if os.path.exists(os.path.join(root, "cgroup.controllers")):
            return Group(2, {"all": str(delegated(Path(root + mine[""]), name))}), ""
        folders = {
            controller: f"{root}/{controller}{path.rstrip('/')}/{name}"
            for names, path in mine.items()
            for controller in set(names.split(",")) & set(CONTROLLERS)
        }
        if missing := [controller for controller in CONTROLLERS if controller not in folders]:
            return None, f"this system has no control groups for {', '.join(missing)}"
        for folder in folders.values():
            os.makedirs(folder, exist_ok=True)
        return Group(1, folders), ""
    except OSError as error:
        return None, f"control groups cannot be made here ({error.strerror}: {error.filename})"


def of(settings):
    """The Group that this hub has found, or None."""
    return Group(*settings.groups) if settings.groups else None


def delegated(mine, name):
    """In version 2 only a group without processes of its own can have limited children: move the hub into a child."""
    hub = mine / "hpdl-hub"
    hub.mkdir(exist_ok=True)
    (hub / "cgroup.procs").write_text("0")
    (mine / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in CONTROLLERS))
    folder = mine / name
    folder.mkdir(exist_ok=True)
    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in CONTROLLERS))
    return folder


def of_process(settings, grouped):
    """{resource: most} for each process of an attendee, where no group does it."""
    if grouped:
        return {}
    most = {"RLIMIT_DATA": settings.memory_limit}
    return most | {"RLIMIT_NPROC": PROCESSES} if settings.isolated else most


def cores_of(settings, name):
    """The cores that the engines of `name` start on, taken in turns; none where that is all of them."""
    machine = sorted(os.sched_getaffinity(0))
    n = max(1, round(settings.core_limit))
    if n >= len(machine):
        return []
    turn = settings.users.index(name) if name in settings.users else sum(name.encode())
    return [machine[(turn * n + i) % len(machine)] for i in range(n)]


def said(settings):
    """What is in force, as sentences."""
    group, why_not = of(settings), settings.why_no_groups
    n = settings.core_limit
    memory, cores = f"{settings.memory_limit / 1e9:.1f} GB", f"{n:g} {'core' if n == 1 else 'cores'}"
    if group:
        return [
            f"Each attendee has {memory} of memory, {cores} and {PROCESSES:,} processes at most, by control groups "
            f"(version {group.version})."
        ]
    sentences = [
        f"Each process of an attendee has {memory} of memory at most (RLIMIT_DATA), all together no limit: {why_not}."
    ]
    if settings.isolated:
        return [*sentences, f"CPU is shared: {cores} each by affinity, which programs can change, and nice {NICE}."]
    return [*sentences, f"CPU is shared: {cores} each by affinity and nice {NICE}; both can be changed by programs."]

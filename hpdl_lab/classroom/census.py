"""Who runs what on a hub's machine, and what it uses: one look at /proc, below the hub's process.

    hub --- proxy                                        nobody's: owner ""
     `----- server of ada --- kernel --- keeper --- controller, once %px is used
                                           `------- mpiexec --- engine, engine, ...       all of them ada's

Memory is proportional (PSS): a page that k processes share counts 1/k in each, so that sums are true. It is split into
what grows with every attendee (anonymous), shared memory, and mapped files, which all attendees share.
"""

import os
from collections import defaultdict
from typing import NamedTuple

import psutil

MB = 1e6
KINDS = (  # (kind, what its command line has); the first that fits
    ("mpiexec", "/mpiexec"),  # these two name the engine as well
    ("mpiexec", "$HPDL_SESSION/exit-"),  # the shell around each engine that keeps its exit code
    ("kernel", "ipykernel_launcher"),
    ("keeper", "engines/keeper.py"),
    ("controller", "hpdl_lab.engines.controller"),
    ("engine", "hpdl_lab.engines.engine"),
    ("proxy", "configurable-http-proxy"),
    ("proxy", "configurable_http_proxy"),
    ("culler", "jupyterhub_idle_culler"),
    ("server", "hpdl_lab.classroom.server"),
)
SERVER_MARK = "JUPYTERHUB_USER"  # in the environment of what a hub starts for an attendee
CLUSTER = ("keeper", "controller", "mpiexec")  # one of each per engine cluster, the controller where %px is used
SHM = "/dev/shm/"


class Process(NamedTuple):
    """One process. private_MB, shared_MB, file_MB: its proportional memory; cpu_s: processor time so far."""

    pid: int
    kind: str
    owner: str
    private_MB: float
    shared_MB: float
    file_MB: float
    cpu_s: float
    threads: int
    files: int
    listening: int
    shm: frozenset  # (path, bytes) of the files in /dev/shm that it has mapped
    began: float  # when it started: with the pid it names one process for ever

    @property
    def pss_MB(self):
        return self.private_MB + self.shared_MB + self.file_MB


class Census(list):
    """The processes below the hub at one moment. Empty where there is no hub any more."""

    def of(self, owner=None, *kinds):
        """Those of `owner` (None: of anybody) that are one of `kinds` (none: of any)."""
        return Census(p for p in self if owner in (None, p.owner) and (not kinds or p.kind in kinds))

    def total(self, field):
        """The sum of one number over all processes."""
        return sum(getattr(process, field) for process in self)

    def shm_MB(self):
        """Shared memory that has a name in /dev/shm, each file once."""
        return sum(nbytes for _, nbytes in frozenset().union(*(process.shm for process in self))) / MB

    def traces(self):
        """What must be gone in the end: (pid, began) of each process, the path of each file of shared memory."""
        for process in self:
            yield process.pid, process.began
            yield from (path for path, _ in process.shm)

    @property
    def owners(self):
        """The attendees who have a server."""
        return sorted({process.owner for process in self} - {""})


def census(hub_pid):
    """The Census of the process `hub_pid` and all below it. What ends meanwhile is left out."""
    try:
        hub = psutil.Process(hub_pid)
        tree = [hub, *hub.children(recursive=True)]
    except psutil.NoSuchProcess:
        return Census()
    owners, found = defaultdict(str), Census()
    for process in tree:  # parents come before their children
        try:
            inherited = owners[process.ppid()]
            owners[process.pid] = owner = inherited or ("" if process is hub else owner_of(process.pid))
            kind = "hub" if process is hub else kind_of(process.cmdline(), owner)
            found.append(look(process, kind, owner))
        except (psutil.Error, OSError):
            continue
    return found


def owner_of(pid):
    """The attendee for whom a hub has started this process, from its environment; "" for nobody."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        for entry in file.read().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name == SERVER_MARK.encode():
                return value.decode()
    return ""


def kind_of(command, owner):
    """What a process of this command line is, in one word."""
    text = " ".join(command)
    known = next((kind for kind, mark in KINDS if mark in text), None)
    return known or ("server" if owner and "jupyter" in text else "other")


def look(process, kind, owner):
    """The Process of one psutil.Process. Raises OSError or psutil.Error where it has ended."""
    pss = {}
    with open(f"/proc/{process.pid}/smaps_rollup") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name.startswith("Pss_"):
                pss[name] = int(rest.split()[0]) * 1024 / MB
    times = process.cpu_times()
    return Process(
        process.pid,
        kind,
        owner,
        pss["Pss_Anon"],
        pss["Pss_Shmem"],
        pss["Pss_File"],
        times.user + times.system + times.children_user + times.children_system,
        process.num_threads(),
        process.num_fds(),
        sum(c.status == psutil.CONN_LISTEN for c in process.net_connections("tcp")),
        shm_of(process.pid),
        process.create_time(),
    )


def shm_of(pid):
    """Files in /dev/shm that the process has mapped: frozenset of (path, bytes in memory)."""
    with open(f"/proc/{pid}/maps") as file:
        paths = {line[line.index(SHM) :].rstrip("\n") for line in file if SHM in line}
    found = set()
    for path in paths:
        try:
            found.add((path, os.stat(path).st_blocks * 512))
        except OSError:  # removed: it counts in shared_MB only
            continue
    return frozenset(found)

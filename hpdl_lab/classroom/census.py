"""Who runs what on a hub's machine, and what it uses: one look at /proc, below the processes that make up the hub.

    hub ---- server of ada --- kernel --- supervisor --- mpiexec --- shell --- engine       all of them ada's
    proxy                                               `------- shell --- engine

Memory is proportional (PSS): a page that k processes share counts 1/k in each, so that sums are true.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

MB = 1e6
KINDS = (("mpiexec", "/mpiexec"), ("shell", "$HPDL_SESSION/exit-"), ("engine", "hpdl_lab.engines.engine"))


class Process(NamedTuple):
    """One process. own_MB, file_MB: its proportional memory; cpu_s: processor time so far, of ended children too."""

    pid: int
    kind: str  # "hub", one of KINDS, or "other"
    owner: str  # the attendee, "" for the hub's own
    own_MB: float
    file_MB: float
    cpu_s: float
    threads: int
    shm: frozenset  # (path, bytes) of the files in /dev/shm that it has mapped
    began: float  # when it started: with the pid it names one process for ever


class Census(list):
    """The processes of a hub at one moment. Empty where there is no hub any more."""

    def of(self, owner: str | None = None, *kinds: Any) -> Any:
        """Those of `owner` (None: of anybody) that are one of `kinds` (none: of any)."""
        return Census(p for p in self if owner in (None, p.owner) and (not kinds or p.kind in kinds))

    def total(self, field: str) -> float:
        """The sum of one number over all processes."""
        return sum(getattr(process, field) for process in self)

    @property
    def memory_MB(self) -> float:
        return self.total("own_MB") + self.total("file_MB")

    @property
    def shm_MB(self) -> float:
        """Shared memory that has a name in /dev/shm, each file once."""
        return sum(nbytes for _, nbytes in frozenset().union(*(process.shm for process in self))) / MB

    def traces(self) -> Iterator[Any]:
        """What must be gone in the end: (pid, began) of each process, the path of each file of shared memory."""
        for process in self:
            yield process.pid, process.began
            yield from (path for path, _ in process.shm)


def census(pids: tuple) -> Any:
    """The Census of the processes `pids`, JupyterHub's first, and all below them. What ends meanwhile is left out."""
    owners, tree, found = dict.fromkeys(pids, ""), [], {}
    for root in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree += [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    for process in tree:  # parents come before their children; engines are started without the mark of the server
        with contextlib.suppress(psutil.Error, OSError):
            inherited = owners.get(process.ppid()) or process.environ().get("JUPYTERHUB_USER", "")
            owner = owners.setdefault(process.pid, inherited)
            kind = "hub" if process.pid == pids[0] else kind_of(process.cmdline())
            found[process.pid] = look(process, kind, owner)
    return Census(found.values())


def kind_of(command: list) -> str:
    """What a process of this command line is, in one word. Launcher and shell name the engine as well."""
    return next((kind for kind, mark in KINDS if mark in " ".join(command)), "other")


def look(process: Any, kind: str, owner: str) -> Any:
    """The Process of one psutil.Process. Raises OSError or psutil.Error if it has ended."""
    proc = Path(f"/proc/{process.pid}")
    pss_kB = dict(re.findall(r"^Pss_(\w+): +(\d+)", (proc / "smaps_rollup").read_text(), re.MULTILINE))
    anonymous, shared, file = (int(pss_kB[name]) * 1024 / MB for name in ("Anon", "Shmem", "File"))
    shm = set()
    for path in set(re.findall(r"/dev/shm/.*", (proc / "maps").read_text())):
        with contextlib.suppress(OSError):  # removed
            shm.add((path, os.lstat(f"{proc}/root{path}").st_blocks * 512))
    cpu_s, threads, began = sum(process.cpu_times()[:4]), process.num_threads(), process.create_time()
    return Process(process.pid, kind, owner, anonymous + shared, file, cpu_s, threads, frozenset(shm), began)

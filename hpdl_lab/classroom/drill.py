"""The rehearsal: a class of attendees does, all at once and through the proxy, all that it will do on the day.

    all log in  ->  a server each  ->  a notebook each  ->  engines  ->  torch  ->  all cells of the solution
            census             census                census       census     census                          census

A step begins when everybody who is still there has done the one before, as when an instructor says "now start your
engines": times and memory are for the whole class at once. An attendee who fails stays out, and is named with the
step and the reason. At the end the drill checks that nothing is left. A drill of one attendee measures the plan's
constants.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

import nbformat
import psutil
from nbformat import NotebookNode

from .. import features
from ..release import forms
from . import hub
from .attendee import Attendee, CellFailed, Trouble
from .costs import ClassroomCosts
from .plan import ENGINES, STEPS

Cells: TypeAlias = list[tuple[str, bool]]  # code, True if it is meant to raise
Say: TypeAlias = Callable[[str], object]
Trace: TypeAlias = tuple[int, float] | str  # (pid, start time) of a process; path of a file
NOTEBOOK = "00"  # the one that a class opens first, and all at once
SERVER_SECONDS, CELL_SECONDS = 600, 300
GONE_SECONDS = 30  # for processes to be gone after the hub has stopped
START = """import os
os.environ["HPDL_TORCH"] = "later"  # as a step of its own, so that memory and time of both are known
from hpdl_lab import lab
lab.start({n})
lab.run(lambda comm: None)"""
TORCH = f"lab.run(lambda comm: __import__('torch').__version__, deadline={CELL_SECONDS})"
VERSIONS = ("hpdl_lab", "jupyterhub", "jupyterlab", "ipykernel", "torch", "mpich")


class _Failure(NamedTuple):
    """A step that one attendee could not do; `str` is the sentence."""

    name: str
    step: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} failed at {self.step}: {self.reason}"


class DrillStep(NamedTuple):
    """The result of one step. seconds: {name: s} of all who did it; before, after: the Census of either time."""

    seconds: dict[str, float]
    before: Census
    after: Census

    def cpu_s(self, *kinds: str) -> float:
        """Return the processor time that it took, of all processes or of some kinds."""
        return self.after.of(None, *kinds).total("cpu_s") - self.before.of(None, *kinds).total("cpu_s")


class Drill:
    """A rehearsal on a running hub.Hub. attendees: [Attendee]; cells: as of `solution_cells`; say(sentence) tells how.

    notebook: the name of what the cells are of, "" for something else.
    """

    def __init__(
        self,
        running: hub.Hub,
        attendees: list[Attendee],
        cells: Cells,
        engines: int = ENGINES,
        say: Say = lambda sentence: None,
        notebook: str = "",
    ) -> None:
        self.pids, self.log = running.pids, Path(running.settings.state, "hub", "hub.log")
        self.attendees, self.cells, self.engines, self.say = attendees, cells, engines, say
        self.notebook = notebook
        self.steps: dict[str, DrillStep] = {}
        self.failures: list[_Failure] = []
        self.last = census(self.pids)
        self.seen: set[Trace] = set()  # all processes and files of shared memory so far: nothing of it may be left
        self.actions: dict[str, Callable[[Attendee], object]] = {
            "login": lambda attendee: attendee.log_in(),
            "server": self._server,
            "kernel": lambda attendee: attendee.open_notebook("drill.ipynb"),
            "engines": lambda attendee: attendee.run(START.format(n=engines), CELL_SECONDS),
            "torch": lambda attendee: attendee.run(TORCH, CELL_SECONDS),
            "notebook": self._notebook,
        }

    @property
    def present(self) -> list[Attendee]:
        """Attendees who have not failed."""
        failed = {failure.name for failure in self.failures}
        return [attendee for attendee in self.attendees if attendee.name not in failed]

    def do(self, step: str) -> None:
        """Have everybody who is present do one step, all at once."""
        seconds: dict[str, float] = {}
        failed: list[_Failure] = []
        began = time.monotonic()

        def one(attendee: Attendee) -> None:
            try:
                self.actions[step](attendee)
            except Trouble as trouble:
                failed.append(_Failure(attendee.name, step, str(trouble)))
            except Exception as error:  # an unforeseen reply: this attendee failed, and is not forgotten
                failed.append(_Failure(attendee.name, step, f"{type(error).__name__}: {error}"))
            else:
                seconds[attendee.name] = time.monotonic() - began

        # Daemons: after Ctrl-C they end with this process, and do not keep it.
        threads = [threading.Thread(target=one, args=[attendee], daemon=True) for attendee in self.present]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall_s, now = time.monotonic() - began, census(self.pids)
        self.seen.update(now.traces())
        self.steps[step] = DrillStep(seconds, self.last, now)
        self.last = now
        self.failures += sorted(failed)
        memory = f"{now.memory_MB / 1e3:.2f} GB in use"
        self.say(f"{step:<10}{len(seconds):>3} of {len(threads)} in {wall_s:6.1f} s, {memory}")
        for failure in sorted(failed):
            self.say(str(failure))

    def _server(self, attendee: Attendee) -> None:
        try:
            attendee.start_server(SERVER_SECONDS)
        except Trouble as trouble:  # a browser sees little of it
            text, own = self.log.read_text(errors="replace"), rf"\b{re.escape(attendee.name)}'s server .*"
            lines = re.findall(own, text) or re.findall(r"^\w+(?:Error|Exception)\b.*", text, re.MULTILINE)
            raise Trouble("; the hub's log says: ".join([str(trouble), *lines[-1:]])) from None

    def _notebook(self, attendee: Attendee) -> None:
        for number, (cell, raises) in enumerate(self.cells, 1):
            try:
                attendee.run(cell, CELL_SECONDS)
            except Trouble as trouble:
                if raises and isinstance(trouble, CellFailed):  # it is there to show a failure
                    continue
                first = next((line for line in cell.splitlines() if line.strip()), "")
                raise Trouble(f"code cell {number} of {len(self.cells)} ({first}): {trouble}") from None

    def look_for_leftovers(self, folder: str) -> None:
        """Add a Failure for what is still there after the hub has stopped: processes, shared memory, the folder."""
        give_up = time.monotonic() + GONE_SECONDS
        while (there := [trace for trace in self.seen if still_there(trace)]) and time.monotonic() < give_up:
            time.sleep(0.1)
        left = [f"process {trace[0]}" if isinstance(trace, tuple) else trace for trace in there]
        left += [folder] * os.path.exists(folder)
        if left:
            said = f"{len(left)} things are left, such as {sorted(left)[0]}"
            self.failures.append(_Failure("the hub", "its end", said))


def still_there(trace: Trace) -> bool:
    """Return True if a process (pid, start time) or a file still exists."""
    if isinstance(trace, str):
        return os.path.exists(trace)
    try:
        process = psutil.Process(trace[0])
        return process.create_time() == trace[1] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_drill(n: int, notebook: str = NOTEBOOK, engines: int = ENGINES, say: Say = print) -> Drill:
    """Do a whole drill of `n` attendees on a hub of its own, which is removed afterwards; return the Drill.

    Raises: ValueError, RuntimeError, OSError: one sentence if no hub can be started.
    """
    cells = solution_cells(notebook)
    names = [f"drill{os.getpid()}-{i:02}" for i in range(1, n + 1)]  # no hub of this machine has them
    with hub.private(names, engines=engines, idle=0) as running:
        folder = running.settings.state
        say(f"a hub for {n} attendee{'s' * (n != 1)} in {folder}")
        attendees = [Attendee(running.url, name, f"{name}-password") for name in names]
        drill = Drill(running, attendees, cells, engines, say, notebook)
        try:
            for step in STEPS:
                if drill.present:
                    drill.do(step)
        finally:
            for attendee in attendees:
                attendee.leave()
    drill.look_for_leftovers(folder)
    return drill


def solution_cells(number: str) -> Cells:
    """Return the Cells of the solution of notebook `number`, such as "00". Raises ValueError that lists all."""
    paths = sorted((forms.NOTEBOOKS / "solutions").glob(forms.NAMES), reverse=True)
    there = {path.name[:2]: path for path in paths}  # "00" is 00_engines, not 00_why, which has no engines
    if number not in there:
        raise ValueError(f"no notebook {number!r}: {', '.join(sorted(there))}")
    cells = cast("NotebookNode", nbformat.read(there[number], as_version=4)).cells
    code = [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]
    return [(cell.source, "raises-exception" in cell.metadata.get("tags", ())) for cell in code]


# -- the plan's constants ----------------------------------------------------------------------------------------------


def measure_costs(command: str, say: Say = print) -> ClassroomCosts:
    """Rehearse with one attendee on this machine, for `hpdl plan --measure`; return ClassroomCosts.

    Raises: RuntimeError, ValueError, OSError: one sentence if the drill fails, or no hub can be started.
    """
    done = run_drill(1, say=say)
    if any(failure.step in STEPS for failure in done.failures):
        raise RuntimeError(f"nothing was measured: {done.failures[0]}")
    return ClassroomCosts(values(done), done.engines, done.notebook, command, *provenance())


def values(done: Drill) -> dict[str, float]:
    """Return {name in costs.COSTS: number} from the Drill of one attendee."""
    found: dict[str, float] = {}
    n, (name,) = done.engines, (attendee.name for attendee in done.attendees)
    for step, row in done.steps.items():
        by_hub = row.cpu_s("hub") if step in ("login", "server") else 0.0  # later it only looks who is there
        found |= {f"{step}_s": row.seconds[name], f"{step}_hub_cpu_s": by_hub}
        own, engines = row.after.of(name), row.after.of(name, "engine", "shell")
        for what, whole, of_engines in (
            ("cpu_s", row.cpu_s(), max(0.0, row.cpu_s("engine"))),  # less than none if they were started anew
            ("MB", own.total("own_MB"), engines.total("own_MB")),
            ("threads", own.total("threads"), engines.total("threads")),
        ):
            found |= {f"{step}_{what}": whole - of_engines, f"{step}_engine_{what}": of_engines / n}
    found["hub_MB"] = row.after.of("").total("own_MB")
    found["files_MB"] = max(step.after.total("file_MB") for step in done.steps.values())
    found["shm_MB"] = row.after.shm_MB / n
    return {key: round(value, 3) for key, value in found.items()}


def provenance() -> tuple[str, str, str]:
    """Return (machine, versions, date), on which numbers depend, as texts."""
    versions = [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in VERSIONS)]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return f"{features.processor()}, {features.cores()} cores", ", ".join(versions), date


MB = 1e6
KINDS = (("mpiexec", "/mpiexec"), ("shell", "$HPDL_SESSION/exit-"), ("engine", "hpdl_lab.engines.engine"))


class Process(NamedTuple):
    """A process. own_MB, file_MB: its proportional memory; cpu_s: processor time so far, of ended children too."""

    pid: int
    kind: str  # "hub", one of KINDS, or "other"
    owner: str  # the attendee, "" for the hub's own
    own_MB: float
    file_MB: float
    cpu_s: float
    threads: int
    shm: frozenset[tuple[str, int]]  # (path, bytes) of the files in /dev/shm that it has mapped
    began: float  # when it started: with the pid it names one process forever


class Census(list[Process]):
    """The processes of a hub at one moment; none if there is no hub any more."""

    def of(self, owner: str | None = None, *kinds: str) -> Census:
        """Return the processes of `owner` (None: of anybody) whose kind is one of `kinds` (none: any)."""
        return Census(p for p in self if owner in (None, p.owner) and (not kinds or p.kind in kinds))

    def total(self, field: str) -> float:
        """Return the sum of one number over all processes."""
        return sum(getattr(process, field) for process in self)

    @property
    def memory_MB(self) -> float:
        return self.total("own_MB") + self.total("file_MB")

    @property
    def shm_MB(self) -> float:
        """Shared memory that has a name in /dev/shm, each file once."""
        files: set[tuple[str, int]] = set()
        return sum(nbytes for _, nbytes in files.union(*(process.shm for process in self))) / MB

    def traces(self) -> Iterator[Trace]:
        """Yield what must be gone in the end: each process, and each file of shared memory."""
        for process in self:
            yield process.pid, process.began
            yield from (path for path, _ in process.shm)


def census(pids: Sequence[int]) -> Census:
    """Take the Census of the processes `pids`, JupyterHub's first, and all below them that do not end meanwhile."""
    owners = dict.fromkeys(pids, "")
    tree: list[psutil.Process] = []
    found: dict[int, Process] = {}
    for root in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree += [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
    for process in tree:  # parents come before their children; engines are started without the mark of the server
        with contextlib.suppress(psutil.Error, OSError):
            inherited = owners.get(process.ppid()) or process.environ().get("JUPYTERHUB_USER", "")
            owner = owners.setdefault(process.pid, inherited)
            kind = "hub" if process.pid == pids[0] else kind_of(process.cmdline())
            found[process.pid] = _look(process, kind, owner)
    return Census(found.values())


def kind_of(command: list[str]) -> str:
    """Return the kind of a process with this command line. Launcher and shell name the engine as well."""
    return next((kind for kind, mark in KINDS if mark in " ".join(command)), "other")


def _look(process: psutil.Process, kind: str, owner: str) -> Process:
    """Return the Process of one psutil.Process. Raises OSError or psutil.Error if it has ended."""
    proc = Path(f"/proc/{process.pid}")
    pss_kB = dict(re.findall(r"^Pss_(\w+): +(\d+)", (proc / "smaps_rollup").read_text(), re.MULTILINE))
    anonymous, shared, file = (int(pss_kB[name]) * 1024 / MB for name in ("Anon", "Shmem", "File"))
    shm: set[tuple[str, int]] = set()
    for path in set(re.findall(r"/dev/shm/.*", (proc / "maps").read_text())):
        with contextlib.suppress(OSError):  # removed
            shm.add((path, os.lstat(f"{proc}/root{path}").st_blocks * 512))
    cpu_s, threads, began = sum(process.cpu_times()[:4]), process.num_threads(), process.create_time()
    return Process(process.pid, kind, owner, anonymous + shared, file, cpu_s, threads, frozenset(shm), began)

"""The rehearsal: a class of attendees does, all at once and through the proxy, what it will do on the day.

    all log in  ->  a server each  ->  a notebook each  ->  engines  ->  torch  ->  all cells of the solution
            census             census                census       census     census                          census

A step begins when everybody who is still there has done the one before, as when an instructor says "now start your
engines": times and memory are those of the whole class at once. Whoever fails stays out, and is named with the step and
the reason. At the end nothing may be left, which is looked at.
"""

import contextlib
import os
import re
import threading
import time
from pathlib import Path
from typing import NamedTuple

import nbformat
import psutil

from . import forms, hub
from .attendee import Attendee, CellFailed, Trouble
from .census import Census, census
from .plan import ENGINES, STEPS

NOTEBOOK = "00"  # the one that a class opens first, and all at once
SERVER_SECONDS, CELL_SECONDS = 600, 300
GONE_SECONDS = 30  # for processes to be gone after the hub has stopped
START = """import os
os.environ["HPDL_TORCH"] = "later"  # as a step of its own, so that memory and time of both are known
from hpdl_lab import lab
lab.start({n})
lab.run(lambda comm: None)"""
TORCH = "lab.run(lambda comm: __import__('torch').__version__, deadline={seconds})"


class Failure(NamedTuple):
    """What one attendee could not do; `str` is the sentence."""

    name: str
    step: str
    reason: str

    def __str__(self):
        return f"{self.name} failed at {self.step}: {self.reason}"


class Step(NamedTuple):
    """What became of one step. seconds: {name: s} of those who did it; wall_s: until the last; cpu_s: of the whole hub,
    and hub_cpu_s: of the hub's own process; census: afterwards."""

    name: str
    seconds: dict
    wall_s: float
    cpu_s: float
    hub_cpu_s: float
    census: Census


class Drill:
    """A rehearsal on a running hub.Hub. attendees: [Attendee]; cells: as of `solution`; say(sentence) tells how.

    notebook: the name of what the cells are of, "" for something else.
    """

    def __init__(self, running, attendees, cells, engines=ENGINES, say=lambda sentence: None, notebook=""):
        self.hub_pid, self.state = running.pid, Path(running.settings.state)
        self.attendees, self.cells, self.engines, self.say = attendees, cells, engines, say
        self.notebook = notebook
        self.steps, self.failures = {}, []
        self.before = census(self.hub_pid)
        self.seen = set()  # every process and file of shared memory that was there: nothing of it may be left

    @property
    def present(self):
        """Attendees who have not failed."""
        failed = {failure.name for failure in self.failures}
        return [attendee for attendee in self.attendees if attendee.name not in failed]

    def do(self, step):
        """Have everybody who is present do one step, all at once."""
        seconds, failed = {}, []
        began = time.monotonic()

        def one(attendee):
            begin = time.monotonic()
            try:
                getattr(self, f"_{step}")(attendee)
            except Trouble as trouble:
                failed.append(Failure(attendee.name, step, str(trouble)))
            except Exception as error:  # a reply that nobody thought of: this attendee failed, and is not forgotten
                failed.append(Failure(attendee.name, step, f"{type(error).__name__}: {error}"))
            else:
                seconds[attendee.name] = time.monotonic() - begin

        # Daemons: after Ctrl-C they end with this process, and do not keep it.
        threads = [threading.Thread(target=one, args=[attendee], daemon=True) for attendee in self.present]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall_s, last = time.monotonic() - began, self.last
        now = census(self.hub_pid)
        self.seen.update(now.traces())
        cpu_s = now.total("cpu_s") - last.total("cpu_s")
        hub_cpu_s = now.of("", "hub").total("cpu_s") - last.of("", "hub").total("cpu_s")
        self.steps[step] = Step(step, seconds, wall_s, cpu_s, hub_cpu_s, now)
        self.failures += sorted(failed)
        memory = f"{now.total('pss_MB') / 1e3:.2f} GB in use"
        self.say(f"{step:<10}{len(seconds):>3} of {len(threads)} in {wall_s:6.1f} s, {memory}")
        for failure in sorted(failed):
            self.say(str(failure))

    @property
    def last(self):
        """The census before the next step."""
        return next(reversed(self.steps.values())).census if self.steps else self.before

    # -- what an attendee does at each step ---------------------------------------------------------------------------

    def _login(self, attendee):
        attendee.log_in()

    def _server(self, attendee):
        try:
            attendee.start_server(SERVER_SECONDS)
        except Trouble as trouble:
            raise Trouble(f"{trouble}{self._said_of(attendee)}") from None

    def _said_of(self, attendee):
        """What the logs tell of a server that did not start, of which a browser is told little."""
        own = self.state / "homes" / attendee.name / "server.log"
        for who, log, line in (
            ("the server", own, r"^\w+(?:Error|Exception)\b.*"),  # the end of a traceback
            ("the hub", self.state / "hub" / "hub.log", rf"{re.escape(attendee.name)}'s server .*"),
            ("a server", self.state / "hub" / "hub.log", r"^\w+(?:Error|Exception)\b.*"),
        ):
            with contextlib.suppress(OSError):
                if lines := re.findall(line, log.read_text(errors="replace"), re.MULTILINE):
                    return f"; {who} said: {lines[-1]}"
        return ""

    def _kernel(self, attendee):
        attendee.open_notebook("drill.ipynb")

    def _engines(self, attendee):
        attendee.run(START.format(n=self.engines), CELL_SECONDS)

    def _torch(self, attendee):
        attendee.run(TORCH.format(seconds=CELL_SECONDS), CELL_SECONDS)

    def _notebook(self, attendee):
        for number, (cell, raises) in enumerate(self.cells, 1):
            try:
                attendee.run(cell, CELL_SECONDS)
            except Trouble as trouble:
                if raises and isinstance(trouble, CellFailed):  # it is there to show a failure
                    continue
                first = next((line for line in cell.splitlines() if line.strip()), "")
                raise Trouble(f"code cell {number} of {len(self.cells)} ({first}): {trouble}") from None

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def look_for_leftovers(self, folder):
        """Add a Failure for what is still there after the hub has stopped: processes, shared memory, the folder."""
        give_up = time.monotonic() + GONE_SECONDS
        while (left := [trace for trace in self.seen if still_there(trace)]) and time.monotonic() < give_up:
            time.sleep(0.1)
        left = [*(f"process {trace[0]}" if isinstance(trace, tuple) else trace for trace in left)]
        left += [folder] if os.path.exists(folder) else []
        if left:
            self.failures.append(
                Failure("the hub", "its end", f"{len(left)} things are left, such as {sorted(left)[0]}")
            )


def still_there(trace):
    """Whether a process (pid, start time) or a file still exists."""
    if isinstance(trace, str):
        return os.path.exists(trace)
    try:
        process = psutil.Process(trace[0])
        return process.create_time() == trace[1] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def rehearse(n, notebook=NOTEBOOK, engines=ENGINES, say=print, between=None):
    """A whole drill of `n` attendees on a hub of its own, which is removed afterwards; returns the Drill.

    between: {step: f(hub_pid)}, called after the step, while nobody does anything.
    Raises: ValueError, RuntimeError, OSError: one sentence where no hub can be started.
    """
    cells = solution(notebook)
    names = [f"drill{os.getpid()}-{i:02}" for i in range(1, n + 1)]  # no hub of this machine has them
    isolated = os.geteuid() == 0
    who = "each with a Unix account" if isolated else "all with your Unix account"
    with hub.private(names, engines=engines, isolated=isolated, idle=0) as running:
        folder = running.settings.state
        say(f"a hub for {n} attendee{'s' * (n > 1)}, {who}, in {folder}")
        attendees = [Attendee(running.url, name, f"{name}-password") for name in names]
        drill = Drill(running, attendees, cells, engines, say, notebook)
        try:
            for step in STEPS:
                if drill.present:
                    drill.do(step)
                (between or {}).get(step, lambda hub_pid: None)(running.pid)
        finally:
            for attendee in attendees:
                attendee.leave()
    drill.look_for_leftovers(folder)
    return drill


def solution(number):
    """[(code, whether it is meant to raise)] of the solution of notebook "00". Raises ValueError that lists all."""
    there = {path.name[:2]: path for path in sorted((forms.NOTEBOOKS / "solutions").glob(forms.NAMES))}
    if number not in there:
        raise ValueError(f"no notebook {number!r}: {', '.join(there)}")
    cells = nbformat.read(there[number], as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]
    return [(cell.source, "raises-exception" in cell.metadata.get("tags", ())) for cell in code]

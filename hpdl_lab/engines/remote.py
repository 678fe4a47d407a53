"""Engines on other machines, seen from the notebook's: relay and job as children of the supervisor, and their end.

    supervisor --- relay        what the nodes connect to (relay.py)
               |-- job          holds the nodes: a job of Slurm (slurm_job.py), or a cluster that ipyparallel has
               |                started (ipyparallel_job.py); has an agent started on them, and says how they do
               |-- controller   as for engines of this machine
               `-- engines      asks the relay for engines, prints what they print

Relay and job outlive `lab.restart()`: new engines in the same job wait in no queue.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..system import until
from . import session_dir, slurm, slurm_job
from .errors import EngineError
from .layout import Layout

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import DisplayHandle

    from .supervisor_client import SupervisorConnection

Json: TypeAlias = dict[str, Any]


class Launching(Protocol):
    """The launch.Launching of engines."""

    path: str
    layout: Layout
    supervisor: SupervisorConnection

    def spawn(self, name: str, argv: list[str], grace: float = 0.0) -> None: ...

    def wait_for(self, files: list[str]) -> None: ...

    def ended(self) -> list[str]: ...

    def failure(self, gone: Collection[str], seconds: float) -> str: ...


class _QueueLine:
    """`with _QueueLine("the wait") as line: line.show(text)`, again and again. ends: what the stop button ends."""

    def __init__(self, ends: str) -> None:
        self._ends = ends
        self._began = time.monotonic()
        self._shown = ""
        self._handle: DisplayHandle | None = None

    def __enter__(self) -> _QueueLine:
        return self

    def show(self, text: str) -> None:
        """Show the sentence `text`, to which the seconds so far are added in a notebook."""
        if not hasattr(ipython(), "kernel"):  # no notebook
            if text != self._shown:
                print(f"{text}. Ctrl-C ends {self._ends}.", flush=True)
            self._shown = text
            return
        line = f"{text}. {time.monotonic() - self._began:.0f} s so far; the stop button ends {self._ends}."
        if line == self._shown:
            return
        self._shown = line
        if self._handle is None:
            from IPython.display import display

            self._handle = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": line}, raw=True)

    def __exit__(self, *exc: object) -> None:
        """Remove the line, in a notebook."""
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)


def ipython() -> InteractiveShell | None:
    """Return the IPython shell of this process; None in a plain script."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


JOB = ("relay", "job")
START_SECONDS = 240  # all nodes read the same files of one file system, some for the first time
RELAY_GRACE, JOB_GRACE = 5.0, 20.0  # s: to remove a folder; for scancel
LOOK = 0.1  # s between two looks at the state of the job
NEWS = 10.0  # s for Slurm to report that a node or a job has gone
LOST = ("vanished", "has gone")  # what is said of an engine that said nothing of its end: by the relay, and here
BY_SLURM = (*LOST, "was killed by signal 15 ")  # scancel, limits and preemption end ranks with SIGTERM first


def step_argv(path: str, layout: Layout) -> list[str]:
    """Return the command line of the process that asks the relay for engines, and ends with them."""
    request = json.dumps({"n": layout.n})
    return [sys.executable, "-m", "hpdl_lab.engines.remote", session_dir.relay_socket(path), request]


def wait_for_job(launching: Launching) -> None:
    """Return when a job runs in which engines can be started. Raises EngineError with the reason if none will."""
    path, wanted = launching.path, launching.layout
    begun = "job" in launching.supervisor.ask("status")["running"]
    relay = begun
    if not begun and wanted.where == "slurm":
        relay = _start_relay(launching, slurm=wanted.job.get("partition"))
        with open(session_dir.relay_file(path)) as file:
            shared = json.load(file)["shared"]
        agent = [sys.executable, "-m", "hpdl_lab.engines.node_agent", slurm.shared_relay_file(shared)]
        launching.spawn("job", slurm_job.argv(path, wanted.n, wanted.job, agent, shared), grace=JOB_GRACE)
    elif not begun:
        session_dir.write_private_file(session_dir.job_request(path), json.dumps(wanted._asdict()))
        launching.spawn("job", [sys.executable, "-m", "hpdl_lab.engines.ipyparallel_job", path], grace=JOB_GRACE)
    with _QueueLine("the wait, and the job" if wanted.where in ("slurm", "pbs", "lsf") else "the wait") as line:
        while (job := state(path)).get("state") != "running":
            if "addresses" in job and not relay:
                relay = _start_relay(launching, addresses=job["addresses"])
            gone = launching.ended()
            if text := ended(path):  # looked at after `gone`: the process "job" writes it before it ends
                raise EngineError(text)
            if gone:
                raise EngineError(launching.failure(gone, 0))
            if job:
                line.show(job["text"])
            time.sleep(LOOK)


def _start_relay(launching: Launching, **where: object) -> bool:
    """Start the relay; return True when it takes connections. where: see relay.py."""
    argv = [sys.executable, "-m", "hpdl_lab.engines.relay", launching.path, json.dumps(where)]
    launching.spawn("relay", argv, grace=RELAY_GRACE)
    launching.wait_for([session_dir.relay_file(launching.path)])
    return True


def kept(path: str, running: Collection[str], before: Layout | None, wanted: Layout) -> tuple[str, ...]:
    """Return the names of the processes that go on when engines `before` are replaced by `wanted`.

    running: names of the processes that are alive.
    """
    same = before == wanted and wanted.remote and set(JOB) <= set(running)
    return JOB if same and state(path).get("state") == "running" and not _lost_a_node(path, wanted.n) else ()


def _lost_a_node(path: str, n: int) -> bool:
    """Return True if one of `n` engines has vanished: the job can start none there, though Slurm may show no fault."""
    for rank in range(n):
        with suppress(OSError), open(session_dir.exit_file(path, rank)) as file:
            if file.read().startswith(LOST):
                return True
    return False


def state(path: str) -> Json:
    """Return what the process "job" has written last: {"id", "state", "text", ...}; {} when nothing yet."""
    try:
        with open(session_dir.job_file(path)) as file:
            return json.load(file)
    except OSError:
        return {}


def remarks(path: str) -> list[str]:
    """Return remarks on engines in a job: sentences without their full stops."""
    job = state(path)
    return [job["text"]] if job.get("state") == "running" else []


def ended(path: str) -> str | None:
    """Return how the job ended, as a sentence; None while it has not."""
    job = state(path)
    return job["text"] if job.get("state") == "ended" else None


def end_of_job(path: str, endings: Iterable[str]) -> str | None:
    """Return how the job ended, as a sentence without its full stop; None while it runs.

    endings: what is known of the engines that have gone. If Slurm may have ended them, it is given time to say why.
    """
    perhaps = any(ending.startswith(BY_SLURM) for ending in endings)
    text = until(lambda: ended(path), NEWS if perhaps else 0, every=LOOK)
    return text.rstrip(".") if text else None


def _main() -> None:
    relay = socket.socket(socket.AF_UNIX)
    relay.connect(sys.argv[1])
    relay.sendall(sys.argv[2].encode() + b"\n")
    while output := relay.recv(1 << 16):
        os.write(2, output)


if __name__ == "__main__":
    _main()

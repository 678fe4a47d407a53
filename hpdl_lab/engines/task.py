"""The work of an engine on one task: take the function, run it on a fresh communicator, return its outcome.

The outcome (messages.py) holds only plain values, so that the notebook can always read it.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Protocol

from ..comm.base import Comm
from ..comm.device import comm_class
from ..comm.errors import CommError
from ..comm.no_input import no_input
from ..spelling import explain_spelling
from ..trace import is_user_code, now_ns, source_line
from . import client
from .errors import is_bug
from .messages import EngineState, Frame, Function, Packed, RankTask, TaskFailure, TaskOutcome, pack
from .script import ScriptEnded

if TYPE_CHECKING:
    from ..comm.mpi.session import Session
    from ..comm.real import RealComm
    from ..comm.status.table import StatusTable
    from ..comm.torch.plain import PlainTorch

LIBRARY_FRAMES = 8  # shown at most, the innermost ones
GATHER = 30.0  # seconds for all ranks to come: one may be in a cell of %px, or import; the attendee's deadline is later


class Server(Protocol):
    """The engine.Server that runs a task."""

    rank: int
    session: Session
    torch: PlainTorch
    interruptible: bool


class Kernel(Protocol):
    """The engine._KernelConnection that a task came by."""

    def send(self, kind: int, content: object) -> None: ...


def execute_task(server: Server, kernel: Kernel, task: RankTask, cancelled: bool) -> TaskOutcome:
    """Run `task` in this thread and return its outcome; never raises."""
    if cancelled:
        return interrupted(server.rank)
    outcome: TaskOutcome = {"rank": server.rank, "t0_ns": now_ns(), "t1_ns": 0, "events": [], "dropped": 0}
    out, err = _Writer(kernel, "stdout"), _Writer(kernel, "stderr")
    comm = error = None
    try:
        with redirect_stdout(out), redirect_stderr(err), no_input():
            server.interruptible = True
            comm = server.session.comm(
                task["run"],
                ranks=task["ranks"],
                deadline=max(GATHER, task["deadline"]),
                on_row=lambda row: kernel.send(client.ROW, row),
                make=_kind_of_this_engine(),
            )
            comm.waiting.deadline, comm.waiting.inject = task["deadline"], task["inject"]
            server.torch.begin(comm, task["master"])
            fn, args, keywords = _load(task, comm.device)
            outcome["t0_ns"] = now_ns()
            value = fn(comm, *args, **keywords)
            server.torch.leave(failed=False)
            comm.require_no_forgotten_wait()
            outcome["t1_ns"] = now_ns()
            server.interruptible = False
            outcome["value"] = _dump(value)
    except BaseException as raised:
        server.interruptible = False  # before anything is called: an interrupt would come now
        error = server.torch.explained(raised)
        if isinstance(error, Exception):
            explain_spelling(error, Comm)
    finally:
        server.interruptible = False
    server.torch.leave(failed=True)
    outcome["t1_ns"] = outcome["t1_ns"] or now_ns()
    line = ""
    if error is not None:
        failure = outcome["failure"] = _describe_failure(error)
        if where := failure["frames"]:
            line = source_line(*where[-1][:2])
    if comm is not None:
        outcome["events"] = [e[:] for e in comm.trace.events]  # plain tuples
        outcome["dropped"] = comm.trace.dropped
        comm.close(error, line)
    out.end()
    err.end()
    return outcome


def interrupted(rank: int) -> TaskOutcome:
    """Return the outcome of a task that never ran, or whose end was cut short."""
    failure: TaskFailure = {
        "kind": "interrupt",
        "type": "KeyboardInterrupt",
        "message": "",
        "frames": [],
        "library": [],
    }
    return {"rank": rank, "t0_ns": now_ns(), "t1_ns": now_ns(), "events": [], "dropped": 0, "failure": failure}


def _load(task: RankTask, where: str = "cpu") -> tuple[Function, list[object], dict[str, object]]:
    """Return the function, its arguments and its keywords, with all tensors on the device `where`.

    Modules of the notebook's folder are importable here as they are there.
    """
    for entry in task["sys_path"]:
        if entry not in sys.path:
            sys.path.append(entry)
    fn, args, keywords = task["task"].value(where)
    if task["own"] is not None:
        for key, value in task["own"].value(where).items():
            (keywords if isinstance(key, str) else args)[key] = value
    return fn, args, keywords


class CannotReturn(Exception):
    """A return value of a task that cannot travel."""


def _dump(value: object) -> Packed:
    """Pack the return value, to be sent. Raises CannotReturn with the reason."""
    try:
        return pack(value)
    except Exception as error:
        kind = type(value).__name__
        raise CannotReturn(
            f"it returned a {kind} that cannot travel to the notebook ({error}): "
            "return numbers, tensors, arrays, lists or dicts"
        ) from None


def _describe_failure(error: BaseException) -> TaskFailure:
    """Return plain facts about an exception of the task.

    kind:   "interrupt", "comm" (a CommError: what the communicator says), "result" (one sentence) or "error".
    frames: [(file, line, function)] of the attendee's code, outermost first; library: see `_frames_of`.
    comm:   (name of the class, message, waits) of a CommError.
    """
    kind = "interrupt" if isinstance(error, KeyboardInterrupt) else "error"
    frames, library = _frames_of(error)
    name, message = type(error).__name__, str(error)
    facts: TaskFailure = {"kind": kind, "type": name, "message": message, "frames": frames, "library": library}
    if isinstance(error, CommError):
        facts["kind"], facts["comm"] = "comm", (name, error.args[0], error.waits)
    elif isinstance(error, CannotReturn | ScriptEnded):
        facts["kind"], facts["frames"], facts["library"] = "result", [], []
    return facts


def _frames_of(error: BaseException) -> tuple[list[Frame], list[Frame]]:
    """Return the frames that led to `error`: ([(file, line, function)] of the attendee's code, the same of libraries).

    Libraries' are those below the attendee's last line, if that line does not explain the error: it is of a type that
    nothing raises on purpose, such as KeyError.
    """
    every = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        every.append((error.filename, error.lineno or 0, ""))
    every = [f for f in every if f[0] != __file__]
    last = max((i for i, f in enumerate(every) if is_user_code(f[0])), default=-1)
    explained = not is_bug(error) or (every and every[-1][2] == "__getattr__")  # which names what was asked for
    return [f for f in every if is_user_code(f[0])], [] if explained else every[last + 1 :][-LIBRARY_FRAMES:]


class _Writer(io.TextIOBase):
    """sys.stdout of a task: sends what is written to the notebook, line by line."""

    def __init__(self, kernel: Kernel, stream: str) -> None:
        self.kernel = kernel
        self.stream = stream
        self.waiting = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.waiting += text
        if "\n" in text:
            lines, _, self.waiting = self.waiting.rpartition("\n")
            self._send("\n".join(map(_last_state, lines.split("\n"))))
        return len(text)

    def flush(self) -> None:
        """Send a line that has not ended, unless it is a progress bar, which will write itself anew."""
        if "\r" not in self.waiting:
            self.end()

    def end(self) -> None:
        """Send what has not been sent."""
        if self.waiting:
            self._send(_last_state(self.waiting))
            self.waiting = ""

    def _send(self, text: str) -> None:
        self.kernel.send(client.TEXT, (self.stream, text))


def _last_state(line: str) -> str:
    """Return what a terminal shows of a line that returns to its beginning: the last of its texts."""
    return line.rstrip("\r").rpartition("\r")[2]


DEVICE = "HPDL_DEVICE"  # environment variable: "cpu" or "cuda", from lab.start(n, device=...)


def _kind_of_this_engine() -> Callable[..., RealComm]:
    """Return what makes its communicators, for Session.comm. Raises RuntimeError if "cuda" cannot be had."""
    return comm_class(os.environ.get(DEVICE, "cpu"))


def own_state(status: StatusTable, rank: int, px: bool) -> EngineState:
    """Return what an engine tells of its rank, with the time on its own clock. px: True if it runs cells of %px."""
    return {"slot": tuple(status.slot(rank)), "px": px, "now_ns": now_ns()}

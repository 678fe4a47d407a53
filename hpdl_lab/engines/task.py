"""What an engine does with one task: take the function, run it on a fresh communicator, say what came of it.

The outcome is a dict that holds only plain values, so that the notebook can always read it:

    rank, t0_ns, t1_ns, events (as tuples), dropped
    value        the return value, Packed (messages.py), or
    failure      {"kind", "type", "message", "frames", "comm"}: see `describe_failure`
"""

import io
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from ..comm.base import Comm
from ..comm.device import kind
from ..comm.errors import CommError
from ..comm.no_input import no_input
from ..comm.spelling import name_the_call
from ..trace import is_the_attendees, now_ns, source_line
from . import client
from .errors import is_bug
from .messages import Packed, pack
from .script import ScriptEnded

LIBRARY_FRAMES = 8  # shown at most, the innermost ones
GATHER = 30.0  # seconds for all ranks to come: one may be in a cell of %px, or import; the attendee's deadline is later


def execute(server: Any, kernel: Any, task: dict, cancelled: bool) -> dict:
    """Run `task` in this thread and return its outcome; never raises."""
    if cancelled:
        return interrupted(server.rank)
    outcome = {"rank": server.rank, "t0_ns": now_ns(), "events": [], "dropped": 0}
    out, err = Writer(kernel, "stdout"), Writer(kernel, "stderr")
    comm = error = None
    try:
        with redirect_stdout(out), redirect_stderr(err), no_input():
            server.interruptible = True
            comm = server.session.comm(
                task["run"],
                ranks=task["ranks"],
                deadline=max(GATHER, task["deadline"]),
                on_row=lambda row: kernel.send(client.ROW, row),
                make=kind_of_this_engine(),
            )
            comm.waiting.deadline, comm.waiting.inject = task["deadline"], task["inject"]
            server.torch.begin(comm, task["master"])
            fn, args, keywords = load(task, comm.device)
            outcome["t0_ns"] = now_ns()
            value = fn(comm, *args, **keywords)
            server.torch.leave(failed=False)
            comm.require_no_forgotten_wait()
            outcome["t1_ns"] = now_ns()
            server.interruptible = False
            outcome["value"] = dump(value)
    except BaseException as raised:
        server.interruptible = False  # before anything is called: an interrupt would come now
        error = server.torch.explained(raised)
        if isinstance(error, Exception):
            name_the_call(error, Comm)
    finally:
        server.interruptible = False
    server.torch.leave(failed=True)
    outcome.setdefault("t1_ns", now_ns())
    line = ""
    if error is not None:
        outcome["failure"] = describe_failure(error)
        if where := outcome["failure"]["frames"]:
            line = source_line(*where[-1][:2])
    if comm is not None:
        outcome["events"] = [tuple(e) for e in comm.trace.events]
        outcome["dropped"] = comm.trace.dropped
        comm.close(error, line)
    out.end()
    err.end()
    return outcome


def interrupted(rank: int) -> dict:
    """The outcome of a task that never ran, or whose end was cut short."""
    failure = {"kind": "interrupt", "type": "KeyboardInterrupt", "message": "", "frames": []}
    return {"rank": rank, "t0_ns": now_ns(), "t1_ns": now_ns(), "events": [], "dropped": 0, "failure": failure}


def load(task: dict, where: str = "cpu") -> tuple[Callable, list, dict[str, Any]]:
    """The function, its arguments and its keywords, with all tensors on the device `where`.

    Modules of the notebook's folder are importable here as they are there.
    """
    for entry in task["sys_path"]:
        if entry not in sys.path:
            sys.path.append(entry)
    fn, args, keywords = task["task"].value(where)
    if task["own"] is not None:
        for place, value in task["own"].value(where).items():
            (keywords if isinstance(place, str) else args)[place] = value
    return fn, args, keywords


class CannotReturn(Exception):
    """The return value of a task does not travel."""


def dump(value: Any) -> Packed:
    """The return value, to be sent. Raises CannotReturn with the reason."""
    try:
        return pack(value)
    except Exception as error:
        kind = type(value).__name__
        raise CannotReturn(
            f"it returned a {kind} that cannot travel to the notebook ({error}): "
            "return numbers, tensors, arrays, lists or dicts"
        ) from None


def describe_failure(error: BaseException) -> dict:
    """Plain facts about an exception of the task.

    kind:   "interrupt", "comm" (a CommError: what the communicator says), "result" (one sentence) or "error".
    frames: [(file, line, function)] of the attendee's code, outermost first; library: see `frames_of`.
    comm:   (name of the class, message, waits) of a CommError.
    """
    kind = "interrupt" if isinstance(error, KeyboardInterrupt) else "error"
    frames, library = frames_of(error)
    facts = {"type": type(error).__name__, "message": str(error), "frames": frames, "library": library}
    if isinstance(error, CommError):
        kind, facts["comm"] = "comm", (type(error).__name__, error.args[0], error.waits)
    elif isinstance(error, CannotReturn | ScriptEnded):
        kind, facts["frames"], facts["library"] = "result", [], []
    return facts | {"kind": kind}


def frames_of(error: BaseException) -> tuple[list[tuple[str, int, str]], list[tuple[str, int, str]]]:
    """Return the frames that led to `error`: ([(file, line, function)] of the attendee's code, the same of libraries).

    Libraries' are those below the attendee's last line, if that line does not explain the error: it is of a type that
    nothing raises on purpose, such as KeyError.
    """
    every = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        every.append((error.filename, error.lineno or 0, ""))
    every = [f for f in every if f[0] != __file__]
    last = max((i for i, f in enumerate(every) if is_the_attendees(f[0])), default=-1)
    explained = not is_bug(error) or (every and every[-1][2] == "__getattr__")  # which names what was asked for
    return [f for f in every if is_the_attendees(f[0])], [] if explained else every[last + 1 :][-LIBRARY_FRAMES:]


class Writer(io.TextIOBase):
    """sys.stdout of a task: sends what is written to the notebook, line by line."""

    def __init__(self, kernel: Any, stream: str) -> None:
        self.kernel = kernel
        self.stream = stream
        self.waiting = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.waiting += text
        if "\n" in text:
            lines, _, self.waiting = self.waiting.rpartition("\n")
            self._send("\n".join(map(last_state, lines.split("\n"))))
        return len(text)

    def flush(self) -> None:
        """Send a line that has not ended, unless it is a progress bar, which will write itself anew."""
        if "\r" not in self.waiting:
            self.end()

    def end(self) -> None:
        """Send what has not been sent."""
        if self.waiting:
            self._send(last_state(self.waiting))
            self.waiting = ""

    def _send(self, text: str) -> None:
        self.kernel.send(client.TEXT, (self.stream, text))


def last_state(line: str) -> str:
    """What a terminal shows of a line that returns to its beginning: the last of its texts."""
    return line.rstrip("\r").rpartition("\r")[2]


DEVICE = "HPDL_DEVICE"  # environment variable: "cpu" or "cuda", from lab.start(n, device=...)


def kind_of_this_engine() -> Any:
    """What makes its communicators, for Session.comm. Raises RuntimeError if "cuda" cannot be had."""
    return kind(os.environ.get(DEVICE, "cpu"))


def own_state(status: Any, rank: int, px: bool) -> dict:
    """What an engine tells of its rank: plain values, with the time on its own clock. px: does it run cells of %px?"""
    return {"slot": tuple(status.slot(rank)), "px": px, "now_ns": now_ns()}

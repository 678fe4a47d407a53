"""The notes of every process of a watched script, in FOLDER/PID.jsonl.

    began, meets, met               the process; the line that asks for a process group; its rank
    model, forward, step, steps     what torch's own hooks see (training.py)
    loader, epoch, rows             which examples it reads
    prints, writes                  lines that it prints, files that it writes
    raised, collectives, ended      the exception that ends it; torch's flight recorder, when asked for and at the end

FOLDER/PID.now has the state of the process, written four times a second by a thread of its own, and a waiting rank
need not be asked. The script is left as it is. A hook that fails is noted ("trouble") and not used again.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from .places import Place, call_of, is_authors, line_at, place_of

if TYPE_CHECKING:
    from .collectives import Begun
    from .records import Beat

BEAT = 0.25  # s between two looks at the script
ANSWERS = 4 * BEAT  # s that a rank which dies gives the others to note their states
LAST = 0.1  # s: torch 2.13 aborts if a thread of gloo still wants Python's lock when Python ends
NAMED = "HPDL_WATCH_ALL"  # in the environment: examples and gradients of every step, as the checks of exercises want


def sampled(step: int, first: int = 8) -> bool:
    """Return True if costly things are looked at in this step: in the first ones, then at powers of two."""
    return step < first or step & (step - 1) == 0 or NAMED in os.environ


OBSERVERS: list[Observer] = []  # of this process: one


class Observer:
    """A log of this process: empty before `begin`, and not written in the child of a fork until that begins anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pid = 0
        self.trouble: set[str] = set()
        self.failed = False  # an exception has ended it
        self.spent_ns = 0  # in hooks, in all
        self.live: Beat = {}  # what the line of a running script shows
        self.dump: Callable[[], Sequence[Begun]] = list  # the collectives, once torch is there
        self.waited: Callable[[int], None] = lambda ns: None  # called with the ns of a wait, once torch is there
        self.ending: list[Callable[[], None]] = []  # called before the last notes

    def begin(self) -> None:
        """Observe this process, unless that has begun."""
        if self.active:
            return
        self.pid, self.ended, self.trouble = os.getpid(), False, set()
        self.main, self.lock = threading.main_thread().ident or 0, threading.Lock()
        self.file = open(self.folder / f"{self.pid}.jsonl", "a", buffering=1)
        self.note("began", ppid=os.getppid(), rank=self.environment_rank())
        if not faulthandler.is_enabled():
            faulthandler.enable(open(self.folder / f"{self.pid}.fault", "w"))  # its stack when C++ ends it
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            try:
                self.raised(error)
            finally:
                before(kind, error, trace)

        sys.excepthook = hook
        atexit.register(self.end)
        if multiprocessing.parent_process():
            multiprocessing.util.Finalize(None, self.end, exitpriority=100)  # a forked one leaves without atexit
        threading.Thread(target=self.watch, daemon=True).start()

    @property
    def active(self) -> bool:
        return self.pid == os.getpid()

    @staticmethod
    def environment_rank() -> int | None:
        """Return the rank that a launcher has given this process, None for a process of multiprocessing."""
        return None if is_child() or "RANK" not in os.environ else int(os.environ["RANK"])

    def note(self, what: str, **event: object) -> None:
        """Write one event, with the time."""
        if self.active:
            self.file.write(json.dumps({"what": what, "time_ns": time.time_ns(), **event}, default=str) + "\n")

    def quietly(self, hook: Callable[..., object]) -> Callable[..., None]:
        """Return `hook` such that the script never sees it fail: what it raises is noted once, and it stops."""

        @wraps(hook)
        def quiet(*args: object, **named: object) -> None:
            if not self.active or hook.__name__ in self.trouble:
                return
            begun = time.perf_counter_ns()
            try:
                hook(*args, **named)
            except Exception as error:
                self.trouble.add(hook.__name__)
                self.note("trouble", hook=hook.__name__, error=f"{type(error).__name__}: {error}")
            self.spent_ns += time.perf_counter_ns() - begun

        return quiet

    # -- its state --------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Write the state of this process, again and again; and its collectives whenever FOLDER/ask is newer."""
        asked, seen = self.folder / "ask", 0
        while not self.ended:
            if not self.folder.exists():  # and with it the process that watches
                return
            try:
                self.beat()
                if asked.exists() and (when := asked.stat().st_mtime_ns) != seen:
                    seen = when
                    self.note("collectives", entries=self.dump())
                    (self.folder / f"{self.pid}.answered").write_text(str(when))
            except (OSError, RuntimeError):  # the main thread has changed `live` meanwhile: next time
                pass
            time.sleep(BEAT)

    def beat(self) -> None:
        """Write the state of the main thread of this process."""
        frame = sys._current_frames().get(self.main)
        now = {
            "time": time.monotonic(),
            "wall_ns": time.time_ns(),
            "cpu": time.process_time() + _for_a_core(),
            "place": place_of(frame),
            "call": call_of(frame),
            "top": [frame.f_code.co_name, frame.f_lineno] if frame else None,
            "memory": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            **self.live,
        }
        aside = self.folder / f"{self.pid}.new"
        aside.write_text(json.dumps(now, default=str))
        with self.lock:
            if not self.ended:
                aside.replace(self.folder / f"{self.pid}.now")

    # -- the end ----------------------------------------------------------------------------------------------------

    def raised(self, error: BaseException) -> None:
        """Note the exception that ends this process, and give the others time to note their states."""
        if not self.active:
            return
        self.failed = True
        self.note("raised", **_described_error(error), entries=self.dump())
        asked = self.folder / "ask"
        asked.touch()
        time.sleep(ANSWERS)

    def end(self) -> None:
        """Note the end of this process."""
        if self.active and not self.ended:
            for last in self.ending:
                self.quietly(last)()
            self.note("ended", entries=self.dump())
            with self.lock:
                self.ended = True
                (self.folder / f"{self.pid}.now").unlink(missing_ok=True)  # it is nowhere any more
            time.sleep(LAST)


def _described_error(error: BaseException) -> dict[str, object]:
    """Return the kind and text of an exception, and its lines in the author's files, outermost first."""
    trace, places = error.__traceback__, list[Place]()
    while trace:
        name = trace.tb_frame.f_code.co_filename
        if is_authors(name):
            places.append(line_at(name, trace.tb_lineno))
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno or 0, (error.text or "").strip()))
    return {"kind": type(error).__name__, "text": str(error)[:4000], "places": places}


def is_child() -> bool:
    """Return True if multiprocessing spawned this process: it is a rank only if it asks for a process group."""
    return any("multiprocessing" in word for word in sys.orig_argv)


def _for_a_core() -> float:
    """Return the s that the main thread of this process has waited for a core: on a busy machine it may be seconds."""
    path = Path("/proc/self/schedstat")  # some kernels have none
    return int(path.read_text().split()[1]) / 1e9 if path.exists() else 0.0

"""The code of a simulated rank as a thread that runs only while it holds the scheduler's token: free to pause anywhere.

Autograd keeps its state in the thread while backward runs, so a function that communicates inside backward needs one.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from greenlet import GreenletExit

if TYPE_CHECKING:
    from types import FrameType

    from .torch_state import Outside

LOOK = 0.2  # s: between two looks whether the thread that is to hand back the token is still there
PATIENCE = 2.0  # s: for a thread that has to end; nothing interrupts it while it waits for something outside Python


class TokenThread:
    """A call of `main()`, piece by piece, as coroutine.Coroutine. Only one thread of a run runs at any time."""

    def __init__(self, main: Callable[[], None], outside: Outside, name: str) -> None:
        """outside: of the run."""
        self.main, self.outside, self.name = main, outside, name
        self.resumed, self.back = threading.Lock(), threading.Lock()  # released to hand the token over, and back
        self.resumed.acquire()
        self.back.acquire()
        self.thread: threading.Thread | None = None  # started when it is first resumed
        self.running = self.stopping = self.ended = False
        self.raised: BaseException | None = None  # what ends the whole run, as SystemExit

    def resume(self) -> None:
        """Let it go on until it pauses or ends. Called by the scheduler."""
        self._hand_over()
        self._take_back()
        if self.raised is not None:
            raise self.raised

    def pause(self) -> None:
        """Let the scheduler go on. Called by the code itself."""
        self.running = False
        self.back.release()
        self.resumed.acquire()
        if self.stopping:
            raise GreenletExit

    def may_pause(self) -> bool:
        """Return True to its own code: whatever the thread keeps stays in the thread."""
        return threading.current_thread() is self.thread

    def where(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame in which the running code is. frame: of a signal's handler."""
        return sys._current_frames().get(self._number(), frame)

    def give_up(self, error: BaseException) -> None:
        """Raise a copy of `error`, a CommError, in the running code. Called by a signal's handler."""
        kind, args = type(error), error.args
        self._raise_inside(type(kind.__name__, (kind,), {"__init__": lambda self: kind.__init__(self, *args)}))

    def stop(self) -> None:
        """Unwind it, so that its `finally` clauses run."""
        self.stopping = True
        for _ in range(3):  # code that catches everything may go on to pause again; it is then abandoned
            if self.thread is None or self.ended:
                return
            if self.running:  # the scheduler was interrupted meanwhile
                self._raise_inside(GreenletExit)
            else:
                self._hand_over()
            self._take_back(PATIENCE)

    def _run(self) -> None:
        try:
            with self.outside.begun():
                self.main()
        except BaseException as error:
            self.raised = error
        finally:
            self.ended, self.running = True, False
            self.back.release()

    def _hand_over(self) -> None:
        self.running = True
        if self.thread is not None:
            self.resumed.release()
            return
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:
            self.thread, self.running = None, False
            many = f"{threading.active_count():,} threads run in this process"
            raise RuntimeError(f"no thread for {self.name}: {many}; try fewer ranks") from error

    def _take_back(self, seconds: float = float("inf")) -> None:
        """Wait until the token is handed back, at most `seconds`."""
        give_up = time.monotonic() + seconds
        while not self.back.acquire(timeout=LOOK):
            self.ended = self.ended or self.thread is None or not self.thread.is_alive()
            if self.ended or time.monotonic() > give_up:
                break
        if self.ended and self.thread is not None:
            self.thread.join()

    def _number(self) -> int:
        """Return Python's number of the thread; 0 before it has begun."""
        return 0 if self.thread is None else self.thread.ident or 0

    def _raise_inside(self, kind: type[BaseException]) -> None:
        """Have `kind()` raised in the thread, before its next instruction of Python."""
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._number()), ctypes.py_object(kind))

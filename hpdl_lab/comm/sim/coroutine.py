"""The code of a simulated rank as a coroutine of the scheduler's thread: it runs until it pauses, at little cost."""

from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from .torch_state import OUTSIDE_BACKWARD


class Coroutine:
    """Calls `main()` piece by piece. What torch keeps per thread is kept here while the coroutine pauses.

    token.TokenThread is the same, in a thread of its own.
    """

    def __init__(self, main: Callable, outside: Any, name: str = "") -> None:
        """outside: torch_state.Outside of the run."""
        self.main, self.outside = main, outside
        self.state = None  # TorchState, where it differs from that outside
        self.greenlet: Any = None  # made by whoever resumes it first: the scheduler

    def resume(self) -> None:
        """Let it go on until it pauses or ends. Called by the scheduler."""
        if self.greenlet is None:
            self.greenlet = greenlet(self.main)
        outside = self.outside
        if outside.torch is None and outside.look() is None:
            self.greenlet.switch()
            return
        if self.state is not None:
            self.state.apply(outside.torch)
        try:
            self.greenlet.switch()
        finally:
            self.state = outside.restore() if outside.left() else None

    def pause(self) -> None:
        """Let the scheduler go on. Called by the code itself."""
        self.greenlet.parent.switch()

    def may_pause(self) -> bool:
        """True where its own code asks, unless inside backward: nobody else may find autograd's state in the thread."""
        return self.greenlet is getcurrent() and self.outside.graph_task() == OUTSIDE_BACKWARD

    @property
    def running(self) -> bool:
        return self.greenlet is getcurrent()

    def where(self, frame: Any) -> Any:
        """The frame in which the running code is. frame: that of a signal's handler."""
        return frame

    def give_up(self, error: BaseException | None) -> None:
        """Raise `error` in the running code. Called by a signal's handler."""
        raise error

    def stop(self) -> None:
        """Unwind it, so that its `finally` clauses run."""
        for _ in range(3):  # code that catches everything may go on to pause again; it is then abandoned
            if not self.greenlet or self.greenlet.dead:  # not begun, or ended
                return
            if self.state is not None:
                self.state.apply(self.outside.torch)
            self.greenlet.throw(GreenletExit)
            if self.outside.torch is not None:
                self.state = self.outside.restore()

"""The code of a simulated rank as a coroutine of the scheduler's thread: it runs until it pauses, at little cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from greenlet import GreenletExit, getcurrent, greenlet

from .torch_state import OUTSIDE_BACKWARD

if TYPE_CHECKING:
    from types import FrameType

    from .torch_state import Outside, TorchState


class Coroutine:
    """A call of `main()`, piece by piece. The state that torch keeps per thread is kept here while it pauses.

    token.TokenThread is the same, in a thread of its own.
    """

    def __init__(self, main: Callable[[], None], outside: Outside, name: str = "") -> None:
        """outside: of the run."""
        self.main, self.outside = main, outside
        self.state: TorchState | None = None  # if it differs from that outside
        self.greenlet: greenlet | None = None  # made by the scheduler when it resumes it first

    def resume(self) -> None:
        """Let it go on until it pauses or ends. Called by the scheduler."""
        if self.greenlet is None:
            self.greenlet = greenlet(self.main)
        outside = self.outside
        torch = outside.torch or outside.look()
        if torch is None:
            self.greenlet.switch()
            return
        if self.state is not None:
            self.state.apply(torch)
        try:
            self.greenlet.switch()
        finally:
            self.state = outside.restore(torch) if outside.left(torch) else None

    def pause(self) -> None:
        """Let the scheduler go on. Called by the code itself."""
        self.greenlet.parent.switch()  # pyrefly: ignore[missing-attribute]

    def may_pause(self) -> bool:
        """Return True to its own code, unless inside backward: no other code may find its state in the thread."""
        return self.greenlet is getcurrent() and self.outside.graph_task() == OUTSIDE_BACKWARD

    @property
    def running(self) -> bool:
        return self.greenlet is getcurrent()

    def where(self, frame: FrameType | None) -> FrameType | None:
        """Return the frame in which the running code is. frame: of a signal's handler."""
        return frame

    def give_up(self, error: BaseException) -> None:
        """Raise `error` in the running code. Called by a signal's handler."""
        raise error

    def stop(self) -> None:
        """Unwind it, so that its `finally` clauses run."""
        for _ in range(3):  # code that catches everything may go on to pause again; it is then abandoned
            if not self.greenlet or self.greenlet.dead:  # not begun, or ended
                return
            torch = self.outside.torch
            if torch is not None and self.state is not None:
                self.state.apply(torch)
            self.greenlet.throw(GreenletExit)
            if (torch := self.outside.torch) is not None:
                self.state = self.outside.restore(torch)

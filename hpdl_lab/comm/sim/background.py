"""The background of a simulated rank: a coroutine and a virtual clock of its own for each communicator that asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit

from ..base import Work
from ..errors import ForgottenWait
from .coroutine import Coroutine
from .ending import require_no_forgotten_wait
from .rank import SimRank

if TYPE_CHECKING:
    import numpy as np


class Lane(SimRank):
    """Runs what `comm.background` was given, one after the other. It has the ports of its rank, and waits by itself."""

    def __init__(self, rank: SimRank) -> None:
        """rank: the SimRank whose background it is, which may be a Lane itself."""
        super().__init__(rank.scheduler, rank.index, rank.trace.enabled)
        self.rank = rank
        self.trace = rank.trace.in_lane("background", self.clock_ns)
        self.calls = rank.calls
        self.state = "finished"
        self.given = deque()
        self.code = Coroutine(self._main, self.scheduler.outside)
        self.number = self.scheduler.enroll(self)

    def give(self, work: SimBackground) -> None:
        """Run `work` after what has been given before, and not before the rank's own time."""
        self.given.append(work)
        if self.state == "finished":
            self.state = "running"
            self.code = Coroutine(self._main, self.scheduler.outside)
            self.scheduler.resume_at(max(self.clock, work.posted), self)

    def sleep_until(self, seconds: float) -> None:
        """Let virtual time pass, but not without end for a rank that has failed: nobody waits for this any more."""
        if self.rank.state == "failed":
            raise GreenletExit
        super().sleep_until(seconds)

    def _main(self) -> None:
        try:
            while self.given:
                work = self.given.popleft()
                if work.posted > self.clock:
                    self.sleep_until(work.posted)
                for other in work.after:
                    if not other.ended:
                        self.block(Turn(other))
                self.trace.line_of_call = work.line
                work.run(self)
            self.state = "finished"
        except GreenletExit:
            pass  # stopped by the scheduler: `state` says in what


class Turn:
    """What a Lane waits for whose next work comes after `work`, of another Lane."""

    waiter: Any = None

    def __init__(self, work: SimBackground) -> None:
        self.lane = work.lane
        work.turns.append(self)


class SimBackground(Work):
    """One call of `comm.background`."""

    ended = waited = False
    value: Any = None
    error: BaseException | None = None
    waiter: Any = None

    def __init__(
        self, comm: Any, double: Any, fn: Callable, args: tuple[np.ndarray, ...], after: Sequence[SimBackground]
    ) -> None:
        """comm: that of the caller; double: the communicator that `fn` is given; after: works that end before."""
        self.comm, self.double, self.fn, self.args, self.after = comm, double, fn, args, after
        self.turns: list[Turn] = []
        state = comm.state
        self.posted, self.line = state.clock, state.trace.line()
        state.unwaited[id(self)] = self
        double.state.give(self)

    @property
    def lane(self) -> Lane:
        """What runs it, whose wait is that of a rank that waits for this."""
        return self.double.state

    def run(self, lane: Lane) -> None:
        """Call the function in `lane`, keep what it returns or raises, and tell the rank where it waits."""
        try:
            self.value = self.fn(self.double, *self.args)
            require_no_forgotten_wait(lane)
        except Exception as error:
            self.error = error
        self.ended = True
        lane.unwaited.clear()
        for waiter in (self.waiter, *(turn.waiter for turn in self.turns)):
            if waiter is not None:
                lane.scheduler.resume_at(lane.clock, waiter)

    def wait(self) -> np.ndarray:
        if not self.waited:
            state = self.comm.state
            state.unwaited.pop(id(self), None)
            state.settle()
            step, t0, line = state.trace.step(), state.clock_ns(), state.trace.line()
            if not self.ended:
                state.block(self)
            self.waited = True
            state.trace.add(step, "wait", t0, state.clock_ns(), line=line)
        if self.error is not None:
            raise self.error
        return self.value

    def test(self) -> bool:
        if not self.ended:
            state = self.comm.state
            state.sleep_until(state.clock + state.scheduler.network.alpha)
        return self.ended

    def forgotten(self) -> ForgottenWait:
        """The error of a rank that ends without waiting for this."""
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return ForgottenWait.of_background(self.comm.state.index, name, self.line)

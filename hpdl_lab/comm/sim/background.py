"""The background of a simulated rank: a coroutine and a virtual clock of its own for each communicator that asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from greenlet import GreenletExit

from ..base import Comm, Work
from ..errors import ForgottenWait
from .coroutine import Coroutine
from .rank import InLane, SimRank


class Lane(SimRank):
    """A runner of what `comm.background` is given, one after the other, with the ports of its rank. It waits by itself.

    Its rank may be a Lane itself.
    """

    def __init__(self, rank: SimRank) -> None:
        super().__init__(rank.scheduler, rank.index, rank.trace.enabled)
        self.rank = rank
        self.trace = rank.trace.in_lane("background", self.clock_ns)
        self.calls = rank.calls
        self.state = "finished"
        self.given: deque[SimBackground] = deque()
        self.code = Coroutine(self._main, self.scheduler.outside)
        self.number = self.scheduler.enroll(self)

    def give(self, work: SimBackground) -> None:
        """Run `work` after what was given before, and not before the rank's own time."""
        self.given.append(work)
        if self.state == "finished":
            self.state = "running"
            self.code = Coroutine(self._main, self.scheduler.outside)
            self.scheduler.resume_at(max(self.clock, work.posted), self)

    def sleep_until(self, seconds: float) -> None:
        """Let virtual time pass, but not without end for a rank that has failed: no rank waits for this any more."""
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
                        self.block(_Dependent(other))
                self.trace.line_of_call = work.line
                work.run(self)
            self.state = "finished"
        except GreenletExit:
            pass  # stopped by the scheduler: `state` says in what


class _Dependent(InLane):
    """The end of `work`, of another Lane, for which a Lane waits."""

    def __init__(self, work: SimBackground) -> None:
        self.lane = work.lane
        work.dependents.append(self)


class SimBackground(InLane, Work):
    """A call of `comm.background`."""

    ended = waited = False
    value: object = None
    error: BaseException | None = None

    def __init__(
        self,
        state: SimRank,
        lane: Lane,
        double: Comm,
        fn: Callable[..., object],
        args: tuple[object, ...],
        after: Sequence[SimBackground],
    ) -> None:
        """state: the rank that calls; lane: its background; double: given to `fn`; after: these end before."""
        self.state, self.lane, self.double, self.fn, self.args, self.after = state, lane, double, fn, args, after
        self.dependents: list[_Dependent] = []
        self.posted, self.line = state.clock, state.trace.line()
        state.unwaited[id(self)] = self
        lane.give(self)

    def run(self, lane: Lane) -> None:
        """Call the function in `lane`, keep what it returns or raises, and resume all that wait for it."""
        try:
            self.value = self.fn(self.double, *self.args)
            lane.require_no_forgotten_wait()
        except Exception as error:
            self.error = error
        self.ended = True
        lane.unwaited.clear()
        for waiter in (self.waiter, *(dependent.waiter for dependent in self.dependents)):
            if waiter is not None:
                lane.scheduler.resume_at(lane.clock, waiter)

    def wait(self) -> object:
        if not self.waited:
            state = self.state
            state.unwaited.pop(id(self), None)
            state.synchronize()
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
            state = self.state
            state.sleep_until(state.clock + state.scheduler.network.alpha)
        return self.ended

    def forgotten(self) -> ForgottenWait:
        """Return the error of a rank that ends without waiting for this."""
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return ForgottenWait.of_background(self.state.index, name, self.line)

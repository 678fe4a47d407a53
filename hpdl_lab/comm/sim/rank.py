"""One simulated rank: its code, its virtual clock, what it waits for."""

import math
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit

from ...trace import Trace, caller_line
from ..base import Comm
from ..calls import Calls
from ..spelling import name_the_call
from .channel import Meeting, MeetingSeat
from .ending import raised_line, require_no_forgotten_wait

UNWIND = 100  # times that a rank which the scheduler stops may go on to wait, in one `finally` after the other


class SimRank:
    """One simulated rank. Whenever its code runs, its clock (virtual s) is the scheduler's, or ahead of it.

    `background.Lane` is the background of a rank, and is scheduled like one.
    """

    def __init__(self, scheduler: Any, index: int, enabled: bool) -> None:
        self.scheduler, self.index = scheduler, index
        self.number = index  # among all that is scheduled
        self.trace = Trace(index, self.clock_ns, enabled=enabled)
        self.clock = 0.0
        self.ahead = False  # of the scheduler: see `spend`
        self.calls = Calls()
        self.delay = scheduler.inject.delay(index) if scheduler.inject else 0.0  # s, see comm/inject.py
        self.unwaited = {}  # receives, and work in the background, that this rank has not waited for
        self.state = "running"
        self.pending: Any = None  # the work or meeting that this rank waits for
        self.since = 0.0
        self.value: Any = None
        self.error: Exception | None = None
        self.error_line = ""
        self.unwound = 0  # times

    def clock_ns(self) -> int:
        return round(self.clock * 1e9)

    def start(self, body: Callable) -> None:
        def main() -> None:
            try:
                self.value = body(self)
                require_no_forgotten_wait(self)
                self.state = "finished"
            except GreenletExit:
                pass  # stopped by the scheduler: `state` says in what
            except Exception as error:
                name_the_call(error, Comm)
                self.error, self.state = error, "failed"
                self.error_line = raised_line(error)

        self.code = self.scheduler.code(main, self.scheduler.outside, f"simulated rank {self.index}")

    def block(self, pending: Any) -> None:
        """Wait until somebody resumes this rank, which happens at the time when `pending` is done."""
        if self.scheduler.stopping or not self.code.may_pause():
            self._refuse_pause()
        self.state, self.pending, self.since = "waiting", pending, self.clock
        pending.waiter = self
        self.code.pause()
        self.state, self.pending = "running", None

    def sleep_until(self, seconds: float) -> None:
        """Let virtual time pass; other ranks whose time comes first go on meanwhile."""
        scheduler = self.scheduler
        if scheduler.bookings or (scheduler.ready and scheduler.ready[0][0] <= seconds):
            if scheduler.stopping or not self.code.may_pause():
                self._refuse_pause()
            scheduler.resume_at(seconds, self)
            self.code.pause()
        else:
            if scheduler.stopping:
                self._unwind()
            self.clock = scheduler.now = seconds
        self.ahead = False

    def spend(self, seconds: float) -> None:
        """Let `seconds` of virtual time pass in which this rank needs nobody.

        Where it cannot pause, inside autograd's backward, its clock runs ahead, and the others catch up before it meets
        them again.
        """
        if self.code.running and not self.code.may_pause():
            self.clock += seconds
            self.ahead = True
        else:
            self.sleep_until(self.clock + seconds)

    def settle(self) -> None:
        """Let the others catch up with this rank."""
        if self.ahead:
            self.sleep_until(self.clock)

    def meet(self, call: Any, key: Any, members: Any, answer: tuple[int, ...] | None) -> Meeting:
        """Wait for `members` to meet in the operation `key`; returns the Meeting."""
        self.settle()
        meeting = self.scheduler.meetings.setdefault(key, Meeting(members))
        meeting.require_same(self.index, call)
        meeting.answers[self.index], meeting.calls[self.index] = answer, call
        if len(meeting.answers) < len(members):
            meeting.waiters.append(self)
            self.block(MeetingSeat(meeting, self.index))
            return meeting
        del self.scheduler.meetings[key]
        end = self.clock + self.scheduler.network.alpha * math.ceil(math.log2(len(members)))
        for rank in meeting.waiters:
            self.scheduler.resume_at(end, rank)
        self.sleep_until(end)
        return meeting

    def _unwind(self) -> None:
        """End this rank's code. Where that is caught again and again, in a loop, it is left where it is."""
        self.unwound += 1
        if self.unwound > UNWIND:
            self.code.pause()
        raise GreenletExit

    def _refuse_pause(self) -> None:
        """Say why this rank cannot pause here, so that others go on."""
        if self.scheduler.stopping:
            self._unwind()
        line = caller_line()
        at = f" ({line})" if line else ""
        if not self.code.running:
            whose = f"the {self.trace.lane} of rank {self.index}" if self.trace.lane else f"rank {self.index}"
            raise ValueError(
                f"the communicator of {whose} is used by somebody else{at}: a function, also in the background, uses "
                "the one that it is given, and ranks share no model with hooks"
            )
        raise ValueError(
            f"rank {self.index} waits for other ranks inside autograd's backward{at}, "
            f"where a coroutine cannot pause: use {'no background' if self.trace.lane else 'threads=True'}"
        )

"""A simulated rank: its code, its virtual clock, what it waits for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from greenlet import GreenletExit

from ...trace import Trace, caller_line, line_of
from ..base import Comm
from ..calls import Calls
from ..errors import explainers
from .channel import Booker, End, Meeting, MeetingSeat

if TYPE_CHECKING:
    from ..calls import Call
    from ..errors import ForgottenWait
    from ..network import Network
    from .channel import Answer, Channel, Waiter
    from .coroutine import Coroutine
    from .token import TokenThread
    from .torch_state import Outside

UNWIND = 100  # times that a rank which the scheduler stops may go on to wait, in one `finally` after the other

Key: TypeAlias = tuple[int | str, ...]  # of a communicator: the path of splits that led to it


class Scheduling(Booker, Protocol):
    """The scheduler, as far as ranks, and the report of how they ended, use it."""

    ready: list[tuple[float, int]]
    stopping: bool

    @property
    def ranks(self) -> Sequence[SimRank]: ...

    @property
    def lanes(self) -> Sequence[SimRank]: ...

    @property
    def scheduled(self) -> Sequence[SimRank]: ...

    @property
    def channels(self) -> Mapping[tuple[Key, int, int], Channel]: ...

    @property
    def meetings(self) -> dict[tuple[Key, int], Meeting]: ...

    @property
    def network(self) -> Network: ...

    @property
    def outside(self) -> Outside: ...

    @property
    def code(self) -> type[Coroutine] | type[TokenThread]: ...

    @property
    def seconds(self) -> float: ...

    def enroll(self, lane: SimRank) -> int: ...


class _Unwaited(Protocol):
    """A receive, or work in the background, that a rank has not waited for."""

    def forgotten(self) -> ForgottenWait: ...


class InLane:
    """Something that a rank or a lane waits for until `lane` has done it."""

    lane: SimRank
    waiter: Waiter | None = None


class SimRank:
    """A simulated rank. Whenever its code runs, its clock (virtual s) is the scheduler's, or ahead of it.

    `background.Lane` is the background of a rank, and is scheduled like one.
    """

    code: Coroutine | TokenThread  # from `start` on

    def __init__(self, scheduler: Scheduling, index: int, enabled: bool) -> None:
        self.scheduler, self.index = scheduler, index
        self.number = index  # among all that is scheduled
        self.trace = Trace(index, self.clock_ns, enabled=enabled)
        self.clock = 0.0
        self.ahead = False  # of the scheduler: see `spend`
        self.calls = Calls()
        self.delay = scheduler.inject.delay(index) if scheduler.inject else 0.0  # s, see comm/inject.py
        self.unwaited: dict[int, _Unwaited] = {}  # by id
        self.state = "running"
        self.pending: End | MeetingSeat | InLane | None = None  # what this rank waits for
        self.since = 0.0
        self.value: object = None
        self.error: Exception | None = None
        self.error_line = ""
        self.unwound = 0  # times

    def clock_ns(self) -> int:
        return round(self.clock * 1e9)

    def start(self, body: Callable[[SimRank], object]) -> None:
        def main() -> None:
            try:
                self.value = body(self)
                self.require_no_forgotten_wait()
                self.state = "finished"
            except GreenletExit:
                pass  # stopped by the scheduler: `state` says in what
            except Exception as error:
                for explain in explainers:
                    explain(error, Comm)
                self.error, self.state = error, "failed"
                self.error_line = _raised_line(error)

        self.code = self.scheduler.code(main, self.scheduler.outside, f"simulated rank {self.index}")

    def block(self, pending: End | MeetingSeat | InLane) -> None:
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
        """Let `seconds` of virtual time pass in which this rank needs no other.

        If it cannot pause, inside autograd's backward, its clock runs ahead, and the others catch up before it meets
        them again.
        """
        if self.code.running and not self.code.may_pause():
            self.clock += seconds
            self.ahead = True
        else:
            self.sleep_until(self.clock + seconds)

    def synchronize(self) -> None:
        """Let the others catch up with this rank."""
        if self.ahead:
            self.sleep_until(self.clock)

    def meet(self, call: Call, key: tuple[Key, int], members: Sequence[int], answer: Answer) -> Meeting:
        """Wait for `members` to meet in the operation `key`; returns the Meeting."""
        self.synchronize()
        meeting = self.scheduler.meetings.setdefault(key, Meeting(members))
        meeting.require_same(self.index, call)
        meeting.answers[self.index], meeting.calls[self.index] = answer, call
        if len(meeting.answers) < len(members):
            meeting.waiters.append(self)
            self.block(MeetingSeat(meeting, self.index, self.calls))
            return meeting
        del self.scheduler.meetings[key]
        end = self.clock + self.scheduler.network.alpha * math.ceil(math.log2(len(members)))
        for rank in meeting.waiters:
            self.scheduler.resume_at(end, rank)
        self.sleep_until(end)
        return meeting

    def require_no_forgotten_wait(self) -> None:
        """Raise ForgottenWait if this rank has not waited for a receive, or for its background."""
        if self.unwaited:
            raise next(iter(self.unwaited.values())).forgotten()

    def _unwind(self) -> None:
        """End this rank's code. If it catches that again and again, in a loop, it is left at its place."""
        self.unwound += 1
        if self.unwound > UNWIND:
            self.code.pause()
        raise GreenletExit

    def _refuse_pause(self) -> None:
        """Raise ValueError that says why this rank cannot pause here to let others go on."""
        if self.scheduler.stopping:
            self._unwind()
        line = caller_line()
        at = f" ({line})" if line else ""
        if not self.code.running:
            whose = f"the {self.trace.lane} of rank {self.index}" if self.trace.lane else f"rank {self.index}"
            raise ValueError(
                f"the communicator of {whose} is used by other code{at}: a function, also in the background, must "
                "use the communicator that it gets, and each rank needs its own model if that has hooks"
            )
        raise ValueError(
            f"rank {self.index} waits for other ranks inside autograd's backward{at}, "
            f"where a coroutine cannot pause: use {'no background' if self.trace.lane else 'threads=True'}"
        )


def _raised_line(error: BaseException) -> str:
    """Return the user's innermost line in the traceback of `error`."""
    line, entry = "", error.__traceback__
    while entry is not None:
        line = line_of(entry.tb_frame, entry.tb_lineno) or line
        entry = entry.tb_next
    return line

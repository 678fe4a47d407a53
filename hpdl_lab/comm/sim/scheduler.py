"""The discrete-event scheduler under simulated ranks: whose turn it is, and what is booked next."""

from __future__ import annotations

import heapq
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ...trace import line_of
from ..errors import CommTimeout
from ..no_input import no_input
from .channel import Channel
from .coroutine import Coroutine
from .ending import raise_fault, waits_of
from .rank import SimRank
from .token import TokenThread
from .torch_state import Outside, bounded_workers

if TYPE_CHECKING:
    from types import FrameType

    from torch import Tensor

    from ..inject import Injection
    from ..network import Network
    from .channel import Booking, Meeting, Waiter
    from .rank import Key


class Scheduler:
    """Runner of ranks in the order of virtual time, and of messages in the order in which they become ready.

    No message is booked while a rank can still run at the same virtual time, so that messages are booked in the order
    of comm/network: by time, by the rank of the later end, by that rank's own order. Nothing depends on which of two
    ranks runs first.
    """

    def __init__(
        self,
        size: int,
        network: Network,
        trace: bool = True,
        inject: Injection | None = None,
        threads: bool = False,
    ) -> None:
        self.network, self.inject = network, inject
        self.timetable = network.timetable(size)
        self.threads = threads
        self.code = TokenThread if threads else Coroutine  # how the code of a rank is run
        self.outside = Outside()
        self.ranks = [SimRank(self, i, trace) for i in range(size)]
        self.lanes: list[SimRank] = []  # the background of the ranks
        self.scheduled = [*self.ranks]  # SimRank.number -> SimRank
        self.now = 0.0  # virtual s
        self.ready: list[tuple[float, int]] = []  # heap of (virtual s, SimRank.number)
        self.bookings: list[Booking] = []  # what is ready now
        self.channels: dict[tuple[Key, int, int], Channel] = {}  # (communicator, source, dest) -> Channel
        self.meetings: dict[tuple[Key, int], Meeting] = {}  # (communicator, n) -> Meeting, until its last rank has come
        self.segments: dict[tuple[Key, int], list[Tensor]] = {}  # the nth tensor that each rank of one has allocated
        self.stopping = False
        self.late: CommTimeout | None = None  # once the deadline has passed

    @property
    def seconds(self) -> float:
        """Makespan: the virtual time of the last rank to end."""
        return max(rank.clock for rank in self.ranks)

    def channel(self, key: Key, source: int, dest: int) -> Channel:
        channel = self.channels.get((key, source, dest))
        if channel is None:
            channel = self.channels[key, source, dest] = Channel(self, source, dest)
        return channel

    def enroll(self, lane: SimRank) -> int:
        """Schedule `lane` like the ranks; returns its number."""
        self.lanes.append(lane)
        self.scheduled.append(lane)
        return len(self.scheduled) - 1

    def resume_at(self, seconds: float, rank: Waiter) -> None:
        heapq.heappush(self.ready, (seconds, rank.number))

    def run(self, body: Callable[[SimRank], object], deadline: float) -> list[object]:
        """Run `body(rank)` on every rank; returns the values in rank order."""
        self.outside.look()
        for rank in self.ranks:
            rank.start(body)
            self.resume_at(0.0, rank)
        try:
            workers = len(self.ranks) if self.threads else 0
            with _real_time_limit(deadline, self), bounded_workers(workers), no_input():
                self._run_in_order()
        finally:
            self._stop_unfinished()
        raise_fault(self)
        return [rank.value for rank in self.ranks]

    def _run_in_order(self) -> None:
        """Let ranks run until none is ready and nothing is to be booked, or the deadline has passed.

        Then others that loop without end are not begun: each of them would have to be interrupted as well.
        """
        ready, scheduled = self.ready, self.scheduled
        while (ready or self.bookings) and self.late is None:
            if self.bookings and not (ready and ready[0][0] <= self.now):
                self._book()
            else:
                self.now, number = heapq.heappop(ready)
                rank = scheduled[number]
                rank.clock = self.now
                rank.code.resume()
        if self.late is not None and not any(rank.error for rank in self.ranks) and (ready or self.bookings):
            raise self.late  # whose code was interrupted has caught it

    def running_code(self) -> Coroutine | TokenThread | None:
        """Return the code of the rank or lane that runs now; None while the scheduler does."""
        return next((rank.code for rank in self.scheduled if rank.code.running), None)

    def threads_of_ranks(self) -> list[int]:
        """Return the system's numbers of the threads that ranks have."""
        threads = [rank.code.thread for rank in self.ranks if isinstance(rank.code, TokenThread)]
        return [thread.native_id for thread in threads if thread is not None and thread.native_id is not None]

    def _book(self) -> None:
        """Book every message that has become ready at this virtual time."""
        bookings, self.bookings = self.bookings, []
        bookings.sort()
        for _, _, channel, send, receive in bookings:
            end = self.timetable.book(channel.route, send.buffer.nbytes, self.now)
            channel.transferred(send, receive, end)

    def _stop_unfinished(self) -> None:
        """Unwind the ranks that are still inside their function, so that their `finally` clauses run."""
        self.stopping = True
        for rank in self.scheduled:
            rank.code.stop()


LOOK = 0.25  # s: between two looks at what has passed; until a deadline there are four at least
AGAIN = 0.5  # s: after the deadline it is raised again and again, because code that catches all may swallow the first


@contextmanager
def _real_time_limit(seconds: float, scheduler: Scheduler) -> Generator[None]:
    """Raise CommTimeout in whatever code runs once `seconds` of OwnTime have passed, also in a loop without messages.

    Only the main thread, in which notebooks and scripts run, can be interrupted so; elsewhere there is no limit.
    A timer that was set before is restored with what is left of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own, look, passed = OwnTime(scheduler.threads_of_ranks), min(LOOK, seconds / 4), False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal passed
        if scheduler.stopping or not passed and own.seconds(look) < seconds:
            return
        if not passed:
            signal.setitimer(signal.ITIMER_REAL, AGAIN, AGAIN)
        passed = True
        code = scheduler.running_code()
        frames = _frames_up(code.where(frame) if code else frame)
        line = next((line for f in frames if (line := line_of(f, f.f_lineno))), "")
        at = f", in {line}" if line else ""
        text = f"the simulated run did not end within {seconds:g} s of real time{at}"
        error = CommTimeout(text, waits_of(scheduler, line))
        scheduler.late = error
        if code is None:
            raise error
        code.give_up(error)

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, look, look)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 0.001), interval)


class OwnTime:
    """Real time since it was made, without the time in which the main thread or one of others waited for a core.

    others: returns the other threads, as numbers of the system. Only one of all threads works at a time.
    """

    def __init__(self, others: Callable[[], Iterable[int]]) -> None:
        self.others, self.main = others, threading.get_native_id()
        self.own = 0.0
        self.looked, self.used = time.monotonic(), time.process_time()
        self.waited: dict[int, float] = {}  # thread -> s, at the last look; the first counts all before it

    def seconds(self, look: float = float("inf")) -> float:
        """Return the seconds until now. look: s between two calls; if more have passed, all was stopped meanwhile."""
        now, used = time.monotonic(), time.process_time()
        waited = {thread: seconds_waited(thread) for thread in (self.main, *self.others())}
        waits = sum(max(0.0, s - self.waited.get(thread, 0.0)) for thread, s in waited.items())
        passed = now - self.looked
        worked = min(used - self.used, passed)  # two that wait at once for a moment count twice
        self.own += max(min(passed - waits, look), worked)
        self.looked, self.used, self.waited = now, used, waited
        return self.own


def seconds_waited(thread: int) -> float:
    """Return the s that this thread was ready without a core; 0 if it has ended, or if the system does not count."""
    with suppress(OSError, IndexError), open(f"/proc/self/task/{thread}/schedstat", "rb", buffering=0) as file:
        return int(file.read(100).split()[1]) / 1e9
    return 0.0


def _frames_up(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back

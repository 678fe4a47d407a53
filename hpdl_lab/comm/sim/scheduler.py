"""The discrete-event scheduler under simulated ranks: whose turn it is, and what is booked next."""

import heapq
from collections.abc import Callable
from typing import Any

from ..no_input import no_input
from .channel import Channel
from .coroutine import Coroutine
from .ending import raise_fault
from .rank import SimRank
from .real_time import real_time_limit
from .token import TokenThread
from .torch_state import Outside, bounded_workers


class Scheduler:
    """Runs ranks in the order of virtual time, and books messages in the order in which they become ready.

    No message is booked while a rank can still run at the same virtual time, so that the order of booking is that of
    comm/network: by time, by the rank of the later end, by that rank's own order. Nothing depends on which of two ranks
    runs first.
    """

    def __init__(self, size: int, network: Any, trace: bool = True, inject: Any = None, threads: bool = False) -> None:
        self.network, self.inject = network, inject
        self.timetable = network.timetable(size)
        self.threads = threads
        self.code = TokenThread if threads else Coroutine  # how the code of a rank is run
        self.outside = Outside()
        self.ranks = [SimRank(self, i, trace) for i in range(size)]
        self.lanes = []  # the background of the ranks
        self.scheduled = [*self.ranks]  # SimRank.number -> SimRank
        self.now = 0.0  # virtual s
        self.ready = []  # heap of (virtual s, SimRank.number)
        self.bookings = []  # (rank, step) of the later end, then channel, send, receive: what is ready now
        self.channels = {}  # (communicator, source, dest) -> Channel
        self.meetings = {}  # (communicator, n) -> Meeting, until its last rank has arrived
        self.stopping = False
        self.late = None  # CommTimeout, once the deadline has passed

    @property
    def seconds(self) -> float:
        """The makespan: the virtual time of the last rank to end."""
        return max(rank.clock for rank in self.ranks)

    def channel(self, key: Any, source: int, dest: int) -> Channel:
        channel = self.channels.get((key, source, dest))
        if channel is None:
            channel = self.channels[key, source, dest] = Channel(self, source, dest)
        return channel

    def enroll(self, lane: SimRank) -> int:
        """Schedule `lane` like the ranks; returns its number."""
        self.lanes.append(lane)
        self.scheduled.append(lane)
        return len(self.scheduled) - 1

    def resume_at(self, seconds: float, rank: SimRank) -> None:
        heapq.heappush(self.ready, (seconds, rank.number))

    def run(self, body: Callable, deadline: float) -> list[Any]:
        """Run `body(rank)` on every rank; returns the values in rank order."""
        self.outside.look()
        for rank in self.ranks:
            rank.start(body)
            self.resume_at(0.0, rank)
        try:
            workers = len(self.ranks) if self.threads else 0
            with real_time_limit(deadline, self), bounded_workers(workers), no_input():
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

    def running_code(self) -> Any:
        """The code of the rank or lane that runs now; None while the scheduler does."""
        return next((rank.code for rank in self.scheduled if rank.code.running), None)

    def threads_of_ranks(self) -> list[int]:
        """The system's numbers of the threads that ranks have."""
        return [rank.code.thread.native_id for rank in self.ranks if self.threads and rank.code.thread is not None]

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

"""The discrete-event scheduler under simulated ranks: whose turn it is, and what is booked next."""

import heapq
import math
import signal
import sys
import threading
import time
from contextlib import contextmanager

from greenlet import GreenletExit, getcurrent, greenlet

from ..trace import Trace, line_of
from .calls import Calls
from .channel import Channel, Meeting, MeetingSeat
from .ending import raise_fault, raised_line, require_no_forgotten_wait, waits_of
from .errors import CommTimeout


class Scheduler:
    """Runs ranks in the order of virtual time, and books messages in the order in which they become ready.

    No message is booked while a rank can still run at the same virtual time, so that the order of booking is that of
    comm/network: by time, by the rank of the later end, by that rank's own order. Nothing depends on which of two ranks
    runs first.
    """

    def __init__(self, size, network, trace=True, inject=None):
        self.network, self.inject = network, inject
        self.timetable = network.timetable(size)
        self.ranks = [SimRank(self, i, trace) for i in range(size)]
        self.now = 0.0  # virtual s
        self.ready = []  # heap of (virtual s, rank number)
        self.bookings = []  # (rank, step) of the later end, then channel, send, receive: what is ready now
        self.channels = {}  # (communicator, source, dest) -> Channel
        self.meetings = {}  # (communicator, n) -> Meeting, until its last rank has arrived
        self.stopping = False

    @property
    def seconds(self):
        """The makespan: the virtual time of the last rank to end."""
        return max(rank.clock for rank in self.ranks)

    def channel(self, key, source, dest):
        channel = self.channels.get((key, source, dest))
        if channel is None:
            channel = self.channels[key, source, dest] = Channel(self, source, dest)
        return channel

    def resume_at(self, seconds, rank):
        heapq.heappush(self.ready, (seconds, rank.index))

    def run(self, body, deadline):
        """Run `body(rank)` on every rank; returns the values in rank order."""
        hub = getcurrent()
        for rank in self.ranks:
            rank.start(body, hub)
            self.resume_at(0.0, rank)
        try:
            with real_time_limit(deadline, self):
                self._run_in_order()
        finally:
            self._stop_unfinished()
        raise_fault(self)
        return [rank.value for rank in self.ranks]

    def _run_in_order(self):
        """Let ranks run until none is ready and nothing is to be booked."""
        ready, ranks = self.ready, self.ranks
        while ready or self.bookings:
            if self.bookings and not (ready and ready[0][0] <= self.now):
                self._book()
            else:
                self.now, index = heapq.heappop(ready)
                rank = ranks[index]
                rank.clock = self.now
                rank.resume()

    def _book(self):
        """Book every message that has become ready at this virtual time."""
        bookings, self.bookings = self.bookings, []
        bookings.sort()
        for _, _, channel, send, receive in bookings:
            end = self.timetable.book(channel.route, send.buffer.nbytes, self.now)
            channel.transferred(send, receive, end)

    def _stop_unfinished(self):
        """Unwind the ranks that are still inside their function, so that their `finally` clauses run."""
        self.stopping = True
        for rank in self.ranks:
            rank.stop()


class SimRank:
    """One simulated rank: its coroutine, its virtual clock (s), its events."""

    def __init__(self, scheduler, index, trace):
        self.scheduler, self.index = scheduler, index
        self.clock = 0.0
        self.trace = Trace(index, self.clock_ns, enabled=trace)
        self.calls = Calls()
        self.delay = scheduler.inject.delay(index) if scheduler.inject else 0.0  # s, see comm/inject.py
        self.unwaited = {}  # receives that this rank has not waited for
        self.state = "running"
        self.pending = None  # the work or meeting that this rank waits for
        self.since = 0.0
        self.value = self.error = None
        self.error_line = ""
        self.grad_mode = None  # of torch, where this rank has run since its import

    def clock_ns(self):
        return round(self.clock * 1e9)

    def start(self, body, hub):
        def main():
            try:
                self.value = body(self)
                require_no_forgotten_wait(self)
                self.state = "finished"
            except GreenletExit:
                pass  # stopped by the scheduler: `state` says in what
            except Exception as error:
                self.error, self.state = error, "failed"
                self.error_line = raised_line(error)

        self.coroutine = greenlet(main, hub)

    def resume(self):
        """Let this rank go on until it waits or ends. Grad mode belongs to the thread, so it is kept per rank here."""
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "is_grad_enabled"):
            self.coroutine.switch()
            return
        outside = torch.is_grad_enabled()
        if self.grad_mode not in (None, outside):
            torch.set_grad_enabled(self.grad_mode)
        try:
            self.coroutine.switch()
        finally:
            self.grad_mode = torch.is_grad_enabled()
            if self.grad_mode != outside:
                torch.set_grad_enabled(outside)

    def stop(self):
        for _ in range(3):  # code that catches everything may go on to wait again; it is then abandoned
            if self.coroutine.dead or not self.coroutine:
                return
            self.coroutine.throw(GreenletExit)

    def block(self, pending):
        """Wait until somebody resumes this rank, which happens at the time when `pending` is done."""
        if self.scheduler.stopping:
            raise GreenletExit
        self.state, self.pending, self.since = "waiting", pending, self.clock
        pending.waiter = self
        self.coroutine.parent.switch()
        self.state, self.pending = "running", None

    def sleep_until(self, seconds):
        """Let virtual time pass; other ranks whose time comes first go on meanwhile."""
        if self.scheduler.stopping:
            raise GreenletExit
        scheduler = self.scheduler
        if scheduler.bookings or (scheduler.ready and scheduler.ready[0][0] <= seconds):
            scheduler.resume_at(seconds, self)
            self.coroutine.parent.switch()
        else:
            self.clock = scheduler.now = seconds

    def meet(self, call, key, members, answer):
        """Wait for `members` to meet in the operation `key`; returns {index: answer}."""
        meeting = self.scheduler.meetings.setdefault(key, Meeting(members))
        meeting.require_same(self.index, call)
        meeting.answers[self.index], meeting.calls[self.index] = answer, call
        if len(meeting.answers) < len(members):
            meeting.waiters.append(self)
            self.block(MeetingSeat(meeting, self.index))
            return meeting.answers
        del self.scheduler.meetings[key]
        end = self.clock + self.scheduler.network.alpha * math.ceil(math.log2(len(members)))
        for rank in meeting.waiters:
            self.scheduler.resume_at(end, rank)
        self.sleep_until(end)
        return meeting.answers


@contextmanager
def real_time_limit(seconds, scheduler):
    """Raise CommTimeout in whatever code runs once `seconds` of real time have passed, also in a loop without messages.

    Only the main thread can be interrupted so (it is where notebooks and scripts run); elsewhere there is no limit.
    A timer that was set before is restored with what is left of it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum, frame):
        if scheduler.stopping:
            return
        running = next((f for f in frames_up(frame) if line_of(f, f.f_lineno)), None)
        line = line_of(running, running.f_lineno) if running else ""
        at = f", in {line}" if line else ""
        text = f"the simulated run did not end within {seconds:g} s of real time{at}"
        raise CommTimeout(text, waits_of(scheduler, line))

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, stop)
    # Repeats, because code that catches every exception may swallow the first.
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 0.001), interval)


def frames_up(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back

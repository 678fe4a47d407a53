"""Where simulated ranks meet: the two ends of a message in a channel, the ranks of a collective in a meeting."""

from __future__ import annotations

import functools
from typing import Any

from ..base import parts_of
from ..buffers import payload_of
from ..errors import Mismatch
from ..status.report import OTHER_BACKGROUND, OTHER_ORDER, disagreement, mismatch


class Channel:
    """Messages from one rank to another: sends and receives meet first come, first served."""

    def __init__(self, scheduler: Any, source: int, dest: int) -> None:
        self.scheduler, self.source, self.dest = scheduler, source, dest
        self.route = scheduler.timetable.route(source, dest)
        slow = scheduler.inject.seconds_per_byte(source, dest) if scheduler.inject else 0.0
        self.lost = max(0.0, slow - self.route.beta)  # s per byte, to an injected slow link
        if self.lost:
            self.route = self.route._replace(beta=slow)
        self.sends, self.receives = [], []  # short as a rule, and there may be a million channels: no deques

    def post_send(self, send: Any) -> None:
        """Add the sender's end of a message and match it where a receive is there. An eager one leaves at once."""
        if send.end is not None:
            self.scheduler.bookings.append((self.source, send.step, self, send, None))
        if self.receives:
            self._match(send, self.receives.pop(0))
        else:
            self.sends.append(send)

    def post_receive(self, receive: Any) -> None:
        """Add the receiver's end of a message and match it where a send is there."""
        if self.sends:
            self._match(self.sends.pop(0), receive)
        else:
            self.receives.append(receive)

    def _match(self, send: Any, receive: Any) -> None:
        ours, theirs = send.buffer, receive.buffer
        if ours.count != theirs.count or ours.dtype != theirs.dtype:
            self._refuse(send, receive)
        elif send.end is None:
            receive.payload = payload_of(send.x, ours.nbytes)
            if (send.posted, self.source) > (receive.posted, self.dest):
                self.scheduler.bookings.append((self.source, send.step, self, send, receive))
            else:
                self.scheduler.bookings.append((self.dest, receive.step, self, send, receive))
        else:  # eager
            receive.payload = send.payload
            send.partner = receive
            if send.arrival is not None:
                self._finish(receive, max(send.arrival, self.scheduler.now))

    def transferred(self, send: Any, receive: Any, end: float) -> None:
        """A message has been booked and arrives at `end` (s)."""
        if send.end is None:
            self._finish(send, end)
            self._finish(receive, end)
            return
        send.arrival = end  # of an eager message, whose receive may come later or not at all
        if send.partner is not None:
            self._finish(send.partner, end)

    def _finish(self, work: Any, end: float) -> None:
        work.end = end
        if work.waiter is not None:
            self.scheduler.resume_at(end, work.waiter)

    def _refuse(self, send: Any, receive: Any) -> None:
        error = mismatch(self.source, self.dest, send.buffer[:2], receive.buffer[:2])
        error += f" (sent at {send.line or '?'}, expected at {receive.line or '?'})"
        later_sends, later_receives = self.sends or [send], self.receives or [receive]
        if later_sends[0].buffer[:2] == receive.buffer[:2] or later_receives[0].buffer[:2] == send.buffer[:2]:
            error += OTHER_ORDER
        elif send.comm.state.trace.lane and receive.comm.state.trace.lane:
            error += OTHER_BACKGROUND
        for work in (send, receive):
            if work.end is None:
                work.error = Mismatch(error)
                self._finish(work, self.scheduler.now)


class Meeting:
    """Ranks that come together in one collective operation (barrier, split)."""

    def __init__(self, members: Any) -> None:
        self.members = members
        self.answers, self.calls, self.waiters = {}, {}, []

    @functools.cached_property
    def parts(self) -> dict[int, list[int]]:
        """{member: the members of its color, ordered by (key, rank)}, once all have given (color, key)."""
        parts = [[self.members[r] for r in part] for part in parts_of([self.answers[m] for m in self.members])]
        return {member: part for part in parts for member in part}

    def require_same(self, index: int, call: Any) -> None:
        """Raise Mismatch unless rank `index` calls what the others have called."""
        if next(iter(self.calls.values()), call).op != call.op:
            calls = {i: (c.op, c.count, c.dtype, c.root) for i, c in {**self.calls, index: call}.items()}
            raise Mismatch(f"{disagreement(calls)}: every rank must call the same")


class MeetingSeat:
    """What one rank waits for in a meeting: the ranks that have not come."""

    def __init__(self, meeting: Meeting, index: int) -> None:
        self.meeting, self.index = meeting, index
        self.waiter: Any = None

    def waits_for(self) -> dict[str, Any]:
        """The fields of errors.Wait for the report of a stuck run; peers are scheduler indices."""
        call = self.meeting.calls[self.index]
        missing = tuple(m for m in self.meeting.members if m not in self.meeting.answers)
        info = {"op": call.op, "peers": missing, "line": call.line, **call.facts()}
        return {**info, "counts": self.waiter.calls.times(call.op, call.line)}

"""Meeting points of simulated ranks: a channel for the two ends of a message, a meeting for a collective."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ..base import Work, split_groups
from ..buffers import payload_of
from ..errors import Mismatch
from ..status.report import OTHER_BACKGROUND, OTHER_ORDER, describe_mismatch, mismatch

if TYPE_CHECKING:
    import numpy as np

    from ..buffers import Array, Extent
    from ..calls import Call, Calls, Facts
    from ..inject import Injection
    from ..network import Timetable

    Answer: TypeAlias = tuple[object, object] | None  # (color, key) in a split
    Booking: TypeAlias = tuple[int, int, "Channel", "End", "End | None"]  # rank and step of the later end, then what


class Waiter(Protocol):
    """A simulated rank, or its background, that waits."""

    number: int


class Booker(Protocol):
    """The scheduler, as far as channels use it."""

    now: float
    bookings: list[Booking]

    @property
    def timetable(self) -> Timetable: ...

    @property
    def inject(self) -> Injection | None: ...

    def resume_at(self, seconds: float, rank: Waiter) -> None: ...


class End(Work):
    """An end of a message, as far as its channel uses it.

    end: when this end may go on, in virtual s; None until the message is booked. An eager send may go on at once.
    arrival: when the bytes of an eager send are at its receiver; partner: the receive that it was matched with.
    """

    x: Array
    buffer: Extent
    posted: float  # virtual s
    step: int
    line: str
    end: float | None = None
    arrival: float | None = None
    partner: End | None = None
    error: BaseException | None = None
    payload: bytes | np.ndarray = b""
    waiter: Waiter | None = None

    @property
    @abstractmethod
    def in_background(self) -> bool:
        """True if the background of a rank has posted it."""

    @abstractmethod
    def waits_for(self) -> Facts:
        """Return the fields of errors.Wait for the report of a stuck run; peers are scheduler indices."""


class Channel:
    """Messages from one rank to another: sends and receives meet first come, first served."""

    def __init__(self, scheduler: Booker, source: int, dest: int) -> None:
        self.scheduler, self.source, self.dest = scheduler, source, dest
        self.route = scheduler.timetable.route(source, dest)
        slow = scheduler.inject.seconds_per_byte(source, dest) if scheduler.inject else 0.0
        self.lost = max(0.0, slow - self.route.beta)  # s per byte, to an injected slow link
        if self.lost:
            self.route = self.route._replace(beta=slow)
        self.sends: list[End] = []  # short as a rule, and there may be a million channels: no deques
        self.receives: list[End] = []

    def post_send(self, send: End) -> None:
        """Add the sender's end of a message and match it with a receive if one is there. Eager ones leave at once."""
        if send.end is not None:
            self.scheduler.bookings.append((self.source, send.step, self, send, None))
        if self.receives:
            self._match(send, self.receives.pop(0))
        else:
            self.sends.append(send)

    def post_receive(self, receive: End) -> None:
        """Add the receiver's end of a message and match it with a send if one is there."""
        if self.sends:
            self._match(self.sends.pop(0), receive)
        else:
            self.receives.append(receive)

    def _match(self, send: End, receive: End) -> None:
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

    def transferred(self, send: End, receive: End | None, end: float) -> None:
        """Finish the ends of a message that has been booked and arrives at `end` (s)."""
        if receive is not None:
            self._finish(send, end)
            self._finish(receive, end)
            return
        send.arrival = end  # of an eager message, whose receive may come later or not at all
        if send.partner is not None:
            self._finish(send.partner, end)

    def _finish(self, work: End, end: float) -> None:
        work.end = end
        if work.waiter is not None:
            self.scheduler.resume_at(end, work.waiter)

    def _refuse(self, send: End, receive: End) -> None:
        error = mismatch(self.source, self.dest, send.buffer[:2], receive.buffer[:2])
        error += f" (sent at {send.line or '?'}, expected at {receive.line or '?'})"
        later_sends, later_receives = self.sends or [send], self.receives or [receive]
        if later_sends[0].buffer[:2] == receive.buffer[:2] or later_receives[0].buffer[:2] == send.buffer[:2]:
            error += OTHER_ORDER
        elif send.in_background and receive.in_background:
            error += OTHER_BACKGROUND
        for work in (send, receive):
            if work.end is None:
                work.error = Mismatch(error)
                self._finish(work, self.scheduler.now)


class Meeting:
    """Ranks that come together in one collective operation (barrier, split)."""

    def __init__(self, members: Sequence[int]) -> None:
        self.members = members
        self.answers: dict[int, Answer] = {}
        self.calls: dict[int, Call] = {}
        self.waiters: list[Waiter] = []

    @functools.cached_property
    def parts(self) -> dict[int, list[int]]:
        """{member: the members of its color, ordered by (key, rank)}, once all have given (color, key)."""
        answers = [answer for m in self.members if (answer := self.answers[m]) is not None]
        parts = [[self.members[r] for r in part] for part in split_groups(answers)]
        return {member: part for part in parts for member in part}

    def require_same(self, index: int, call: Call) -> None:
        """Raise Mismatch unless rank `index` calls what the others have called."""
        if next(iter(self.calls.values()), call).op != call.op:
            calls = {i: (c.op, c.count, c.dtype, c.root) for i, c in {**self.calls, index: call}.items()}
            raise Mismatch(f"{describe_mismatch(calls)}: every rank must call the same")


class MeetingSeat:
    """A rank's place in a meeting, in which it waits for the ranks that have not come."""

    waiter: Waiter | None = None

    def __init__(self, meeting: Meeting, index: int, calls: Calls) -> None:
        """calls: of that rank."""
        self.meeting, self.index, self.calls = meeting, index, calls

    def waits_for(self) -> Facts:
        """Return the fields of errors.Wait for the report of a stuck run; peers are scheduler indices."""
        call = self.meeting.calls[self.index]
        missing = tuple(m for m in self.meeting.members if m not in self.meeting.answers)
        info = {"op": call.op, "peers": missing, "line": call.line, **call.facts()}
        return {**info, "counts": self.calls.times(call.op, call.line)}

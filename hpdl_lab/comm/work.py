"""Messages of real ranks that are under way."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .base import Work
from .buffers import DTYPES, buffer_of
from .errors import Mismatch
from .status.report import OTHER_ORDER, mismatch
from .status.waiting import NAP

if TYPE_CHECKING:
    from .buffers import Array
    from .calls import Facts
    from .transport import Pending, PendingMessage, Ranks, Transport


class RealWork(Work):
    """An end of a message, which the transport of its communicator carries as `message`."""

    __slots__ = ("call", "comm", "line", "message", "op", "peer", "step", "t0_ns", "x")

    def __init__(self, comm: Ranks, op: str, x: Array, peer: int, sent: Array | None = None) -> None:
        """sent: what the transport carries in place of `x`.

        An interrupt may come between any two lines: what MPI could touch is known to `comm` before MPI knows it.
        """
        self.comm, self.op, self.x, self.peer = comm, op, x, peer
        self.message: PendingMessage | None = None  # None again after the end
        self.step, self.t0_ns, self.line = comm.begun()
        self.call = comm.calling
        if self.call is None or not self.call.nth:
            comm.calls.note((op, self.line))
        comm.pending[id(self)] = self
        transport = comm.transport
        try:
            (transport.send if op == "send" else transport.receive)(self, x if sent is None else sent, peer)
        except BaseException as error:
            if self.message is None:
                comm.pending.pop(id(self), None)
            if isinstance(error, RuntimeError):
                comm.waiting.explain(error, op, (comm.members[peer],))
            raise
        if transport.polled and self.message is not None:
            waiting = comm.waiting
            (waiting.sends if op == "send" else waiting.receives)[id(self)] = self.message

    @property
    def transport(self) -> Transport:
        return self.comm.transport

    def wait(self) -> None:
        if (message := self.message) is not None:
            comm = self.comm
            with self._matching(message):
                peers = (comm.members[self.peer],)
                comm.waiting.finish(message, self.op, peers, message.nbytes, self.line, facts=self._facts)
            self._arrived(message.nbytes)

    def test(self) -> bool:
        if (message := self.message) is not None:
            with self._matching(message):
                arrived = message.wait(0.0, 0.0, False)
            if arrived:
                self._arrived(message.nbytes)
        return self.message is None

    def let_go(self, seconds: float) -> bool:
        """Wait for a send, up to `seconds`, or cancel a receive; return True if MPI will not touch the tensor again."""
        if self.message is None:
            return True
        gone = self.message.wait(seconds, NAP, self.comm.oversubscribed) if self.op == "send" else self.message.cancel()
        if gone:
            self._forget()
        return gone

    def _forget(self) -> None:
        self.comm.pending.pop(id(self), None)
        self.comm.waiting.receives.pop(id(self), None)
        self.comm.waiting.sends.pop(id(self), None)

    @contextmanager
    def _matching(self, message: PendingMessage) -> Generator[None]:
        """Raise Mismatch for a message that is not what was expected: it has come, and MPI has done with the tensor."""
        try:
            yield
        except ValueError:
            text = self._contradiction(message.sent)
            self._done(message.nbytes)
            raise Mismatch(text) from None

    def _contradiction(self, sender: tuple[int, int]) -> str:
        """Return a sentence of what the sender has sent, and what was expected instead."""
        comm, wanted = self.comm, self._expected()
        sent = (sender[0], DTYPES[sender[1]])
        text = mismatch(comm.names[self.peer], comm.names[comm.rank], sent, wanted)
        return text + OTHER_ORDER if self._swapped(sent, wanted) else text

    def _swapped(self, sent: tuple[int, str], wanted: tuple[int, str]) -> bool:
        """Return True if another receive expects what has come, or if what was expected is the next message."""
        pending = [work for work in self.comm.pending.values() if isinstance(work, RealWork) and work is not self]
        others = [work for work in pending if (work.op, work.peer) == ("recv", self.peer)]
        if any(work._expected() == sent for work in others):
            return True
        return self.comm.transport.announces(self.peer, wanted)

    def _expected(self) -> tuple[int, str]:
        """Return (count, dtype) of this end."""
        return buffer_of(self.x, self.op)[1:3]

    def _facts(self) -> Facts:
        """Return the fields of errors.Wait for a rank that waits for this message."""
        comm, call = self.comm, self.call
        if call is None or not call.nth:
            count, dtype = self._expected()
            about: Facts = {
                "count": count,
                "dtype": dtype,
                "comm": comm.name,
                "counts": comm.calls.times(self.op, self.line),
            }
        else:
            about = {**call.facts(), "counts": comm.calls.times(call.op, call.line)}
        if unreceived := comm.transport.unreceived():
            about["unreceived"] = tuple(comm.members[r] for r in unreceived)
        return {**about, "call": call.op if call else ""}

    def _arrived(self, nbytes: int) -> None:
        inject = self.comm.waiting.inject
        self._done(nbytes)
        if inject is not None:
            inject.after(self.comm, self.peer, nbytes)

    def _done(self, nbytes: int) -> None:
        comm, trace = self.comm, self.comm.trace
        self._forget()
        trace.add(self.step, self.op, self.t0_ns, trace.clock(), comm.names[self.peer], nbytes, self.line)
        self.message = None
        del self.x  # a caller that keeps the work does not keep its tensor


def still_pending(works: Sequence[Pending], seconds: float) -> list[Pending]:
    """Wait for all of `works`, `seconds` at most; return those whose tensors MPI may still touch."""
    end = time.monotonic() + seconds
    return [work for work in works if not work.let_go(max(0.0, end - time.monotonic()))]

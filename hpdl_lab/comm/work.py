"""Messages of real ranks that are under way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .base import Work
from .buffers import DTYPES, buffer_of
from .errors import Mismatch
from .status.report import OTHER_ORDER, mismatch
from .status.waiting import NAP

if TYPE_CHECKING:
    from torch import Tensor


class RealWork(Work):
    """One end of a message, which the transport of its communicator carries as the Operation `message`."""

    __slots__ = ("call", "comm", "line", "message", "op", "peer", "step", "t0_ns", "x")

    def __init__(self, comm: Any, op: str, x: Tensor, peer: int, sent: Any = None) -> None:
        """sent: what the transport carries in place of `x`.

        An interrupt may come between any two lines: what MPI could touch is known to `comm` before MPI knows it.
        """
        self.comm, self.op, self.x, self.peer = comm, op, x, peer
        self.message: Any = None
        self.step, self.t0_ns, self.line = comm._begin()
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
        if transport.polled:
            waiting = comm.waiting
            (waiting.sends if op == "send" else waiting.receives)[id(self)] = self.message

    def wait(self) -> None:
        if self.message is not None:
            comm, nbytes = self.comm, self.message.nbytes
            with self._matching():
                peers = (comm.members[self.peer],)
                comm.waiting.finish(self.message, self.op, peers, nbytes, self.line, facts=self._facts)
            self._arrived()

    def test(self) -> bool:
        if self.message is not None:
            with self._matching():
                arrived = self.message.wait(0.0, 0.0, False)
            if arrived:
                self._arrived()
        return self.message is None

    def let_go(self, seconds: float) -> bool:
        """Wait for a send, up to `seconds`, or cancel a receive; true when MPI will not touch the tensor again."""
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
    def _matching(self) -> Iterator[Any]:
        """A message that is not what was expected has been received, and MPI has done with its tensor."""
        try:
            yield
        except ValueError:
            text = self._contradiction()
            self._done()
            raise Mismatch(text) from None

    def _contradiction(self) -> str:
        """What the sender has sent, and what was expected instead."""
        comm, wanted = self.comm, buffer_of(self.x, self.op)[1:3]
        sent = (self.message.sent[0], DTYPES[self.message.sent[1]])
        text = mismatch(comm.names[self.peer], comm.names[comm.rank], sent, wanted)
        return text + OTHER_ORDER if self._swapped(sent, wanted) else text

    def _swapped(self, sent: tuple[int, str], wanted: tuple[int, str]) -> bool:
        """Does another receive expect what has come, or is what was expected the next message?"""
        pending = self.comm.pending.values()
        others = [w for w in pending if (w.op, w.peer) == ("recv", self.peer) and w is not self]
        return any(buffer_of(w.x, w.op)[1:3] == sent for w in others) or self.comm.transport.announces(
            self.peer, wanted
        )

    def _facts(self) -> dict[str, Any]:
        """The fields of errors.Wait for a rank that waits for this message."""
        comm, call = self.comm, self.call
        if call is None or not call.nth:
            count, dtype = buffer_of(self.x, self.op)[1:3]
            about = {"count": count, "dtype": dtype, "comm": comm.name, "counts": comm.calls.times(self.op, self.line)}
        else:
            about = {**call.facts(), "counts": comm.calls.times(call.op, call.line)}
        if unreceived := comm.transport.unreceived():
            about["unreceived"] = tuple(comm.members[r] for r in unreceived)
        return {**about, "call": call.op if call else ""}

    def _arrived(self) -> None:
        inject, nbytes = self.comm.waiting.inject, self.message.nbytes
        self._done()
        if inject is not None:
            inject.after(self.comm, self.peer, nbytes)

    def _done(self) -> None:
        comm, trace = self.comm, self.comm.trace
        self._forget()
        trace.add(self.step, self.op, self.t0_ns, trace.clock(), comm.names[self.peer], self.message.nbytes, self.line)
        self.message = self.x = None


def unsettled(works: list, seconds: float) -> list:
    """Those of `works` whose tensors MPI may still touch after `seconds`, which is the limit for all of them."""
    end = time.monotonic() + seconds
    return [work for work in works if not work.let_go(max(0.0, end - time.monotonic()))]

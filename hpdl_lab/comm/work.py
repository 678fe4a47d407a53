"""Messages of real ranks that are under way."""

import time
from contextlib import contextmanager

from .base import Work
from .waiting import NAP


class MpiWork(Work):
    """One end of a message."""

    __slots__ = ("comm", "line", "message", "op", "peer", "step", "t0_ns", "x")

    def __init__(self, comm, op, post, x, peer):
        """post: core.send or core.receive, which sets `message` as it begins.

        An interrupt may come between any two lines: what MPI could touch is known to `comm` before MPI knows it.
        """
        self.comm, self.op, self.message, self.x, self.peer = comm, op, None, x, peer
        self.step, self.t0_ns, self.line = comm._begin()
        comm.pending[id(self)] = self
        try:
            post(self, comm.group, x, peer)
        except BaseException:
            if self.message is None:
                comm.pending.pop(id(self), None)
            raise

    def wait(self):
        if self.message is not None:
            comm, nbytes = self.comm, self.message.nbytes
            with self._matching():
                comm.waiting.finish(self.message, self.op, (comm.members[self.peer],), nbytes, self.line)
            self._done()

    def test(self):
        if self.message is not None:
            with self._matching():
                arrived = self.message.wait(0.0, 0.0, False)
            if arrived:
                self._done()
        return self.message is None

    def let_go(self, seconds):
        """Wait for a send, up to `seconds`, or cancel a receive; true when MPI will not touch the tensor again."""
        if self.message is None:
            return True
        gone = self.message.wait(seconds, NAP, self.comm.crowded) if self.op == "send" else self.message.cancel()
        if gone:
            self.comm.pending.pop(id(self), None)
        return gone

    @contextmanager
    def _matching(self):
        """A message that is not what was expected has been received, and MPI has done with its tensor."""
        try:
            yield
        except ValueError:
            self._done()
            raise

    def _done(self):
        comm, trace = self.comm, self.comm.trace
        comm.pending.pop(id(self), None)
        trace.add(self.step, self.op, self.t0_ns, trace.clock(), comm.names[self.peer], self.message.nbytes, self.line)
        self.message = self.x = None


def unsettled(works, seconds):
    """Those of `works` whose tensors MPI may still touch after `seconds`, which is the limit for all of them."""
    end = time.monotonic() + seconds
    return [work for work in works if not work.let_go(max(0.0, end - time.monotonic()))]

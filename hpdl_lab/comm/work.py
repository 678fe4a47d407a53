"""Messages of real ranks that are under way."""

from contextlib import contextmanager

from .base import Work


class MpiWork(Work):
    """One end of a message."""

    __slots__ = ("comm", "line", "message", "op", "peer", "step", "t0_ns", "x")

    def __init__(self, comm, op, message, x, peer):
        self.comm, self.op, self.message, self.x, self.peer = comm, op, message, x, peer
        self.step, self.t0_ns, self.line = comm._begin()
        comm.pending[id(self)] = self

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
        del comm.pending[id(self)]
        trace.add(self.step, self.op, self.t0_ns, trace.clock(), comm.names[self.peer], self.message.nbytes, self.line)
        self.message = self.x = None

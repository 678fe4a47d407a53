"""Messages between GPUs that are under way.

NCCL's messages carry neither count nor dtype, and would hang where the ends disagree. So a note of both goes ahead of
each through MPI, and the receiver compares. The elements wait until somebody waits: all messages that have been posted
by then start as one group, in which none waits for another, as in the ncclGroup of a ring.
"""

import numpy as np

from .buffers import DTYPES, buffer_of, copy_into
from .errors import CommError, Mismatch
from .nccl_api import DTYPE
from .reasons import mismatch
from .work import MpiWork

CALL = {"send": "ncclSend", "recv": "ncclRecv"}


class NcclWork(MpiWork):
    """One end of a message; its `message` is the note."""

    __slots__ = ("buffer", "launch", "note")

    def __init__(self, comm, op, post, x, peer):
        """post: as of MpiWork."""
        self.buffer, self.launch = buffer_of(x, op, comm.device), None
        mine = (self.buffer.count, DTYPES.index(self.buffer.dtype))
        self.note = np.array(mine if op == "send" else (-1, -1), np.int64)
        super().__init__(comm, op, lambda work, group, x, to: post(work, group, self.note, to), x, peer)
        comm.posted.append(self)

    @property
    def calls(self):
        """What NCCL is to do: nothing for a message without elements."""
        to = (self.buffer.address, self.buffer.count, DTYPE[self.buffer.dtype], self.peer)
        return [(CALL[self.op], *to)] if self.buffer.count else []

    def has_come(self):
        """True when the note has left, or has come and says what this rank expects. Raises Mismatch otherwise."""
        expected = (self.buffer.count, self.buffer.dtype)
        try:
            if not self.message.wait(0.0, 0.0, False):
                return False
            sent = (int(self.note[0]), DTYPES[self.note[1]])
        except ValueError:  # no note came, but a message of CPU memory
            count, dtype = self.message.sent
            sent = (count, f"{DTYPES[dtype]} of the CPU")
        if sent != expected:
            names = self.comm.names
            raise Mismatch(mismatch(names[self.peer], names[self.comm.rank], sent, expected))
        return True

    def wait(self):
        if self.message is not None:
            comm = self.comm
            comm.launch_posted()
            with comm.aborting(self.op):
                whom = (comm.members[self.peer],)
                comm.waiting.finish(self.launch, self.op, whom, self.buffer.nbytes, self.line, facts=self._facts)
            self._arrived()

    def test(self):
        if self.message is not None:
            with self.comm.aborting(self.op):
                if self.launch is None and self.comm.busy:
                    return False
                self.comm.launch_posted()
                arrived = self.launch.wait(0.0, 0.0, False)
            if arrived:
                self._arrived()
        return self.message is None

    def let_go(self, seconds):
        """See MpiWork.let_go: what is still on the GPU after `seconds` is aborted there."""
        if self.message is not None and self.launch is not None:
            try:
                self.launch.wait(seconds, 1e-3, self.comm.crowded)
            except (CommError, ValueError):
                pass  # nobody waits for it any more
            if not self.launch.done:
                self.launch.clique.abort(self.op)
        return super().let_go(0.0)

    def _facts(self):
        """See MpiWork._facts."""
        counts = self.comm.calls.times(self.op, self.line)
        return {"count": self.buffer.count, "dtype": self.buffer.dtype, "comm": self.comm.name, "counts": counts}

    def _arrived(self):
        inject = self.comm.waiting.inject
        self._done()
        if inject is not None:
            inject.after(self.comm, self.peer, self.buffer.nbytes)

    def _done(self):
        comm, trace = self.comm, self.comm.trace
        self._forget()
        trace.add(self.step, self.op, self.t0_ns, trace.clock(), comm.names[self.peer], self.buffer.nbytes, self.line)
        self.message = self.x = None


class StagedReceive(MpiWork):
    """A receive into CPU memory, from where it goes to the GPU."""

    __slots__ = ("target",)

    def __init__(self, comm, x, source):
        buffer_of(x, "receive into", comm.device)
        self.target = x
        super().__init__(comm, "recv", comm.core.receive, x.new_empty(x.shape, device="cpu"), source)

    def _arrived(self):
        copy_into(self.target, self.x)
        super()._arrived()

"""A training step that waits for no message: the strategy is rehearsed, and when it talks is noted.

All-reduces that hold up the rank are left out. Those beside it are sent, or left out too: what they cost the rank even
where they hide, since somebody has to hand them over, and a core that moves bytes computes nothing meanwhile, is the
difference between the two, see scaling/interference.py.
"""

import copy

import numpy as np

from ...comm.base import Comm, Done
from ...comm.buffers import is_tensor
from ...trace import Trace, now_ns
from .overlap_model import Message, StepProfile


class Rehearsal(Comm):
    """The communicator of a rehearsal on the ranks of `comm`. What it does not send, everybody is taken to have equal.

    all_reduce_beside: the strategy's own, for what runs beside the rank.
    sends: whether what runs beside the rank is sent.
    called: [(ns, bytes, whether beside this rank)] of all-reduces; under_way: the Works of those beside it.
    starting: whether the strategy may still broadcast parameters and compare notes, which no step does.
    """

    def __init__(self, comm, all_reduce_beside):
        super().__init__(comm.rank, comm.size, Trace(comm.rank, clock=now_ns))
        self.comm, self.all_reduce_beside, self.under_way = comm, all_reduce_beside, []
        self.node_rank, self.node_size, self.device = comm.node_rank, comm.node_size, comm.device
        self.runs_beside = comm.runs_beside
        self.called, self.starting, self.sends = [], True, False

    def all_reduce(self, x):
        self.called.append((now_ns(), x.nbytes, False))
        return x

    def background(self, fn, *args):
        """Start, if this `sends`, an all-reduce of the first argument beside this rank; wait for nothing."""
        if self.starting:  # the memory that buckets are sent from
            return self.comm.background(fn, *args)
        if fn is not free:
            raise NotRehearsed("a strategy that does more than all-reduces beside a rank cannot be rehearsed")
        self.called.append((now_ns(), args[0].nbytes, self.runs_beside))
        if self.runs_beside and self.sends:
            self.under_way.append(self.comm.background(self.all_reduce_beside, *args))
        return Done.of(lambda comm: args[0], self)

    def barrier(self):
        pass

    def broadcast(self, x, root=0):
        self.require_starting()
        return x

    def all_gather(self, x):
        self.require_starting()
        return x.expand(self.size, *x.shape).clone() if is_tensor(x) else np.stack([x] * self.size)

    def split(self, color, key=0):
        return Rehearsal(self.comm, self.all_reduce_beside)

    def allocate(self, shape, dtype="float32"):
        return self.comm.allocate(shape, dtype)

    def isend(self, x, dst):
        raise NotRehearsed("a strategy that sends messages of its own cannot be rehearsed")

    irecv = isend

    def settle(self):
        """Wait for what is under way: the next rehearsal begins with nothing."""
        while self.under_way:
            self.under_way.pop(0).wait()

    def require_starting(self):
        if not self.starting:
            raise NotRehearsed("a strategy that broadcasts or gathers in every step cannot be rehearsed")


class NotRehearsed(TypeError):
    """A strategy whose steps cannot be told apart into computing and all-reduces."""


def free(comm, x):
    """The all-reduce of a rehearsal."""
    return comm.all_reduce(x)


def rehearsed(strategy):
    """A copy of `strategy`, which has not started, with an all-reduce that costs nothing. Raises NotRehearsed."""
    if not hasattr(strategy, "all_reduce"):
        raise NotRehearsed(f"{type(strategy).__name__} has no all_reduce that could be left out")
    strategy = copy.deepcopy(strategy)
    strategy.all_reduce = free
    return strategy


def profile_of(comm, samples, step):
    """Call `step()`, a training step on the Rehearsal `comm`; returns its StepProfile. Then nothing is under way."""
    comm.called.clear()
    seen = len(comm.trace.log)
    begin = now_ns()
    step()
    end = now_ns()
    ends = {event.op: event.t1_ns for event in comm.trace.events[seen:]}
    forward, backward, added = ((ends[op] - begin) / 1e9 for op in ("forward", "backward", "add gradients"))
    comm.settle()
    messages = tuple(Message((t - begin) / 1e9, nbytes, beside) for t, nbytes, beside in comm.called)
    return StepProfile(samples, forward, backward, added, (end - begin) / 1e9, messages)

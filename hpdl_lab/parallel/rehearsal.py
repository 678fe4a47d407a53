"""A training step whose messages cost nothing: the strategy is rehearsed, and when it would talk is noted."""

import copy

import numpy as np

from ..comm.base import Comm, Done
from ..comm.buffers import is_tensor
from ..trace import Trace, now_ns
from .overlap_model import Message, StepProfile


class Rehearsal(Comm):
    """The communicator of a rehearsal, as large as `comm`: everybody else is taken to do what this rank does.

    called: [(ns, bytes, whether beside this rank)] of its all-reduces, which leave x as it is.
    starting: whether the strategy may still broadcast parameters and compare notes, which no step does.
    """

    def __init__(self, comm):
        super().__init__(comm.rank, comm.size, Trace(comm.rank, clock=now_ns))
        self.node_rank, self.node_size, self.device = comm.node_rank, comm.node_size, comm.device
        self.runs_beside = comm.runs_beside
        self.called, self.starting = [], True

    def all_reduce(self, x):
        self.called.append((now_ns(), x.nbytes, False))
        return x

    def background(self, fn, *args):
        """Note an all-reduce of the first argument, beside this rank where `comm` can do that."""
        if self.starting:  # the memory that buckets are sent from
            return super().background(fn, *args)
        if fn is not free:
            raise NotRehearsed("a strategy that does more than all-reduces beside a rank cannot be rehearsed")
        self.called.append((now_ns(), args[0].nbytes, self.runs_beside))
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
        return Rehearsal(self)

    def allocate(self, shape, dtype="float32"):
        import torch

        return torch.zeros(shape, dtype=getattr(torch, str(dtype).removeprefix("torch.")))

    def isend(self, x, to):
        raise NotRehearsed("a strategy that sends messages of its own cannot be rehearsed")

    irecv = isend

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
    """Call `step()`, a training step on the Rehearsal `comm`; returns its StepProfile."""
    comm.called.clear()
    seen = len(comm.trace.log)
    begin = now_ns()
    step()
    end = now_ns()
    ends = {event.op: event.t1_ns for event in comm.trace.events[seen:]}
    forward, backward, added = ((ends[op] - begin) / 1e9 for op in ("forward", "backward", "add gradients"))
    messages = tuple(Message((t - begin) / 1e9, nbytes, beside) for t, nbytes, beside in comm.called)
    return StepProfile(samples, forward, backward, added, (end - begin) / 1e9, messages)

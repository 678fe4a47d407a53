"""A training step on simulated ranks: computing takes the virtual time that it took here, and messages are real.

Where both go on at once they slow each other down, as profile.interference says: computing goes in slices, each at the
speed of its beginning, and what a message has not got done beside computing is done behind it.
"""

import torch

ITEMSIZE = 4
SLICES = 64  # of a step, at most: how exactly the end of a message is seen


def simulated_step(comm, profile, all_reduce):
    """Spend the times of `profile`, and call `all_reduce` with as many bytes, and when, as the strategy did.

    Args:    profile: overlap_model.StepProfile, different per rank; all_reduce: f(comm, x), x (n,) float32.
    Returns: s of virtual time that this rank's step took.
    """
    clock, begin = comm.trace.clock, comm.trace.clock()
    step = Step(comm, profile, all_reduce)
    with comm.trace.span("forward"):
        step.go_on_to(profile.forward)
    with comm.trace.span("backward"):
        step.go_on_to(profile.backward)
    with comm.trace.span("add gradients"):
        step.go_on_to(profile.waits)
        step.wait()
        step.go_on_to(profile.added)
    with comm.trace.span("update"):
        step.go_on_to(profile.end)
    return (clock() - begin) / 1e9


class Step:
    """How far one rank is. done: s of the profile; messages: those not called yet; works: those in the background.

    under_way: how many of these have not ended; idle_since: virtual ns since which the rank waits for them, or None.
    """

    def __init__(self, comm, profile, all_reduce):
        self.comm, self.all_reduce, self.interference = comm, all_reduce, profile.interference
        self.done, self.slice = 0.0, profile.end / SLICES
        self.messages, self.works = list(profile.messages), []
        self.under_way, self.idle_since = 0, None

    def go_on_to(self, seconds):
        """Compute until `seconds` of the profile, and call the messages on the way."""
        while self.messages and self.messages[0].at <= seconds:
            message = self.messages.pop(0)
            self.compute(message.at)
            x = torch.zeros(max(1, message.nbytes // ITEMSIZE))
            if message.background:
                self.under_way += 1
                self.works.append(self.comm.background(self.beside, x))
            else:
                self.all_reduce(self.comm, x)
        self.compute(seconds)

    def compute(self, until):
        speed = self.interference.compute
        while self.under_way and speed != 1 and until > self.done:
            part = min(self.slice, until - self.done)
            self.comm.compute(part / speed)
            self.done += part
        if until > self.done:
            self.comm.compute(until - self.done)
            self.done = until

    def wait(self):
        """Wait for all that is in the background."""
        self.idle_since = self.comm.trace.clock()
        for work in self.works:
            work.wait()
        self.works = []

    def beside(self, comm, x):
        """In the background: the all-reduce, and then what it would not have got done beside computing."""
        pace, clock = self.interference.messages, comm.trace.clock
        begin = clock()
        self.all_reduce(comm, x)
        if pace != 1:
            with comm.trace.span("all_reduce"):
                self.make_up(comm, self.beside_computing(begin, clock()) * (1 - pace) / 1e9)
        self.under_way -= 1

    def beside_computing(self, begin, end):
        """ns between `begin` and `end` in which the rank has computed."""
        return (end if self.idle_since is None else max(begin, min(end, self.idle_since))) - begin

    def make_up(self, comm, left):
        """Spend the time for what takes `left` s without computing beside it. Nothing for a pace above 1."""
        pace = self.interference.messages
        while left > 0 and self.idle_since is None:
            part = min(self.slice, left / pace) if pace > 0 else self.slice
            comm.compute(part)
            left -= part * pace
        if left > 0:
            comm.compute(left)

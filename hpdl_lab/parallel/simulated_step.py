"""A training step on simulated ranks: computing takes the virtual time that it took here, and messages are real."""

import torch

ITEMSIZE = 4


def simulated_step(comm, profile, all_reduce):
    """Spend the times of `profile`, and call `all_reduce` with as many bytes, and when, as the strategy did.

    Args:    profile: overlap_model.StepProfile, different per rank; all_reduce: f(comm, x), x (n,) float32.
    Returns: s of virtual time that this rank's step took.
    """
    clock, begin = comm.trace.clock, comm.trace.clock()
    messages, works, done = list(profile.messages), [], 0.0

    def go_on_to(seconds):
        """Compute until `seconds` of the profile, and call the messages on the way."""
        nonlocal done
        while messages and messages[0].at <= seconds:
            message = messages.pop(0)
            compute(max(message.at, done))
            x = torch.zeros(max(1, message.nbytes // ITEMSIZE))
            if message.background:
                works.append(comm.background(all_reduce, x))
            else:
                all_reduce(comm, x)
        compute(seconds)

    def compute(until):
        nonlocal done
        if until > done:
            comm.compute(until - done)
            done = until

    with comm.trace.span("forward"):
        go_on_to(profile.forward)
    with comm.trace.span("backward"):
        go_on_to(profile.backward)
    with comm.trace.span("add gradients"):
        for work in works:
            work.wait()
        go_on_to(profile.added)
    with comm.trace.span("update"):
        go_on_to(profile.end)
    return (clock() - begin) / 1e9

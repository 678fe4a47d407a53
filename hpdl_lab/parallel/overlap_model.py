"""The alpha-beta-overlap model: how long a data-parallel step takes, and how much of its communication shows.

    own thread   | forward | backward  b2 ready   b1 ready   b0 ready | wait | update |
    background                         |-- T(b2) --|-- T(b1) --|-- T(b0) ---|
                                                                      |-----| exposed: nothing else goes on

T(n) is the time of an all-reduce of n bytes, such as cost.all_reduce(p, n).seconds(alpha, beta). What computes is
measured, profile.py; what communicates is a formula; this file puts one beside the other.
"""

from statistics import median
from typing import NamedTuple


class Message(NamedTuple):
    """One all-reduce of a step: s since the step began when it is called, where messages cost nothing; its bytes."""

    at: float
    nbytes: int
    background: bool = False  # whether the rank goes on meanwhile


class StepProfile(NamedTuple):
    """The course of a step on one rank where communication costs nothing: s since the step began.

    samples:  examples of this rank.
    forward, backward, added, end: when forward, backward, the adding of gradients and the step ended.
    messages: the all-reduces in the order of their calls.
    """

    samples: int
    forward: float
    backward: float
    added: float
    end: float
    messages: tuple = ()


class StepTime(NamedTuple):
    """seconds: of the step; communication: s in which an all-reduce was under way; exposed: s of waiting for them."""

    seconds: float
    communication: float
    exposed: float

    @property
    def exposed_share(self):
        """Of the step's time, 0 to 1."""
        return self.exposed / self.seconds if self.seconds else 0.0

    @property
    def overlap_share(self):
        """Of the communication, the part that computing hides, 0 to 1; 0 where there is none."""
        return max(0.0, 1 - self.exposed / self.communication) if self.communication else 0.0


def step_time(profile, time_of):
    """How long a step takes on ranks that all have the same profile.

        blocking      a message holds up all that follows: step = end + sum of T(n_i)
        background    start_i = max(at_i, end of message i - 1); backward waits for the last: exposed = what is left

    Args:    profile: StepProfile; time_of: time_of(nbytes) -> s of one all-reduce among all ranks.
    Returns: StepTime.
    Ref: Li et al. 2020 (PyTorch Distributed); Awan et al. 2017 (S-Caffe); Hockney 1994 (alpha, beta).
    """
    late = 0.0  # s that this rank's own thread has lost to messages so far
    free = 0.0  # when the last message has ended
    communication = 0.0
    for message in profile.messages:
        called = message.at + late
        seconds = time_of(message.nbytes)
        free = max(called, free) + seconds
        communication += seconds
        if not message.background:
            late += free - called
    if any(message.background for message in profile.messages):
        late += max(0.0, free - (profile.backward + late))
    return StepTime(profile.end + late, communication, late)


def between(few, many, samples):
    """The StepProfile for `samples`, on the straight line through two measured ones (beyond them, too; never below 0).

    Args:    few, many: StepProfiles of the same strategy and model, with few.samples < many.samples.
    """
    share = (samples - few.samples) / (many.samples - few.samples)

    def on_line(a, b):
        return max(0.0, a + share * (b - a))

    messages = tuple(
        Message(on_line(a.at, b.at), a.nbytes, a.background) for a, b in zip(few.messages, many.messages, strict=True)
    )
    phases = (on_line(a, b) for a, b in zip(few[1:5], many[1:5], strict=True))
    return StepProfile(samples, *phases, messages)


def median_of(profiles):
    """The StepProfile whose times are medians over `profiles`, of the same strategy, model and number of examples."""
    first = profiles[0]
    phases = (median(times) for times in zip(*(p[1:5] for p in profiles), strict=True))
    calls = (median(m.at for m in same) for same in zip(*(p.messages for p in profiles), strict=True))
    messages = tuple(m._replace(at=at) for m, at in zip(first.messages, calls, strict=True))
    return StepProfile(first.samples, *phases, messages)


def profile_for(profiles, samples):
    """The StepProfile for any number of samples, from some that were measured: list in rising order of samples."""
    above = [p for p in profiles if p.samples >= samples]
    if above and above[0].samples == samples:
        return above[0]
    if len(profiles) == 1:
        return profiles[0]._replace(samples=samples)
    many = above[0] if above and above[0] is not profiles[0] else profiles[-1] if not above else profiles[1]
    return between(profiles[profiles.index(many) - 1], many, samples)

"""The alpha-beta-overlap model: how long a data-parallel step takes, and how much of its communication shows.

    own thread   | forward | backward  b2 ready   b1 ready   b0 ready | wait | update |
    background                         |-- T(b2) --|-- T(b1) --|-- T(b0) ---|
                                                                      |-----| exposed: nothing else goes on

T(n) is the time of an all-reduce of n bytes. What computes is measured, profile.py; what communicates is a formula, or
an evaluated schedule. If both go on at once they take a core, the memory, or Python's interpreter from each other;
how much is found by three timings on real ranks:

    alone    | forward | backward   m0  m1  m2 | update |              computing: a rehearsal in which nothing is sent
    alone    |-- m0 --|-- m1 --|-- m2 --|                              messages: the same all-reduces in a row
    both     | forward  |  backward    m0    m1    m2  |  update  |    a rehearsal that sends them, and waits for none
                                       |--- m0 ---|--- m1 ---|-- m2 --|
                                                               end ^     ^ settled
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple, TypeAlias

from ...predict.graph import Need, TaskGraph

TimeOf: TypeAlias = Callable[[int], float]  # f(bytes) -> s of an all-reduce
SPEEDS = 1 / 16, 4.0  # of computing; above 1 it is noise, which is kept, because the noise below 1 is
PACES = -8.0, 4.0  # of messages, which wait for every rank that computes
HALVINGS = 13  # of these ranges
SEEN = 0.05  # of a step: of less overlap than this nothing can be said


class Message(NamedTuple):
    """An all-reduce of a step: s from the step's begin to its call, if messages cost nothing; its bytes."""

    at: float
    nbytes: int
    background: bool = False  # whether the rank goes on meanwhile


class Interference(NamedTuple):
    """The speeds of computing and of messages while both go on at once. 1: as fast as each does alone.

    A progress thread with a core of its own slows nothing, (1, 1); two that share one core each get half, (0.5, 0.5).
    messages may be 0, if none gets on until computing ends, and below 0: then they lose more than that time.
    """

    compute: float = 1.0
    messages: float = 1.0


class StepProfile(NamedTuple):
    """The course of a step on one rank if communication costs nothing: s since the step began.

    samples:  examples of this rank.
    forward, backward, added, end: when forward, backward, the adding of gradients and the step ended.
    messages: the all-reduces in the order of their calls.
    interference: of computing and the messages in the background.
    """

    samples: int
    forward: float
    backward: float
    added: float
    end: float
    messages: tuple[Message, ...] = ()
    interference: Interference = Interference()

    @property
    def waits(self) -> float:
        """The time of waiting for the background: after backward, and after the last all-reduce is called."""
        return max([self.backward, *(message.at for message in self.messages if message.background)])


class StepTime(NamedTuple):
    """seconds: of the step; communication: s in which an all-reduce was under way; exposed: s of waiting for them."""

    seconds: float
    communication: float
    exposed: float

    @property
    def exposed_share(self) -> float:
        """The exposed share of the step's time, 0 to 1."""
        return self.exposed / self.seconds if self.seconds else 0.0

    @property
    def overlap_share(self) -> float:
        """The part of the communication that computing hides, 0 to 1; 0 if there is none."""
        return max(0.0, 1 - self.exposed / self.communication) if self.communication else 0.0


def step_time(profile: StepProfile, time_of: TimeOf) -> StepTime:
    """Return how long a step takes on ranks that all have the same profile.

        blocking      a message holds up all that follows: step = end + sum of T(n_i)
        background    start_i = max(at_i, end of message i - 1); backward waits for the last: exposed = what is left
                      while both go on, computing and messages go as fast as profile.interference says

    Args:    profile: StepProfile; time_of: time_of(nbytes) -> s of one all-reduce among all ranks.
    Returns: StepTime.
    Ref: Li et al. 2020 (PyTorch Distributed); Awan et al. 2017 (S-Caffe); Hockney 1994 (alpha, beta).
    """
    graph, computing, messages = _tasks_of(profile, time_of)
    compute, rate = profile.interference
    begins, ends = graph.times(speeds={"compute": compute, "messages": rate})
    gaps = (begins[after] - ends[before] for before, after in pairwise(computing))
    return StepTime(ends[computing[-1]], sum(ends[task] - begins[task] for task in messages), sum(gaps))


def _tasks_of(profile: StepProfile, time_of: TimeOf, waits: bool = True) -> tuple[TaskGraph, list[int], list[int]]:
    """Return (Graph, tasks that compute, messages). waits: whether the rank waits for its messages."""
    computing: list[int] = []
    messages: list[int] = []
    graph = TaskGraph()
    needs: list[Need] = []
    done = 0.0  # how far the rank has computed, and the message that holds it up
    for message in profile.messages:
        computing.append(graph.add(max(0.0, message.at - done), needs, row="compute"))
        messages.append(graph.add(time_of(message.nbytes), [Need(computing[-1])], row="messages"))
        done, needs = max(done, message.at), [Need(messages[-1])] if waits and not message.background else []
    computing.append(graph.add(max(0.0, profile.waits - done), needs, row="compute"))
    last = [Need(task) for task in messages[-1:] if waits]
    computing.append(graph.add(profile.end - max(done, profile.waits), last, row="compute"))
    return graph, computing, messages


def _between(few: StepProfile, many: StepProfile, samples: int) -> StepProfile:
    """Return the StepProfile for `samples`, on the line through two measured ones (beyond them, too; never below 0).

    Args:    few, many: StepProfiles of the same strategy and model, with few.samples < many.samples.
    """
    share = (samples - few.samples) / (many.samples - few.samples)

    def on_line(a: float, b: float) -> float:
        return max(0.0, a + share * (b - a))

    messages = tuple(
        Message(on_line(a.at, b.at), a.nbytes, a.background) for a, b in zip(few.messages, many.messages, strict=True)
    )
    forward, backward, added, end = (on_line(a, b) for a, b in zip(few[1:5], many[1:5], strict=True))
    return StepProfile(samples, forward, backward, added, end, messages, many.interference)


def median_of(profiles: Sequence[StepProfile]) -> StepProfile:
    """Return the StepProfile of the median times of `profiles`, of one strategy, model and number of examples."""
    first = profiles[0]
    forward, backward, added, end = (median(times) for times in zip(*(p[1:5] for p in profiles), strict=True))
    calls = (median(m.at for m in same) for same in zip(*(p.messages for p in profiles), strict=True))
    messages = tuple(m._replace(at=at) for m, at in zip(first.messages, calls, strict=True))
    disturbed = Interference(*(median(rates) for rates in zip(*(p.interference for p in profiles), strict=True)))
    return StepProfile(first.samples, forward, backward, added, end, messages, disturbed)


def profile_for(profiles: Sequence[StepProfile], samples: int) -> StepProfile:
    """Return the StepProfile for any number of samples, from some that were measured, in rising order of samples."""
    above = [p for p in profiles if p.samples >= samples]
    if above and above[0].samples == samples:
        return above[0]
    if len(profiles) == 1:
        return profiles[0]._replace(samples=samples)
    many = above[0] if above and above[0] is not profiles[0] else profiles[-1] if not above else profiles[1]
    return _between(profiles[profiles.index(many) - 1], many, samples)


# -- interference ------------------------------------------------------------------------------------------------------


class Both(NamedTuple):
    """A rehearsal that sends its messages, s since it began: when computing ended, and when the last message had."""

    end: float
    settled: float


def interference(profile: StepProfile, time_of: TimeOf, both: Both) -> Interference:
    """Return the Interference with which computing takes until both.end, and messages until both.settled.

    Args:    profile: StepProfile of computing alone; time_of: time_of(nbytes) -> s of an all-reduce alone.
    Returns: Interference; of no interference if too little goes on at once.
    """
    alone = _together(profile, time_of, Interference())
    if profile.messages and min(alone) - profile.messages[0].at < SEEN * profile.end:
        return Interference()

    def compute(pace: float) -> float:
        return _halve(lambda speed: _together(profile, time_of, Interference(speed, pace)).end > both.end, *SPEEDS)

    def too_late(pace: float) -> bool:
        return _together(profile, time_of, Interference(compute(pace), pace)).settled > both.settled

    pace = _halve(too_late, *PACES)
    return Interference(compute(pace), pace)


def _together(profile: StepProfile, time_of: TimeOf, disturbed: Interference) -> Both:
    """Return Both as it would be with the Interference `disturbed`."""
    graph, computing, messages = _tasks_of(profile, time_of, waits=False)
    ends = graph.times(speeds={"compute": disturbed.compute, "messages": disturbed.messages})[1]
    return Both(ends[computing[-1]], ends[messages[-1]] if messages else 0.0)


def _halve(too_slow: Callable[[float], bool], low: float, high: float) -> float:
    """Return the speed between `low` and `high` from which on too_slow(speed) is false."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if too_slow(middle) else (low, middle)
    return (low + high) / 2

"""The alpha-beta-overlap model: how long a data-parallel step takes, and how much of its communication shows.

    own thread   | forward | backward  b2 ready   b1 ready   b0 ready | wait | update |
    background                         |-- T(b2) --|-- T(b1) --|-- T(b0) ---|
                                                                      |-----| exposed: nothing else goes on

T(n) is the time of an all-reduce of n bytes, such as cost.all_reduce(p, n).seconds(alpha, beta). What computes is
measured, profile.py; what communicates is a formula; this file puts one beside the other. Where both go on at once they
take a core, the memory, or Python's interpreter from each other: parallel/scaling/interference.py says how much.
"""

from statistics import median
from typing import NamedTuple


class Message(NamedTuple):
    """One all-reduce of a step: s since the step began when it is called, where messages cost nothing; its bytes."""

    at: float
    nbytes: int
    background: bool = False  # whether the rank goes on meanwhile


class Interference(NamedTuple):
    """How fast a rank computes, and its messages go, while both go on at once. 1: as fast as each does alone.

    A progress thread with a core of its own disturbs nobody, (1, 1); two that share one core each get half, (0.5, 0.5).
    messages may be 0, where none gets on until computing ends, and below 0: then they lose more than that time.
    """

    compute: float = 1.0
    messages: float = 1.0


class StepProfile(NamedTuple):
    """The course of a step on one rank where communication costs nothing: s since the step began.

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
    messages: tuple = ()
    interference: Interference = Interference()

    @property
    def waits(self):
        """When the rank waits for what runs beside it: after backward, and after the last all-reduce is called."""
        return max([self.backward, *(message.at for message in self.messages if message.background)])


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
                      where both go on, computing and messages go as fast as profile.interference says

    Args:    profile: StepProfile; time_of: time_of(nbytes) -> s of one all-reduce among all ranks.
    Returns: StepTime.
    Ref: Li et al. 2020 (PyTorch Distributed); Awan et al. 2017 (S-Caffe); Hockney 1994 (alpha, beta).
    """
    course = Course(profile.interference)
    waits = profile.waits
    for message in profile.messages:
        course.compute_to(message.at)
        course.call(time_of(message.nbytes))
        if not message.background:
            course.wait()
    course.compute_to(waits)
    course.wait()
    course.compute_to(profile.end)
    return StepTime(course.now, course.communication, course.exposed)


class Course:
    """What a rank computes and what goes on beside it, from one change of either to the next. All times in s.

    now: since the step began; done: computing so far; queue: what is left of each message that was called.
    communication: time with a message under way; exposed: time with nothing else; settled: when the last one ended.
    """

    def __init__(self, interference):
        self.interference = interference
        self.now = self.done = self.communication = self.exposed = self.settled = 0.0
        self.queue = []

    def call(self, seconds):
        """Put a message of this length behind those that are under way."""
        self.queue.append(seconds)

    def compute_to(self, done):
        """Compute until `done`, while messages go on."""
        speed, pace = self.interference
        while self.queue and done > self.done:
            left = (done - self.done) / speed
            passed = min(left, self.queue[0] / pace) if pace > 0 else left
            self.done = done if passed == left else self.done + passed * speed
            self.talk(passed, pace)
        self.now += max(0.0, done - self.done)
        self.done = max(done, self.done)

    def wait(self):
        """Do nothing until all messages have ended."""
        while self.queue:
            self.exposed += self.queue[0]
            self.talk(self.queue[0], 1.0)

    def talk(self, passed, pace):
        """The first message goes on for a time of `passed`, at `pace`."""
        self.now += passed
        self.communication += passed
        if pace > 0 and passed >= self.queue[0] / pace:
            self.queue.pop(0)
            self.settled = self.now
        else:
            self.queue[0] -= passed * pace


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
    return StepProfile(samples, *phases, messages, many.interference)


def median_of(profiles):
    """The StepProfile whose times are medians over `profiles`, of the same strategy, model and number of examples."""
    first = profiles[0]
    phases = (median(times) for times in zip(*(p[1:5] for p in profiles), strict=True))
    calls = (median(m.at for m in same) for same in zip(*(p.messages for p in profiles), strict=True))
    messages = tuple(m._replace(at=at) for m, at in zip(first.messages, calls, strict=True))
    disturbed = Interference(*(median(rates) for rates in zip(*(p.interference for p in profiles), strict=True)))
    return StepProfile(first.samples, *phases, messages, disturbed)


def profile_for(profiles, samples):
    """The StepProfile for any number of samples, from some that were measured: list in rising order of samples."""
    above = [p for p in profiles if p.samples >= samples]
    if above and above[0].samples == samples:
        return above[0]
    if len(profiles) == 1:
        return profiles[0]._replace(samples=samples)
    many = above[0] if above and above[0] is not profiles[0] else profiles[-1] if not above else profiles[1]
    return between(profiles[profiles.index(many) - 1], many, samples)

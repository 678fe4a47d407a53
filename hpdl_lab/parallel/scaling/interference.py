"""How much computing and the messages beside it slow each other down, found by three timings on real ranks.

    alone    | forward | backward   m0  m1  m2 | update |              computing: a rehearsal in which nothing is sent
    alone    |-- m0 --|-- m1 --|-- m2 --|                              messages: the same all-reduces in a row
    both     | forward  |  backward    m0    m1    m2  |  update  |    a rehearsal that sends them, and waits for none
                                       |--- m0 ---|--- m1 ---|-- m2 --|
                                                               end ^     ^ settled

An all-reduce written in Python takes its interpreter from the training every few microseconds, and waits for it up to 5
ms (sys.getswitchinterval). One that is compiled needs no interpreter, but a core, where ranks share cores; and both
move bytes through the memory that backward reads. The two speeds of an Interference are what of it can be seen: those
with which overlap_model.Course puts the first two timings together to the third.
"""

from typing import NamedTuple

from .overlap_model import Course, Interference

SPEEDS = 1 / 16, 4.0  # of computing; above 1 it is noise, which is kept, because the noise below 1 is
PACES = -8.0, 4.0  # of messages, which wait for every rank that computes: see overlap_model.Interference
HALVINGS = 13  # of these ranges
SEEN = 0.05  # of a step: of less overlap than this nothing can be said


class Both(NamedTuple):
    """A rehearsal with messages beside it, s since it began: when computing ended, and when the last message had."""

    end: float
    settled: float


def interference(profile, time_of, both):
    """The Interference with which computing takes until both.end, and messages until both.settled.

    Args:    profile: StepProfile of computing alone; time_of: time_of(nbytes) -> s of an all-reduce alone.
    Returns: Interference; of no interference where too little goes on at once to tell.
    """
    alone = together(profile, time_of, Interference())
    if profile.messages and min(alone) - profile.messages[0].at < SEEN * profile.end:
        return Interference()

    def compute(pace):
        return halve(lambda speed: together(profile, time_of, Interference(speed, pace)).end > both.end, *SPEEDS)

    def too_late(pace):
        return together(profile, time_of, Interference(compute(pace), pace)).settled > both.settled

    pace = halve(too_late, *PACES)
    return Interference(compute(pace), pace)


def together(profile, time_of, disturbed):
    """Both, as it would be with the Interference `disturbed`."""
    course = Course(disturbed)
    for message in profile.messages:
        course.compute_to(message.at)
        course.call(time_of(message.nbytes))
    course.compute_to(profile.end)
    end = course.now
    course.wait()
    return Both(end, course.settled)


def halve(too_slow, low, high):
    """The speed between `low` and `high` from which on too_slow(speed) is false."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if too_slow(middle) else (low, middle)
    return (low + high) / 2

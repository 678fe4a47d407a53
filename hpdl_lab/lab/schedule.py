"""`lab.schedule`: a pipeline schedule drawn over time, with its bubble and what every rank holds."""

import inspect
from dataclasses import dataclass, field
from numbers import Integral, Real

from .. import schedules
from ..plots import animation, live
from ..plots import schedule as drawing
from ..plots.schedule import of_schedule
from ..schedules import Action, Schedule
from ..schedules.strings import parse
from ..trace import number_text
from .picture import WithFigure, picture

MOST_FRAMES = 16  # of the animation
FRAME_MS = 350  # from frame to frame
MOST_ACTIONS = 4000  # that one picture can hold


@dataclass(frozen=True)
class Drawn(WithFigure):
    """A schedule and its times: makespan in units of the costs given; bubble 0 to 1; live: the most that a rank holds.

    live: for each rank, how many micro-batches' activations at once.
    """

    schedule: Schedule = field(repr=False)
    makespan: float
    bubble: float
    live: list
    figure: object = field(repr=False)

    def __repr__(self):
        plan = self.schedule
        return (
            f"{plan.name} on {of_schedule(plan)}: "
            f"{number_text(float(self.makespan))} units of time, bubble {self.bubble:.1%}, "
            f"live activations at most {', '.join(map(str, self.live))}"
            f"{f', of stages 1/{plan.chunks} as long' if plan.chunks > 1 else ''}"
        )


def schedule(
    schedule="1f1b",
    ranks=4,
    micro_batches=8,
    chunks=None,
    forward=1,
    backward=2,
    input=1,
    weight=1,
    transfer=0,
    live=False,
):
    """Draw a pipeline schedule over time; hatched is the bubble, in which ranks wait.

        lab.schedule("1f1b", ranks=4, micro_batches=8)
        lab.schedule("interleaved", chunks=2)
        lab.schedule(my_row, live=True)               your function f(rank, ranks, micro_batches), played

    Args:    schedule: a name of schedules.CATALOG, a Schedule, or a function that makes the row of one rank.
             chunks: stages per rank, where the schedule has several. live: play it above the picture, action by action.
             forward, backward, input, weight: time of F, B and of the halves of B; a number or one per stage.
             transfer: time of a message between ranks.
    Returns: Drawn.
    Raises:  ValueError, one sentence, before anything is drawn: a micro-batch that is lost, the cycle of ranks that
             would wait for each other, an action before what it needs.
    """
    if isinstance(ranks, int) and isinstance(micro_batches, int):
        require_few(2 * ranks * micro_batches)  # before they are made
    plan = asked_schedule(schedule, ranks, micro_batches, chunks)
    require_few(sum(map(len, plan.rows)))
    require_times(plan, forward=forward, backward=backward, input=input, weight=weight, transfer=transfer)
    times = schedules.evaluate(plan, forward, backward, input, weight, transfer)
    text = f"{plan.name}: {of_schedule(plan)}, bubble {times.bubble:.1%}"
    if live:
        play(plan, times, text)
    shown = picture(drawing.draw, plan, times, text=text, height=drawing.height(plan))
    return Drawn(plan, times.makespan, times.bubble, list(times.peak), shown.figure)


def require_few(actions):
    """Raise ValueError where one picture cannot hold so many actions."""
    if actions > MOST_ACTIONS:
        raise ValueError(f"{actions:,} actions do not fit a picture: take fewer ranks or micro-batches")


def require_times(plan, transfer, **times):
    """Raise ValueError unless each is a time above 0, or one for every stage, and `transfer` a time of at least 0."""
    if not isinstance(transfer, Real) or not 0 <= transfer < float("inf"):
        raise ValueError(f"transfer={transfer!r}: a time of a message, of at least 0, is needed")
    for name, time in times.items():
        each = time if isinstance(time, list | tuple) else [time]
        good = all(isinstance(t, Real) and 0 < t < float("inf") for t in each)
        if not good or len(each) not in (1, plan.stages):
            raise ValueError(f"{name}={time!r}: a time above 0 is needed, or one for each of {plan.stages} stages")


def asked_schedule(schedule, ranks, micro_batches, chunks=None):
    """The Schedule that is meant, which is valid. Raises ValueError, TypeError in one sentence."""
    if isinstance(schedule, Schedule):
        plan = schedule
    elif isinstance(schedule, str):
        plan = schedules.build(schedule, ranks, micro_batches, chunks)
    elif callable(schedule):
        plan = schedule_of(schedule, ranks, micro_batches, chunks)
    else:
        known = ", ".join(schedules.CATALOG)
        raise TypeError(f"{schedule!r} is no schedule: a name ({known}), a Schedule or a function of a row is needed")
    return schedules.validate(plan)


def schedule_of(row, ranks, micro_batches, chunks=None):
    """The Schedule of a function f(rank, ranks, micro_batches), or f(..., chunks): one row for each rank."""
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks or 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{what} of a schedule is a whole number, at least 1, got {number!r}")
    name = getattr(row, "__name__", "your schedule")
    try:
        takes = inspect.signature(row).parameters
    except ValueError:  # of some functions that are written in C
        raise TypeError(f"{name} is no function of a row: f(rank, ranks, micro_batches) is needed") from None
    chunks = chunks or (2 if "chunks" in takes else 1)
    more = (chunks,) if "chunks" in takes else ()
    rows = tuple(actions_of(row(rank, ranks, micro_batches, *more), name, rank) for rank in range(ranks))
    return Schedule(name, ranks, ranks * chunks, micro_batches, 1, rows)


def actions_of(row, name, rank):
    """A tuple of Action of what the function has made for one rank. Raises TypeError."""
    actions = []
    try:
        for place, item in enumerate(row):
            if isinstance(item, str):  # "2F5", as torch writes them
                actions += parse(item, rank, place)
            else:
                actions.append(Action(*item))
        good = all(isinstance(n, Integral) for a in actions for n in (a.stage, a.micro_batch))
    except TypeError:
        good = False
    if not good:
        raise TypeError(
            f"{name}({rank}, ...) returned {row!r:.80}: a list of Action(stage, kind, micro_batch) is needed"
        )
    return tuple(actions)


def play(plan, times, text):
    """The schedule as it grows, in a notebook."""
    if not live.in_notebook():
        return
    moments = sorted({timed.end for row in times.rows for timed in row})
    chosen = [moments[round((i + 1) * len(moments) / MOST_FRAMES) - 1] for i in range(MOST_FRAMES)]
    chosen = list(dict.fromkeys(chosen if len(moments) > MOST_FRAMES else moments))
    frames = [(plan, times, "", now) for now in chosen]
    animation.show(drawing.draw, frames, f"{text}, played", drawing.height(plan), frame_ms=FRAME_MS)

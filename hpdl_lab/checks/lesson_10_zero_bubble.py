"""Notebook 10, ZB-H1: the gradients of weights fill the bubble of 1F1B, in its memory."""

from ..schedules.zero_bubble import zero_bubble_h1
from .pipeline_rows import CASES, SHOW, beginning, facts_of, schedule_of, shown, times_of
from .record import Broken, Exercise, Passed

FILLED = tuple((p, m) for p, m in CASES if m >= p)  # ZB-H1 needs so many micro-batches


def check_zero_bubble_h1(fn, runner=None):
    for p, m in FILLED:
        schedule = schedule_of(fn, p, m, "FIW")
        times = times_of(schedule)
        if max(times.peak) > p:
            rank = times.peak.index(max(times.peak))
            message = (
                f"{beginning(schedule)} rank {rank} holds the activations of {times.peak[rank]} micro-batches at once: "
                f"they live until W is done, and ZB-H1 gets by with p = {p}, as 1F1B on rank 0. How many Ws do you "
                "keep back?"
            )
            raise Broken("memory", message, shown(schedule, times))
        if times.makespan > 3 * m + p - 1:
            raise Broken("bubble", not_filled(schedule, times), shown(schedule, times))
    p, m = SHOW
    memory = f"held at most: {p} micro-batches, as by 1F1B, whose bubble is {3 * (p - 1) / (3 * (m + p - 1)):.1%}"
    return Passed(facts_of(fn, FILLED, "FIW", memory))


def not_filled(schedule, times):
    """The message about a bubble that is larger than it has to be."""
    p, m = schedule.ranks, schedule.micro_batches
    text = (
        f"{beginning(schedule)} F, I and W take 1 each, and your schedule {times.makespan}, where 3m+p-1 = "
        f"{3 * m + p - 1} would do: {times.bubble:.0%} of it is bubble, not {(p - 1) / (3 * m + p - 1):.0%}. "
    )
    places = [{(action.kind, action.micro_batch): place for place, action in enumerate(row)} for row in schedule.rows]
    if all(row["W", i] == row["I", i] + 1 for row in places for i in range(m)):
        return f"{text}Every W follows its I at once, so the ranks wait where 1F1B's wait: keep Ws back to fill that."
    gap = next((r for r in reversed(range(p)) if times.rows[r][-1].end < times.makespan), 0)
    return f"{text}Rank {gap} still waits where a W could be done: which W is left by then?"


EXERCISES = (
    Exercise(
        id="10.4",
        title="ZB-H1: weights fill the bubble",
        reference=zero_bubble_h1,
        stars=3,
        check=check_zero_bubble_h1,
        explanation=(
            "1F1B's bubble is (p-1)(tf+tb) = 9 of 33 for p=4, m=8; ZB-H1's is (p-1)(F+I-W) = 3 of 27, for the same "
            "memory. With twice the memory, ZB-H2 has none at all. It needs a backward that can be had in halves: "
            "parallel/pipeline/stage.py."
        ),
        parallel=False,
    ),
)

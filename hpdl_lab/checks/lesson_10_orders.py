"""Notebook 10, schedules: what a rank does in GPipe and in 1F1B; judged by bubble and memory."""

from ..schedules.gpipe import gpipe
from ..schedules.one_f_one_b import one_f_one_b
from .pipeline_rows import CASES, SHOW, beginning, facts_of, schedule_of, shown, times_of
from .ranks import count
from .record import Broken, Exercise, Passed

COSTS = ((1, 2), (1, 1), (2, 1))  # time of forward and of backward


def check_gpipe(fn, runner=None):
    for p, m in CASES:
        schedule = schedule_of(fn, p, m, "FB")
        for rank, row in enumerate(schedule.rows):
            check_forwards_first(schedule, rank, row)
        check_makespan(schedule, "Do all ranks take the micro-batches in the same order?")
    return Passed(
        facts_of(fn, CASES, "FB", f"held: {SHOW[1]} micro-batches on every rank, all of them: 10.2 needs fewer")
    )


def check_forwards_first(schedule, rank, row):
    """Raise Broken where a backward comes before a forward."""
    kinds = [action.kind for action in row]
    forwards = [place for place, kind in enumerate(kinds) if kind == "F"]
    early = next((place for place in range(forwards[-1]) if kinds[place] == "B"), None)
    if early is not None:
        p, m, times = schedule.ranks, schedule.micro_batches, times_of(schedule)
        why = "GPipe's synchronous step has all forwards first."
        if times.makespan == 3 * m * p and p > 1:
            why = f"So only one of {p} ranks works at a time: no pipeline, {times.bubble:.0%} bubble. {why}"
        message = f"{beginning(schedule)} rank {rank} does {row[early]} while forwards are still to come. {why}"
        raise Broken("forwards first", message, shown(schedule, times))


def check_makespan(schedule, question):
    """Raise Broken unless the schedule takes (m + p - 1)(tf + tb), for several tf and tb."""
    p, m = schedule.ranks, schedule.micro_batches
    for tf, tb in COSTS:
        times, least = times_of(schedule, forward=tf, backward=tb), (m + p - 1) * (tf + tb)
        if times.makespan > least:
            message = (
                f"{beginning(schedule)} a forward takes {tf}, a backward {tb}, and your schedule {times.makespan}, "
                f"where (m+p-1)(tf+tb) = {least} would do: {times.bubble:.0%} of it is bubble, not "
                f"{(p - 1) / (m + p - 1):.0%}. {question}"
            )
            raise Broken("bubble", message, shown(schedule, times))


def check_one_f_one_b(fn, runner=None):
    for p, m in CASES:
        schedule = schedule_of(fn, p, m, "FB")
        times = times_of(schedule)
        for rank, peak in enumerate(times.peak):
            if peak > min(m, p - rank):
                raise Broken("memory", too_many_live(schedule, times, rank), shown(schedule, times))
        check_makespan(schedule, "Warm-up: how many forwards before the first backward comes back?")
    return Passed(
        facts_of(fn, CASES, "FB", f"held at most: {', '.join(map(str, range(SHOW[0], 0, -1)))} micro-batches, not 8")
    )


def too_many_live(schedule, times, rank):
    """The message about a rank that holds more than it has to."""
    m, peak, enough = schedule.micro_batches, times.peak[rank], min(schedule.micro_batches, schedule.ranks - rank)
    text = (
        f"{beginning(schedule)} rank {rank} holds the activations of {peak} micro-batches at once, and 1F1B needs "
        f"min(m, p - rank) = {enough}. "
    )
    if set(times.peak) == {m}:
        return f"{text}That is GPipe: as short, but m live everywhere. Do a backward as soon as one is possible."
    if len(set(times.peak)) == 1:
        return f"{text}All ranks hold as many. A later rank has its first backward sooner: it warms up less."
    return f"{text}Backward should come {count(peak - enough, 'forward')} sooner."


EXERCISES = (
    Exercise(
        id="10.1",
        title="GPipe: all forwards, then all backwards",
        reference=gpipe,
        stars=2,
        check=check_gpipe,
        explanation=(
            "The bubble is (p-1)/(m+p-1): more micro-batches make it small, and GPipe advises m >= 4p. But every rank "
            "holds the activations of all m, which is why GPipe came with activation checkpointing."
        ),
        parallel=False,
    ),
    Exercise(
        id="10.2",
        title="1F1B: a backward as soon as there is one",
        reference=one_f_one_b,
        stars=2,
        check=check_one_f_one_b,
        explanation=(
            "As long as GPipe, with p - rank instead of m micro-batches in memory: m can grow for nothing. Rank 0 pays "
            "most, and its peers at the end have room to spare. PipeDream-Flush, DAPPLE and Megatron-LM run it."
        ),
        parallel=False,
    ),
)

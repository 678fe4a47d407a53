"""When everything in a schedule happens, and how much waits in memory: arithmetic, without ranks.

Every rank does its actions in order, each as soon as what it needs is there. The numbers may be ints, floats or
fractions: nothing but sums and one division by the number of chunks is done with them.
"""

from collections import defaultdict
from collections.abc import Iterable
from numbers import Real
from typing import NamedTuple

from .schedule import Action, require_schedule


class Timed(NamedTuple):
    """An action with its begin and its end."""

    action: Action
    begin: float
    end: float


class Evaluation(NamedTuple):
    """What evaluate found.

    rows:     rows[r] is a tuple of Timed of rank r, in order.
    makespan: when the last rank ends.
    bubble:   share of the ranks' time, from 0 to the makespan, in which they wait.
    live:     live[r] is a tuple of (time, count): from then on rank r holds the activations of `count` micro-batches,
              from the begin of a forward to the end of its backward, or of its weight gradient. With v chunks per
              rank each stage counts for itself, and its activations are 1/v as large.
    peak:     peak[r] is the largest count of rank r.
    """

    rows: tuple
    makespan: float
    bubble: float
    live: tuple
    peak: tuple


def evaluate(schedule, forward=1, backward=2, input=1, weight=1, transfer=0):
    """Time a schedule.

    Args:    forward, backward, input, weight: time of an F, B, I, W. A number is what one micro-batch costs on a
             rank: with v chunks each takes 1/v of it. A sequence has one number for each stage of the model.
             transfer: from the end of an action to the begin of what needs it on another rank.
    Returns: Evaluation.
    Raises:  ValueError that names the cycle where the schedule deadlocks; for sequences of another length, and what is
             no time; TypeError for what is no Schedule.
    """
    require_schedule(schedule)
    costs = {"F": per_stage(schedule, "forward", forward), "B": per_stage(schedule, "backward", backward)}
    costs |= {"I": per_stage(schedule, "input", input), "W": per_stage(schedule, "weight", weight)}
    return summary(timed(schedule, costs, transfer))


def per_stage(schedule, what, cost):
    """One number for each stage of the model."""
    if isinstance(cost, Real):
        costs = [cost / schedule.chunks if schedule.chunks > 1 else cost] * schedule.stages
    else:
        costs = list(cost) if isinstance(cost, Iterable) else [cost]
    if wrong := [time for time in costs if not isinstance(time, Real) or not time >= 0]:
        raise ValueError(f"{what} takes a time of at least 0, or one for each stage, got {wrong[0]!r}")
    if len(costs) != schedule.stages:
        raise ValueError(f"{what} has {len(costs)} numbers, and {schedule.name} has {schedule.stages} stages")
    return costs


def timed(schedule, costs, transfer):
    """A list of Timed for each rank.

    Goes on with one rank until it has to wait, then with any that has not, until all have ended, or all wait.
    """
    rows, ends = [[] for _ in schedule.rows], {}
    waiting = defaultdict(list)  # (stage, micro-batch) -> ranks that wait for something of it
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        row = rows[rank]
        now = row[-1].end if row else 0
        for action in schedule.rows[rank][len(row) :]:
            begin, missing = begin_of(schedule, rank, action, now, ends, transfer)
            if missing:
                waiting[missing[0], missing[2]].append(rank)
                break
            ends[action] = now = begin + costs[action.kind][action.stage % schedule.stages]
            row.append(Timed(action, begin, now))
            ready += waiting.pop((action.stage, action.micro_batch), [])
    if any(len(row) < len(actions) for row, actions in zip(rows, schedule.rows, strict=True)):
        raise ValueError(told_cycle(schedule, [len(row) for row in rows], ends))
    return rows


def begin_of(schedule, rank, action, free, ends, transfer):
    """(when `action` begins on `rank`, which is free then, None), or (free, the first that it needs and has not ended).

    What it needs is as Schedule.needs has it; ends: {action: when it has ended}.
    """
    begin = free
    for need in schedule.needs(action):
        stage, kinds, micro_batch = need
        for kind in kinds:
            if (stage, kind, micro_batch) in ends:
                break
        else:
            return free, need
        end = ends[stage, kind, micro_batch]
        if schedule.rank_of(stage) != rank:
            end += transfer
        if end > begin:
            begin = end
    return begin, None


def told_cycle(schedule, heads, ends):
    """The sentence about ranks that wait for each other; rank r is about to do action heads[r] of its row."""
    rank = next(r for r, row in enumerate(schedule.rows) if heads[r] < len(row))
    passed, steps = [], []
    while rank not in passed:
        passed.append(rank)
        action = schedule.rows[rank][heads[rank]]
        stage, kinds, micro_batch = begin_of(schedule, rank, action, 0, ends, 0)[1]
        later = [(r, a) for r, row in enumerate(schedule.rows) for a in row[heads[r] :]]
        found = [(r, a) for r, a in later if (a.stage, a.micro_batch) == (stage, micro_batch) and a.kind in kinds]
        if not found:
            lost = Action(stage, kinds[0], micro_batch)
            return f"{schedule.name}: rank {rank} waits at {action} for {lost}, which no rank does"
        rank, needed = found[0]
        steps.append(f"at {action} for {needed} of rank {rank}")
    return f"{schedule.name} deadlocks: rank {rank} waits " + ", which waits ".join(steps[passed.index(rank) :])


def summary(rows):
    """The Evaluation of a list of Timed for each rank, measured or calculated; the clock begins at 0."""
    makespan = max((row[-1].end for row in rows if row), default=0)
    busy = sum(end - begin for row in rows for _, begin, end in row)
    live = tuple(held(row) for row in rows)
    return Evaluation(
        rows=tuple(map(tuple, rows)),
        makespan=makespan,
        bubble=1 - busy / (makespan * len(rows)) if makespan else 0,
        live=live,
        peak=tuple(max((count for _, count in counts), default=0) for counts in live),
    )


def held(row):
    """((time, count), ...) of one rank: how many micro-batches' activations it holds from that time on."""
    changes = [(begin, 1) for action, begin, _ in row if action.kind == "F"]
    changes += [(end, -1) for action, _, end in row if action.kind in "BW"]
    counts, count = [], 0
    for time, change in sorted(changes):  # at equal times the -1 first: what ends makes room for what begins
        count += change
        if counts and counts[-1][0] == time:
            counts.pop()
        counts.append((time, count))
    return tuple(counts)

"""When everything in a schedule happens, and how much waits in memory: arithmetic, without ranks.

Every rank does its actions in order, each as soon as what it needs is there. The numbers may be ints, floats or
fractions: nothing but sums and one division by the number of chunks is done with them.
"""

from collections import defaultdict
from typing import NamedTuple


class Timed(NamedTuple):
    """An action with its begin and its end."""

    action: tuple
    begin: float
    end: float


class Evaluation(NamedTuple):
    """What evaluate found.

    rows:     rows[r] is a tuple of Timed of rank r, in order.
    makespan: when the last rank ends.
    bubble:   share of the ranks' time, from 0 to the makespan, in which they wait.
    live:     live[r] is a tuple of (time, count): from then on rank r holds the activations of `count` micro-batches,
              from the begin of a forward to the end of its backward, or of its weight gradient. A chunk counts as one.
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
    Raises:  ValueError that names the cycle where the schedule deadlocks; for sequences of another length.
    """
    costs = {
        kind: per_stage(schedule, cost, what)
        for kind, cost, what in (
            ("F", forward, "forward"),
            ("B", backward, "backward"),
            ("I", input, "input"),
            ("W", weight, "weight"),
        )
    }
    rows, done = [[] for _ in schedule.rows], {}
    clocks, heads = [0] * len(schedule.rows), [0] * len(schedule.rows)
    waiting = defaultdict(list)  # (stage, micro-batch) -> ranks whose next action needs something of it
    ready = list(range(len(schedule.rows)))
    while ready:
        rank = ready.pop()
        row = schedule.rows[rank]
        while heads[rank] < len(row):
            action = row[heads[rank]]
            begin, missing = clocks[rank], None
            for need in schedule.needs(action):
                end = ended(need, done)
                if end is None:
                    missing = need
                    break
                apart = schedule.rank_of(need[0]) != rank
                begin = max(begin, end + transfer if apart else end)
            if missing is not None:
                waiting[missing[0], missing[2]].append(rank)
                break
            clocks[rank] = done[action] = begin + costs[action.kind][action.stage % schedule.stages]
            rows[rank].append(Timed(action, begin, clocks[rank]))
            heads[rank] += 1
            ready += waiting.pop((action.stage, action.micro_batch), [])
    if any(head < len(row) for head, row in zip(heads, schedule.rows, strict=True)):
        raise ValueError(told_cycle(schedule, heads))
    makespan = max(clocks, default=0)
    busy = sum(timed.end - timed.begin for row in rows for timed in row)
    live = tuple(held(row) for row in rows)
    return Evaluation(
        rows=tuple(map(tuple, rows)),
        makespan=makespan,
        bubble=1 - busy / (makespan * len(rows)) if makespan else 0,
        live=live,
        peak=tuple(max((count for _, count in counts), default=0) for counts in live),
    )


def per_stage(schedule, cost, what):
    """One number for each stage of the model."""
    try:
        costs = list(cost)
    except TypeError:
        return [cost / schedule.chunks if schedule.chunks > 1 else cost] * schedule.stages
    if len(costs) != schedule.stages:
        raise ValueError(f"{what} has {len(costs)} numbers, and {schedule.name} has {schedule.stages} stages")
    return costs


def ended(need, done):
    """When what is needed was done, None if it was not yet."""
    stage, kinds, micro_batch = need
    for kind in kinds:
        if (stage, kind, micro_batch) in done:
            return done[stage, kind, micro_batch]
    return None


def held(row):
    """((time, count), ...) of one rank's Timed actions: what it holds from that time on."""
    changes = []
    for action, begin, end in row:
        if action.kind == "F":
            changes.append((begin, 1))
        elif action.kind in "BW":
            changes.append((end, -1))
    counts, count = [], 0
    for time, change in changes:
        count += change
        if counts and counts[-1][0] == time:
            counts[-1] = (time, count)
        else:
            counts.append((time, count))
    return tuple(counts)


def told_cycle(schedule, heads):
    """The sentence about ranks that wait for each other, each at the action heads[rank] of its row."""
    rank = next(r for r, row in enumerate(schedule.rows) if heads[r] < len(row))
    seen, steps = [], []
    done = {action for row, head in zip(schedule.rows, heads, strict=True) for action in row[:head]}
    while rank not in seen:
        seen.append(rank)
        action = schedule.rows[rank][heads[rank]]
        stage, kinds, micro_batch = next(
            need for need in schedule.needs(action) if not any((need[0], k, need[2]) in done for k in need[1])
        )
        there = [a for row in schedule.rows for a in row if a.stage == stage and a.micro_batch == micro_batch]
        needed = next((a for a in there if a.kind in kinds), None)
        if needed is None:
            return f"rank {rank} waits at {action} for {stage}{kinds[0]}{micro_batch}, which no rank does"
        rank = schedule.rank_of(stage)
        steps.append(f"at {action} for {needed} of rank {rank}")
    cycle = steps[seen.index(rank) :]
    return f"{schedule.name} deadlocks: rank {rank} waits " + ", which waits ".join(cycle)

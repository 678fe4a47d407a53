"""How long a pipeline takes, in milliseconds of our own time: schedules.evaluate for stages of any length, and fast.

The order of a schedule's actions is found once. After a few rounds a pipeline repeats itself, so a step with many
micro-batches is one with few, and as much more as the last round took.

    T(m) = T(2n) + (m / n - 2) (T(2n) - T(n))         for m > 2n micro-batches, n = twice the ranks, or a multiple of n
"""

import functools
from typing import NamedTuple

from ... import schedules

MANY = 16  # ranks from which a round of as many micro-batches as ranks is long enough
KINDS = {"F": 0, "B": 1, "I": 2, "W": 3}


class PipelineTime(NamedTuple):
    """s: ends[rank], when its last action ends; gradients[rank]: ((stage, s, s), ...), when the
    action with which a stage's are complete begins and ends."""

    ends: tuple
    gradients: tuple

    @property
    def seconds(self):
        return max(self.ends)


def pipeline_time(name, ranks, micro_batches, costs, transfer, chunks=None):
    """The times of one step.

    Args:    name: of a schedule; costs: per stage of the model (forward, backward, input, weight) in s.
             transfer: s of a message between stages on different ranks.
    Returns: PipelineTime.
    Raises:  ValueError as schedules.build.
    """
    period = 2 * ranks if ranks < MANY else ranks
    if micro_batches <= 2 * period:
        return timed(order_of(name, ranks, micro_batches, chunks), ranks, costs, transfer)
    more, rest = divmod(micro_batches - period, period)
    short = timed(order_of(name, ranks, period + rest, chunks), ranks, costs, transfer)
    long = timed(order_of(name, ranks, 2 * period + rest, chunks), ranks, costs, transfer)

    def go_on(few, many):
        return many + (more - 1) * (many - few)

    ends = tuple(map(go_on, short.ends, long.ends))
    gradients = tuple(
        tuple((stage, *map(go_on, few, many)) for (stage, *few), (_, *many) in zip(a, b, strict=True))
        for a, b in zip(short.gradients, long.gradients, strict=True)
    )
    return PipelineTime(ends, gradients)


class Order(NamedTuple):
    """The actions of a schedule, each after what it needs: (rank, stage, stage of the model, kind, need, apart).

    need: the number of the action before it on another stage, -1 for none; apart: 1 where that is on another rank.
    last: per rank, (stage, number of the action with which its gradients are complete).
    """

    actions: tuple
    last: tuple


@functools.lru_cache(maxsize=512)
def order_of(name, ranks, micro_batches, chunks):
    """The Order of a schedule, which does not depend on how long anything takes."""
    plan = schedules.build(name, ranks, micro_batches, chunks)
    rows = schedules.evaluate(plan).rows
    placed = sorted((t.begin, t.end, rank, i) for rank, row in enumerate(rows) for i, t in enumerate(row))
    numbers, actions, last = {}, [], [{} for _ in range(ranks)]
    for _, _, rank, i in placed:
        action = rows[rank][i].action
        need = -1
        for stage, kinds, micro_batch in plan.needs(action):
            if stage != action.stage or plan.rank_of(stage) != rank:
                need = next(n for k in kinds if (n := numbers.get((stage, k, micro_batch))) is not None)
        apart = int(need >= 0 and actions[need][0] != rank)
        numbers[action] = len(actions)
        if action.kind in "BW":
            last[rank][action.stage] = len(actions)
        actions.append((rank, action.stage % plan.stages, KINDS[action.kind], need, apart))
    return Order(tuple(actions), tuple(tuple(sorted(stages.items())) for stages in last))


def timed(order, ranks, costs, transfer):
    """The PipelineTime of an Order."""
    clocks, begins, ends, late = [0.0] * ranks, [], [], (0.0, transfer)  # two lists: pairs take longer
    for rank, stage, kind, need, apart in order.actions:
        begin = clocks[rank]
        if need >= 0:
            there = ends[need] + late[apart]
            if there > begin:
                begin = there
        clocks[rank] = end = begin + costs[stage][kind]
        begins.append(begin)
        ends.append(end)
    gradients = tuple(tuple((stage, begins[n], ends[n]) for stage, n in stages) for stages in order.last)
    return PipelineTime(tuple(clocks), gradients)

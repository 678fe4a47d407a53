"""What a rank of a grid holds, in bytes: parameters, gradients, the optimizer's state, activations.

a GPT on dp=2, pp=2, tp=2                   held by one rank                   divided by
parameters, gradients, optimizer            of its layers                      pp and tp, not dp
activations of one micro-batch              of its layers                      pp and partly tp; sequence: wholly
    times the micro-batches in flight       gpipe m, 1f1b min(m, pp - stage)   the schedule
with recomputation                          inputs of its stages only, and one micro-batch of one stage whole
"""

import functools
from typing import NamedTuple

from .. import schedules
from .partition import partition


class Memory(NamedTuple):
    """Bytes of one rank, by what they are for."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self):
        return sum(self)


def stages_of(spec, stages):
    """The layers of each stage: tuples of Layers, cut so that the most that a stage computes is least.

    Raises:  ValueError where there are more stages than layers.
    """
    require_layers(spec, stages)
    return _stages_of(spec, stages)


def require_layers(spec, stages):
    """Raise ValueError unless there is a layer for each stage."""
    if stages > len(spec.layers):
        raise ValueError(f"{spec.name} has {len(spec.layers)} layers, which cannot be shared by {stages} stages")


@functools.lru_cache(maxsize=256)
def _stages_of(spec, stages):
    costs = [layer.flops for layer in spec.layers]
    sizes = partition(costs, stages)
    cuts = [sum(sizes[:i]) for i in range(stages + 1)]
    return tuple(spec.layers[a:b] for a, b in zip(cuts, cuts[1:], strict=False))


class Deal(NamedTuple):
    """How a schedule deals out the stages. held: per rank, its stages of the model; stages, replicas: of the schedule.

    in_flight: per rank ((stage of the model, micro-batches whose activations it holds), ...) when it holds most.
    """

    stages: int
    replicas: int
    held: tuple
    in_flight: tuple


def deal(schedule, ranks, micro_batches, chunks=None):
    """The Deal of a schedule. Raises ValueError as schedules.build.

    After a few rounds a rank's order repeats itself, so that three show how much is in flight; not so in GPipe.
    """
    few = micro_batches if schedule == "gpipe" else min(micro_batches, 3 * ranks + micro_batches % ranks)
    return _deal(schedule, ranks, few, chunks)


@functools.lru_cache(maxsize=4096)
def _deal(schedule, ranks, micro_batches, chunks):
    if schedule == "gpipe":  # all forwards before the first backward, whatever their number
        schedules.build(schedule, ranks, 1, chunks)
        return Deal(ranks, 1, tuple((r,) for r in range(ranks)), tuple(((r, micro_batches),) for r in range(ranks)))
    plan = schedules.build(schedule, ranks, micro_batches, chunks)
    most = []
    for row in plan.rows:
        held, best, now, total = {}, {}, 0, 0
        for stage, kind, _ in row:
            change = {"F": 1, "B": -1, "I": 0, "W": -1}[kind]
            held[stage] = held.get(stage, 0) + change
            now += change
            if now > total:
                best, total = dict(held), now
        most.append(tuple((stage % plan.stages, n) for stage, n in best.items()))
    held = tuple(tuple(stage % plan.stages for stage in plan.stages_of(r)) for r in range(ranks))
    return Deal(plan.stages, plan.replicas, held, tuple(most))


def memory_of(
    spec, grid, schedule="1f1b", micro_batches=8, micro_batch=1, recompute=False, sequence=False, chunks=None
):
    """Bytes on the ranks of every pipeline place: a list of Memory, one for each rank along pp.

    Args:    spec: a Spec; grid: a Grid; schedule: its name; micro_batches: of one replica; micro_batch: its examples.
             recompute: activation checkpointing, a stage at a time; sequence: sequence parallel.
    Returns: list of Memory. Gradients are those that all micro-batches are added up in; what a message needs on its way
             is not counted.
    Raises:  ValueError where the grid has more stages than the model has layers, or the schedule cannot be.
    """
    dealt = deal(schedule, grid["pp"], micro_batches, chunks)
    parts, each, tp = stages_of(spec, dealt.stages), spec.bytes_each, grid["tp"]
    inputs = [
        0,
        *(part[-1].output_on(tp, sequence) for part in parts[:-1]),
    ]  # the first stage reads the batch, which is there anyway
    whole = [sum(layer.saved_on(tp, sequence) for layer in part) for part in parts]
    for stage in range(1, len(parts)):
        before, first = parts[stage - 1][-1], parts[stage][0]
        whole[stage] += first.again * before.output_on(tp, sequence) // before.output
    parameters = [sum(layer.parameters_on(tp) for layer in part) for part in parts]
    rows = []
    for mine, counts in zip(dealt.held, dealt.in_flight, strict=True):
        count = sum(parameters[stage] for stage in mine)
        if {0, dealt.stages - 1} <= {*mine}:  # one table of both ends, for each model that the rank holds both ends of
            count -= spec.tied // tp * mine.count(0)
        if recompute:
            kept = sum(n * inputs[stage] for stage, n in counts) + max(whole[s] for s in mine)
        else:
            kept = sum(n * whole[stage] for stage, n in counts)
        bytes_of_all = (count * n for n in each[:3])
        rows.append(Memory(*bytes_of_all, kept * micro_batch * each.activations))
    return rows

"""The memory of a rank of a grid, in bytes: parameters, gradients, the optimizer's state, activations, temporaries.

a GPT on dp=2, pp=2, tp=2                   held by one rank                   divided by
parameters, gradients, optimizer            of its layers                      pp and tp; dp with ZeRO: state_bytes
    experts                                 of its layers                      ep, too
activations of one micro-batch              of its layers                      pp and partly tp; sequence: wholly
    of a part of the sequences              of its layers                      cp
    times the micro-batches in flight       gpipe m, 1f1b min(m, pp - stage)   the schedule
recomputed, a stage at a time               inputs of its stages only, and one micro-batch of one stage whole
recomputed, a block at a time               inputs of its blocks, and one of them whole
temporaries of ZeRO                         2: whole gradients, 3: parameters as well, of two blocks and of the rest
copies that compute, in fewer bits          all parameters, from forward to backward; 3: as temporaries of ZeRO
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import schedules
from ...mesh import Grid
from ...schedules import Action
from ..pipeline.split import partition
from .machine import replicas
from .spec import Layer, Spec

Layers = tuple[Layer, ...]  # of a stage
Moment = tuple[tuple[int, int, int], ...]


class Memory(NamedTuple):
    """Bytes of one rank, by what they are for."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    temporaries: int = 0

    @property
    def total(self) -> int:
        return sum(self)


def state_bytes(parameters: int, ranks: int, stage: int, mixed: bool = True) -> tuple[float, float, float]:
    """Count the bytes of parameters, gradients and Adam's state on one rank.

        stage    parameters    gradients    optimizer
        0        whole         whole        whole         data parallelism
        1        whole         whole        a share       ZeRO-1
        2        whole         a share      a share       ZeRO-2
        3        a share       a share      a share       ZeRO-3

    mixed: parameters and gradients have 16 bits. Adam updates the master weights, a copy
    of the parameters in 32 bits. Without mixed, everything has 32 bits, and Adam updates
    the parameters themselves. Adam keeps two averages of the gradient for each parameter,
    always in 32 bits.

    Args:    parameters: their number in the model; stage: of ZeRO, 0 to 3.
             ranks: number of data-parallel ranks, which have equal shares.
    Returns: on one rank, (bytes of parameters, bytes of gradients, bytes of the optimizer).
    Ref: Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, section 3.
    """
    number = 2 if mixed else 4
    states = 3 * 4 if mixed else 2 * 4
    return (
        number * parameters / (ranks if stage >= 3 else 1),
        number * parameters / (ranks if stage >= 2 else 1),
        states * parameters / (ranks if stage >= 1 else 1),
    )


def collectives_per_step(stage: int, micro_batches: int = 1) -> tuple[int, int]:
    """Count the all-gathers and reduce-scatters of a step, each of as many numbers as there are parameters.

        stage    all-gathers    reduce-scatters      k micro-batches; an all-reduce is one of each
        0, 1     1              1                    gradients are added over micro-batches first, and sent once
        2        1              k                    gradients of each micro-batch are sent, and freed
        3        2 k            k                    parameters are gathered for each forward and each backward

    Returns: (all-gathers, reduce-scatters).
    """
    return 2 * micro_batches if stage == 3 else 1, micro_batches if stage >= 2 else 1


def sharded(held: Memory, ranks: int, stage: int) -> Memory:
    """Return what is left of `held` on each of `ranks` ranks whose parameters, gradients and optimizer ZeRO divides."""
    parameters, gradients, optimizer = (
        -(-nbytes // (ranks if stage >= least else 1)) for nbytes, least in zip(held[:3], (3, 2, 1), strict=True)
    )
    return held._replace(parameters=parameters, gradients=gradients, optimizer=optimizer)


@functools.lru_cache(maxsize=256)
def stages_of(spec: Spec, stages: int) -> tuple[Layers, ...]:
    """Return the layers of each stage: tuples of Layers, cut so that the most that a stage computes is least.

    Raises:  ValueError if there are more stages than layers.
    """
    require_layers(spec, stages)
    costs = [layer.flops for layer in spec.layers]
    sizes = partition(costs, stages)
    cuts = [sum(sizes[:i]) for i in range(stages + 1)]
    return tuple(spec.layers[a:b] for a, b in zip(cuts, cuts[1:], strict=False))


def require_layers(spec: Spec, stages: int) -> None:
    """Raise ValueError unless there is a layer for each stage."""
    if stages > len(spec.layers):
        raise ValueError(f"{spec.name} has {len(spec.layers)} layers, which cannot be shared by {stages} stages")


class StageAssignment(NamedTuple):
    """The stages that a schedule gives to each rank. held: stages of the model per rank; stages, replicas: its own.

    fullest: per rank, the moments at which it holds most, each ((stage of the model, live, graphs), ...). live:
    micro-batches between their forward and the end of their backward; graphs: how many of them are in their backward,
    with their whole graph there even if it was computed again.
    """

    stages: int
    replicas: int
    held: tuple[tuple[int, ...], ...]
    fullest: tuple[tuple[Moment, ...], ...]


def assign_stages(schedule: str, ranks: int, micro_batches: int, chunks: int | None = None) -> StageAssignment:
    """Return the StageAssignment of a schedule. Raises ValueError as schedules.build.

    After a few rounds a rank's order repeats itself, so that three show how much is in flight; not so in GPipe.
    """
    few = micro_batches if schedule == "gpipe" else min(micro_batches, 3 * ranks + micro_batches % ranks)
    return _assign_stages(schedule, ranks, few, chunks)


@functools.lru_cache(maxsize=4096)
def _assign_stages(schedule: str, ranks: int, micro_batches: int, chunks: int | None) -> StageAssignment:
    if schedule == "gpipe":  # all forwards before the first backward, whatever their number
        schedules.build(schedule, ranks, 1, chunks)
        moments = tuple((((r, micro_batches, 1),),) for r in range(ranks))
        return StageAssignment(ranks, 1, tuple((r,) for r in range(ranks)), moments)
    plan = schedules.build(schedule, ranks, micro_batches, chunks)
    held = tuple(tuple(stage % plan.stages for stage in plan.stages_of(r)) for r in range(ranks))
    fullest = tuple(tuple(_fullest(row, plan.stages)) for row in plan.rows)
    return StageAssignment(plan.stages, plan.replicas, held, fullest)


def _fullest(row: Sequence[Action], stages: int) -> list[Moment]:
    """Return the moments of a row that no other one exceeds in everything: a list of ((stage, live, graphs), ...)."""
    live: dict[int, int] = {}
    graphs: dict[int, int] = {}
    moments = set()
    for stage, kind, _ in row:
        if kind == "F":
            live[stage] = live.get(stage, 0) + 1
        elif kind in "BI":
            graphs[stage] = graphs.get(stage, 0) + 1
        moments.add(tuple((s, n, graphs.get(s, 0)) for s, n in live.items()))
        if kind in "BW":
            live[stage] -= 1
            graphs[stage] -= 1
    kept = []
    for moment in sorted(moments, key=lambda m: -sum(n + g for _, n, g in m)):
        if not any(_exceeds(other, moment) for other in kept):
            kept.append(moment)
    return [tuple((s % stages, n, g) for s, n, g in moment) for moment in kept]


def _exceeds(other: Moment, moment: Moment) -> bool:
    """Return True if `other` holds as much of everything as `moment`."""
    counts = {s: (n, g) for s, n, g in other}
    return all(counts.get(s, (0, 0))[0] >= n and counts.get(s, (0, 0))[1] >= g for s, n, g in moment)


def memory_of(
    spec: Spec,
    grid: Grid,
    schedule: str = "1f1b",
    micro_batches: int = 8,
    micro_batch: int = 1,
    recompute: bool | str = False,
    sequence: bool = False,
    chunks: int | None = None,
    stage: int = 0,
) -> list[Memory]:
    """Return bytes on the ranks along pp: a list of Memory, one for each of them.

    Args:    spec: a Spec; grid: a Grid; schedule: its name; micro_batches: of one replica; micro_batch: its examples.
             recompute: activation checkpointing, True: a stage at a time, "blocks": a block at a time, "attention":
             only the (s, s) weights of eager attention. sequence: sequence parallel. stage: of ZeRO, 0 to 3, along dp,
             ep and cp, experts along dp and cp.
    Returns: list of Memory. Gradients are the sums of all micro-batches; what a message needs on its way
             is not counted.
    Raises:  ValueError if the grid has more stages than the model has layers, or the schedule cannot be.
    """
    assignment = assign_stages(schedule, grid["pp"], micro_batches, chunks)
    parts, each = stages_of(spec, assignment.stages), spec.bytes_each
    tp, cp, ep = grid["tp"], grid["cp"], grid["ep"]
    inputs = [
        0,
        *(part[-1].output_on(tp, sequence) for part in parts[:-1]),
    ]  # the first stage reads the batch, which is there anyway
    whole = [sum(layer.saved_on(tp, sequence) for layer in part) for part in parts]
    if recompute == "attention" or cp > 1:  # ring attention computes them again
        whole = [n - sum(layer.attention_weights // tp for layer in part) for n, part in zip(whole, parts, strict=True)]
    for s in range(1, len(parts)):
        before, first = parts[s - 1][-1], parts[s][0]
        whole[s] += first.saved_input * before.output_on(tp, sequence) // before.output
    blocks = [_recomputed(part, tp, sequence) for part in parts]
    parameters = [sum(layer.parameters_on(tp, ep) for layer in part) for part in parts]
    experts = [sum(layer.expert_parameters // ep for layer in part) for part in parts]
    rows = []
    for mine, moments in zip(assignment.held, assignment.fullest, strict=True):
        count = sum(parameters[s] for s in mine)
        if {0, assignment.stages - 1} <= {*mine}:  # one table for each model that the rank holds both ends of
            count -= spec.tied // tp * mine.count(0)
        if recompute == "blocks":
            kept = max(
                sum(live * blocks[s][0] + graphs * blocks[s][1] for s, live, graphs in moment) for moment in moments
            )
        elif recompute is True:
            kept = max(sum(live * inputs[s] + graphs * whole[s] for s, live, graphs in moment) for moment in moments)
        else:
            kept = max(sum(live * whole[s] for s, live, _ in moment) for moment in moments)
        in_experts = sum(experts[s] for s in mine)
        dense, expert = (
            sharded(Memory(*(n * nbytes for nbytes in each[:3]), activations=0), ranks, stage)
            for n, ranks in ((count - in_experts, replicas(grid)), (in_experts, replicas(grid) // ep))
        )
        sizes = [layer.parameters_on(tp, ep) for s in mine for layer in parts[s] if _is_block(layer)]
        gathered = (count - sum(sizes) + sum(sorted(sizes)[-2:])) * (replicas(grid) > 1)
        passing = gathered * ((stage >= 3) * each.activations + (stage >= 2) * each.gradients)
        if stage < 3 and each.activations < each.parameters:  # a copy of each parameter in the dtype that computes
            passing += count * each.activations
        state = (a + b for a, b in zip(dense[:3], expert[:3], strict=True))
        activations = -(-kept * micro_batch * each.activations // cp)
        rows.append(Memory(*state, activations=activations, temporaries=passing))
    return rows


def _is_block(layer: Layer) -> bool:
    """Return True if it is an item of an nn.Sequential or the like: what is recomputed, and a unit of ZeRO."""
    return layer.name.rpartition(".")[2].isdigit()


def _recomputed(part: Layers, tp: int, sequence: bool) -> tuple[int, int]:
    """Return numbers per example, if blocks of these layers are recomputed: (kept per micro-batch, more in backward).

    Kept are the inputs of blocks; what else there is, before or behind them, is kept as ever, until backward has come
    through it. Then one block is whole.
    """
    kept = others = graph = 0
    for before, layer in zip((None, *part), part, strict=False):
        saved = layer.saved_on(tp, sequence)
        if not _is_block(layer):
            others += saved
            continue
        size = (before or layer).output_on(tp, sequence)
        kept, graph = kept + size, max(graph, saved - size)
    return kept + others, max(graph - others, 0)


class SavedBytes:
    """The most bytes that autograd has kept for backward at once, within it; parameters are not counted."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params = {p.untyped_storage()._cdata for p in params}  # also of one whose memory is taken away and back
        self.live: dict[int, int] = {}
        self.now, self.most = 0, 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda kept: kept.tensor)

    def __enter__(self) -> SavedBytes:
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.hooks.__exit__(*exception)

    def pack(self, tensor: Tensor) -> Kept:
        return Kept(self, tensor)

    def add(self, storage: torch.UntypedStorage, sign: int) -> None:
        """Count one more tensor, or one less, that needs this storage."""
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self.params:
            return
        before = self.live.get(key, 0)
        self.live[key] = before + sign
        if not before or not self.live[key]:
            self.now += sign * nbytes
            self.most = max(self.most, self.now)
        if not self.live[key]:
            del self.live[key]


class Kept:
    """A tensor as long as autograd keeps it, without its graph, which would otherwise hold itself."""

    def __init__(self, counter: SavedBytes, tensor: Tensor) -> None:
        self.counter, self.tensor = counter, tensor.detach()
        counter.add(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self.counter.add(self.tensor.untyped_storage(), -1)

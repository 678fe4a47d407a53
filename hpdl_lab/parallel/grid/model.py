"""What a grid costs before it runs: s per step, bubble, bytes per link, bytes per rank, as formulas.

    stage time     flops / (flops per s) + all-reduces over tp                              backward: twice the flops
    pipeline       the schedule's makespan with these times, and a message over pp between stages
    step           makespan + what is left of the all-reduces over dp when backward has ended

A test holds the seconds to those of the same grid on simulated ranks, and the bytes to those of a real step.
Ref: Narayanan et al. 2021, arXiv:2104.04473, sections 3.2 and 3.3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ...collectives import cost
from ...mesh import Grid
from ...schedules.evaluation import PipelineTime, pipeline_time
from . import memory as memories
from .machine import MACHINES, Machine, message_cost
from .memory import Deal, Layers, Memory
from .spec import Spec


class Prediction(NamedTuple):
    """A grid and what it costs.

    grid, schedule, micro_batches, micro_batch, recompute, sequence: what was asked; micro_batch: examples in one.
    seconds:  of a step.   bubble: share of the pipeline's time in which its ranks wait, 0 to 1.
    memory:   Memory of the fullest rank; stages: of every rank along pp.
    links:    {"dp": bytes, "pp": bytes, "tp": bytes, "shared": bytes} that the busiest rank sends in a step: along each
              axis, and, for parameters of several stages, to the ranks that hold them along dp and pp together.
    sent:     the same of every rank along pp: a tuple of such tables.
    parts:    {"compute", "tp", "pp", "dp", "bubble", "cores": s} of the busiest rank, which add up to `seconds`;
              bubble: it waits for other stages; cores: it waits for a core that it shares with other ranks.
    limit:    bytes that a rank may hold.
    """

    grid: Grid
    schedule: str
    micro_batches: int
    micro_batch: int
    recompute: bool
    sequence: bool
    seconds: float
    bubble: float
    memory: Memory
    stages: tuple[Memory, ...]
    links: dict[str, float]
    sent: tuple[dict[str, float], ...]
    parts: dict[str, float]
    limit: int

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.limit

    @property
    def nbytes(self) -> int:
        """Of the fullest rank."""
        return self.memory.total


class StageTime(NamedTuple):
    """s of one micro-batch on one stage: arithmetic and messages over tp, forward and backward."""

    forward: float
    backward: float
    forward_sums: float
    backward_sums: float

    @property
    def costs(self) -> tuple[float, ...]:
        """(forward, backward, input gradient, weight gradient) of a schedule. Messages come with the input's half."""
        forward, backward = self.forward + self.forward_sums, self.backward + self.backward_sums
        half = self.forward  # the gradient of weights costs what forward does
        return forward, backward, backward - half, half


def predict(
    spec: Spec,
    grid: Grid,
    schedule: str = "1f1b",
    micro_batches: int = 8,
    recompute: bool = False,
    sequence: bool = False,
    machine: Machine | None = None,
    batch: int | None = None,
    chunks: int | None = None,
    limit: int | None = None,
) -> Prediction:
    """What one training step of `spec` costs on `grid`.

    Args:    spec: a grid.spec.Spec; grid: a Grid of dp, pp and tp, tp varying fastest.
             micro_batches: into which each replica cuts its share of `batch`, by default one example each.
             machine: a grid.machine.Machine, by default the laptop; limit: bytes per rank, by default the machine's.
             chunks: stages per rank of the schedule "interleaved".
    Returns: Prediction.
    Raises:  ValueError, a sentence with numbers, for a grid that cannot be: heads, positions, layers, batch.
    """
    case = case_of(spec, grid, schedule, micro_batches, recompute, sequence, machine, batch, chunks)
    dealt, micro_batch = case.dealt, case.micro_batch
    stages = [case.stage_time(part) for part in case.layers]
    alpha, beta = message_cost(case.machine.network, grid, "pp")
    nbytes = max((case.activation(part) for part in case.layers[:-1]), default=0)
    transfer = alpha + nbytes * beta if grid["pp"] > 1 else 0.0
    costs = [stage.costs for stage in stages]
    times = pipeline_time(schedule, grid["pp"], micro_batches, costs, transfer, chunks)
    share = micro_batches / dealt.replicas  # of the micro-batches, that each stage of a rank works on
    busy = [sum(sum(costs[s][:2]) for s in mine) * share for mine in dealt.held]
    sums = [case.reductions(rank) for rank in range(grid["pp"])]
    ends = [case.end_of(rank, times, sums[rank]) for rank in range(grid["pp"])]
    computed = [sum(stages[s].forward + stages[s].backward for s in mine) * share for mine in dealt.held]
    shared = grid["dp"] * grid["tp"] * sum(computed) / case.machine.at_once if case.machine.at_once else 0.0
    seconds = max(*ends, shared)
    most = max(range(grid["pp"]), key=busy.__getitem__)
    parts = {
        "compute": computed[most],
        "tp": busy[most] - computed[most],
        "pp": 2 * (dealt.stages - 1) * transfer,  # of the first micro-batch, there and back
        "dp": max(ends) - times.seconds,
        "cores": seconds - max(ends),
    }
    rows = memories.memory_of(spec, grid, schedule, micro_batches, micro_batch, recompute, sequence, chunks)
    sent = tuple(case.bytes_sent(mine, share, sums[rank]) for rank, mine in enumerate(dealt.held))
    waiting = seconds - sum(parts.values())
    return Prediction(
        grid,
        schedule,
        micro_batches,
        micro_batch,
        recompute,
        sequence,
        seconds,
        bubble=max(0.0, 1 - sum(busy) / (times.seconds * grid["pp"])),  # rounding may take it below 0
        memory=max(rows, key=lambda row: row.total),
        stages=tuple(rows),
        links={axis: max(table[axis] for table in sent) for axis in sent[0]},
        sent=sent,
        parts=parts | {"bubble": waiting if waiting > 1e-9 * seconds else 0.0},  # a rest of rounding is none
        limit=case.machine.memory if limit is None else limit,
    )


class Reduction(NamedTuple):
    """Gradients of one layer that are added over `ranks` ranks.   layer: its place in the stage; shared: by stages."""

    stage: int
    layer: int
    ranks: int
    nbytes: int
    shared: bool


class Case(NamedTuple):
    """What is priced: a model on a grid of a machine. micro_batch: examples; dealt, layers: which stages lie where."""

    spec: Spec
    grid: Grid
    machine: Machine
    micro_batch: int
    recompute: bool
    sequence: bool
    dealt: Deal
    layers: tuple[Layers, ...]

    def stage_time(self, part: Layers) -> StageTime:
        """The StageTime of these layers; with `recompute` backward begins with another forward."""
        tp, each, network = self.grid["tp"], self.spec.bytes_each.activations * self.micro_batch, self.machine.network
        compute = sum(layer.flops_on(tp) for layer in part) * self.micro_batch / network.flops_per_s
        alpha, beta = message_cost(network, self.grid, "tp")
        sums = sum(all_reduce_seconds(tp, n * each, alpha, beta) for layer in part for n in layer.sums)
        sums += sum(cost.all_gather(tp, tp * n * each).seconds(alpha, beta) for layer in part for n in layer.gathers)
        returns = sum(all_reduce_seconds(tp, n * each, alpha, beta) for layer in part for n in layer.returns)
        again = int(self.recompute)
        return StageTime(compute, (2 + again) * compute, sums, returns + again * sums)

    def activation(self, part: Layers) -> int:
        """Bytes of what a stage hands to the next for one micro-batch."""
        return part[-1].output_on(self.grid["tp"], self.sequence) * self.micro_batch * self.spec.bytes_each.activations

    def reductions(self, rank: int) -> list[Reduction]:
        """What the rank at place `rank` along pp adds up, as hybrid/gradients.py does it: a list of Reductions."""
        spec, grid, dealt, layers = self.spec, self.grid, self.dealt, self.layers
        mine, last, rows = dealt.held[rank], dealt.stages - 1, []
        each, over_tp = spec.bytes_each.gradients, grid["tp"] if self.sequence else 1
        tied = spec.tied // grid["tp"] * each
        for stage in sorted({*mine}):
            holders = sum(stage in held for held in dealt.held)
            if grid["dp"] * holders * over_tp == 1:
                continue
            for i, layer in enumerate(layers[stage]):
                ends = ((stage, i) == (0, 0)) + ((stage, i) == (last, len(layers[last]) - 1))
                parts = (layer.parameters - layer.cut) * each if over_tp > 1 else 0  # each tp rank saw other positions
                nbytes = layer.parameters_on(grid["tp"]) * each - ends * tied - parts
                rows.append(Reduction(stage, i, grid["dp"] * holders, nbytes, holders > 1))
                if parts:
                    rows.append(Reduction(stage, i, grid["dp"] * holders * over_tp, parts, holders > 1))
        if tied and {0, last} & {*mine}:
            holders = sum(0 in held or last in held for held in dealt.held)
            rows.append(Reduction(min({0, last} & {*mine}), 0, grid["dp"] * holders, tied, holders > 1))
        return [row for row in rows if row.nbytes and row.ranks > 1]

    def end_of(self, rank: int, times: PipelineTime, sums: Sequence[Reduction]) -> float:
        """When this rank has all its gradients: s since the step began.

        A stage sends those of a layer when its last backward has come through it, one after the other: what is left
        when backward has ended is exposed. What several stages share comes after all of them.
        """
        layers, grid, machine = self.layers, self.grid, self.machine
        alpha, beta = message_cost(machine.network, grid, "dp")
        spans = {stage % len(layers): span for stage, *span in times.gradients[rank]}
        complete = {stage: completed(layers[stage], spans[stage], grid["tp"]) for stage in {row.stage for row in sums}}
        alone = [(complete[row.stage][row.layer], row) for row in sums if not row.shared]
        sender = 0.0
        for ready, row in sorted(alone, key=lambda pair: pair[0]):
            sender = max(sender, ready) + all_reduce_seconds(row.ranks, row.nbytes, alpha, beta)
        end = max(times.ends[rank], sender)
        slow = [max(pair) for pair in zip((alpha, beta), message_cost(machine.network, grid, "pp"), strict=True)]
        shared = sum(all_reduce_seconds(row.ranks, row.nbytes, *slow) for row in sums if row.shared)
        return max(end, times.seconds) + shared if shared else end

    def bytes_sent(self, mine: Sequence[int], share: float, sums: Sequence[Reduction]) -> dict[str, float]:
        """{"dp": bytes, "pp": bytes, "tp": bytes, "shared": bytes} that a rank with stages `mine` sends in a step."""
        tp, pp, layers, times = self.grid["tp"], 0.0, self.layers, 1 + self.recompute
        each: Any = self.spec.bytes_each.activations * self.micro_batch * share
        in_layers = sum(times * sum(layer.sums) + sum(layer.returns) for s in mine for layer in layers[s])
        gathers = sum(times * sum(layer.gathers) for s in mine for layer in layers[s])
        for s in mine:
            if s + 1 < len(layers) and self.grid["pp"] > 1:
                pp += self.activation(layers[s]) * share
            if s > 0 and self.grid["pp"] > 1:
                pp += self.activation(layers[s - 1]) * share
        gradients = {False: 0.0, True: 0.0}
        for row in sums:
            gradients[row.shared] += cost.all_reduce(row.ranks, row.nbytes).nbytes_sent
        return {
            "dp": gradients[False],
            "pp": pp,
            "tp": cost.all_reduce(tp, in_layers * each).nbytes_sent + (tp - 1) * gathers * each,
            "shared": gradients[True],
        }


def case_of(
    spec: Spec,
    grid: Grid,
    schedule: str,
    micro_batches: int,
    recompute: bool,
    sequence: bool,
    machine: Machine | None,
    batch: int | None,
    chunks: int | None,
) -> Case:
    """The Case. Raises ValueError unless heads, positions, layers and the batch can be shared out like this."""
    dp, tp = grid["dp"], grid["tp"]
    batch = dp * micro_batches if batch is None else batch
    memories.require_layers(spec, grid["pp"])
    if spec.heads % tp:
        raise ValueError(f"{spec.heads} heads of {spec.name} cannot be shared by tp={tp} ranks: tp must divide them")
    if sequence and spec.positions % tp:
        raise ValueError(f"{spec.positions} positions of {spec.name} cannot be cut into tp={tp} equal parts")
    if micro_batches < 1 or batch % dp or batch // dp % micro_batches:
        raise ValueError(
            f"a batch of {batch} cannot be cut into dp={dp} shards of {micro_batches} micro-batches each: "
            f"it must be a multiple of {dp} x {micro_batches} = {dp * micro_batches}"
        )
    dealt = memories.deal(schedule, grid["pp"], micro_batches, chunks)
    layers, machine = memories.stages_of(spec, dealt.stages), machine or MACHINES["laptop"]
    return Case(spec, grid, machine, batch // (dp * micro_batches), recompute, sequence, dealt, layers)


@functools.lru_cache(maxsize=4096)  # the layers of a model are alike, and a search asks for each of them
def all_reduce_seconds(p: int, nbytes: int, alpha: float, beta: float) -> float:
    """Of a ring."""
    return cost.all_reduce(p, nbytes).seconds(alpha, beta)


def completed(part: Layers, span: Sequence[float], tp: int) -> list[float]:
    """When the gradients of each layer are: the stage's last backward, of this (begin, end), ends with the first."""
    begin, end = span
    before = [0.0, *accumulate(layer.flops_on(tp) for layer in part)]
    return [end - (end - begin) * flops / (before[-1] or 1) for flops in before[:-1]]

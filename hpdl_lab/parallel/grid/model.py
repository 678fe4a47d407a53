"""The costs of a grid before it runs: s per step, bubble, bytes per link, bytes per rank, as formulas.

    stage time     flops / (flops per s) + all-reduces over tp                              backward: twice the flops
                   + keys and values around cp, as far as attention does not hide them      backward: twice the bytes
                   + the all-to-alls over ep, to the experts and back                       backward: the same
                     hidden in pairs of a forward and a backward (DualPipe)
    pipeline       the schedule's makespan with these times, and a message over pp between stages
    step           makespan + what is left of the all-reduces over dp when backward has ended: of gradients over dp,
                   ep and cp, of experts over dp and cp

ZeRO sends gradients to their owners as they come (stage 1: when all are there) and gathers parameters before the next
step; stage 3 gathers them for each forward and backward, and hides what it can behind the arithmetic of the stage.
Stage 2 sends once per step, as HybridParallel does: it adds the gradients of all micro-batches before. Strategies that
send after each micro-batch: memory.collectives_per_step.

A test compares the seconds with the same grid on simulated ranks, and the bytes with a real step.
Ref: Narayanan et al. 2021, arXiv:2104.04473, sections 3.2 and 3.3.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ...collectives import cost
from ...mesh import Grid
from ...schedules.evaluation import PipelineTime, pipeline_time
from . import memory as memories
from .machine import MACHINES, Machine, message_cost, replicas
from .memory import Layers, Memory, StageAssignment
from .spec import Layer, Spec


class Prediction(NamedTuple):
    """A grid and what it costs.

    grid, schedule, micro_batches, micro_batch, recompute, sequence: what was asked; micro_batch: examples in one.
    seconds:  of a step.   bubble: share of the pipeline's time in which its ranks wait, 0 to 1.
    memory:   Memory of the fullest rank; stages: of every rank along pp.
    links:    {"dp": bytes, "pp": bytes, "tp": bytes, "cp": bytes, "ep": bytes, "shared": bytes} that the busiest rank
              sends in a step: activations along each axis, gradients as "dp", and, for parameters of several stages,
              to the ranks that hold them along dp and pp together.
    sent:     the same of every rank along pp: a tuple of such tables.
    parts:    {"compute", "tp", "cp", "ep", "pp", "dp", "bubble", "cores": s} of the busiest rank, which add up to
              `seconds`; bubble: it waits for other stages; cores: it waits for a core that it shares with other ranks.
    limit:    bytes that a rank may hold.   zero: stage of ZeRO.
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
    zero: int = 0

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.limit

    @property
    def nbytes(self) -> int:
        """The memory of the fullest rank."""
        return self.memory.total


class StageTime(NamedTuple):
    """s of one micro-batch on one stage: arithmetic, and of messages what it does not hide, forward and backward.

    messages: {axis: (s in forward, s in backward)}; "dp": gathers of ZeRO-3.
    """

    forward: float
    backward: float
    messages: dict[str, tuple[float, float]]

    @property
    def costs(self) -> tuple[float, ...]:
        """(forward, backward, input gradient, weight gradient) of a schedule. Messages come with the input's half."""
        forward, backward = (
            seconds + sum(both[i] for both in self.messages.values()) for i, seconds in enumerate(self[:2])
        )
        half = self.forward  # the gradient of weights costs what forward does
        return forward, backward, backward - half, half


def predict_step(
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
    zero: int = 0,
) -> Prediction:
    """Predict what one training step of `spec` costs on `grid`.

    Args:    spec: a grid.spec.Spec; grid: as grid_of makes it, tp varying fastest. Examples are divided over dp and
             ep, positions over cp, in zigzag, so that all have the same work.
             micro_batches: into which each replica cuts its share of `batch`, by default one example each.
             machine: a grid.machine.Machine, by default the laptop; limit: bytes per rank, by default the machine's.
             chunks: stages per rank of the schedule "interleaved"; zero: stage of ZeRO.
    Returns: Prediction.
    Raises:  ValueError, a sentence with numbers, for a grid that cannot be: heads, positions, experts, layers, batch.
    """
    model = cost_model(spec, grid, schedule, micro_batches, recompute, sequence, machine, batch, chunks, zero)
    assignment, micro_batch = model.assignment, model.micro_batch
    stages = [model.stage_time(part) for part in model.layers]
    alpha, beta = message_cost(model.machine.network, grid, "pp")
    nbytes = max((model.activation(part) for part in model.layers[:-1]), default=0)
    transfer = alpha + nbytes * beta if grid["pp"] > 1 else 0.0
    costs = [stage.costs for stage in stages]
    times = pipeline_time(schedule, grid["pp"], micro_batches, costs, transfer, chunks, model.hideable(stages))
    share = micro_batches / assignment.replicas  # of the micro-batches, that each stage of a rank works on
    alone = [sum(sum(costs[s][:2]) for s in mine) * share for mine in assignment.held]
    busy = [seconds - hidden for seconds, hidden in zip(alone, times.hidden, strict=True)]
    reductions = [model.reductions(rank) for rank in range(grid["pp"])]
    ends = [model.end_of(rank, times, reductions[rank]) for rank in range(grid["pp"])]
    computed = [sum(stages[s].forward + stages[s].backward for s in mine) * share for mine in assignment.held]
    ranks_of_place = grid.size // grid["pp"]
    shared = ranks_of_place * sum(computed) / model.machine.at_once if model.machine.at_once else 0.0
    seconds = max(*ends, shared)
    most = max(range(grid["pp"]), key=busy.__getitem__)
    held = assignment.held[most]
    sending = {axis: sum(sum(stages[s].messages[axis]) for s in held) * share for axis in ("tp", "cp", "ep", "dp")}
    sending["ep"] -= times.hidden[most]
    parts = {
        "compute": computed[most],
        **sending,
        "pp": 2 * (assignment.stages - 1) * transfer,  # of the first micro-batch, there and back
        "dp": sending["dp"] + max(ends) - times.seconds,
        "cores": seconds - max(ends),
    }
    rows = memories.memory_of(spec, grid, schedule, micro_batches, micro_batch, recompute, sequence, chunks, zero)
    sent = tuple(model.bytes_sent(mine, share, reductions[rank]) for rank, mine in enumerate(assignment.held))
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
        limit=model.machine.memory if limit is None else limit,
        zero=zero,
    )


class Reduction(NamedTuple):
    """Gradients of one layer that are added over `ranks` ranks.

    layer: its index in the stage; shared: by stages; experts: routed ones; ranks along ep hold different ones.
    """

    stage: int
    layer: int
    ranks: int
    nbytes: float
    shared: bool
    experts: bool = False


class CostModel(NamedTuple):
    """The costs of a model on a grid of a machine. micro_batch: examples; assignment, layers: of its stages."""

    spec: Spec
    grid: Grid
    machine: Machine
    micro_batch: int
    recompute: bool
    sequence: bool
    assignment: StageAssignment
    layers: tuple[Layers, ...]
    zero: int = 0

    @property
    def each(self) -> float:
        """Bytes on a rank for one number per example."""
        return self.spec.bytes_each.activations * self.micro_batch / self.grid["cp"]

    def stage_time(self, part: Layers) -> StageTime:
        """Return the StageTime of these layers; with `recompute` backward begins with another forward."""
        tp, each, network = self.grid["tp"], self.each, self.machine.network
        speed = self.micro_batch / self.grid["cp"] / network.flops_per_s  # s per flop of an example
        compute = sum(layer.flops_on(tp) for layer in part) * speed
        alpha, beta = message_cost(network, self.grid, "tp")
        forward, backward = (
            sum(_all_reduce_seconds(tp, n * each, alpha, beta) for sizes in both for n in sizes)
            for both in zip(*((layer.forward_all_reduces, layer.backward_all_reduces) for layer in part), strict=True)
        )
        gathered = [tp * n * each for layer in part for n in layer.forward_all_gathers]
        forward += sum(cost.all_gather(tp, nbytes).seconds(alpha, beta) for nbytes in gathered)
        alpha, beta = message_cost(network, self.grid, "ep")
        dispatched = [cost.all_to_all(self.grid["ep"], n * each) for n in _nonzero(part, "dispatched")]
        all_to_all = 2 * sum(one.seconds(alpha, beta) for one in dispatched)
        ring = [self.ring_seconds(layer, speed, times) for layer in part for times in (1, 2)]
        recomputed = int(self.recompute)
        both = {"tp": (forward, backward), "cp": (sum(ring[::2]), sum(ring[1::2])), "ep": (all_to_all, all_to_all)}
        messages = {axis: (ahead, back + recomputed * ahead) for axis, (ahead, back) in both.items()}
        gather = self.gather_seconds(part) if self.zero == 3 else 0.0
        compute_backward = (2 + recomputed) * compute
        messages["dp"] = max(0.0, gather - compute), max(0.0, gather - compute_backward)
        return StageTime(compute, compute_backward, messages)

    def hideable(self, stages: Sequence[StageTime]) -> list[tuple[float, float]]:
        """Return s of the all-to-alls over ep of each stage, forward and backward, which a pair of DualPipe hides."""
        return [stage.messages["ep"] for stage in stages] if self.grid["ep"] > 1 else []

    def ring_seconds(self, layer: Layer, speed: float, times: int) -> float:
        """Return how long ring attention waits for keys and values: cp - 1 messages, each under a part of the products.

        times: 2 in backward: their gradients travel with them, and there are twice the products.
        """
        cp, tp = self.grid["cp"], self.grid["tp"]
        if cp == 1 or not layer.kv:
            return 0.0
        alpha, beta = message_cost(self.machine.network, self.grid, "cp")
        sending = alpha + times * (layer.kv // tp) * self.each * beta
        return (cp - 1) * max(0.0, sending - times * layer.attention_flops / tp / cp * speed)

    def gather_seconds(self, part: Layers) -> float:
        """Return the seconds of ZeRO-3 until the parameters of these layers are there."""
        tp, ep, ranks = self.grid["tp"], self.grid["ep"], replicas(self.grid)
        alpha, beta = self.reduction_cost()
        each, seconds = self.spec.bytes_each.activations, 0.0
        for layer in part:
            experts = layer.expert_parameters // ep
            for n, p in ((layer.parameters_on(tp, ep) - experts, ranks), (experts, ranks // ep)):
                seconds += cost.all_gather(p, n * each).seconds(alpha, beta) if n else 0.0
        return seconds

    def reduction_cost(self) -> tuple[float, float]:
        """Return (alpha, beta) of the slowest axis over which gradients are added."""
        costs = [message_cost(self.machine.network, self.grid, axis) for axis in ("dp", "ep", "cp")]
        return max(a for a, _ in costs), max(b for _, b in costs)

    def activation(self, part: Layers) -> float:
        """Return bytes of what a stage hands to the next for one micro-batch."""
        return part[-1].output_on(self.grid["tp"], self.sequence) * self.each

    def reductions(self, rank: int) -> list[Reduction]:
        """Return what pipeline rank `rank` adds up, as hybrid/gradients.py does it: [Reduction]."""
        spec, grid, assignment, layers = self.spec, self.grid, self.assignment, self.layers
        rows: list[Reduction] = []
        mine, last, alike, ep = assignment.held[rank], assignment.stages - 1, replicas(grid), grid["ep"]
        each, over_tp = spec.sent_each, grid["tp"] if self.sequence else 1
        tied = spec.tied // grid["tp"] * each
        for stage in sorted({*mine}):
            holders = sum(stage in held for held in assignment.held)
            if alike * holders * over_tp == 1:
                continue
            for i, layer in enumerate(layers[stage]):
                ends = ((stage, i) == (0, 0)) + ((stage, i) == (last, len(layers[last]) - 1))
                parts = (layer.parameters - layer.cut) * each if over_tp > 1 else 0  # each tp rank saw other positions
                experts = layer.expert_parameters // ep * each
                nbytes = layer.parameters_on(grid["tp"], ep) * each - ends * tied - parts - experts
                rows.append(Reduction(stage, i, alike * holders, nbytes, holders > 1))
                rows.append(Reduction(stage, i, alike // ep * holders, experts, holders > 1, experts=True))
                if parts:
                    rows.append(Reduction(stage, i, alike * holders * over_tp, parts, holders > 1))
        if tied and {0, last} & {*mine}:
            holders = sum(0 in held or last in held for held in assignment.held)
            rows.append(Reduction(min({0, last} & {*mine}), 0, alike * holders, tied, holders > 1))
        return [row for row in rows if row.nbytes and row.ranks > 1]

    def end_of(self, rank: int, times: PipelineTime, reductions: Sequence[Reduction]) -> float:
        """Return when this rank has all its gradients: s since the step began.

        A stage sends a layer's when its last backward has come through it, one after the other: what is left
        when backward has ended is exposed. What several stages share comes after all of them. With ZeRO that is half of
        each sum, and before the next step the parameters are gathered.
        """
        layers, grid, machine = self.layers, self.grid, self.machine
        alpha, beta = self.reduction_cost()
        spans = {stage % len(layers): span for stage, *span in times.gradients[rank]}
        reduced = {row.stage for row in reductions}
        complete = {stage: _completed(layers[stage], spans[stage], grid["tp"]) for stage in reduced}
        alone = [(complete[row.stage][row.layer], row) for row in reductions if not row.shared]
        sender, part = 0.0, 0.5 if self.zero else 1.0
        for ready, row in sorted(alone, key=lambda pair: pair[0]):
            begin = times.ends[rank] if self.zero == 1 else ready
            sender = max(sender, begin) + part * _all_reduce_seconds(row.ranks, row.nbytes, alpha, beta)
        end = max(times.ends[rank], sender)
        if self.zero in (1, 2):
            back = self.spec.updated
            end += sum(_all_reduce_seconds(row.ranks, back * row.nbytes, alpha, beta) for _, row in alone) / 2
        slow = [max(pair) for pair in zip((alpha, beta), message_cost(machine.network, grid, "pp"), strict=True)]
        shared = sum(_all_reduce_seconds(row.ranks, row.nbytes, *slow) for row in reductions if row.shared)
        return max(end, times.seconds) + shared if shared else end

    def bytes_sent(self, mine: Sequence[int], share: float, reductions: Sequence[Reduction]) -> dict[str, float]:
        """Return {axis, "shared": bytes} that a rank with stages `mine` sends in a step, as Prediction.links."""
        tp, pp, layers, times = self.grid["tp"], 0.0, self.layers, 1 + self.recompute
        cp, ep, each = self.grid["cp"], self.grid["ep"], self.each * share
        held = [layer for s in mine for layer in layers[s]]
        in_layers = sum(times * sum(layer.forward_all_reduces) + sum(layer.backward_all_reduces) for layer in held)
        gathers = sum(times * sum(layer.forward_all_gathers) for layer in held)
        for s in mine:
            if s + 1 < len(layers) and self.grid["pp"] > 1:
                pp += self.activation(layers[s]) * share
            if s > 0 and self.grid["pp"] > 1:
                pp += self.activation(layers[s - 1]) * share
        gathers_of_zero = 2 * share if self.zero == 3 else 1  # and the reduce-scatter, which is as large
        gradients = {False: 0.0, True: 0.0}
        for row in reductions:
            sent = cost.all_reduce(row.ranks, row.nbytes).nbytes_sent
            gradients[row.shared] += sent * (1 + gathers_of_zero * self.spec.updated) / 2 if self.zero else sent
        kv, dispatched = sum(layer.kv // tp for layer in held), sum(layer.dispatched for layer in held)
        return {
            "dp": gradients[False],
            "pp": pp,
            "tp": cost.all_reduce(tp, in_layers * each).nbytes_sent + (tp - 1) * gathers * each,
            "cp": (times + 2) * (cp - 1) * kv * each,
            "ep": (2 * times + 2) * cost.all_to_all(ep, dispatched * each).nbytes_sent,
            "shared": gradients[True],
        }


def cost_model(
    spec: Spec,
    grid: Grid,
    schedule: str,
    micro_batches: int,
    recompute: bool,
    sequence: bool,
    machine: Machine | None,
    batch: int | None,
    chunks: int | None,
    zero: int = 0,
) -> CostModel:
    """Return the CostModel. Raises ValueError unless heads, positions, experts, layers, batch can be shared out so."""
    tp, cp, ep = grid["tp"], grid["cp"], grid["ep"]
    dp = grid["dp"] * ep
    batch = dp * micro_batches if batch is None else batch
    memories.require_layers(spec, grid["pp"])
    if spec.heads % tp:
        raise ValueError(f"{spec.heads} heads of {spec.name} cannot be shared by tp={tp} ranks: tp must divide them")
    if spec.kv_heads % tp:
        raise ValueError(f"{spec.kv_heads} key heads of {spec.name} cannot be shared by tp={tp}: tp must divide them")
    if sequence and spec.positions // cp % tp:
        raise ValueError(f"{spec.positions // cp} positions of {spec.name} cannot be cut into tp={tp} equal parts")
    if cp > 1 and not _nonzero(spec.layers, "kv"):
        raise ValueError(f"cp={cp} cuts sequences whose positions attend to each other: {spec.name} has none")
    if cp > 1 and spec.positions % (2 * cp):
        raise ValueError(f"{spec.positions} positions of {spec.name} cannot be cut into 2 x cp={2 * cp} equal parts")
    if ep > 1 and not spec.experts:
        raise ValueError(f"ep={ep} shards experts, and {spec.name} has none")
    if spec.experts % ep:
        raise ValueError(f"{spec.experts} experts of {spec.name} cannot be shared by ep={ep}: ep must divide them")
    _require_stage(zero, grid["pp"])
    if micro_batches < 1 or batch % dp or batch // dp % micro_batches:
        shards = f"dp={dp}" if ep == 1 else f"dp={grid['dp']} x ep={ep} = {dp}"
        raise ValueError(
            f"a batch of {batch} cannot be cut into {shards} shards of {micro_batches} micro-batches each: "
            f"it must be a multiple of {dp} x {micro_batches} = {dp * micro_batches}"
        )
    assignment = memories.assign_stages(schedule, grid["pp"], micro_batches, chunks)
    layers, machine = memories.stages_of(spec, assignment.stages), machine or MACHINES["laptop"]
    return CostModel(spec, grid, machine, batch // (dp * micro_batches), recompute, sequence, assignment, layers, zero)


def _require_stage(zero: int, pp: int) -> None:
    """Raise ValueError for a stage of ZeRO that there is not, or that does not go with pipelines."""
    why = ": stage 3 would gather each unit anew for every micro-batch of a pipeline" if zero == 3 and pp > 1 else ""
    if zero not in (0, 1, 2, 3) or why:
        raise ValueError(f"zero={zero!r} with pp={pp}: 0, 1 or 2 is needed{why}")


def _nonzero(part: Layers, field: str) -> list[int]:
    """Return the numbers that these layers have in a field, such as "kv", without zeros."""
    return [n for layer in part if (n := getattr(layer, field))]


@functools.lru_cache(maxsize=4096)  # the layers of a model are alike, and a search asks for each of them
def _all_reduce_seconds(p: int, nbytes: float, alpha: float, beta: float) -> float:
    """Return the seconds of an all-reduce around a ring."""
    return cost.all_reduce(p, nbytes).seconds(alpha, beta)


def _completed(part: Layers, span: Sequence[float], tp: int) -> list[float]:
    """Return when each layer's gradients are there: the stage's last backward ends with the first."""
    begin, end = span
    before = [0.0, *accumulate(layer.flops_on(tp) for layer in part)]
    return [end - (end - begin) * flops / (before[-1] or 1) for flops in before[:-1]]

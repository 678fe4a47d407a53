"""A step of a grid, rank by rank and message by message: 1,024 ranks in seconds, in virtual time.

    a rank          does the actions of its schedule, in the last backward of a stage layer by layer
    over pp         a message for each activation and its gradient, on the links between both ranks
    over dp         a ring of messages per layer in the background, as soon as the last micro-batch has passed it; what
                    several stages share (tied tokens, the replicas of GEMS) after the last of them. Dense layers add
                    over ep and cp, too, experts over cp. With ZeRO half of it, and the other half at the end
    tp, cp, ep      inside a layer, as a formula, on ranks that do the same at the same time: exact on ports that no
                    other message uses

All of it is one graph of predict/graph.py, in which messages wait for links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from ...collectives import ring, steps
from ...mesh import Grid
from ...predict.graph import Need, TaskGraph
from ...predict.messages import Exchange, Pattern, with_patterns
from ...schedules import Action
from ...schedules.evaluation import built, hidden_in_pair, repeating_rounds
from ..pipeline.run_schedule import AHEAD
from . import memory as memories
from .machine import Machine
from .model import CostModel, Reduction, cost_model
from .spec import Spec

# what goes around during backward, by stage of ZeRO; of stage 1 nothing
Rounds: TypeAlias = Callable[[int, int], Iterator[steps.Round]]  # f(ranks, elements)
DURING: dict[int, Rounds] = {0: ring.all_reduce_steps, 2: ring.reduce_scatter_steps, 3: ring.reduce_scatter_steps}


def simulate_step(
    spec: Spec,
    grid: Grid,
    schedule: str = "1f1b",
    micro_batches: int = 8,
    recompute: bool = False,
    machine: Machine | None = None,
    batch: int | None = None,
    chunks: int | None = None,
    zero: int = 0,
) -> float:
    """Take one step of `spec` on `grid`; returns s.

    Args:    as of grid.model.predict_step.
    Raises:  ValueError as predict.
    """
    model = cost_model(spec, grid, schedule, micro_batches, recompute, False, machine, batch, chunks, zero)
    counts, more = repeating_rounds(schedule, grid["pp"], micro_batches)  # a long step repeats itself
    few, *many = (
        _Step(model, (schedule, grid["pp"], m, chunks)).seconds() for m in (counts if more else (micro_batches,))
    )
    return many[0] + (more - 1) * (many[0] - few) if many else few


class _Step:
    """A step as a graph.

    ranks[s]: (dp, ep, cp, tp) numbers of the ranks at s along pp; costs[stage][layer]: s of its (F, B, I, W).
    done: {action: its tasks}, rows[s]: the tasks of its actions so far: lists in the order of ranks[s].
    """

    def __init__(self, model: CostModel, schedule: tuple[str, int, int, int | None]) -> None:
        """Lay out the step. schedule: as schedules.evaluation.built takes it, of as many micro-batches or fewer."""
        model = model._replace(assignment=memories.assign_stages(*schedule))
        spec, grid, assignment, layers = model.spec, model.grid, model.assignment, model.layers
        self.grid, self.network, (self.plan, self.actions, _) = grid, model.machine.network, built(*schedule)
        self.costs = [[model.stage_time((layer,)).costs for layer in part] for part in layers]
        stages = [model.stage_time(part) for part in layers]
        self.whole, self.hideable = [stage.costs for stage in stages], model.hideable(stages)
        self.nbytes = [model.activation(part) for part in layers]
        self.itemsize, self.updated = spec.sent_each, spec.bytes_each.activations
        self.reductions = [model.reductions(pp_rank) for pp_rank in range(grid["pp"])]
        ends = spec.tied // grid["tp"] and {0, self.plan.stages - 1}
        self.tied = [bool(ends and ends & {*held}) for held in assignment.held]  # the last reduction is of tied layers
        shape = [grid[axis] for axis in ("dp", "pp", "ep", "cp", "tp")]
        self.ranks = np.arange(grid.size).reshape(shape).swapaxes(0, 1)
        self.zero = model.zero
        self.graph = TaskGraph()
        self.routes: dict[tuple[int, int], Pattern] = {}
        self.done: dict[tuple[int, str, int], list[int]] = {}
        self.second = {backward: forward for forward, backward in self.plan.partner.items()}
        self.rows: list[list[list[int]]] = [[] for _ in self.ranks]
        self.exchange = Exchange(self.graph, [self.graph.add()] * grid.size, self.network)

    def seconds(self) -> float:
        """Return the seconds of the step."""
        actions = [(pp_rank, action) for pp_rank, row in enumerate(self.plan.rows) for action in row]
        backwards = Counter((pp_rank, a.stage % self.plan.stages) for pp_rank, a in actions if a.kind in "BW")
        for number in self.actions.order:
            pp_rank, action = actions[number]
            mine = pp_rank, action.stage % self.plan.stages  # one for both replicas that a rank may hold
            backwards[mine] -= action.kind in "BW"
            self.act(pp_rank, action, not backwards[mine])
        self.add_shared_gradients()
        self.all_gather_parameters()
        return max(self.graph.times()[1])

    def act(self, pp_rank: int, action: Action, is_last: bool) -> None:
        """Do one action on all ranks of a stage. is_last: the gradients of its stage are complete with it."""
        stage = action.stage % self.plan.stages
        messages = [self.receive(pp_rank, action, *required) for required in self.plan.needs(action)]
        needs = [[Need(task) for task in tasks if task is not None] for tasks in zip(*messages, strict=True)]
        rows = [row for row in self.reductions[pp_rank] if row.stage == stage and not row.shared] if is_last else []
        costs = [times["FBIW".index(action.kind)] for times in self.costs[stage]]
        if self.hideable and action in self.second:
            less = hidden_in_pair(self.plan, self.second[action], self.whole, self.hideable)
            costs = [seconds * (1 - less / sum(costs)) for seconds in costs]
        tasks: list[int] = []
        for layer in reversed(range(len(costs))) if rows else (None,):
            seconds = sum(costs) if layer is None else costs[layer]
            tasks = self.compute(pp_rank, seconds, needs)
            for row in rows:
                if row.layer == layer and self.zero in DURING:
                    self.start_ring(DURING[self.zero], row, [(pp_rank, tasks)])
        self.done[action] = tasks
        self.rows[pp_rank].append(tasks)

    def compute(self, pp_rank: int, seconds: float, needs: Sequence[Sequence[Need]]) -> list[int]:
        """Return a task on each rank at `pp_rank`."""
        ranks = self.ranks[pp_rank].ravel().tolist()
        needs = needs or [()] * len(ranks)
        return [self.graph.add(seconds, required, row=rank) for rank, required in zip(ranks, needs, strict=True)]

    def receive(self, pp_rank: int, action: Action, stage: int, kinds: str, micro_batch: int) -> list[int | None]:
        """Return the messages with what `action` needs, one for each rank; None if it is on the same rank."""
        source = self.plan.rank_of(stage)
        if source == pp_rank:
            return [None] * self.ranks[pp_rank].size
        if (source, pp_rank) not in self.routes:
            ends = self.ranks[source].ravel(), self.ranks[pp_rank].ravel()
            self.routes[source, pp_rank] = Pattern(*ends, self.grid.size, self.network)
        route = self.routes[source, pp_rank]
        sent = next(self.done[stage, kind, micro_batch] for kind in kinds if (stage, kind, micro_batch) in self.done)
        seconds = self.nbytes[min(stage, action.stage) % self.plan.stages] * (route.beta + np.zeros(len(sent)))
        rows = self.rows[pp_rank]
        posted = rows[-1 - AHEAD] if len(rows) > AHEAD else sent  # behind this, the receives
        columns = sent, posted, route.source.tolist(), seconds.tolist(), route.alpha.tolist(), route.routes
        return [
            self.graph.add(cost, [Need(task, False, rank), Need(there, False, rank)], links=links, latency=alpha)
            for task, there, rank, cost, alpha, links in zip(*columns, strict=True)
        ]

    def start_ring(
        self,
        rounds_of: Rounds,
        row: Reduction,
        receivers: Sequence[tuple[int, list[int]]],
        itemsize: float | None = None,
    ) -> None:
        """Send rings in the background over the ranks that have gradients of the same parameters.

        behind: (pp_rank, its tasks) of each whose ranks take part; itemsize: bytes of a number in messages, by
        default of a gradient.
        """
        columns = self.grid["tp"] * (self.grid["ep"] if row.experts else 1)  # of experts, ranks along ep hold others
        groups = []
        for pp_rank, tasks in receivers:
            ranks = self.ranks[pp_rank]
            for rank, task in zip(ranks.ravel().tolist(), tasks, strict=True):
                self.exchange.end(rank, task)
            groups.append((ranks.swapaxes(1, 2) if row.experts else ranks).reshape(-1, columns))
        ranks = np.concatenate(groups)
        rounds = steps.among(rounds_of(len(ranks), int(row.nbytes / self.itemsize)), ranks.T)
        for batch in with_patterns(rounds, self.grid.size, itemsize or self.itemsize, self.network):
            self.exchange.add(*batch)

    def add_shared_gradients(self) -> None:
        """Add what several pipeline ranks share over all of them, when a rank has computed all."""
        holders: dict[str | tuple[int, int, bool], dict[int, Reduction]] = {}  # what is shared, by pipeline rank
        for pp_rank, rows in enumerate(self.reductions):
            for i, row in enumerate(rows):
                is_tied = self.tied[pp_rank] and i == len(rows) - 1
                if row.shared:
                    key = "tied" if is_tied else (row.stage, row.layer, row.experts)
                    holders.setdefault(key, {})[pp_rank] = row
        for shared in holders.values():
            most = max(shared.values(), key=lambda row: row.nbytes)
            self.start_ring(ring.all_reduce_steps, most, [(pp_rank, self.rows[pp_rank][-1]) for pp_rank in shared])

    def all_gather_parameters(self) -> None:
        """Do what ZeRO-1 and 2 do when a rank has computed all: owners give the others what they have updated."""
        for pp_rank, rows in enumerate(self.reductions) if self.zero in (1, 2) else ():
            last = [(pp_rank, self.rows[pp_rank][-1])]
            collectives = (ring.reduce_scatter_steps, self.itemsize), (ring.all_gather_steps, self.updated)
            for during, itemsize in collectives[self.zero - 1 :]:
                for row in rows:
                    if not row.shared:
                        self.start_ring(during, row, last, itemsize)

"""A few training steps of a real model on a grid, told one by one, and what they held, sent and waited for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...collectives import cost
from ...comm.base import Comm, Results
from ...mesh import DeviceMesh, Grid
from ...schedules import Timed
from ...trace import Event
from ..hybrid.model import HybridParallel
from ..pipeline.run_schedule import timed_actions
from .memory import Memory, SavedBytes

LR, MOMENTUM = 0.01, 0.9
LITTLE = 32  # bytes: of the all-reduce that adds the loss up, which is no layer's


class Taken(NamedTuple):
    """What a rank says afterwards: what it held, and when its last step began, in ns of its clock.

    sums: {bytes of a bucket of gradients: among how many ranks it is added}.
    """

    held: Memory  # activations: the most that autograd kept at once, without inputs
    begin_ns: int
    sums: dict[int, int]


def grid_steps(
    comm: Comm, model: torch.nn.Module, grid: Grid, x: Tensor, y: Tensor, options: dict[str, Any], steps: int
) -> Taken:
    """Train `model` on `grid` for `steps` steps, and one step before and one after them.

    Args:    model, x, y: of the whole batch, the same on every rank. options: of HybridParallel, such as schedule.
    Returns: Taken. Rank 0 reports {step, seconds} of each of the `steps`.
    Raises:  as HybridParallel.
    """
    mesh = DeviceMesh(comm, grid)
    hybrid = HybridParallel(model, mesh, x, **options)
    params = hybrid.parameters()
    optimizer = torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)
    with SavedBytes([*params, x, y]) as kept:
        hybrid.step(x, y)
        optimizer.step()
    for step in range(steps):
        comm.barrier()
        begin = comm.trace.clock()
        hybrid.step(x, y)
        optimizer.step()
        comm.barrier()
        if comm.rank == 0:
            comm.report(step=step, seconds=(comm.trace.clock() - begin) / 1e9)
    comm.barrier()
    begin = comm.trace.clock()
    hybrid.step(x, y)
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    gradients = [p.grad for p in params if p.grad is not None]
    nbytes = (sum(t.nbytes for t in tensors) for tensors in (params, gradients, state))
    held = Memory(*nbytes, activations=kept.most)
    sums = {
        bucket.flat.nbytes: group.comm.size for group in hybrid.gradients.groups for bucket in group.reducer.buckets
    }
    return Taken(held, begin, sums)


def last_step(results: Results) -> list[Event]:
    """The events of the last step of all ranks, from the Results of grid_steps."""
    return [e for e in results.events if e.t0_ns >= results[e.rank].begin_ns]


def bytes_over_axes(results: Results, grid: Grid) -> dict[str, float]:
    """{"dp": bytes, "pp": bytes, "tp": bytes} that the busiest rank sent in the last step of grid_steps.

    What runs beside a rank is gradients: "dp", those of tied weights and of replicas along pp included. Other single
    messages go along the axis in which both ranks differ; other all-reduces are those of layers, over tp. Where an
    all-reduce is not made of messages, it counts as a ring's.
    """
    places = [grid.coordinates(rank) for rank in range(grid.size)]
    sent = {axis: [0.0] * grid.size for axis in ("dp", "pp", "tp")}
    for e in last_step(results):
        if e.op not in ("send", "all_reduce") or e.nbytes <= LITTLE:
            continue
        if e.op == "all_reduce":
            ranks = results[e.rank].sums.get(e.nbytes, grid["dp"]) if e.lane else grid["tp"]
            sent["dp" if e.lane else "tp"][e.rank] += cost.all_reduce(ranks, e.nbytes).nbytes_sent
            continue
        apart = [axis for axis in sent if places[e.rank][axis] != places[e.peer][axis]]
        if e.lane or len(apart) == 1:
            sent["dp" if e.lane else apart[0]][e.rank] += e.nbytes
    return {axis: max(ranks) for axis, ranks in sent.items()}


def rows_over_pp(events: Iterable[Event], grid: Grid) -> list[list[Timed]]:
    """What the ranks of the first pipeline did: a list of schedules.Timed for each place along pp."""
    ranks = grid.groups("pp")[0]
    mine = [e._replace(rank=ranks.index(e.rank)) for e in events if e.rank in ranks]
    return timed_actions(mine, len(ranks))

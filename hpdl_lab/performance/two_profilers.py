"""A training step under two profilers: torch's, and the laboratory's own event log."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..comm.base import Comm
from ..parallel.scaling.accounting import inside, union
from . import profile_step

WIDTH, LAYERS, ROWS = 1024, 4, 64


class Exposed(NamedTuple):
    """Exposed communication by both, and a step, in s. last: begin and end of the last step, in ns."""

    by_torch: float
    by_lab: float
    step: float
    last: tuple[int, int]


def ddp_step_seen_twice(comm: Comm) -> Exposed:
    """Record the same steps of DDP, on the back end "hpdl", by both; on real ranks."""
    from ..torch_backend import process_group

    with process_group(comm, "hpdl"):
        model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
        x = torch.randn(ROWS, WIDTH)
        cost, ended = profile_step.cost_of_recording(), 0
        with profile_step.recorder() as profiler:
            for _ in range(profile_step.WARMED + profile_step.RECORDED):
                with comm.trace.span("forward"):
                    loss = model(x).square().mean()
                with comm.trace.span("backward"):
                    loss.backward()
                ended = comm.trace.clock()
                profiler.step()
        found = profile_step.read_profile(profiler, cost)
    steps = [e.t0_ns for e in comm.trace.events if e.op == "forward"][-profile_step.RECORDED :]
    waits = union((e.t0_ns, e.t1_ns) for e in comm.trace.events if e.op == "wait" and not e.lane)
    by_lab = sum(end - begin for begin, end in inside(waits, steps[0], ended))
    per_step = 1e9 * len(steps)
    by_torch = found.bars[profile_step.EXPOSED]
    return Exposed(by_torch, by_lab / per_step, (ended - steps[0]) / per_step, (steps[-1], ended))

"""What notebook 11 runs: a training script for one rank, and the same with three changed lines for a mesh of ranks."""

from itertools import islice
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from ...data.sharding import batches
from ...mesh import DeviceMesh
from ...models import build_for
from ..grid.machine import MACHINES, grid_of
from ..grid.model import predict
from ..grid.search import micro_batches as count_of_micro_batches
from ..grid.simulation import simulate
from ..grid.spec import SPECS
from . import checkpoint as hybrid_checkpoint
from .model import HybridParallel

BATCH, LR, MICRO_BATCHES = 16, 3e-3, 4


class Trained(NamedTuple):
    """One rank after training. losses: of the whole batch, one per step; held: numbers in this rank's parameters.

    seconds: median of a step, without the first; 0 for a single step.
    """

    losses: list
    held: int
    seconds: float


def script(comm, data, steps=3):
    """Train a tiny GPT on one rank, as everybody does; returns Trained."""
    model = build_for(data, "gpt", dtype="float64")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for x, y in steps_of(data, 0, steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, numbers_in(model.parameters()), 0.0)


def hybrid_script(comm, data, grid, steps=3, load=None, save=None):
    """The same on a mesh: lines 1 to 3 are new, and in the place of forward, loss and backward; returns Trained.

    Args:    data: a data.dataset.Dataset of tokens, the same on every rank; grid: {"dp": 2, "pp": 2} for four ranks.
             load, save: paths of checkpoints, of any grid, to go on from and to leave behind; None for neither.
    """
    mesh = DeviceMesh(comm, **grid)  # 1
    model = build_for(data, "gpt", dtype="float64")
    model = HybridParallel(model, mesh, data.train_x[:BATCH], micro_batches=MICRO_BATCHES)  # 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    begun = hybrid_checkpoint.restore(model, load, optimizer) if load else 0
    losses, times = [], [comm.trace.clock()]
    for x, y in steps_of(data, begun, steps):
        loss = model.step(x, y)  # 3
        optimizer.step()
        losses.append(loss)
        times.append(comm.trace.clock())
    if save:
        hybrid_checkpoint.save(model, save, optimizer, begun + steps)
    return Trained(losses, numbers_in(model.parameters()), median_step(times))


def steps_of(data, begun, steps):
    """Yield (x, y) of so many batches, behind those of the steps that have been taken."""
    for indices in islice(batches(len(data.train_y), BATCH), begun, begun + steps):
        yield data.train_x[indices], data.train_y[indices]


def numbers_in(parameters):
    return sum(p.numel() for p in parameters)


def median_step(times):
    """s of a step, from the ns between steps; the first one, which allocates, does not count."""
    taken = sorted(b - a for a, b in zip(times[1:], times[2:], strict=False))
    return taken[len(taken) // 2] / 1e9 if taken else 0.0


def price(dp, pp, tp, model="gpt3", machine="dgx_a100", batch=1536, recompute=True):
    """What a step of a published model costs on a grid of GPUs: a grid.model.Prediction, .seconds and .nbytes.

    Micro-batches of one sequence, 1F1B.   Raises:  ValueError where the grid cannot be; LookupError for a name that
    is none.
    """
    require_known(model, machine)
    m = count_of_micro_batches(batch, dp, 1)
    grid, of = grid_of(dp, pp, tp), MACHINES[machine]
    return predict(SPECS[model], grid, "1f1b", m, recompute, machine=of, batch=batch)


def simulated_step(dp, pp, tp, micro_batches, model="gpt3", machine="dgx_a100"):
    """(s on simulated ranks, s by the model) of one step with micro-batches of one example each, recomputed."""
    require_known(model, machine)
    spec, grid, machine = SPECS[model], grid_of(dp, pp, tp), MACHINES[machine]
    asked = {"recompute": True, "machine": machine, "batch": dp * micro_batches}
    simulated = simulate(spec, grid, "1f1b", micro_batches, **asked)
    return simulated.seconds, predict(spec, grid, "1f1b", micro_batches, **asked).seconds


def require_known(model, machine):
    """Raise LookupError unless these are names of a published model and of a machine."""
    for what, name, known in (("model", model, SPECS), ("machine", machine, MACHINES)):
        if name not in known:
            raise LookupError(f"no {what} is called {name!r}: {', '.join(known)}")

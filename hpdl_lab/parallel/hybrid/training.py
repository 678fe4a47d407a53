"""The training loop of one rank of a mesh: as training.train, with a model dealt out over dp, pp and tp."""

import copy
from itertools import islice
from typing import Any

import torch

from ...comm.base import Comm
from ...data.dataset import Dataset
from ...data.loading import batches
from ...mesh import DeviceMesh, Grid
from .. import checkpoint
from ..consensus import require_same
from ..training import Recipe, Trained, evaluate, run_steps, steps_taken
from .model import HybridParallel, WholeOptimizer


def train_on_mesh(
    comm: Comm,
    model: torch.nn.Module,
    grid: Grid,
    data: Dataset,
    recipe: Recipe,
    schedule: str = "1f1b",
    recompute: bool = False,
    chunks: int | None = None,
) -> Trained:
    """Train `model` over the ranks of `grid`, and report {step, loss, samples_per_s} of every step from rank 0.

    The course is that of one rank, but for the end of an epoch: a batch that is shorter than the others is left out,
    because all micro-batches have one shape.

    Args:    model, grid, data, recipe: the same on every rank; recipe.micro_batches: of each replica's share.
             schedule, recompute, chunks: see HybridParallel.
    Returns: training.Trained, with the losses and the parameters of the whole model, the same on every rank.
    Raises:  ValueError on every rank: as HybridParallel, and where there are fewer examples than a batch has.
    """
    n = len(data.train_y)
    require_same(comm, "recipe", f"{recipe} on {grid!r} for {n:,} examples of shape {tuple(data.train_x.shape[1:])}")
    if n < recipe.batch:
        raise ValueError(f"a batch of {recipe.batch} is more than the {n} examples that there are")
    mesh, example = DeviceMesh(comm, grid), data.train_x[: recipe.batch]
    how: dict[str, Any] = {
        "schedule": schedule,
        "micro_batches": recipe.micro_batches,
        "recompute": recompute,
        "chunks": chunks,
    }
    hybrid = HybridParallel(model, mesh, example, **how)
    optimizer = recipe.optimizer_for(hybrid)
    facts = recipe.facts() | checkpoint.facts_of(data, model)
    if recipe.checkpoint_every:
        checkpoint.require_writable(comm, recipe.checkpoint)
    whole_optimizer = WholeOptimizer(hybrid, optimizer)
    first = steps_taken(comm, hybrid, whole_optimizer, recipe, facts)
    whole = (some for some in batches(n, recipe.batch, recipe.seed) if len(some) == recipe.batch)
    shuffled = islice(whole, first, recipe.steps)

    def step() -> tuple[float, float, int]:
        some = next(shuffled)
        loss = hybrid.step(data.train_x[some], data.train_y[some])
        with comm.trace.span("update"):
            optimizer.step()
        return loss, loss, recipe.batch

    def save(steps: int) -> None:
        checkpoint.save(comm, recipe.checkpoint, hybrid, whole_optimizer, steps, facts)

    losses, samples, seconds = run_steps(comm, recipe, first, step, save)
    model = copy.deepcopy(model)
    model.load_state_dict(hybrid.state_dict())
    loss, accuracy = evaluate(comm, model, data.test_x, data.test_y)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return Trained(losses, seconds, samples, loss, accuracy, flat)

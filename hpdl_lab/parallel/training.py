"""The training loop of one rank: shard, forward, backward, add gradients, update; any strategy plugs in."""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from ..data.sharding import batches, shard
from ..models.mlp import mlp


@dataclass(frozen=True)
class Recipe:
    """What decides the course of a training, apart from the number of ranks, which must not."""

    steps: int = 300
    batch: int = 128  # examples per step over all ranks
    lr: float = 0.2
    momentum: float = 0.9
    seed: int = 0  # of the shuffling

    def __post_init__(self):
        if self.steps < 1 or self.batch < 1:
            raise ValueError(f"training needs at least 1 step of 1 example, got {self.steps} steps of {self.batch}")


@dataclass(frozen=True)
class Trained:
    """What a rank returns: losses of every step; seconds and samples of all steps; the flat parameters (N,)."""

    losses: list
    seconds: float
    samples: int
    test_accuracy: float
    parameters: torch.Tensor


def train(comm, model, strategy, data, recipe):
    """Train `model` on this rank's shards and report {step, loss, samples_per_s} of every step from rank 0.

    Args:    model: nn.Module, overwritten; rank 0's parameters are where all ranks start.
             strategy: start(comm, model) and add_gradients(comm, model), such as parallel.data.DataParallel.
             data: a data.digits.Digits, the same on every rank.
    Returns: Trained. The losses are of the global batch, the same on every rank.
    """
    strategy.start(comm, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    schedule = batches(len(data.train_y), recipe.batch, recipe.seed)
    losses, samples, clock = [], 0, comm.trace.clock
    begin = before = clock()
    for step in range(recipe.steps):
        indices = next(schedule)
        mine = shard(indices, comm.rank, comm.size)
        part = train_step(comm, model, strategy, optimizer, data.train_x[mine], data.train_y[mine], len(indices))
        # Through the communicator's own all-reduce, so that a wrong one in the exercise cannot hide in the loss.
        losses.append(float(comm.all_reduce(torch.tensor([part], dtype=torch.float64))))
        samples += len(indices)
        now = clock()
        if comm.rank == 0:
            rate = len(indices) * 1e9 / (now - before) if now > before else 0.0
            comm.report(step=step, loss=losses[-1], samples_per_s=rate)
        before = now
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return Trained(losses, (before - begin) / 1e9, samples, accuracy(model, data.test_x, data.test_y), flat)


def train_step(comm, model, strategy, optimizer, x, y, batch):
    """One step on this rank's shard; returns this rank's part of the loss: added over ranks it is the mean loss.

    Args:    x: (b, features), y: (b,) int64: this rank's shard, which may be empty; batch: examples over all ranks.
    """
    optimizer.zero_grad()
    with comm.trace.span("forward"):
        loss = cross_entropy(model(x), y, reduction="sum") / batch
    with comm.trace.span("backward"):
        loss.backward()
    with comm.trace.span("add gradients"):
        strategy.add_gradients(comm, model)
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model, x, y):
    """Share of the images x (n, features) whose greatest logit is the label y (n,)."""
    return (model(x).argmax(1) == y).double().mean().item()


class TrainingStep:
    """f(comm, n): one step of training on a global batch of n digits, shared by the ranks; what lab.scaling times."""

    def __init__(self, strategy, data, sizes=(64, 512, 256, 10)):
        self.strategy, self.data, self.sizes = strategy, data, sizes
        self.model = None  # built at the first call, on the rank that steps

    def __call__(self, comm, n):
        if self.model is None:
            self.model = mlp(self.sizes).to(comm.device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        mine = shard(torch.arange(n) % len(self.data.train_y), comm.rank, comm.size)
        x, y = self.data.train_x[mine], self.data.train_y[mine]
        train_step(comm, self.model, self.strategy, self.optimizer, x, y, n)

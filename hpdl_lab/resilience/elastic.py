"""A training that goes on from its sharded checkpoint with another number of ranks, and comes to the same weights.

4 ranks   | w m v | w m v | w m v | w m v |   each rank: its shard of weights and both moments
disk      w0 m0 v0  w1 m1 v1  w2 m2 v2 ...    the same for any number of ranks
3 ranks   |  w m v  |  w m v  |  w m v   |    half of the elements are now on another rank
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives.chunks import bounds
from ..comm import sim
from ..comm.base import Comm
from ..units import counted
from .shards import LATEST, Disk, Killed, load_range, read_latest, save_sharded


@dataclass(frozen=True)
class Task:
    """A linear regression with Adam: x (examples, n), y (examples,), start (n,), in float64; batch: of all ranks."""

    x: Tensor
    y: Tensor
    start: Tensor
    examples: int
    batch: int
    lr: float = 0.05
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-2

    def order(self, epoch: int) -> list[int]:
        """Return the numbers of all examples in the order of an epoch, the same on every rank."""
        return random.Random(epoch).sample(range(self.examples), self.examples)

    def gradient(self, weights: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the sum of the gradients of these examples, (n,) float64; zeros for none."""
        x = self.x[list(ids)]
        return x.T @ (x @ weights - self.y[list(ids)])

    def update(self, shard: Tensor, gradient: Tensor, t: int) -> None:
        """Do Adam's update number t in place; t counts from 1. shard: (k, 3), rows [w, m, v]; gradient: (k,)."""
        (b1, b2), (w, m, v) = self.betas, shard.unbind(1)
        m.mul_(b1).add_((1 - b1) * gradient)
        v.mul_(b2).add_((1 - b2) * gradient**2)
        w.sub_(self.lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + self.eps))


def make_task(n: int = 13, examples: int = 7, batch: int = 3, seed: int = 15) -> Task:
    """Return a task with n weights, drawn by a seed."""
    numbers = torch.randn(examples + 1, n + 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Task(numbers[1:, 1:], numbers[1:, 0], numbers[0, 1:], examples, batch)


def assembled(comm: Comm, part: Tensor, start: int, n: int) -> Tensor:
    """Return all n elements on every rank. part: this rank's elements, from `start` on, float64."""
    whole = torch.zeros(n, dtype=torch.float64)
    whole[start : start + len(part)] = part
    return comm.all_reduce(whole)


def train_elastic(comm: Comm, disk: Disk, task: Task, until: int, every: int) -> Tensor:
    """Go on from the checkpoint on `disk` to step `until`, on any number of ranks.

    Without a checkpoint, begin with step 0 and `task.start`. The job may be killed at
    any moment, and started again with fewer or more ranks. It has to reach the same
    weights, to 1e-10, as one rank that is never killed.

        place   0  1  2  3  4  5  6  7  8  9 ...     of all epochs, one after the other
        epoch   0  0  0  0  0  0  0  1  1  1 ...     here with 7 examples
        step    0  0  0  1  1  1  2  2  2  3 ...     here with a batch of 3

    A new epoch goes on with the next place, not with place 0. task.order(epoch) returns
    the numbers of all examples, in the order in which this epoch uses them. A step takes
    the next `task.batch` places. The ranks share these places as evenly as possible: 3
    ranks take 11, 11 and 10 of 32 places. As in ZeRO-1, rank r updates and saves only
    its shard of the weights. The first weight of the shard, and the first weight after
    it, are bounds(n, comm.size, r). A shard has one row [w, m, v] for each of its
    weights: the weight and its two moments.

    Helpers: task.gradient(weights, ids) returns the SUM of the gradients of these
             examples, for all n weights. task.update(shard, gradient, t) changes the
             rows of `shard` in place, by Adam's update number t (the first is 1).
             `gradient` is the MEAN over the batch, for the shard's weights only.
             assembled(comm, part, start, n) returns all n elements on every rank, from
             the parts of all ranks. read_latest(disk.read(LATEST)) returns three
             values: the number of finished steps, the number of all elements (three for
             each weight), and the list of shards. Without a checkpoint, LATEST is not in
             disk.names(). load_range(disk, start, stop) returns elements start to
             stop - 1, as a flat float64 tensor. save_sharded(comm, disk, step, shard,
             start, total) saves `shard`, also a flat float64 tensor.
    Args:    until: total number of steps, counting the steps before any restart;
             every: save when the number of finished steps is a multiple of `every`, and
             when it is `until`. Save each step only once.
    Returns: all n weights, (n,) float64, the same on every rank.
    Ref:     torch.distributed.checkpoint; Rajbhandari et al. 2020 (ZeRO), section 5.1.
    """
    n = len(task.start)
    first, last = bounds(n, comm.size, comm.rank)
    low, high = bounds(task.batch, comm.size, comm.rank)
    step, shard = 0, torch.zeros(last - first, 3, dtype=torch.float64)
    shard[:, 0] = task.start[first:last]
    if LATEST in disk.names():
        step = read_latest(disk.read(LATEST))[0]
        shard = load_range(disk, 3 * first, 3 * last).reshape(-1, 3)
    weights = assembled(comm, shard[:, 0], first, n)
    while step < until:
        places = range(step * task.batch + low, step * task.batch + high)
        ids = [task.order(k // task.examples)[k % task.examples] for k in places]
        gradient = comm.all_reduce(task.gradient(weights, ids)) / task.batch
        step += 1
        task.update(shard, gradient[first:last], step)
        weights = assembled(comm, shard[:, 0], first, n)
        if step % every == 0 or step == until:
            save_sharded(comm, disk, step, shard.flatten(), 3 * first, 3 * n)
    return weights


def in_lives(train: Callable[..., Tensor], task: Task, ranks: Sequence[int], until: int, seed: int) -> list[Tensor]:
    """Return each rank's weights of a job that is killed in all lives but the last; every fourth step is saved."""
    if not ranks:
        raise ValueError("ranks: the number of ranks of at least one life is needed, such as [4, 3]")
    rng, disk, returned = random.Random(seed), Disk(), list[Tensor]()
    for life, p in enumerate(ranks, 1):
        disk = Disk(disk.files, rng.randrange(20, 60) if life < len(ranks) else None)
        with suppress(Killed):
            returned = sim.run(p, lambda comm, disk: train(comm, disk.of(comm), task, until, 4), disk)
        step = read_latest(disk.files[LATEST])[0] if LATEST in disk.files else 0
        print(counted(p, "rank"), "killed" if disk.killed else "ended", f"step {step}")
    return list(returned)


def stays(n: int, before: int, after: int) -> float:
    """Return the share of n elements that stay on their rank if the number of ranks changes."""
    both = zip(*([bounds(n, p, r) for r in range(min(before, after))] for p in (before, after)), strict=True)
    return sum(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in both) / n

"""Trainings with different batches, one after another: a sweep, in which every rank takes whole trainings of its own.

rank 0   | batch 32, seed 0 ................. | batch 1024, seed 0 |
rank 1   | batch 32, seed 1 ................. | batch 1024, seed 1 |       no message between them
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, TypedDict

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .. import models
from ..comm.base import Comm, Row
from ..data.dataset import Dataset
from ..data.loading import batch_indices, shard_indices
from ..optim.large_batch import (
    LAMB,
    LARS,
    Noise,
    Rate,
    Ratio,
    TrainingJob,
    learning_rate,
    lr_schedule,
    noise_of_ranks,
    trust_ratio,
)

WARMUP = 0.5  # of all steps: with the largest batch there are 28 in 20 epochs of the digits
TESTED = 512  # examples


class Method(NamedTuple):
    """The answer of a training to a larger batch.

    optimizer: "sgd", "adamw", "lars" or "lamb"; rate: for the base batch; power: of the batch, in the rate.
    warmup: the share of the steps until the full rate.
    """

    optimizer: str
    rate: float
    power: float = 0.0
    warmup: float = 0.0


class Sweep(NamedTuple):
    """The common part of the trainings of a sweep: the model, the batch that the rates are for, epochs, methods."""

    model: str
    batches: tuple[int, ...]
    base_batch: int
    epochs: float
    methods: dict[str, Method]


SWEEPS = {  # the base rates are tuned for the base batch, by hand
    "digits": Sweep(
        "mlp",
        (32, 128, 512, 1024),
        32,
        20,
        {
            "plain": Method("sgd", 0.02),
            "linear": Method("sgd", 0.02, 1.0),
            "warm-up": Method("sgd", 0.02, 1.0, WARMUP),
            "LARS": Method("lars", 0.5, 0.5, WARMUP / 2),
            "LAMB": Method("lamb", 0.02, 0.5, WARMUP / 2),
        },
    ),
    "text": Sweep(
        "gpt",
        (8, 32, 128),
        8,
        0.12,
        {
            "plain": Method("sgd", 0.05),
            "linear": Method("sgd", 0.05, 1.0),
            "warm-up": Method("sgd", 0.05, 1.0, WARMUP),
            "LARS": Method("lars", 0.5, 0.5, WARMUP / 2),
            "LAMB": Method("lamb", 0.02, 0.5, WARMUP / 2),
        },
    ),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr=lr),
    "lamb": lambda params, lr: LAMB(params, lr=lr),
}


class Training(NamedTuple):
    """A training of a sweep."""

    name: str
    batch: int
    seed: int


class _SweepRow(TypedDict):
    """The result of one training; accuracy and loss are of the test set."""

    steps: int
    seconds: float
    accuracy: float
    loss: float


def train_all(
    comm: Comm,
    sweep: Sweep,
    data: Dataset,
    trainings: Sequence[Training],
    rate: Rate = learning_rate,
    ratio: Ratio = trust_ratio,
) -> None:
    """Report {name, batch, seed, steps, seconds, accuracy, loss} of every training, each made by one rank."""
    for training in trainings[comm.rank :: comm.size]:
        comm.report(**training._asdict(), **_train_one(sweep, data, training, rate, ratio))


def _train_one(sweep: Sweep, data: Dataset, training: Training, rate: Rate, ratio: Ratio) -> _SweepRow:
    """Return {steps, seconds, accuracy, loss}, the last two of the test set; the rate falls to 0 as a cosine."""
    method, batch, n = sweep.methods[training.name], training.batch, len(data.train_y)
    steps = max(1, round(sweep.epochs * n / batch))
    model = models.build_for(data, sweep.model, seed=training.seed)
    if method.optimizer == "lars":
        optimizer: torch.optim.Optimizer = LARS(model.parameters(), lr=method.rate, ratio=ratio)
    else:
        optimizer = OPTIMIZERS[method.optimizer](model.parameters(), method.rate)
    scaled = round(sweep.base_batch * (batch / sweep.base_batch) ** method.power)
    rates = lr_schedule(
        optimizer, scaled, sweep.base_batch, round(method.warmup * steps), lambda step: cosine(step / steps), rate
    )
    begin = time.perf_counter()
    shuffles = torch.Generator().manual_seed(training.seed)
    order = torch.cat([torch.randperm(n, generator=shuffles) for _ in range(math.ceil(sweep.epochs) + 1)])
    for indices in order[: steps * batch].split(batch):  # epochs run into each other: every step has a whole batch
        optimizer.zero_grad()
        _loss_of(model, data.train_x[indices], data.train_y[indices]).backward()
        optimizer.step()
        rates.step()
    seconds = time.perf_counter() - begin
    accuracy, loss = judged(model, data)
    return {"steps": steps, "seconds": seconds, "accuracy": accuracy, "loss": loss}


def cosine(share: float) -> float:
    """Return 1 at the start, 0 at the end. Ref: Loshchilov & Hutter 2016, arXiv:1608.03983, without restarts."""
    return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def _loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x).flatten(0, -2), y.flatten())


@torch.no_grad()
def judged(model: nn.Module, data: Dataset) -> tuple[float, float]:
    """Return (share of right answers, mean cross-entropy) on the test set, or the first TESTED examples of it."""
    x, y = data.test_x[:TESTED], data.test_y[:TESTED].flatten()
    logits = model(x).flatten(0, -2)
    return float((logits.argmax(1) == y).double().mean()), float(cross_entropy(logits, y))


def measure_noise(comm: Comm, model: nn.Module, data: Dataset, batch: int, steps: int, rate: float) -> list[Noise]:
    """Train by plain SGD over all ranks, and estimate the noise at every step from gradients that are there anyway.

    Args:    model: the same on every rank, overwritten; batch: examples per step over all ranks.
    Returns: a Noise for each step, the same on every rank.
    Steps: two all_reduces per step: of all gradients, and of a number.
    """
    found = []
    each = batch // comm.size
    params = list(model.parameters())
    for indices in islice(batch_indices(len(data.train_y), batch), steps):
        if len(indices) < batch:
            continue  # what remains of an epoch
        mine = shard_indices(indices, comm.rank, comm.size)
        model.zero_grad()
        _loss_of(model, data.train_x[mine], data.train_y[mine]).backward()
        grads = torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None])
        mean = comm.all_reduce(grads.clone()) / comm.size
        found.append(noise_of_ranks(comm, grads, mean, each))
        for p, grad in zip(params, mean.split([p.numel() for p in params]), strict=True):
            p.data.sub_(rate * grad.view(p.shape))
    return found


# -- steps and seconds to a target ------------------------------------------------------------------------------------

RATES = {8: 0.2, 32: 0.4, 128: 0.8, 512: 0.8}  # of SGD without momentum on the digits, tuned by hand for each batch
MOST_EPOCHS = 200
LOOK_EVERY = 64  # examples, at least, between two looks at the test set


def train_until(
    comm: Comm, model: nn.Module, data: Dataset, target: float, batches_: Sequence[int], seeds: int
) -> None:
    """Train over all ranks with each batch until the test accuracy is `target`; rank 0 reports every training.

    Rows {ranks, batch, seed, steps, seconds}: of the steps alone; looking at the test set is not counted.
    """
    start = copy.deepcopy(model.state_dict())
    until(comm, model, data, target, max(batches_), 0)  # the first messages between ranks take longer
    for seed in range(seeds):
        for batch in batches_:
            model.load_state_dict(start)
            steps, seconds = until(comm, model, data, target, batch, seed)
            if comm.rank == 0:
                comm.report(ranks=comm.size, batch=batch, seed=seed, steps=steps, seconds=seconds)


def until(comm: Comm, model: nn.Module, data: Dataset, target: float, batch: int, seed: int) -> tuple[int, float]:
    """Return (steps, s) until the target. Raises ValueError if it is not reached in MOST_EPOCHS."""
    n, params, seconds = len(data.train_y), list(model.parameters()), 0.0
    optimizer = torch.optim.SGD(params, lr=RATES[batch])
    every, most = max(1, LOOK_EVERY // batch), MOST_EPOCHS * n // batch
    for step, indices in enumerate(islice(batch_indices(n, batch, seed), most), 1):
        mine = shard_indices(indices, comm.rank, comm.size)
        begin = time.perf_counter()
        optimizer.zero_grad()
        (_loss_of(model, data.train_x[mine], data.train_y[mine]) * (len(mine) / len(indices))).backward()
        total = comm.all_reduce(torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None]))
        for p, grad in zip(params, total.split([p.numel() for p in params]), strict=True):
            p.grad = grad.view(p.shape)
        optimizer.step()
        seconds += time.perf_counter() - begin
        if step % every == 0 and judged(model, data)[0] >= target:
            return step, seconds
    raise ValueError(f"batch {batch:,} has not reached {target:.0%} in {most:,} steps: take a lower target")


def fitted(rows: Sequence[Row]) -> TrainingJob:
    """Return the Job that fits rows of `train_until`, some of 1 rank, by least squares of relative differences."""

    def line(points: list[tuple[float, float]]) -> tuple[float, float]:
        """Return (a, b), both at least 0, of a + b x."""
        x, y = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
        a, b = torch.linalg.lstsq(torch.stack([1 / y, x / y], 1), torch.ones_like(y)).solution.tolist()
        return max(a, 0.0), max(b, 0.0)

    least, rest = line([(1 / r["batch"], r["steps"]) for r in rows])
    fixed, example = line([(r["batch"], r["seconds"] / r["steps"]) for r in rows if r["ranks"] == 1])
    sums: dict[int, float] = {}
    for p in sorted({r["ranks"] for r in rows}):
        over = [
            r["seconds"] / r["steps"] - fixed - -(-r["batch"] // p) * example for r in rows if r["ranks"] == p and p > 1
        ]
        sums[p] = max(statistics.median(over), 0.0) if over else 0.0
    return TrainingJob(max(least, 1.0), rest / max(least, 1.0), example, fixed, sums)

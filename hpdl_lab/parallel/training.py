"""The training loop of one rank: input, forward, backward, add gradients, update; any model, data and strategy."""

from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch.nn.functional import cross_entropy

from ..data.loading import Reader
from ..data.sharding import batches, check_batch, shard
from ..models.batch_norm import synchronized
from . import checkpoint
from .agreement import require_same
from .data import name_of
from .known_sum import require_sums
from .recipe import Recipe

__all__ = ["Recipe", "Trained", "evaluate", "train", "train_step"]

CHUNK = 256  # examples that are evaluated at once, which bounds the memory for it
TESTED = 2**15  # answers that are evaluated: of a long text more would take longer than a short training


@dataclass(frozen=True)
class Trained:
    """What a rank returns: losses of every step; seconds and samples of all steps; the flat parameters (N,).

    test_loss: mean cross-entropy per answer on the test set; test_accuracy: share of its answers that are right.
    """

    losses: list
    seconds: float
    samples: int
    test_loss: float
    test_accuracy: float
    parameters: torch.Tensor


def train(comm, model, strategy, data, recipe, reader=None):
    """Train `model` on this rank's shards and report {step, loss, samples_per_s} of every step from rank 0.

    Args:    model: nn.Module, overwritten; rank 0's parameters are where all ranks start.
             strategy: a parallel.data.Strategy, which adds gradients over ranks.
             data: a data.dataset.Dataset, recipe: a Recipe: the same on every rank.
             reader: a data.loading.Reader; by default examples are there when they are asked for.
    Returns: Trained. The losses are of the global batch, the same on every rank.
    Raises:  ValueError on every rank where ranks differ in recipe, data or model, or outnumber the examples of a batch,
             or where the strategy's all_reduce does not add up;
             OSError and ValueError on every rank where the recipe's checkpoint cannot be used: see checkpoint.py.
    """
    n = len(data.train_y)
    require_same(comm, "recipe", f"{recipe} for {n:,} examples of shape {tuple(data.train_x.shape[1:])}")
    check_batch(n, recipe.batch, comm.size)
    reader = Reader() if reader is None else reader
    optimizer = recipe.optimizer_for(model)
    if recipe.checkpoint_every:
        checkpoint.require_writable(comm, recipe.checkpoint)
    strategy.start(comm, model)
    facts = recipe.facts() | checkpoint.facts_of(data, model) | {"prepare": name_of(reader.prepare)}
    try:
        require_sums(comm, strategy)
        first = steps_taken(comm, model, optimizer, recipe, facts)
        schedule = islice(batches(n, recipe.batch, recipe.seed, first), recipe.steps - first)
        shards = reader.shards(comm, data.train_x, data.train_y, enumerate(schedule, first), recipe.seed)
        with closing(shards), synchronized(model, comm):
            losses, samples, seconds = take_steps(comm, model, strategy, optimizer, shards, recipe, first, facts)
        strategy.finish(comm, model)
    finally:
        strategy.stop()
    if not strategy.synchronous:  # then each rank has its parts of the losses: to add them up earlier would be to wait
        losses = comm.all_reduce(torch.tensor(losses, dtype=torch.float64)).tolist()
    loss, accuracy = evaluate(comm, model, data.test_x, data.test_y)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return Trained(losses, seconds, samples, loss, accuracy, flat)


def steps_taken(comm, model, optimizer, recipe, facts):
    """How many steps have been taken before this run: those of the checkpoint that it goes on from, else none."""
    if not recipe.resume:
        return 0
    first = checkpoint.restore(comm, recipe.checkpoint, model, optimizer, facts)
    if first >= recipe.steps:
        raise ValueError(f"{recipe.checkpoint} holds {first} steps already: ask for more than steps={recipe.steps}")
    return first


def take_steps(comm, model, strategy, optimizer, shards, recipe, first, facts):
    """A step for each of `shards`, from step number `first` on; returns losses, samples and seconds of all.

    facts: what a run that goes on from a checkpoint of this one must have in common with it.
    """
    losses, samples, clock = [], 0, comm.trace.clock
    begin = before = clock()
    for step in range(first, recipe.steps):
        with comm.trace.span("input"):
            x, y, batch = next(shards)
        part = train_step(comm, model, strategy, optimizer, x, y, batch, recipe.micro_batches)
        if strategy.synchronous:
            # Through the communicator's own all-reduce, so that a wrong one in the exercise cannot hide in the loss.
            losses.append(float(comm.all_reduce(torch.tensor([part], dtype=torch.float64))))
        else:
            losses.append(part)
        samples += batch
        now = clock()
        if comm.rank == 0:
            told = losses[-1] if strategy.synchronous else part * batch / max(len(x), 1)
            comm.report(step=step, loss=told, samples_per_s=batch * 1e9 / (now - before) if now > before else 0.0)
        before = now
        if recipe.checkpoint_every and (step + 1) % recipe.checkpoint_every == 0:
            checkpoint.save(comm, recipe.checkpoint, model, optimizer, step + 1, facts)
    return losses, samples, (before - begin) / 1e9


def train_step(comm, model, strategy, optimizer, x, y, batch, micro_batches=1):
    """One step on this rank's shard; returns this rank's part of the loss: added over ranks it is the mean loss.

    Args:    x: (b, ...): this rank's shard, which may be empty; y: (b,) or (b, positions) int64.
             batch: examples over all ranks; micro_batches: parts of the shard that go through the model one by one.
    """
    answers = batch * y.shape[1:].numel()  # of all ranks: the loss is the mean over these
    optimizer.zero_grad()
    part = 0.0
    pairs = list(zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True))
    for i, (some_x, some_y) in enumerate(pairs):
        last = i == micro_batches - 1  # only then do gradients travel, which backward itself may start
        with nullcontext() if last else strategy.accumulating():
            with comm.trace.span("forward"):
                logits = model(some_x)  # (b, classes) or (b, positions, classes)
                loss = cross_entropy(logits.flatten(0, -2), some_y.flatten(), reduction="sum") / answers
            with comm.trace.span("backward"):
                loss.backward()
        part += loss.item()
    with comm.trace.span("add gradients"):
        strategy.add_gradients(comm, model)
    with comm.trace.span("update"):
        optimizer.step()
    return part


@torch.no_grad()
def evaluate(comm, model, x, y):
    """(mean cross-entropy per answer, share of right answers) of x (n, ...), y (n,) or (n, positions).

    Of the first of them, TESTED answers in all. Each rank does its share of these.
    Steps: one all_reduce.   Bytes per rank: those of all_reduce for 24 bytes.
    """
    some = min(len(y), max(1, TESTED // max(1, y[:1].numel())))
    mine = shard(torch.arange(some, device=y.device), comm.rank, comm.size)
    loss, right, n = 0.0, 0, 0
    model.eval()
    for indices in mine.split(CHUNK):
        logits, answers = model(x[indices]).flatten(0, -2), y[indices].flatten()  # (a, classes), (a,)
        loss += cross_entropy(logits, answers, reduction="sum").item()
        right += (logits.argmax(1) == answers).sum().item()
        n += len(answers)
    model.train()
    loss, right, n = comm.all_reduce(torch.tensor([loss, right, n], dtype=torch.float64)).tolist()
    return loss / max(n, 1), right / max(n, 1)

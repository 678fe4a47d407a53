"""The training loop of one rank around a strategy, and the recipe, which decides its course whatever the ranks.

rank 0   | m0  m1  m2 | add | m0  m1 | add | m0 | add |
rank 1   | m0  m1     | add | m0     | add |    | add |      no batch left, and yet it takes part
rank 2   |            | add |        | add |    | add |      an empty shard from the start
"""

import os
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields
from itertools import islice
from numbers import Integral, Real
from types import UnionType
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..comm.base import Comm
from ..data.dataset import Dataset
from ..data.loading import Reader, batch_indices, check_batch, shard_indices
from ..models.batch_norm import synchronized
from ..optim.large_batch import LAMB, LARS
from ..units import require_int, require_number
from . import checkpoint
from .checkpoint import Facts
from .consensus import require_same
from .data_parallel import Strategy
from .optimizer_state import OptimizerLike
from .reducer import name_of

LAYERWISE = ("lars", "lamb")  # which take the length of whole tensors
OPTIMIZERS = ("sgd", "adamw", *LAYERWISE)
SEEDS = 1 << 40  # times the million that data/loading.py multiplies a seed by: what torch can take
TYPES: dict[object, tuple[type | UnionType, str]] = {  # of an option: what it may be, and the same in words
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str | os.PathLike, "a text or the name of a file"),
    bool: (bool, "True or False"),
}


class Trainable(Protocol):
    """A model, on one rank or over many."""

    def parameters(self) -> Iterable[torch.nn.Parameter]: ...


@dataclass(frozen=True)
class Recipe:
    """Steps, batch, optimizer, and what is kept of the run.

    checkpoint: file that rank 0 writes after every `checkpoint_every` steps; resume: go on from that file. The run that
    goes on may have another number of ranks; see parallel/checkpoint.py.
    Raises:  TypeError and ValueError that name the option which cannot be, and what is needed.
    """

    steps: int = 300
    batch: int = 128  # examples per step over all ranks
    lr: float = 0.2
    momentum: float = 0.9  # of SGD and LARS; AdamW and LAMB have their usual ones
    seed: int = 0  # of the shuffling
    optimizer: str = "sgd"  # or "adamw", which transformers are trained with; "lars", "lamb" for large batches
    micro_batches: int = 1  # parts of a shard whose gradients are added up before they travel
    checkpoint: str = ""
    checkpoint_every: int = 0  # steps; 0: never
    resume: bool = False

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            types, words = TYPES[option.type]
            if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
                raise TypeError(f"{option.name}={value!r}: {words} is needed")
            if types in (Integral, Real):  # NumPy's numbers are no plain ones in a checkpoint
                object.__setattr__(self, option.name, (int if types is Integral else float)(value))
        for name in ("lr", "momentum"):
            require_number(name, getattr(self, name), 0)
        for name in ("steps", "batch", "micro_batches"):
            require_int(name, getattr(self, name), 1)
        require_int("seed", self.seed, 1 - SEEDS, SEEDS - 1)
        require_int("checkpoint_every", self.checkpoint_every, 0)
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer={self.optimizer!r}: one of {', '.join(OPTIMIZERS)} is needed")
        if (self.checkpoint_every or self.resume) and not self.checkpoint:
            every, resume = self.checkpoint_every, self.resume
            raise ValueError(f"checkpoint_every={every}, resume={resume}: both need checkpoint, the name of a file")

    def optimizer_for(self, model: Trainable) -> torch.optim.Optimizer:
        """Return the torch optimizer of all parameters of `model`. Raises ValueError if none of them can be trained."""
        _require_trainable(model)
        return self.optimizer_of(model.parameters())

    def optimizer_of(self, params: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Return the torch optimizer of these parameters."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(params, lr=self.lr)
        if self.optimizer == "lamb":
            return LAMB(params, lr=self.lr)
        if self.optimizer == "lars":
            return LARS(params, lr=self.lr, momentum=self.momentum)
        return torch.optim.SGD(params, lr=self.lr, momentum=self.momentum)

    def require_elementwise(self, sharded: str) -> None:
        """Raise ValueError if the optimizer needs whole tensors: with `sharded` each rank has parts of them."""
        if self.optimizer in LAYERWISE:
            got = f"optimizer={self.optimizer!r} takes the length of whole tensors"
            raise ValueError(f"{got}, and with {sharded} each rank has parts of them: sgd or adamw is needed")

    def facts(self) -> Facts:
        """Return the options that a step depends on, which a checkpoint and a run that goes on from it must share.

        The rest, which is of the data set, the model and the reader, comes from checkpoint.facts_of and training.train.
        """
        names = ("batch", "lr", "momentum", "seed", "optimizer", "micro_batches")
        return {name: getattr(self, name) for name in names}


def _require_trainable(model: Trainable) -> None:
    """Raise ValueError unless a parameter of `model` needs a gradient."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameter that needs a gradient: nothing to train")


CHUNK = 256  # examples that are evaluated at once, which bounds the memory for it
TESTED = 2**15  # answers that are evaluated: of a long text more would take longer than a short training


@dataclass(frozen=True)
class Trained:
    """The result of a rank: losses of every step; seconds and samples of all steps; the flat parameters (N,).

    test_loss: mean cross-entropy per answer on the test set; test_accuracy: share of its answers that are right.
    """

    losses: list[float]
    seconds: float
    samples: int
    test_loss: float
    test_accuracy: float
    parameters: Tensor


def train(
    comm: Comm, model: torch.nn.Module, strategy: Strategy, data: Dataset, recipe: Recipe, reader: Reader | None = None
) -> Trained:
    """Train `model` on this rank's shards and report {step, loss, samples_per_s} of every step from rank 0.

    Args:    model: nn.Module, overwritten; all ranks start from rank 0's parameters.
             strategy: a parallel.data_parallel.Strategy, which adds gradients over ranks.
             data: a data.dataset.Dataset, recipe: a Recipe: the same on every rank.
             reader: a data.loading.Reader; by default examples are there when they are asked for.
    Returns: Trained. The losses are of the global batch, the same on every rank.
    Raises:  ValueError on every rank if ranks differ in recipe, data or model, or outnumber the examples of a batch,
             or if the strategy's all_reduce does not add up;
             OSError and ValueError on every rank if the recipe's checkpoint cannot be used: see checkpoint.py.
    """
    n = len(data.train_y)
    require_same(comm, "recipe", f"{recipe} for {n:,} examples of shape {tuple(data.train_x.shape[1:])}")
    check_batch(n, recipe.batch, comm.size)
    reader = Reader() if reader is None else reader
    _require_trainable(model)
    if type(strategy).optimizer is not Strategy.optimizer:
        recipe.require_elementwise(repr(strategy))
    if recipe.checkpoint_every:
        checkpoint.require_writable(comm, recipe.checkpoint)
    strategy.start(comm, model)
    facts = recipe.facts() | checkpoint.facts_of(data, model) | {"prepare": name_of(reader.prepare)}
    try:
        strategy.require_sums(comm)
        optimizer = strategy.optimizer(model, recipe.optimizer_of)
        first = steps_taken(comm, strategy.stateful(model), optimizer, recipe, facts)
        schedule = islice(batch_indices(n, recipe.batch, recipe.seed, first), recipe.steps - first)
        shards = reader.shards(comm, data.train_x, data.train_y, enumerate(schedule, first), recipe.seed)
        with closing(shards), synchronized(model, comm):

            def step() -> tuple[float, float, int]:
                with comm.trace.span("input"):
                    x, y, batch = next(shards)
                part = train_step(comm, model, strategy, optimizer, x, y, batch, recipe.micro_batches)
                if not strategy.synchronous:
                    return part, part * batch / max(len(x), 1), batch
                # By the communicator's own all-reduce, so that a wrong one in the exercise cannot hide in the loss.
                loss = float(comm.all_reduce(torch.tensor([part], dtype=torch.float64)))
                return loss, loss, batch

            def save(steps: int) -> None:
                checkpoint.save(comm, recipe.checkpoint, strategy.stateful(model), optimizer, steps, facts)

            losses, samples, seconds = run_steps(comm, recipe, first, step, save, strategy.facts)
        strategy.finish(comm, model)
    finally:
        strategy.stop()
    if not strategy.synchronous:  # then each rank has its parts of the losses: to add them up earlier would be to wait
        losses = comm.all_reduce(torch.tensor(losses, dtype=torch.float64)).tolist()
    loss, accuracy = evaluate(comm, model, data.test_x, data.test_y)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return Trained(losses, seconds, samples, loss, accuracy, flat)


def steps_taken(
    comm: Comm, model: checkpoint.Stateful, optimizer: checkpoint.Stateful, recipe: Recipe, facts: Facts
) -> int:
    """Return how many steps have been taken before this run, by the checkpoint that it goes on from; else 0."""
    if not recipe.resume:
        return 0
    first = checkpoint.restore(comm, recipe.checkpoint, model, optimizer, facts)
    if first >= recipe.steps:
        raise ValueError(f"{recipe.checkpoint} holds {first} steps already: ask for more than steps={recipe.steps}")
    return first


Step: TypeAlias = Callable[[], tuple[float, float, int]]


def run_steps(
    comm: Comm,
    recipe: Recipe,
    first: int,
    step: Step,
    save: Callable[[int], None],
    more: Callable[[], dict[str, float]] = dict,
) -> tuple[list[float], int, float]:
    """Take the steps of `recipe` from number `first` on, report each from rank 0, and save checkpoints.

    Args:    step: f() -> (loss, the loss as far as this rank has it, examples); save: f(steps taken).
             more: f() -> {name: number} to report as well.
    Returns: losses, samples, and seconds of all steps.
    """
    losses: list[float] = []
    samples, clock = 0, comm.trace.clock
    begin = before = clock()
    for number in range(first, recipe.steps):
        loss, seen, batch = step()
        losses.append(loss)
        samples += batch
        now = clock()
        if comm.rank == 0:
            rate = batch * 1e9 / (now - before) if now > before else 0.0
            comm.report(step=number, loss=seen, samples_per_s=rate, **more())
        before = now
        if recipe.checkpoint_every and (number + 1) % recipe.checkpoint_every == 0:
            save(number + 1)
    return losses, samples, (before - begin) / 1e9


def train_step(
    comm: Comm,
    model: torch.nn.Module,
    strategy: Strategy,
    optimizer: OptimizerLike,
    x: Tensor,
    y: Tensor,
    batch: int,
    micro_batches: int = 1,
) -> float:
    """Take one step on this rank's shard; returns this rank's part of the loss: added over ranks it is the mean loss.

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
                strategy.scaled(loss).backward()
        part += loss.item()
    with comm.trace.span("add gradients"):
        strategy.add_gradients(comm, model)
    with comm.trace.span("update"):
        optimizer.step()
    strategy.after_step(comm, model)
    return part


@torch.no_grad()
def evaluate(comm: Comm, model: torch.nn.Module, x: Tensor, y: Tensor) -> tuple[float, ...]:
    """Return (mean cross-entropy per answer, share of right answers) of x (n, ...), y (n,) or (n, positions).

    Of the first of them, TESTED answers in all. Each rank does its share of these.
    Steps: one all_reduce.   Bytes per rank: as in an all_reduce of 24 bytes.
    """
    some = min(len(y), max(1, TESTED // max(1, y[:1].numel())))
    mine = shard_indices(torch.arange(some, device=y.device), comm.rank, comm.size)
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


def train_steps(
    comm: Comm,
    model: torch.nn.Module,
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    steps: list[list[tuple[Tensor, ...]]],
    loss_of: Callable[[torch.nn.Module, Tensor, Tensor], Tensor],
) -> None:
    """Train on this rank's micro-batches; every rank takes the same number of steps.

    Adding gradients is collective: a rank that leaves its loop early leaves the others
    waiting. So all ranks take as many steps as the rank that has most steps. If a rank
    has no batch for a step, its gradients count as zeros, and it takes the step, too.

    Args:    strategy: an object that sends the gradients of `model` during backward. In
             each step, only the last backward may send. Put all other backwards into
             `with strategy.accumulating():`. After the last backward, call
             strategy.add_gradients(comm, model) on every rank: it sends the gradients
             that are not yet sent, and waits for the sums.
             optimizer: of the parameters of `model`. Begin each step with
             optimizer.zero_grad(), and end it with optimizer.step().
             steps: this rank's steps, each a list of micro-batches (x, y). Ranks have
             different numbers of steps and of micro-batches, or none.
             loss_of: loss_of(model, x, y) is a part of the loss. The loss of a step is
             the sum of these parts over all micro-batches of all ranks.
    Returns: None. On every rank, `model` is trained as by one rank with all
             micro-batches.
    Steps: one all_gather of a number, and one strategy.add_gradients per step.
    """
    counts = comm.all_gather(torch.tensor([len(steps)]))  # (p, 1): how many steps each rank has
    ### BEGIN SOLUTION
    for i in range(int(counts.max())):
        parts = steps[i] if i < len(steps) else []
        optimizer.zero_grad()
        for x, y in parts[:-1]:
            with strategy.accumulating():
                loss_of(model, x, y).backward()
        for x, y in parts[-1:]:
            loss_of(model, x, y).backward()
        strategy.add_gradients(comm, model)
        optimizer.step()
    ### END SOLUTION

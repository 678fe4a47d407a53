"""Notebook 06, the loop: micro-batches add up before anything travels, and all ranks make as many steps."""

import warnings
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import mse_loss

from ..collectives import ring
from ..models.mlp import mlp
from ..parallel import training as reference
from ..parallel.data_parallel import DataParallelOverlapped
from .overlapped_steps import SIZES, SMALL, load_optimizers
from .ranks import Ledger, capital, count, number, on_engines, simulate, times
from .record import Broken, Exercise, Passed
from .training_log import judge

MICRO = 2  # examples of a micro-batch
LR = 0.1
TOLERANCE = 1e-10
EVEN = ((2, 2), (2, 2))  # micro-batches of each step, of every rank
UNEVEN = ((2, 1, 3), (1, 2), (), (3, 1, 1, 2))  # of rank 0, 1, 2, 3, 4 = 0, ...
CASES = ((3, EVEN[:1]), (2, UNEVEN[:2]), (4, UNEVEN), (3, UNEVEN), (1, UNEVEN), (5, UNEVEN))


class Looped(NamedTuple):
    """One rank after the answer.

    log: what it did, see training_log.Log. kept: [flat parameters] at the start and after every step of the optimizer.
    """

    log: list
    kept: list


def micro_batch(rank, i, k):
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * i + k)
    made = (torch.randn(MICRO, n, generator=generator, dtype=torch.float64) for n in (SIZES[0], SIZES[-1]))
    return tuple(made)


def steps_of(rank, shape):
    """This rank's micro-batches: [[(x, y), ...], ...]."""
    return [[micro_batch(rank, i, k) for k in range(parts)] for i, parts in enumerate(shape[rank % len(shape)])]


def loss_of(model, x, y):
    return mse_loss(model(x), y, reduction="sum") / 10


class Watched(DataParallelOverlapped):
    """A strategy that notes when its gradients are added, and whether it accumulates."""

    def __init__(self, log):
        super().__init__(ring.all_reduce, **SMALL)
        self.log = log

    def add_gradients(self, comm, model):
        self.log.append(("add", -1, -1))
        super().add_gradients(comm, model)


def watched_optimizer(model, looped):
    """SGD that notes its calls, and keeps the parameters after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    zero_grad, step = optimizer.zero_grad, optimizer.step

    def noted_zero(*args, **kwargs):
        looped.log.append(("zero", -1, -1))
        zero_grad(*args, **kwargs)

    def noted_step():
        looped.log.append(("step", -1, -1))
        step()
        looped.kept.append(flat(model))

    optimizer.zero_grad, optimizer.step = noted_zero, noted_step
    return optimizer


def flat(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


def call(comm, fn, shape, ledger=None):
    """fn on this rank's micro-batches; returns Looped. ledger: {rank: Looped}, which outlives an answer that raises."""
    model, looped = mlp(SIZES, seed=1).double(), Looped([], [])
    looped.kept.append(flat(model))
    if ledger is not None:
        ledger[comm.rank] = looped
    steps = steps_of(comm.rank, shape)
    place = {x.sum().item(): (i, k) for i, parts in enumerate(steps) for k, (x, _) in enumerate(parts)}
    strategy = Watched(looped.log)

    def noted(model, x, y):
        i, k = place.get(x.sum().item(), (-1, -1))
        looped.log.append(("forward", i, k))
        loss = loss_of(model, x, y)
        loss.register_hook(lambda grad: looped.log.append(("backward", i, k)) or note_last(i, k))
        return loss

    def note_last(i, k):
        if not strategy.adds_up:
            looped.log.append(("last", i, k))

    strategy.start(comm, model)
    with without_warnings():
        fn(comm, model, strategy, watched_optimizer(model, looped), steps, noted)
    strategy.stop()
    return looped


@contextmanager
def without_warnings():
    """A rank without a batch has no gradients, which strategies name once: here it is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def expected(p, shape):
    """[flat parameters] of one rank with all micro-batches, at the start and after every step."""
    model = mlp(SIZES, seed=1).double()
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=LR), [flat(model)]
    everybody = [steps_of(rank, shape) for rank in range(p)]
    for i in range(max(map(len, everybody))):
        optimizer.zero_grad()
        for x, y in (part for steps in everybody if i < len(steps) for part in steps[i]):
            loss_of(model, x, y).backward()
        optimizer.step()
        kept.append(flat(model))
    return kept


def check_train_steps(fn, runner=None):
    load_optimizers()
    for p, shape in CASES:
        where, ledger = case_of(p, shape), Ledger()
        try:
            run = simulate(p, call, fn, shape, ledger, where=where)
        except Broken as broken:
            judge(ledger, shape, where, broken)
            raise
        judge(dict(enumerate(run)), shape, where)
        off = check_course(run, p, shape, where)
    facts = [
        "micro-batches add up first, and travel once: with 2 of them in each step, and with 1 to 3",
        f"ranks with 3, 2, no and 4 steps: all make 4, {off:.0e} at most from one rank with everything",
    ]
    if runner is not None:
        run = on_engines(runner, call, fn, UNEVEN)
        where = f"on {count(len(run), 'engine')}"
        judge(dict(enumerate(run)), UNEVEN, where)
        check_course(run, len(run), UNEVEN, where)
        facts.append(f"engines: right on {count(len(run), 'MPI rank')}")
    return Passed(tuple(facts))


def case_of(p, shape):
    """How a case is named in messages."""
    lengths = [len(shape[rank % len(shape)]) for rank in range(p)]
    return f"with {count(p, 'rank')} of {', '.join(map(str, lengths))} steps"


def check_course(run, p, shape, where):
    """Raise Broken where a rank leaves the course of one rank with everything; returns the largest difference."""
    alone = expected(p, shape)
    for step in range(1, len(alone)):
        for rank, left in enumerate(run):
            off = np.abs(left.kept[step] - alone[step]).max()
            if not off < TOLERANCE:
                got, should = left.kept[step] - left.kept[step - 1], alone[step] - alone[step - 1]
                share = times(got, should)
                scaled = share is not None
                why = (
                    f" It is {number(share)} times as long: parts of the loss add up, so do gradients."
                    if scaled
                    else ""
                )
                message = (
                    f"{capital(where)}, step {step - 1} of rank {rank} ends {number(off)} from where one rank with all "
                    f"micro-batches would be.{why}"
                )
                raise Broken("scale" if scaled else "course", message)
    return max(float(np.abs(left.kept[-1] - alone[-1]).max()) for left in run)


EXERCISES = (
    Exercise(
        id="6.6",
        title="micro-batches, and ranks with less to do",
        reference=reference.train_steps,
        stars=2,
        check=check_train_steps,
        explanation=(
            "Everything collective is behind the inner loop, so it does not matter how often a rank goes around there. "
            "PyTorch's DDP has no_sync() for accumulating(), and join() for ranks that run out; Horovod has "
            "backward_passes_per_step and join(). The plain way is to deal out as many steps to every rank."
        ),
    ),
)

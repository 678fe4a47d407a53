"""Notebook 06, the loop: micro-batches add up before anything travels, and all ranks make as many steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from ...collectives import ring
from ...comm import Results
from ...comm.base import Comm
from ...models.mlp import mlp
from ...parallel import training
from ...parallel.data_parallel import DataParallelOverlapped
from ...units import counted
from ..checkers import check_course, engine_facts, in_all_cases, with_ranks
from ..ranks import Ledger, number, off_by, times
from ..record import Answer, Broken, Exercise, Passed, Reason, Runner
from .lesson_06 import flat_parameters
from .lesson_06_overlap import SIZES, SMALL, course_of_one, load_optimizers

Shape = tuple[tuple[int, ...], ...]  # numbers of micro-batches of the steps of each rank
Example = tuple[torch.Tensor, ...]  # (x, y)
Entry = tuple[str, int, int]  # (what, step, micro-batch)


class _Log(list[Entry]):
    """The log of one rank: [(what, step, micro-batch)], the two numbers -1 if they say nothing.

    what: "forward", "backward", "last" (a backward outside accumulating), "zero", "add", "step".
    """

    def times(self, what: str) -> int:
        return sum(entry[0] == what for entry in self)

    def before(self, n: int, what: str) -> tuple[str, int, int] | None:
        """Return the latest entry of this kind before entry n, or None."""
        return next((entry for entry in reversed(self[:n]) if entry[0] == what), None)

    def after(self, n: int) -> str | None:
        """Return the next thing that the rank does, apart from backward: one of the other words, or None."""
        return next((what for what, *_ in self[n + 1 :] if what not in ("backward", "last")), None)

    def since(self, n: int, what: str) -> _Log:
        """Return the entries between the latest of this kind before entry n, and n; all before n if there is none."""
        begin = max((m for m in range(n) if self[m][0] == what), default=-1)
        return _Log(self[begin + 1 : n])

    def goes_on(self, n: int) -> bool:
        """Return True if a later forward belongs to the step of the last forward before entry n, and was not before."""
        seen, step = {entry[1:] for entry in self[:n] if entry[0] == "forward"}, self.step_at(n)
        return bool(seen) and any(
            what == "forward" and i == step and (i, k) not in seen for what, i, k in self[n + 1 :]
        )

    def step_at(self, n: int) -> int:
        """Return the step whose forward came last before entry n; -1 if there was none."""
        return next((i for what, i, _ in reversed(self[:n]) if what == "forward"), -1)


def _first_fault(looped: Mapping[int, _Looped], shape: Shape, where: str, ended: bool = True) -> Reason | None:
    """Return the Reason for the first thing in a wrong order on a rank, or None. ended: whether all ranks ended."""
    size = len(looped)
    for rank in sorted(looped):
        for why in _faults(_Log(looped[rank].log), shape[rank % len(shape)]):
            failed, _, described = why.partition(": ")
            return f"{failed}: {where}, rank {rank} {described.replace('SIZE', str(size))}"
    adds = {rank: _Log(left.log).times("add") for rank, left in sorted(looped.items())}
    most = max(len(shape[rank % len(shape)]) for rank in looped)
    if not ended:
        return None
    for rank, n in adds.items():
        if n != most:
            early = """Adding is collective: a rank that leaves the loop early leaves the others waiting, and stopping
                all ranks early drops batches."""
            return f"""lengths: {where}, rank {rank} adds gradients {counted(n, "time")}, and {most} are needed, as many
                as the rank with most steps has: {off_by(n, most, "step")}. {early if n < most else ""}"""
    for rank, n in adds.items():
        updates = _Log(looped[rank].log).times("step")
        if updates != n:
            return f"""apart: {where}, rank {rank} adds gradients {counted(n, "time")} and takes
                {counted(updates, "step")}: every rank takes every step, or the replicas drift apart."""
    for rank in looped:
        done = {tuple(place) for what, *place in looped[rank].log if what == "forward"}
        for i, parts in enumerate(shape[rank % len(shape)]):
            lost = [k for k in range(parts) if (i, k) not in done]
            if lost:
                return f"""lost: {where}, rank {rank} uses {parts - len(lost)} of its {parts} micro-batches in step {i}:
                    micro-batch {lost[0]} is left out, and missing from the gradient."""
    return None


def _faults(log: _Log, shape: tuple[int, ...]) -> Iterator[Reason]:
    """Yield the Reason for each entry of a rank's log that cannot be right; shape: micro-batches of its steps."""
    for n, (what, i, k) in enumerate(log):
        before, step = log.since(n, "add"), log.step_at(n)
        worked = before.before(len(before), "backward")
        if what == "forward" and i < 0:
            yield "memory: gives the model something other than its micro-batches: one at a time fits into memory."
        elif what == "forward" and log.before(n, "forward") and not log.since(n, "forward"):
            yield f"""memory: makes the forward of micro-batch {k} of step {i} before the backward of the one before:
                then all of them are kept in memory, and one at a time would be enough."""
        elif what == "forward" and ("forward", i, k) in log[:n]:
            yield f"repeat: uses micro-batch {k} of step {i} twice: a rank without another one adds nothing."
        elif what == "last" and k < shape[i] - 1 and log.after(n) == "forward":
            yield f"""accumulating: lets the strategy send gradients in the backward of micro-batch {k} of step {i}, of
                {shape[i]}: others follow, so it belongs in `with strategy.accumulating():`."""
        elif what == "zero" and log.goes_on(n) and before.times("backward"):
            yield f"""zero: calls zero_grad between two micro-batches of step {step}: what the first has accumulated is
                lost."""
        elif what == "add" and log.goes_on(n):
            yield f"""accumulation: adds gradients over ranks before step {step} has accumulated all of its
                {shape[step]} micro-batches. Then the next backward adds to a .grad that holds the sum of
                the first ones, and this sum travels again, SIZE times as large."""
        elif what == "add" and len(before) < n and not before.times("zero"):
            yield """zero: adds gradients without zero_grad: the gradient of the step before is still in .grad, and
                counts a second time. A rank without a batch needs zero_grad as well."""
        elif what == "add" and worked and not before.times("last"):
            yield f"""accumulating: accumulates in the backward of the last micro-batch of step {worked[1]} as well:
                then nothing can travel during it, and all of the communication is exposed."""


MICRO = 2  # examples of a micro-batch
LR = 0.1
EVEN = ((2, 2), (2, 2))  # micro-batches of each step, of every rank
UNEVEN = ((2, 1, 3), (1, 2), (), (3, 1, 1, 2))  # of rank 0, 1, 2, 3, 4 = 0, ...
CASES = ((3, EVEN[:1]), (2, UNEVEN[:2]), (4, UNEVEN), (3, UNEVEN), (1, UNEVEN), (5, UNEVEN))


class _Looped(NamedTuple):
    """A rank after the answer.

    log: what it did, see Log. start, kept: flat parameters at the start, and after every step of the optimizer.
    """

    log: list[Entry]
    start: np.ndarray
    kept: list[np.ndarray]


def _micro_batch(rank: int, i: int, k: int) -> Example:
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * i + k)
    made = (torch.randn(MICRO, n, generator=generator, dtype=torch.float64) for n in (SIZES[0], SIZES[-1]))
    return tuple(made)


def _steps_of(rank: int, shape: Shape) -> list[list[Example]]:
    """Return this rank's micro-batches: [[(x, y), ...], ...]."""
    return [[_micro_batch(rank, i, k) for k in range(parts)] for i, parts in enumerate(shape[rank % len(shape)])]


def _loss_of(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y, reduction="sum") / 10


class _Watched(DataParallelOverlapped):
    """A strategy that notes when its gradients are added, and whether it accumulates."""

    def __init__(self, log: list[Entry]) -> None:
        super().__init__(ring.all_reduce, *SMALL)
        self.log = log

    def add_gradients(self, comm: Comm, model: torch.nn.Module) -> None:
        self.log.append(("add", -1, -1))
        super().add_gradients(comm, model)


def _watched_optimizer(model: torch.nn.Module, looped: _Looped) -> torch.optim.Optimizer:
    """Return an SGD that notes its calls, and keeps the parameters after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    zero_grad, step = optimizer.zero_grad, optimizer.step

    def noted_zero(set_to_none: bool = True) -> None:
        looped.log.append(("zero", -1, -1))
        zero_grad(set_to_none)

    def noted_step() -> None:
        looped.log.append(("step", -1, -1))
        step()
        looped.kept.append(flat_parameters(model))

    optimizer.zero_grad, optimizer.step = noted_zero, noted_step  # pyrefly: ignore[bad-assignment]
    return optimizer


def _call(comm: Comm, fn: Answer, shape: Shape, ledger: Ledger | None = None) -> _Looped:
    """Call fn on this rank's micro-batches; returns Looped. ledger: {rank: Looped}, also of an answer that raises."""
    model = mlp(SIZES, seed=1).double()
    looped = _Looped([], flat_parameters(model), [])
    if ledger is not None:
        ledger[comm.rank] = looped
    steps = _steps_of(comm.rank, shape)
    place = {x.sum().item(): (i, k) for i, parts in enumerate(steps) for k, (x, _) in enumerate(parts)}
    strategy = _Watched(looped.log)

    def noted(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        i, k = place.get(x.sum().item(), (-1, -1))
        looped.log.append(("forward", i, k))
        loss = _loss_of(model, x, y)
        loss.register_hook(lambda _: looped.log.extend((what, i, k) for what in backwards[: 2 - strategy.adds_up]))
        return loss

    backwards = ("backward", "last")

    strategy.start(comm, model)
    with warnings.catch_warnings():  # about a rank without gradients: here a rank without a batch is meant
        warnings.simplefilter("ignore", UserWarning)
        fn(comm, model, strategy, _watched_optimizer(model, looped), steps, noted)
    strategy.stop()
    return looped


def _check_train_steps(fn: Answer, runner: Runner = None) -> Passed:
    load_optimizers()
    off = []

    def judged(run: Results, where: str, shape: Shape, ledger: Ledger | None = None) -> None:
        if why := _first_fault(dict(enumerate(run)), shape, where):
            raise Broken(why)
        off.append(_compare(run, shape, where))

    def blame(broken: Broken, where: str, shape: Shape, ledger: Ledger) -> Reason | None:
        return _first_fault(ledger, shape, where, ended=broken.failed != "raises")

    in_all_cases(fn, _call, [(p, shape, Ledger()) for p, shape in CASES], _case_of, judged, blame)
    facts = [
        "micro-batches add up first, and travel once: with 2 of them in each step, and with 1 to 3",
        f"ranks with 3, 2, no and 4 steps: all make 4, {off[-1]:.0e} at most from one rank with everything",
    ]
    return Passed(*facts, *engine_facts(runner, judged, _call, fn, UNEVEN))


def _case_of(p: int, shape: Shape, ledger: Ledger | None) -> str:
    lengths = [str(len(shape[rank % len(shape)])) for rank in range(p)]
    return f"{with_ranks(p)} of {', '.join(lengths)} steps"


def _compare(run: Results, shape: Shape, where: str) -> float:
    """Return the largest difference from one rank with everything; raise Broken if a rank leaves its course."""
    everybody = [part for rank in range(len(run)) for part in enumerate(_steps_of(rank, shape))]
    longest = range(max(len(_steps_of(rank, shape)) for rank in range(len(run))))
    batches = [[xy for i, parts in everybody if i == step for xy in parts] for step in longest]
    alone = course_of_one(SIZES, [[partial(_loss_of, x=x, y=y) for x, y in batch] for batch in batches])

    def say(step: int, rank: int, off: float) -> Reason:
        got, should = (kept[step] - (kept[step - 1] if step else run[rank].start) for kept in (run[rank].kept, alone))
        share = times(got, should)
        if share is None:
            failed, why = "course", ""
        else:
            failed, why = "scale", f"It is {number(share)} times as long: parts of the loss add up, so do gradients."
        return f"""{failed}: {where}, step {step} of rank {rank} ends {number(off)} from where one rank with all
            micro-batches would be. {why}"""

    return check_course([left.kept for left in run], alone, say)


EXERCISES = (Exercise("6.6", "micro-batches, and ranks with less to do", training.train_steps, 2, _check_train_steps),)

"""Notebook 06, the loop: micro-batches add up before anything travels, and all ranks make as many steps."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
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
from .lesson_06 import flat
from .lesson_06_overlap import SIZES, SMALL, course_of_one, load_optimizers

Shape = tuple[tuple[int, ...], ...]  # numbers of micro-batches of the steps of each rank
Example = tuple[torch.Tensor, ...]  # (x, y)
Entry = tuple[str, int, int]  # (what, step, micro-batch)


class Log(list[Entry]):
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

    def since(self, n: int, what: str) -> Log:
        """Return the entries between the latest of this kind before entry n, and n; all before n if there is none."""
        begin = max((m for m in range(n) if self[m][0] == what), default=-1)
        return Log(self[begin + 1 : n])

    def goes_on(self, n: int) -> bool:
        """Return True if a later forward belongs to the step of the last forward before entry n, and was not before."""
        seen, step = {entry[1:] for entry in self[:n] if entry[0] == "forward"}, self.step_at(n)
        return bool(seen) and any(
            what == "forward" and i == step and (i, k) not in seen for what, i, k in self[n + 1 :]
        )

    def step_at(self, n: int) -> int:
        """Return the step whose forward came last before entry n; -1 if there was none."""
        return next((i for what, i, _ in reversed(self[:n]) if what == "forward"), -1)


def first_fault(looped: Mapping[int, Looped], shape: Shape, where: str, ended: bool = True) -> Reason | None:
    """Return the Reason for the first thing in a wrong order on a rank, or None. ended: whether all ranks ended."""
    size = len(looped)
    for rank in sorted(looped):
        for why in faults(Log(looped[rank].log), shape[rank % len(shape)]):
            failed, _, described = why.partition(": ")
            return f"{failed}: {where}, rank {rank} {described.replace('SIZE', str(size))}"
    adds = {rank: Log(left.log).times("add") for rank, left in sorted(looped.items())}
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
        updates = Log(looped[rank].log).times("step")
        if updates != n:
            return f"""apart: {where}, rank {rank} adds gradients {counted(n, "time")} and takes
                {counted(updates, "step")}: every rank takes every step, even one without a batch, or the replicas
                drift apart."""
    for rank in looped:
        done = {tuple(place) for what, *place in looped[rank].log if what == "forward"}
        for i, parts in enumerate(shape[rank % len(shape)]):
            lost = [k for k in range(parts) if (i, k) not in done]
            if lost:
                return f"""lost: {where}, rank {rank} uses {parts - len(lost)} of its {parts} micro-batches in step {i}:
                    micro-batch {lost[0]} is left out, and missing from the gradient."""
    return None


def faults(log: Log, shape: tuple[int, ...]) -> Iterator[Reason]:
    """Yield the Reason for each entry of a rank's log that cannot be right; shape: micro-batches of its steps."""
    for n, (what, i, k) in enumerate(log):
        if what in LOOKS and (why := LOOKS[what](log, n, i, k, shape)):
            yield why


def look_at_forward(log: Log, n: int, i: int, k: int, shape: tuple[int, ...]) -> Reason | None:
    if i < 0:
        return "memory: gives the model something other than its micro-batches: one at a time fits into memory."
    if log.before(n, "forward") and not log.since(n, "forward"):
        return f"""memory: makes the forward of micro-batch {k} of step {i} before the backward of the one before: all
            of them are kept in memory then, and one at a time is what micro-batches are for."""
    if ("forward", i, k) in log[:n]:
        return f"repeat: uses micro-batch {k} of step {i} twice: when they are used up, pass nothing."
    return None


def look_at_last(log: Log, n: int, i: int, k: int, shape: tuple[int, ...]) -> Reason | None:
    if k < shape[i] - 1 and log.after(n) == "forward":
        return f"""accumulating: lets the strategy send gradients in the backward of micro-batch {k} of step {i}, of
            {shape[i]}: others follow, so it belongs in `with strategy.accumulating():`."""
    return None


def look_at_add(log: Log, n: int, i: int, k: int, shape: tuple[int, ...]) -> Reason | None:
    before = log.since(n, "add")
    worked = before.before(len(before), "backward")
    if log.goes_on(n):
        step = log.step_at(n)
        return f"""accumulation: adds gradients over ranks before step {step} has accumulated all of its {shape[step]}
            micro-batches. The sum of the first would lie in .grad when the next backward adds to it, and travel again,
            SIZE times as large."""
    if len(before) < n and not before.times("zero"):
        return """zero: adds gradients again without zero_grad: that of the step before is still in .grad, and counts a
            second time. This holds for a rank without a batch as well."""
    if worked and not before.times("last"):
        return f"""accumulating: accumulates in the backward of the last micro-batch of step {worked[1]} as well:
            then nothing can travel during it, and all of the communication is exposed."""
    return None


def look_at_zero(log: Log, n: int, i: int, k: int, shape: tuple[int, ...]) -> Reason | None:
    if log.goes_on(n) and log.since(n, "add").times("backward"):
        step = log.step_at(n)
        return (
            f"zero: calls zero_grad between two micro-batches of step {step}: what the first has accumulated is lost."
        )
    return None


LOOKS = {"forward": look_at_forward, "last": look_at_last, "add": look_at_add, "zero": look_at_zero}


MICRO = 2  # examples of a micro-batch
LR = 0.1
EVEN = ((2, 2), (2, 2))  # micro-batches of each step, of every rank
UNEVEN = ((2, 1, 3), (1, 2), (), (3, 1, 1, 2))  # of rank 0, 1, 2, 3, 4 = 0, ...
CASES = ((3, EVEN[:1]), (2, UNEVEN[:2]), (4, UNEVEN), (3, UNEVEN), (1, UNEVEN), (5, UNEVEN))


class Looped(NamedTuple):
    """A rank after the answer.

    log: what it did, see Log. start, kept: flat parameters at the start, and after every step of the optimizer.
    """

    log: list[Entry]
    start: np.ndarray
    kept: list[np.ndarray]


def micro_batch(rank: int, i: int, k: int) -> Example:
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * i + k)
    made = (torch.randn(MICRO, n, generator=generator, dtype=torch.float64) for n in (SIZES[0], SIZES[-1]))
    return tuple(made)


def steps_of(rank: int, shape: Shape) -> list[list[Example]]:
    """Return this rank's micro-batches: [[(x, y), ...], ...]."""
    return [[micro_batch(rank, i, k) for k in range(parts)] for i, parts in enumerate(shape[rank % len(shape)])]


def loss_of(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return mse_loss(model(x), y, reduction="sum") / 10


class Watched(DataParallelOverlapped):
    """A strategy that notes when its gradients are added, and whether it accumulates."""

    def __init__(self, log: list[Entry]) -> None:
        super().__init__(ring.all_reduce, **SMALL)
        self.log = log

    def add_gradients(self, comm: Comm, model: torch.nn.Module) -> None:
        self.log.append(("add", -1, -1))
        super().add_gradients(comm, model)


def watched_optimizer(model: torch.nn.Module, looped: Looped) -> torch.optim.Optimizer:
    """Return an SGD that notes its calls, and keeps the parameters after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    zero_grad, step = optimizer.zero_grad, optimizer.step

    def noted_zero(set_to_none: bool = True) -> None:
        looped.log.append(("zero", -1, -1))
        zero_grad(set_to_none)

    def noted_step() -> None:
        looped.log.append(("step", -1, -1))
        step()
        looped.kept.append(flat(model))

    optimizer.zero_grad, optimizer.step = noted_zero, noted_step  # pyrefly: ignore[bad-assignment]
    return optimizer


def call(comm: Comm, fn: Answer, shape: Shape, ledger: Ledger | None = None) -> Looped:
    """Call fn on this rank's micro-batches; returns Looped. ledger: {rank: Looped}, also of an answer that raises."""
    model = mlp(SIZES, seed=1).double()
    looped = Looped([], flat(model), [])
    if ledger is not None:
        ledger[comm.rank] = looped
    steps = steps_of(comm.rank, shape)
    place = {x.sum().item(): (i, k) for i, parts in enumerate(steps) for k, (x, _) in enumerate(parts)}
    strategy = Watched(looped.log)

    def noted(model: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        i, k = place.get(x.sum().item(), (-1, -1))
        looped.log.append(("forward", i, k))
        loss = loss_of(model, x, y)
        loss.register_hook(lambda _: looped.log.extend((what, i, k) for what in backwards[: 2 - strategy.adds_up]))
        return loss

    backwards = ("backward", "last")

    strategy.start(comm, model)
    with without_warnings():
        fn(comm, model, strategy, watched_optimizer(model, looped), steps, noted)
    strategy.stop()
    return looped


@contextmanager
def without_warnings() -> Generator[None]:
    """Ignore the warning about a rank without gradients: here a rank without a batch is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def check_train_steps(fn: Answer, runner: Runner = None) -> Passed:
    load_optimizers()
    off = []

    def judged(run: Results, where: str, shape: Shape, ledger: Ledger | None = None) -> None:
        if why := first_fault(dict(enumerate(run)), shape, where):
            raise Broken(why)
        off.append(compare(run, shape, where))

    def blame(broken: Broken, where: str, shape: Shape, ledger: Ledger) -> Reason | None:
        return first_fault(ledger, shape, where, ended=broken.failed != "raises")

    in_all_cases(fn, call, [(p, shape, Ledger()) for p, shape in CASES], case_of, judged, blame)
    facts = [
        "micro-batches add up first, and travel once: with 2 of them in each step, and with 1 to 3",
        f"ranks with 3, 2, no and 4 steps: all make 4, {off[-1]:.0e} at most from one rank with everything",
    ]
    return Passed(*facts, *engine_facts(runner, judged, call, fn, UNEVEN))


def case_of(p: int, shape: Shape, ledger: Ledger | None) -> str:
    lengths = [str(len(shape[rank % len(shape)])) for rank in range(p)]
    return f"{with_ranks(p)} of {', '.join(lengths)} steps"


def compare(run: Results, shape: Shape, where: str) -> float:
    """Return the largest difference from one rank with everything; raise Broken if a rank leaves its course."""
    everybody = [part for rank in range(len(run)) for part in enumerate(steps_of(rank, shape))]
    longest = range(max(len(steps_of(rank, shape)) for rank in range(len(run))))
    batches = [[xy for i, parts in everybody if i == step for xy in parts] for step in longest]
    alone = course_of_one(SIZES, [[partial(loss_of, x=x, y=y) for x, y in batch] for batch in batches])

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


EXERCISES = (Exercise("6.6", "micro-batches, and ranks with less to do", training.train_steps, 2, check_train_steps),)

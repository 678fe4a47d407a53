"""Notebook 10, one action: what a stage does when the backward of a micro-batch is its turn."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from ...comm import Results
from ...comm.base import Comm
from ...parallel.pipeline import naive as reference
from ...schedules import Action, Schedule, build
from ...units import counted
from ..checkers import because, engine_facts, in_all_cases
from ..ranks import ALONE, full_stop, number, simulate
from ..record import Broken, Exercise, Passed, Reason, Runner
from ..traffic import check_waits, in_barriers
from .lesson_10 import case_of

WIDTH, EXAMPLES = 3, 2  # numbers that pass between stages for an example; examples of a micro-batch
GPIPE, GEMS = "gpipe", "gems_mast"
REVERSED = "gpipe, last micro-batch first"  # as in the picture of its paper
CASES = ((GPIPE, 2, 1), (GPIPE, 3, 4), (REVERSED, 3, 3), (GPIPE, 1, 3), (GPIPE, 5, 2), (GEMS, 3, 2), (GEMS, 4, 2))
WHERE = {GEMS: "in GEMS ", REVERSED: "where the last micro-batch goes back first, "}
TOLERANCE = 1e-10


class Ran(NamedTuple):
    """One rank after a step.

    grads:  {stage: {parameter: its gradient as an array, or None}}.
    taken:  [(action, sorted keys that it took out of `saved`)] of its backwards.
    sent:   messages sent in backwards, nbytes: their bytes.
    """

    grads: dict
    taken: list
    sent: int
    nbytes: int


def plan_of(name: str, ranks: int, micro_batches: int) -> Schedule:
    """The schedule of a case."""
    if name != REVERSED:
        return build(name, ranks, micro_batches)
    plan, m = build(GPIPE, ranks, micro_batches), micro_batches
    return replace(plan, name=name, rows=tuple(row[:m] + row[: -m - 1 : -1] for row in plan.rows))


def layers_of(part: int) -> torch.nn.Module:
    """The layers of one stage, the same wherever it is: (b, WIDTH) -> (b, WIDTH)."""
    return copy.deepcopy(drawn(part))


@functools.cache
def drawn(part: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(part)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).double()


def batch(micro_batch: int) -> tuple[Tensor, ...]:
    """(x, y) of a micro-batch, each (EXAMPLES, WIDTH)."""
    generator = torch.Generator().manual_seed(100 + micro_batch)
    made = (torch.randn(EXAMPLES, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return tuple(made)


def step(comm: Comm, fn: Callable, name: str, micro_batches: int) -> Ran:
    """One step of the schedule `name`, forwards by the library, backwards by fn(comm, schedule, action, saved)."""
    schedule = plan_of(name, comm.size, micro_batches)
    modules = {stage: layers_of(stage % schedule.stages) for stage in schedule.stages_of(comm.rank)}
    saved, taken, backwards = {}, [], []
    for action in schedule.rows[comm.rank]:
        if action.kind == "F":
            x, y = batch(action.micro_batch)
            x = x if schedule.is_first(action.stage) else torch.empty_like(x)
            loss = loss_for(y, micro_batches)
            reference.do_forward(comm, schedule, action, modules[action.stage], saved, x, loss)
        else:
            begun, held = len(comm.trace.log), set(saved)
            fn(comm, schedule, action, saved)
            taken.append((action, sorted(held - set(saved))))
            backwards += [e.nbytes for e in comm.trace.events[begun:] if e.op == "send"]
    grads = {
        stage: {name: None if p.grad is None else p.grad.numpy().copy() for name, p in module.named_parameters()}
        for stage, module in modules.items()
    }
    return Ran(grads, taken, len(backwards), sum(backwards))


def loss_for(y: Tensor, micro_batches: int) -> Callable:
    """f(output) -> the loss of a micro-batch, divided so that those of all micro-batches add up."""
    return lambda output: mse_loss(output, y) / micro_batches


def expected(schedule: Schedule, micro_batches: Iterable[int]) -> list[dict[str, np.ndarray]]:
    """{stage: {parameter: gradient}} of the sequential model, for those micro-batches."""
    modules = [layers_of(part) for part in range(schedule.stages)]
    for i in micro_batches:
        x, y = batch(i)
        loss_for(y, schedule.micro_batches)(torch.nn.Sequential(*modules)(x)).backward()
    return [{name: p.grad.numpy() for name, p in module.named_parameters()} for module in modules]


def check_do_backward(fn: Callable, runner: Runner = None) -> Passed:
    in_all_cases(fn, step, [(p, name, m) for name, p, m in CASES], where_of, check_step, neighbor_wrong)
    name, p, m = CASES[1]
    run = simulate(p, step, fn, name, m, where=case_of(p, m))
    facts = [
        f"gradients: those of the sequential model, {agreement(run, build(name, p, m))}, in GPipe and in GEMS",
        f"messages: {m} from each of {p - 1} ranks, {run[1].nbytes} bytes, one for each micro-batch",
    ]
    if facts_there := engine_facts(
        runner, lambda run, *case: check_step(run, f"{case[0]},", *case[1:]), step, fn, name, m
    ):
        facts.append(facts_there[0] if " 1 MPI rank" not in facts_there[0] else ALONE)
    return Passed(*facts, run=run)


def where_of(p: int, name: str, m: int) -> str:
    return f"{WHERE.get(name, '')}{case_of(p, m)},"


def neighbor_wrong(broken: Broken, where: str, name: str, m: int) -> Reason | None:
    """What goes wrong only where stages run the other way is about the neighbor."""
    if name != GEMS:
        return None
    return f"""neighbor: Right in GPipe, but not in GEMS, which the notebook comes to below: its second replica runs
        from the last rank to the first. {full_stop(broken.message)} Stage s + 1 is not always on rank + 1: ask
        schedule.rank_of."""


def check_step(run: Results, where: str, name: str, m: int) -> None:
    """Raise Broken unless every gradient is the sequential model's, nothing is kept, and no message is sent in vain."""
    schedule = plan_of(name, len(run), m)
    events = list(getattr(run, "events", ()))
    for stage in sorted((s for ran in run for s in ran.grads), key=lambda s: -(s % schedule.stages)):
        rank = schedule.rank_of(stage)
        mine = [i for i in range(schedule.micro_batches) if schedule.replica_of(i) == schedule.replica(stage)]
        right = expected(schedule, mine)[stage % schedule.stages]
        for param, got in run[rank].grads[stage].items():
            if got is None or not np.allclose(got, right[param], rtol=TOLERANCE, atol=TOLERANCE):
                raise because(explain(got, param, stage, mine, schedule), where)
    if events:
        check_waits(events, len(run))
    if waits := in_barriers(events):
        raise Broken(f"traffic: {where} the gradients are right, but {waits}")
    for rank, ran in enumerate(run):
        for action, taken in ran.taken:
            if taken != [(action.stage, action.micro_batch)]:
                raise because(wrongly_taken(rank, action, taken), f"{where} the gradients are right, but")
        needed = sum(not schedule.is_first(a.stage) for a in schedule.rows[rank] if a.kind == "B")
        if ran.sent != needed:
            raise Broken(f"""traffic: {where} the gradients are right, but rank {rank} sends
                {counted(ran.sent, "message")} in its backwards and {needed} would do, one per micro-batch. A gradient
                has the shape of what it belongs to, so that nothing has to be asked.""")


def wrongly_taken(rank: int, action: Action, taken: list[tuple[int, ...]]) -> Reason:
    """Reason for a backward that left the wrong things in `saved`."""
    key = action.stage, action.micro_batch
    if not taken:
        return f"""memory: `saved` of rank {rank} still holds the activations of {key} after {action}. Take the entry
            out: saved.pop(key)."""
    return f"""micro-batch: in {action} rank {rank} takes {", ".join(map(str, taken))} out of `saved`, and not {key}.
        Here all ranks err together, and the sums come out; where their orders differ, gradients would meet the wrong
        activations."""


def explain(got: np.ndarray | None, name: str, stage: int, mine: list[int], schedule: Schedule) -> Reason:
    """Reason for a gradient of `stage` that is not the sequential model's."""
    m, part = schedule.micro_batches, stage % schedule.stages
    if got is None:
        return f"""weights: stage {stage} has no gradient for {name}: torch.autograd.grad hands gradients out, and only
            torch.autograd.backward leaves them in .grad of the parameters, where the optimizer looks."""
    right = expected(schedule, mine)[part][name]
    i = int(np.argmax(~np.isclose(got, right, rtol=TOLERANCE, atol=TOLERANCE).reshape(-1)))
    told = f"""the gradient of {name}[{i}] of stage {stage} should be {number(right.reshape(-1)[i])} and is
        {number(got.reshape(-1)[i])}."""
    for factor, why in ((m, "multiplied by"), (1 / m, "divided by")):
        if m > 1 and np.allclose(got, right * factor, rtol=TOLERANCE, atol=TOLERANCE):
            return f"scale: {told} It was {why} {m}, the number of micro-batches: the losses are divided already."
    for which in (mine[0], mine[-1]):
        if len(mine) > 1 and np.allclose(got, expected(schedule, [which])[part][name], rtol=TOLERANCE, atol=TOLERANCE):
            return f"accumulate: {told} That is micro-batch {which} alone: those of all micro-batches add up in .grad."
    if schedule.is_last(stage):
        return f"gradient: {told} Here y is the loss itself: its backward needs no gradient from anybody."
    return f"""gradient: {told} What comes after it is right. So stage {stage} did not begin with the gradient of its
        own output: was something else sent by stage {stage + 1}, or was what came not used?"""


def agreement(run: Results, schedule: Schedule) -> str:
    """How well the gradients of a run agree with those of the sequential model, in words."""
    right = expected(schedule, range(schedule.micro_batches))
    pairs = [(g, right[s][name]) for ran in run for s, grads in ran.grads.items() for name, g in grads.items()]
    most = max(float(np.abs(got - wanted).max()) for got, wanted in pairs)
    return f"to {most:.0e}" if most else "bit for bit"


EXERCISES = (
    Exercise("10.5", "the backward of one micro-batch through one stage", reference.do_backward, 3, check_do_backward),
)

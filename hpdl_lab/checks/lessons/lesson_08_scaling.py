"""Notebook 08: a loss scale on which all ranks agree."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...comm import Results
from ...comm.base import Comm
from ...comm.status.report import name_ranks
from ...parallel.precision import LossScale, unscale_together
from ...units import counted
from ..checkers import engine_facts, in_all_cases, with_ranks
from ..ranks import number, type_text
from ..record import Answer, Broken, Exercise, Passed, Runner

RANKS = (2, 3, 1, 4)
SCALE, INTERVAL, SIZES = 1024.0, 3, (500, 3)
GOOD, INFINITE, NAN = "", "infinity", "NaN"
STEPS = (GOOD, GOOD, GOOD, INFINITE, GOOD, GOOD, NAN, GOOD, GOOD, GOOD, GOOD, GOOD, GOOD)
SCALES = (*2 * (1024.0,), 2048.0, *3 * (1024.0,), *3 * (512.0,), *3 * (1024.0,), 2048.0)  # after each of them
MOST = 200  # bytes that a rank sends in a step, for one number: 8 bytes to each of a few ranks, there and back


class _Step(NamedTuple):
    """taken: what was returned; grads: [array] as they are afterwards; scale: the next one."""

    taken: object
    grads: list[np.ndarray]
    scale: float


def _gradients(rank: int, size: int, step: int) -> list[torch.Tensor]:
    """Return [float32 tensor] that one rank should end a step with; of three ranks and more the last holds none."""
    rng = np.random.default_rng([rank, step])
    sizes = () if size > 2 and rank == size - 1 else SIZES
    return [torch.from_numpy(rng.integers(1, 100, n).astype(np.float32)) for n in sizes]


def _overflowing(size: int, trouble: str) -> list[int]:
    """Return the ranks that have it: one for infinity, two for NaN, if there are."""
    one = min(1, size - 1)
    return [] if trouble == GOOD else [one] if trouble == INFINITE else sorted({0, one})


def _train(comm: Comm, fn: Answer) -> list[_Step]:
    """Run all steps, with gradients of a loss that was multiplied by the right scale."""
    scaler, before, seen = LossScale(SCALE, INTERVAL), SCALE, []
    for step, trouble in enumerate(STEPS):
        grads = [grad * before for grad in _gradients(comm.rank, comm.size, step)]
        if comm.rank in _overflowing(comm.size, trouble):
            grads[-1][-1] = float("inf") if trouble == INFINITE else float("nan")
        taken = fn(comm, list(grads), scaler)
        seen.append(_Step(taken, [grad.numpy().copy() for grad in grads], float(scaler.scale)))
        before = SCALES[step]
    return seen


def _check_unscale_together(fn: Answer, runner: Runner = None) -> Passed:
    run = in_all_cases(fn, _train, [(p,) for p in RANKS], with_ranks, _judge)
    skipped = sum(trouble != GOOD for trouble in STEPS)
    facts = [
        f"decision: {skipped} of {len(STEPS)} steps are skipped by all ranks, the others by none, with 1 to 4 ranks",
        f"scale: {number(SCALE)} at first, halved after infinity and NaN, doubled after {INTERVAL} good steps in a row",
        "gradients: without the scale",
    ]
    facts += engine_facts(runner, _judge, _train, fn)
    return Passed(*facts, run=run)


def _judge(run: Results, where: str) -> None:
    """Raise Broken for the first step in which something is wrong."""
    before = SCALE
    for i, trouble in enumerate(STEPS):
        rows = [steps[i] for steps in run]
        at = f"{where}, in step {i + 1}"
        _check_decision(rows, trouble, at)
        _check_scale(rows, i, before, at)
        if trouble == GOOD:
            _check_gradients(rows, i, before, at)
        before = SCALES[i]
    for rank in range(len(run)):
        sent = sum(e.nbytes for e in run.events if e.op in ("send", "isend") and e.rank == rank)
        if sent > MOST * len(STEPS):
            raise Broken(f"""bytes: {where}, rank {rank} sends {number(sent / len(STEPS))} bytes in a step. The ranks
                have one question, with yes or no for an answer: one number is enough.""")


def _check_decision(rows: list[_Step], trouble: str, at: str) -> None:
    for rank, row in enumerate(rows):
        if not isinstance(row.taken, bool | np.bool_ | torch.Tensor):
            what = type_text(type(row.taken).__name__)
            raise Broken(f"returns: {at}, rank {rank} returned {what}: True takes the step, False skips it.")
    taken, bad = [rank for rank, row in enumerate(rows) if row.taken], _overflowing(len(rows), trouble)
    says = f"{name_ranks(bad)} {'has' if len(bad) == 1 else 'have'} {trouble} in a gradient"
    if bad and taken and len(taken) < len(rows):
        raise Broken(f"""decision: {at}, {says}, and {name_ranks(taken)} {"takes" if len(taken) == 1 else "take"} the
            step that the others skip: replicas drift apart. Ask all ranks before you decide.""")
    if bad and taken:
        raise Broken(f"""overflow: {at}, {says}, and the step is taken: no update can be made of that. Look for both,
            infinity and NaN, in every tensor of every rank.""")
    if not bad and len(taken) < len(rows):
        raise Broken(f"good: {at}, all gradients are finite, and the step is skipped: nothing would ever be learned.")


def _check_scale(rows: list[_Step], i: int, before: float, at: str) -> None:
    scales, right = [row.scale for row in rows], SCALES[i]
    if len(set(scales)) > 1:
        texts = ", ".join(f"{number(s)} on rank {rank}" for rank, s in enumerate(scales))
        raise Broken(f"""scales: {at}, the ranks leave with different scales: {texts}. Their gradients would be added up
            with different factors.""")
    got = scales[0]
    if got == right:
        return
    since = next((k for k in range(i, -1, -1) if STEPS[k] != GOOD), -1)  # the latest that was skipped
    says = f"{at}, the scale is {number(got)} and should be {number(right)}"
    if STEPS[i] != GOOD:
        why = "it has to come down, or the next step overflows as well" if got >= before else "it is halved once"
        raise Broken(f"halve: {says}: {why}, however many ranks have {STEPS[i]}.")
    if right > before:
        raise Broken(f"grow: {says}: {INTERVAL} good steps in a row are behind it, after which it is doubled.")
    if got > before and since >= 0:
        raise Broken(f"""reset: {says}: step {since + 1} was skipped, and {counted(i - since, "good step")} came since.
            Count from 0 again after a skipped step, and after the scale has grown.""")
    raise Broken(f"interval: {says}: it changes after {INTERVAL} good steps in a row, and {i - since} are behind it.")


def _check_gradients(rows: list[_Step], i: int, before: float, at: str) -> None:
    for rank, row in enumerate(rows):
        for got, tensor in zip(row.grads, _gradients(rank, len(rows), i), strict=True):
            right = tensor.numpy()
            if np.allclose(got, right, rtol=1e-6):
                continue
            says = f"{at}, a gradient of rank {rank} is {number(got[0])} and should be {number(right[0])}"
            times = float(got[0] / right[0])
            if np.allclose(got, right * before, rtol=1e-6):
                raise Broken(f"""unscale: {says}: it still has the scale, {number(before)}, in it. Clipping, and the
                    optimizer, need it without. Divide in place.""")
            if np.allclose(got, right / before, rtol=1e-6):
                raise Broken(f"twice: {says}: it was divided by the scale, {number(before)}, twice.")
            if np.allclose(got, right * before / SCALES[i], rtol=1e-6):
                raise Broken(f"""order: {says}: it was divided by the scale of the next step. The loss of this one was
                    multiplied by {number(before)}.""")
            raise Broken(f"gradients: {says}, {number(times)} times as much.")


EXERCISES = (Exercise("8.5", "loss scaling that agrees", unscale_together, 2, _check_unscale_together),)

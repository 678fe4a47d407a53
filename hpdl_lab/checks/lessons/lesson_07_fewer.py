"""Notebook 07, part two: few numbers of the gradients travel, or parameters travel seldom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...collectives import cost
from ...comm import Results
from ...comm.base import Comm
from ...parallel.compression import top_k_all_reduce
from ...parallel.local_sgd import local_sgd
from ...units import counted
from ..checkers import because, engine_facts, exactly, first_wrong, in_all_cases, off_reason, reason, with_ranks
from ..ranks import simulate, unlike
from ..record import Answer, Broken, Exercise, Passed, Reason, Runner
from ..traffic import check_waits

# -- 7.3 ---------------------------------------------------------------------------------------------------------------

ROUNDS = 4
SPARSE = ((3, 12, 3), (2, 40, 1), (4, 9, 9), (1, 8, 2), (5, 1000, 10))  # ranks, numbers of a gradient, k


class _Sent(NamedTuple):
    """A step of one rank: `grad` and `held` before it; the returned value, and both arrays after it."""

    grad: np.ndarray
    held: np.ndarray
    out: np.ndarray | str
    total: np.ndarray
    error: np.ndarray


def _gradient_of(rank: int, step: int, n: int) -> np.ndarray:
    """Return (n,) different per rank and step; ranks agree a little, and most large numbers are negative."""
    common, own = np.random.default_rng([7, step]).normal(size=n), np.random.default_rng([rank, step]).normal(size=n)
    return common + own - 0.7


def _sparse_steps(comm: Comm, fn: Answer, n: int, k: int) -> list[_Sent]:
    """Call fn(comm, grad, error, k) ROUNDS times, with one error."""
    error, course = torch.zeros(n, dtype=torch.float64), []
    for step in range(ROUNDS):
        grad, held = torch.from_numpy(_gradient_of(comm.rank, step, n)), error.numpy().copy()
        out = fn(comm, grad, error, k)
        what = unlike(out, grad) or out.numpy().copy()
        course.append(_Sent(_gradient_of(comm.rank, step, n), held, what, grad.numpy().copy(), error.numpy().copy()))
    return course


def _largest(x: np.ndarray, k: int, by: Callable[[np.ndarray], np.ndarray] = np.abs) -> np.ndarray:
    """Return x (n,) with 0 for all but its k numbers of largest magnitude, or of the largest `by`."""
    out, places = np.zeros_like(x), np.argsort(-by(x))[:k]
    out[places] = x[places]
    return out


def _check_top_k(fn: Answer, runner: Runner = None) -> Passed:
    run = in_all_cases(fn, _sparse_steps, SPARSE, _sparse_case, _check_sparse)
    p, n, k = SPARSE[-1]
    moved = sum(e.nbytes for e in run.events if e.op == "send") / ROUNDS / p
    if moved > (p + 1) * k * (8 + 8):
        raise Broken(f"""bytes: The sums are right, but with {p} ranks a rank sends {moved:,.0f} bytes in a step: {k}
            values of 8 bytes and their {k} places, to each of {p - 1} others, are {16 * k * (p - 1):,}.""")
    sent, held = sum(one.total for one in run[0]), sum(course[-1].error for course in run)
    off = float(np.abs(sent + held - sum(one.grad for course in run for one in course)).max())
    facts = [
        f"sums: the {ROUNDS} sums, and what each rank holds back, with 1 to 5 simulated ranks",
        f"nothing is lost: what was sent and what is held back add up to all gradients, to within {off:.0e}",
        f"bytes: {moved:,.0f} per rank and step; all {n:,} numbers would be {cost.all_reduce(p, 8 * n).nbytes:,.0f}",
    ]
    return Passed(*facts, *engine_facts(runner, _check_sparse, _sparse_steps, fn, *SPARSE[0][1:]), run=run)


def _sparse_case(p: int, n: int, k: int) -> str:
    return f"{with_ranks(p)} and k = {k} of {n:,} numbers"


def _check_sparse(run: Results, where: str, n: int, k: int) -> None:
    """Raise Broken at the first step whose sum, or what is held back after it, is not right."""
    check_waits(run.events, len(run))
    for step in range(ROUNDS):
        now = [course[step] for course in run]
        sums = [_largest(left.grad + left.held, k) for left in now]
        total = np.asarray(sum(sums))
        at = f"{where}, in step {step},"
        for r, left in enumerate(now):
            if isinstance(left.out, str):
                raise Broken(f"returns: {where}, rank {r} returned {left.out}: return grad, the sum.")
            if not exactly(left.out, total):
                text = first_wrong(
                    f"the sum{{}} on rank {r}", left.out, total, np.isclose(left.out, total, 1e-10, 1e-10)
                )
                raise because(_why_sum(left, r, now, k), f"{at} {text}.")
            if not exactly(left.total, total):
                raise Broken(f"in place: {at} what rank {r} returns is right, but grad was not overwritten with it.")
            if not np.array_equal(left.out, now[0].out):
                raise Broken(f"""bitwise: {at} ranks 0 and {r} hold different bits of the same sum: add in the order of
                    ranks on every rank, or replicas drift apart.""")
        for r, left in enumerate(now):
            should = left.grad + left.held - sums[r]
            if not exactly(left.error, should):
                right = np.isclose(left.error, should, 1e-10, 1e-10)
                text = first_wrong(f"error{{}} of rank {r}", left.error, should, right)
                raise because(_why_error(left, sums[r], total), f"{at} the sum is right, but {text}.")


def _why_sum(left: _Sent, r: int, now: list[_Sent], k: int) -> Reason:
    """Return the Reason for a wrong sum on rank r."""
    given = [one.grad + one.held for one in now]
    sums = [_largest(x, k) for x in given]
    mine = np.flatnonzero(sums[r])
    in_my_places, last_wins, first = np.zeros_like(left.grad), np.zeros_like(left.grad), np.argsort(-np.abs(given[r]))
    in_my_places[first[:k]] = sum(x[np.argsort(-np.abs(x))[:k]] for x in given)
    mine_summed = np.zeros_like(left.grad)
    mine_summed[mine] = sum(x[mine] for x in given)
    for x in sums:
        last_wins[x != 0] = x[x != 0]
    total = np.asarray(sum(sums))
    rows = (
        (sum(_largest(one.grad, k) for one in now), """feedback: That is chosen from the gradients alone: what was held
            back has to be added to them before you choose."""),
        (sum(_largest(one.grad + 2 * one.held, k) for one in now), "twice: What was held back is added twice."),
        (sum(_largest(x, k, np.positive) for x in given), """magnitude: Those are the largest by sign: -5 moves a weight
            more than 1 does. Choose by the absolute value."""),
        (sum(given), """dense: That is the sum of all numbers, not only of the k that each rank sends."""),
        (sums[r], f"sum: Those are the k numbers of rank {r} alone: every rank needs the numbers of all ranks."),
        (in_my_places, f"""places: Ranks have chosen different places, and you have put all values into the places
            of rank {r}: the places have to travel, too."""),
        (mine_summed, f"places: Those are sums in the places of rank {r}: other ranks have chosen other places."),
        (last_wins, """collide: Where two ranks have chosen the same place, one value has overwritten the other: add
            them up. x[i] += v counts a place that is twice in i only once; index_add_ counts it twice."""),
        (total + left.grad, "clear: The gradient of this rank is still in it: grad has to be zeros before you add."),
    )  # fmt: skip
    return off_reason(np.asarray(left.out), total, [(np.asarray(value), why) for value, why in rows])


def _why_error(left: _Sent, sent: np.ndarray, total: np.ndarray) -> Reason:
    """Return the Reason for an error of a rank that is not grad + error - sent."""
    given = left.grad + left.held
    rows = (
        (left.held, """feedback: It has not changed: what this rank has not sent is lost. Write into the tensor `error`:
            a new tensor of that name is gone when your function returns."""),
        (given, "sent: What was sent is still in it, and will be sent again: put zeros in its places."),
        (left.grad - sent, "feedback: What was held back in earlier steps is missing."),
        (given - total, "sent: You subtracted numbers of other ranks: subtract only what this rank has sent."),
    )  # fmt: skip
    return reason(left.error, rows, exactly) or "feedback: "


# -- 7.4 ---------------------------------------------------------------------------------------------------------------

N, LR = 6, 0.25
BLOCKS = ((3, 7, 3), (2, 4, 2), (4, 2, 5), (1, 3, 2), (3, 4, 1))  # ranks, steps, every


class _Walk(NamedTuple):
    """seen: [parameters that each call of `gradient` was given]; out: what was returned; held: w afterwards."""

    seen: list[np.ndarray]
    out: np.ndarray | str
    held: np.ndarray


def _slope(rank: int, step: int, w: np.ndarray) -> np.ndarray:
    """Return (N,) the gradient of batch `step` of a rank: of a valley that is steep elsewhere on each rank."""
    rng = np.random.default_rng([rank, step])
    return rng.uniform(0.2, 2.5, N) * (w - rng.normal(size=N))


def _walk(comm: Comm, fn: Answer, steps: int, every: int) -> _Walk:
    """Run fn from zeros."""
    seen, w = list[np.ndarray](), torch.zeros(N, dtype=torch.float64)

    def gradient(w: Tensor) -> Tensor:
        seen.append(w.detach().numpy().copy())
        return torch.from_numpy(_slope(comm.rank, len(seen) - 1, seen[-1]))

    out = fn(comm, w, gradient, steps, LR, every)
    return _Walk(seen, unlike(out, w) or out.numpy().copy(), w.numpy().copy())


def _course(p: int, steps: int, every: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ((p, N) before a step, (p, N) right after it) for every step, and what all ranks have in the end, twice."""
    w = np.zeros((p, N))
    for step in range(steps):
        after = w - LR * np.stack([_slope(r, step, w[r]) for r in range(p)])
        yield w, after
        w = after
        if (step + 1) % every == 0 or step + 1 == steps:
            w = np.broadcast_to(after.mean(0), (p, N))
    yield w, w


def _check_local_sgd(fn: Answer, runner: Runner = None) -> Passed:
    run = in_all_cases(
        fn, _walk, BLOCKS, lambda p, steps, every: f"{with_ranks(p)}, {steps} steps and every = {every}", _check_walks
    )
    p, steps, _ = BLOCKS[-1]
    w = np.zeros(N)
    for step in range(steps):
        w = w - LR * np.mean([_slope(r, step, w) for r in range(p)], axis=0)
    off = float(np.abs(run[0].held - w).max())
    facts = [
        "average: after each block, and after the last, on 1 to 4 simulated ranks",
        f"every = 1: {off:.0e} from data parallelism, which averages gradients",
        _check_meetings(simulate(3, _walk, fn, 12, 4, where="with 3 ranks"), 3, 12, 4),
    ]
    return Passed(*facts, *engine_facts(runner, _check_walks, _walk, fn, *BLOCKS[0][1:]), run=run)


def _check_walks(run: Results, where: str, steps: int, every: int) -> None:
    """Raise Broken at the first step that begins elsewhere than it should, or for a wrong end."""
    p, right = len(run), list(_course(len(run), steps, every))
    check_waits(run.events, p)
    for r, left in enumerate(run):
        if isinstance(left.out, str):
            raise Broken(f"returns: {where}, rank {r} returned {left.out}: return w.")
    for step, (begin, _) in enumerate(right):
        for r, left in enumerate(run):
            if step < steps and len(left.seen) <= step:
                raise Broken(f"""steps: {where}, rank {r} has taken {len(left.seen)} of {steps} steps: one call of
                    gradient each.""")
            got = left.seen[step] if step < steps else left.out
            if not exactly(got, begin[r]):
                when = f"before step {step + 1} of {steps}" if step < steps else "in the end"
                text = first_wrong(f"w{{}} on rank {r}", got, begin[r], np.isclose(got, begin[r], 1e-10, 1e-10))
                raise because(_why_walk(got, r, step, right, steps, every), f"{where}, {when} {text}.")
    for r, left in enumerate(run):
        if len(left.seen) > steps:
            raise Broken(f"steps: {where}, rank {r} asked for {len(left.seen)} gradients, and takes {steps} steps.")
        if not exactly(left.held, left.out):
            raise Broken(f"in place: {where}, what rank {r} returns is right, but w was not overwritten with it.")


def _why_walk(
    got: np.ndarray, r: int, step: int, right: list[tuple[np.ndarray, np.ndarray]], steps: int, every: int
) -> Reason:
    """Return the Reason for parameters `got` of rank r before step `step`, or after the last: all before were right."""
    before, after = right[step - 1]
    p, mine, mean = len(after), after[r], after.mean(0)
    meets, block = step % every == 0 or step == steps, counted(steps % every or every, "step")
    apart = f"average: That is what rank {r} has alone: after {counted(step, 'step')} all ranks average."
    if step == steps:
        apart = f"last: That is what rank {r} has alone: the last block, of {block}, has to be averaged as well."
    early = f"""every: After {counted(step, "step")} all ranks have the same: gradients or parameters were averaged.
        Here each rank steps with its own gradient, and parameters are averaged after every {every} steps."""
    rows = (
        (mine if meets else mean, apart if meets else early),
        (p * mean, f"mean: That is the sum over {p} ranks: divide by comm.size."),
        (mean / p, f"mean: It was divided by {p} twice."),
        ((mine + mean) / 2, "average: That is the mean of this rank and of the mean: ranks would never quite agree."),
        (mine + mean, "average: The mean was added to what this rank has: it has to replace it."),
        (2 * before[r] - mine, "sign: That is a step uphill: w - lr * gradient goes down."),
        (before[r] + (mine - before[r]) / LR, "rate: The step is not multiplied by lr."),
        (before[r] + (mine - before[r]) / p, "gradients: This rank's gradient was divided by the number of ranks."),
    )
    return off_reason(got, mean if meets else mine, rows, "average: " if meets else "steps: ")


def _check_meetings(run: Results, p: int, steps: int, every: int) -> str:
    """Raise Broken if more is sent than an all_reduce per block. Returns a fact."""
    sent = sum(e.nbytes for e in run.events if e.op == "send") / p
    once = cost.all_reduce(p, 8 * N).nbytes
    best = -(-steps // every) * once
    if sent > 1.01 * best:
        raise Broken(f"""bytes: The parameters are right, but with {p} ranks, {steps} steps and every = {every} a rank
            sends {sent:,.0f} bytes, and {steps // every} all_reduces of w are {best:,.0f}.""")
    return f"bytes: {sent:,.0f} per rank in {steps} steps, where data parallelism sends {steps * once:,.0f}"


EXERCISES = (
    Exercise("7.3", "send the largest numbers, hold back the others", top_k_all_reduce, 3, _check_top_k),
    Exercise("7.4", "average parameters every H steps", local_sgd, 2, _check_local_sgd),
)

"""Notebook 07, part two: few numbers of the gradients travel, or parameters travel seldom."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ... import data
from ...collectives import cost
from ...comm import Results
from ...comm.base import Comm
from ...comm.sim.torch_state import one_thread
from ...data.dataset import Dataset
from ...models.mlp import mlp
from ...parallel.compression import DataParallelCompressed, TopK, top_k_all_reduce
from ...parallel.data_parallel import DataParallel
from ...parallel.local_sgd import local_sgd
from ...parallel.training import Recipe, train
from ...units import counted
from ..checkers import because, engine_facts, exactly, first_wrong, in_all_cases, off_reason, reason, with_ranks
from ..ranks import Ledger, simulate, unlike
from ..record import Answer, Broken, Exercise, Passed, Reason, Runner
from ..traffic import check_waits
from .lesson_06_overlap import load_optimizers

# -- 7.3 ---------------------------------------------------------------------------------------------------------------

ROUNDS = 4
SPARSE = ((3, 12, 3), (2, 40, 1), (4, 9, 9), (1, 8, 2), (5, 1000, 10))  # ranks, numbers of a gradient, k
EXAMPLES, STEPS, SHARE = 400, 60, 0.02  # of a training, in which a fiftieth of each gradient travels
AS_GOOD = 1.25  # times the loss of dense gradients


class Sent(NamedTuple):
    """A step of one rank: `grad` and `held` before it; the returned value, and both arrays after it."""

    grad: np.ndarray
    held: np.ndarray
    out: np.ndarray | str
    total: np.ndarray
    error: np.ndarray


def gradient_of(rank: int, step: int, n: int) -> np.ndarray:
    """Return (n,) different per rank and step; ranks agree a little, and most large numbers are negative."""
    common, own = np.random.default_rng([7, step]).normal(size=n), np.random.default_rng([rank, step]).normal(size=n)
    return common + own - 0.7


def sparse_steps(comm: Comm, fn: Answer, n: int, k: int) -> list[Sent]:
    """Call fn(comm, grad, error, k) ROUNDS times, with one error."""
    error, course = torch.zeros(n, dtype=torch.float64), []
    for step in range(ROUNDS):
        grad, held = torch.from_numpy(gradient_of(comm.rank, step, n)), error.numpy().copy()
        out = fn(comm, grad, error, k)
        what = unlike(out, grad) or out.numpy().copy()
        course.append(Sent(gradient_of(comm.rank, step, n), held, what, grad.numpy().copy(), error.numpy().copy()))
    return course


def largest(x: np.ndarray, k: int) -> np.ndarray:
    """Return x (n,) with 0 for all but its k numbers of largest magnitude."""
    out, places = np.zeros_like(x), np.argsort(-np.abs(x))[:k]
    out[places] = x[places]
    return out


def check_top_k(fn: Answer, runner: Runner = None) -> Passed:
    run = in_all_cases(fn, sparse_steps, SPARSE, sparse_case, check_sparse)
    p, n, k = SPARSE[-1]
    facts = [
        f"sums: the {ROUNDS} sums, and what each rank holds back, with 1 to 5 simulated ranks",
        identity(run),
        check_few_bytes(run, p, n, k),
        check_learns(fn),
    ]
    return Passed(*facts, *engine_facts(runner, check_sparse, sparse_steps, fn, *SPARSE[0][1:]), run=run)


def sparse_case(p: int, n: int, k: int) -> str:
    return f"{with_ranks(p)} and k = {k} of {n:,} numbers"


def check_sparse(run: Results, where: str, n: int, k: int) -> None:
    """Raise Broken at the first step whose sum, or what is held back after it, is not right."""
    check_waits(run.events, len(run))
    for step in range(ROUNDS):
        now = [course[step] for course in run]
        sums = [largest(left.grad + left.held, k) for left in now]
        total = np.asarray(sum(sums))
        at = f"{where}, in step {step},"
        for r, left in enumerate(now):
            if isinstance(left.out, str):
                raise Broken(f"returns: {where}, rank {r} returned {left.out}: return grad, the sum.")
            if not exactly(left.out, total):
                text = first_wrong(
                    f"the sum{{}} on rank {r}", left.out, total, np.isclose(left.out, total, 1e-10, 1e-10)
                )
                raise because(why_sum(left, r, now, k), f"{at} {text}.")
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
                raise because(why_error(left, sums[r], total), f"{at} the sum is right, but {text}.")


def why_sum(left: Sent, r: int, now: list[Sent], k: int) -> Reason:
    """Return the Reason for a wrong sum on rank r."""
    given = [one.grad + one.held for one in now]
    sums = [largest(x, k) for x in given]
    mine = np.flatnonzero(sums[r])
    in_my_places, last_wins, first = np.zeros_like(left.grad), np.zeros_like(left.grad), np.argsort(-np.abs(given[r]))
    in_my_places[first[:k]] = sum(x[np.argsort(-np.abs(x))[:k]] for x in given)
    mine_summed = np.zeros_like(left.grad)
    mine_summed[mine] = sum(x[mine] for x in given)
    for x in sums:
        last_wins[x != 0] = x[x != 0]
    total = np.asarray(sum(sums))
    rows = (
        (sum(largest(one.grad, k) for one in now), """feedback: That is chosen from the gradients alone: what was held
            back has to be added to them before you choose."""),
        (sum(largest(one.grad + 2 * one.held, k) for one in now), "twice: What was held back is added twice."),
        (sum(signed(x, k) for x in given), """magnitude: Those are the k largest with their sign: -5 moves a weight more
            than 1 does. Choose by the absolute value."""),
        (sum(given), """dense: That is the sum of all numbers, not only of the k that each rank sends."""),
        (sums[r], f"sum: Those are the k numbers of rank {r} alone: every rank needs those of all ranks."),
        (in_my_places, f"""places: Ranks have chosen different places, and you have put all values into those of rank
            {r}: the places have to travel, too."""),
        (mine_summed, f"places: Those are sums in the places of rank {r}: other ranks have chosen other places."),
        (last_wins, """collide: Where two ranks have chosen the same place, one value has overwritten the other: add
            them up. x[i] += v counts a place that is twice in i only once; index_add_ counts it twice."""),
        (total + left.grad, "clear: The gradient of this rank is still in it: grad has to be zeros before you add."),
        (total + left.grad + left.held, "clear: The numbers of this rank are still in it: begin with zeros."),
    )  # fmt: skip
    found = off_reason(np.asarray(left.out), total, [(np.asarray(value), why) for value, why in rows])
    return found if found != "sum: " else "sum: Each rank sends its k largest, and all of them add up."


def signed(x: np.ndarray, k: int) -> np.ndarray:
    """Return x with 0 for all but its k largest numbers, by their sign."""
    out, places = np.zeros_like(x), np.argsort(-x)[:k]
    out[places] = x[places]
    return out


def why_error(left: Sent, sent: np.ndarray, total: np.ndarray) -> Reason:
    """Return the Reason for an error of a rank that is not grad + error - sent."""
    given = left.grad + left.held
    rows = (
        (left.held, """feedback: It is as it was: what this rank has not sent is lost. Write into the tensor `error`: a
            new tensor of that name is gone when your function returns."""),
        (given, "sent: What was sent is still in it, and will be sent again: put zeros in its places."),
        (left.grad - sent, "feedback: What was held back in earlier steps is no longer in it."),
        (given - total, "sent: Other ranks' numbers were taken from it: take away what this rank has sent."),
        (given + sent, "sent: What was sent was added to it instead of taken away."),
        (sent, "sent: That is what was sent. Hold back the others."),
    )  # fmt: skip
    return reason(left.error, rows, exactly) or "feedback: Hold back grad + error, without what this rank has sent."


def identity(run: Results) -> str:
    """Return the fact that nothing is lost."""
    sent = sum(one.total for one in run[0])
    held, all_of_them = sum(course[-1].error for course in run), sum(one.grad for course in run for one in course)
    off = float(np.abs(sent + held - all_of_them).max())
    return f"nothing is lost: all that was sent and all that is held back are {off:.0e} from all gradients"


def check_few_bytes(run: Results, p: int, n: int, k: int) -> str:
    """Raise Broken if much more than k values and k places of each rank travels. Returns a fact."""
    sent = sum(e.nbytes for e in run.events if e.op == "send") / ROUNDS / p
    most, dense = (p + 1) * k * (8 + 8), cost.all_reduce(p, 8 * n).nbytes
    if sent > most:
        what = "so would all numbers" if sent > dense / 2 else "more than values and places travels"
        raise Broken(f"""bytes: The sums are right, but with {p} ranks a rank sends {sent:,.0f} bytes in a step, and
            {what}: {k} values of 8 bytes and their {k} places, to each of {p - 1} others, are {16 * k * (p - 1):,}.""")
    return f"bytes: {sent:,.0f} per rank and step, where all {n:,} numbers would be {dense:,.0f}"


def check_learns(fn: Answer) -> str:
    """Train a small model with few numbers and with all of them; raises Broken if few are much worse."""
    load_optimizers()
    with one_thread(torch):
        dense = with_all_numbers()
        few = simulate(3, learn, DataParallelCompressed(TopK(SHARE, fn)), where="in a training", evidence=False)[0]
    text = f"after {STEPS} steps the loss is {few:.3f} with {SHARE:.0%} of the numbers, {dense:.3f} with all of them"
    if not few < AS_GOOD * dense:
        raise Broken(f"trains: {text}.")
    return f"trains: {text}"


@functools.cache
def with_all_numbers() -> float:
    return simulate(3, learn, DataParallel(), where="with all numbers", evidence=False)[0]


def learn(comm: Comm, strategy: DataParallel) -> float:
    """Return the test loss of a small model after a short training on some of the digits."""
    some = Dataset(*(part[:EXAMPLES] for part in data.load("digits")))
    return train(comm, mlp((64, 16, 10)), strategy, some, Recipe(steps=STEPS, batch=96, lr=0.3, momentum=0.0)).test_loss


# -- 7.4 ---------------------------------------------------------------------------------------------------------------

N, LR = 6, 0.25
BLOCKS = ((3, 7, 3), (2, 4, 2), (4, 2, 5), (1, 3, 2), (3, 4, 1))  # ranks, steps, every


class Walk(NamedTuple):
    """seen: [parameters that each call of `gradient` was given]; out: what was returned; held: w afterwards."""

    seen: list[np.ndarray]
    out: np.ndarray | str
    held: np.ndarray


def slope(rank: int, step: int, w: np.ndarray) -> np.ndarray:
    """Return (N,) the gradient of batch `step` of a rank: of a valley that is steep elsewhere on each rank."""
    chance = np.random.default_rng([rank, step])
    return chance.uniform(0.2, 2.5, N) * (w - chance.normal(size=N))


def walk(comm: Comm, fn: Answer, steps: int, every: int, ledger: Ledger | None = None) -> Walk:
    """Run fn from zeros. ledger: {rank: what it has seen}, left by an answer that raises, too."""
    seen: list[np.ndarray] = [] if ledger is None else ledger.setdefault(comm.rank, [])
    w = torch.zeros(N, dtype=torch.float64)

    def gradient(w: Tensor) -> Tensor:
        seen.append(w.detach().numpy().copy())
        return torch.from_numpy(slope(comm.rank, len(seen) - 1, seen[-1]))

    out = fn(comm, w, gradient, steps, LR, every)
    return Walk(seen, unlike(out, w) or out.numpy().copy(), w.numpy().copy())


def course(p: int, steps: int, every: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield ((p, N) before a step, (p, N) right after it) for every step, and what all ranks have in the end, twice."""
    w = np.zeros((p, N))
    for step in range(steps):
        after = w - LR * np.stack([slope(r, step, w[r]) for r in range(p)])
        yield w, after
        w = after
        if (step + 1) % every == 0 or step + 1 == steps:
            w = np.broadcast_to(after.mean(0), (p, N))
    yield w, w


def check_local_sgd(fn: Answer, runner: Runner = None) -> Passed:
    cases = [(p, steps, every, Ledger()) for p, steps, every in BLOCKS]
    run = in_all_cases(fn, walk, cases, block_case, check_walks, by_steps)
    p, steps, _ = BLOCKS[-1]
    w = np.zeros(N)
    for step in range(steps):
        w = w - LR * np.mean([slope(r, step, w) for r in range(p)], axis=0)
    off = float(np.abs(run[0].held - w).max())
    facts = [
        "average: after each block, and after the last, on 1 to 4 simulated ranks",
        f"every = 1: {off:.0e} from data parallelism, which averages gradients",
        check_meetings(simulate(3, walk, fn, 12, 4, where="with 3 ranks"), 3, 12, 4),
    ]
    return Passed(*facts, *engine_facts(runner, check_walks, walk, fn, *BLOCKS[0][1:]), run=run)


def block_case(p: int, steps: int, every: int, ledger: Ledger) -> str:
    return f"{with_ranks(p)}, {steps} steps and every = {every}"


def by_steps(broken: Broken, where: str, steps: int, every: int, ledger: Ledger) -> Reason | None:
    """Return why ranks wait, if an answer has asked for one gradient too many on some ranks only."""
    asked = {r: len(seen) for r, seen in ledger.items()}
    if broken.failed != "deadlock" or len(set(asked.values())) < 2:
        return None
    text = ", ".join(f"{n} by rank {r}" for r, n in sorted(asked.items()))
    return f"deadlock: {where}, gradients are asked for {text} times: all_reduce needs every rank, at the same step."


def check_walks(run: Results, where: str, steps: int, every: int, ledger: Ledger | None = None) -> None:
    """Raise Broken at the first step that begins elsewhere than it should, or for a wrong end."""
    p, right = len(run), list(course(len(run), steps, every))
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
                raise because(why_walk(got, r, step, right, steps, every), f"{where}, {when} {text}.")
    for r, left in enumerate(run):
        if len(left.seen) > steps:
            raise Broken(f"steps: {where}, rank {r} asked for {len(left.seen)} gradients, and takes {steps} steps.")
        if not exactly(left.held, left.out):
            raise Broken(f"in place: {where}, what rank {r} returns is right, but w was not overwritten with it.")


def why_walk(
    got: np.ndarray, r: int, step: int, right: list[tuple[np.ndarray, np.ndarray]], steps: int, every: int
) -> Reason:
    """Return the Reason for parameters `got` of rank r before step `step`, or after the last: all before were right."""
    before, after = right[step - 1]
    p, mine, mean = len(after), after[r], after.mean(0)
    begun = right[step - 1 - (step - 1) % every][0][r]
    meets, block = step % every == 0 or step == steps, counted(steps % every or every, "step")
    apart = f"average: That is what rank {r} has alone: after {counted(step, 'step')} all ranks average."
    if step == steps:
        apart = f"last: That is what rank {r} has alone: the last block, of {block}, has to be averaged as well."
    early = f"""every: After {counted(step, "step")} all ranks have the same: gradients or parameters were averaged.
        Here each steps with its own gradient, and parameters are averaged after every {every}."""
    rows = (
        (mine if meets else mean, apart if meets else early),
        (p * mean, f"mean: That is the sum over {p} ranks: divide by comm.size."),
        (mean / p, f"mean: It was divided by {p} twice."),
        ((mine + mean) / 2, "average: That is the mean of this rank and of the mean: ranks would never quite agree."),
        (mine + mean, "average: The mean was added to what this rank has: it has to replace it."),
        (begun, "steps: That is where the block began: nothing of it is left."),
        (2 * before[r] - mine, "sign: That is a step uphill: w - lr * gradient goes down."),
        (before[r] + (mine - before[r]) / LR, "rate: The step is not multiplied by lr."),
        (before[r] + (mine - before[r]) / p, "gradients: This rank's gradient was divided by the number of ranks."),
    )
    return off_reason(got, mean if meets else mine, rows, "average: " if meets else "steps: ")


def check_meetings(run: Results, p: int, steps: int, every: int) -> str:
    """Raise Broken if more is sent than an all_reduce per block. Returns a fact."""
    sent = sum(e.nbytes for e in run.events if e.op == "send") / p
    once = cost.all_reduce(p, 8 * N).nbytes
    best = -(-steps // every) * once
    if sent > 1.01 * best:
        raise Broken(f"""bytes: The parameters are right, but with {p} ranks, {steps} steps and every = {every} a rank
            sends {sent:,.0f} bytes, and {steps // every} all_reduces of w are {best:,.0f}.""")
    return f"bytes: {sent:,.0f} per rank in {steps} steps, where data parallelism sends {steps * once:,.0f}"


EXERCISES = (
    Exercise("7.3", "send the largest numbers, hold back the others", top_k_all_reduce, 3, check_top_k),
    Exercise("7.4", "average parameters every H steps", local_sgd, 2, check_local_sgd),
)

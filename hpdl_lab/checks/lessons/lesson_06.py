"""Notebook 06: equal replicas, the mean of their gradients in one message, buckets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ... import models
from ...collectives import cost, ring
from ...comm import Results
from ...comm.base import Comm
from ...models.mlp import mlp
from ...parallel import data_parallel, reducer
from ...units import counted
from ..checkers import because, engine_facts, exactly, first_wrong, in_all_cases, off_reason, with_ranks
from ..ranks import Ledger, alone, capital, number, shown, simulate
from ..record import Answer, Broken, Exercise, Passed, Reason, Runner
from ..traffic import check_waits

# -- 6.1 ---------------------------------------------------------------------------------------------------------------

FROZEN = "2.bias"
SPARE = 1000  # bytes beyond the model's own that an answer may send


class _Replica(NamedTuple):
    """A model: {name: array} of its tensors before and after the answer; names of parameters that are other objects."""

    before: dict[str, np.ndarray]
    values: dict[str, np.ndarray]
    replaced: list[str]


def _replica(rank: int) -> nn.Module:
    """Return the model of one rank, built from a seed of its own: three layers, one with buffers, one bias frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        for _ in range(rank + 1):  # so that its running statistics differ as well
            model(torch.randn(8, 4, dtype=torch.float64))
    model[2].bias.requires_grad_(False)
    return model


def _values(model: nn.Module) -> dict[str, np.ndarray]:
    """Return {name: copy as an array} of every parameter and buffer."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors}


def _make_equal(comm: Comm, fn: Answer) -> _Replica:
    """Call fn(comm, model) on this rank's replica."""
    model = _replica(comm.rank)
    before, parameters = _values(model), dict(model.named_parameters())
    fn(comm, model)
    replaced = [name for name, p in model.named_parameters() if p is not parameters[name]]
    return _Replica(before, _values(model), replaced)


def _check_broadcast_parameters(fn: Answer, runner: Runner = None) -> Passed:
    def judge(run: Results, where: str) -> None:
        _check_replicas(run, where)
        check_waits(run.events, len(run))

    run = in_all_cases(fn, _make_equal, ((3,), (2,), (1,), (5,)), with_ranks, judge)
    p, nbytes = len(run), sum(value.nbytes for value in run[0].before.values())
    sent, bound = sum(e.nbytes for e in run.events if e.op == "send"), (p - 1) * nbytes
    if sent > bound + SPARE:
        raise Broken(f"""bytes: The models are equal, but with {p} ranks {sent:,} bytes were sent, and {bound:,} are
            enough: rank 0's {nbytes:,} once to each of {p - 1} others. No rank needs what the others have.""")
    facts = [
        "parameters, frozen parameters and buffers of rank 0, bit for bit, on 1, 2, 3 and 5 simulated ranks",
        f"bytes: {sent:,} with {p} ranks, for a model of {nbytes:,}: it goes once to each of the others",
    ]
    return Passed(*facts, *engine_facts(runner, _check_replicas, _make_equal, fn, say="the same on {}"))


def _check_replicas(run: Results, where: str) -> None:
    """Raise Broken unless every rank holds rank 0's tensors, in the same parameters as before."""
    for r, left in enumerate(run):
        if left.replaced:
            raise Broken(f"""object: {where}, {left.replaced[0]} of rank {r} is a different Parameter now: an
                optimizer made before still holds the old one. Write into the one that is there.""")
        for name, right in run[0].before.items():
            got = left.values[name]
            if not np.array_equal(got, right):
                i = int(np.argmax(got.reshape(-1) != right.reshape(-1)))
                wanted, found = number(right.reshape(-1)[i]), number(got.reshape(-1)[i])
                text = f"{name}[{i}] on rank {r} should be {wanted}, as it was on rank 0, and is {found}."
                raise because(_why_replica(name, r, run), f"{where}, {text}")


def _why_replica(name: str, r: int, run: Results) -> Reason:
    """Return the Reason for the tensor `name` of rank r, which is not what rank 0 had."""
    before = [left.before for left in run]
    got, mine = run[r].values[name], before[r][name]
    changed = [other for other in before[r] if not np.array_equal(run[r].values[other], before[r][other])]
    if not np.array_equal(got, mine) and np.allclose(got, sum(b[name] for b in before) / len(before)):
        return "value: That is the mean over ranks: equal everywhere, but no layer was initialized for such values."
    for s in range(1, len(before)):
        if s != r and np.array_equal(got, before[s][name]):
            return f"root: That is what rank {s} had: rank 0 is the root, for every rank."
    if all(np.array_equal(left.values[name], got) for left in run):
        return "value: All ranks hold the same there, but not what rank 0 had: another seed is another model."
    if not np.array_equal(got, mine):
        return "value: "
    if not changed:
        return f"copy: Nothing in the model of rank {r} has changed: did you write into a copy?"
    parameters = dict(_replica(0).named_parameters())
    if name not in parameters and not set(changed) - set(parameters):
        return f"""buffers: {name} is a buffer: a part of the model that no gradient reaches, so it stays different
            forever. model.parameters() does not list it; model.buffers() does."""
    if name == FROZEN:
        return f"frozen: {name} is frozen: it needs no gradient, but rank {r} computes with it all the same."
    right = sum(np.array_equal(run[r].values[other], value) for other, value in before[0].items())
    return f"""some: That is what rank {r} had before, although {changed[0]} has arrived: {right} of {len(before[0])}
        tensors equal rank 0's, and all of them must."""


# -- 6.2 ---------------------------------------------------------------------------------------------------------------

SIZES = (5, 4, 3)  # of the layers: tensors of 20, 4, 12 and 3 numbers
NUMBERS = 39
SHARD = 4  # examples of each rank
LAST = "2.bias"
EVERYBODY = -1
CASES = ((3, None), (2, None), (4, 1), (3, EVERYBODY), (1, None), (5, 4))  # (ranks, who lacks the gradient of LAST)


class _Averaged(NamedTuple):
    """A rank after the answer.

    before, after: {name: the gradient as an array, or None}; calls: [numbers of every tensor given to all_reduce].
    moved: whether the answer changed a parameter.
    """

    before: dict[str, np.ndarray | None]
    after: dict[str, np.ndarray | None]
    calls: list[int]
    moved: bool


def _shard_of(rank: int) -> tuple[Tensor, ...]:
    """Return (x, y) of one rank, different per rank."""
    generator = torch.Generator().manual_seed(rank)
    return tuple(torch.randn(SHARD, n, generator=generator, dtype=torch.float64) for n in (SIZES[0], SIZES[-1]))


def noted_ring(calls: list[int]) -> Callable[[Comm, Tensor], Tensor]:
    """Return a ring all-reduce, of tensors of any shape, that appends how many numbers it was given."""

    def all_reduce(comm: Comm, x: Tensor) -> Tensor:
        calls.append(x.numel())
        return ring.all_reduce(comm, x.view(-1)).view(x.shape)

    return all_reduce


def flat_parameters(model: nn.Module) -> np.ndarray:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()


def _gradients(model: nn.Module) -> dict[str, np.ndarray | None]:
    return {name: None if p.grad is None else p.grad.numpy().copy() for name, p in model.named_parameters()}


def _average(comm: Comm, fn: Answer, lacking: int | None, ledger: Ledger | None = None) -> _Averaged:
    """Call fn(comm, params, all_reduce) after the backward passes of two micro-batches. ledger: {rank: calls}."""
    model, (x, y) = mlp(SIZES, seed=1).double(), _shard_of(comm.rank)
    start = flat_parameters(model)
    for part in (slice(0, SHARD // 2), slice(SHARD // 2, SHARD)):
        (mse_loss(model(x[part]), y[part]) / 2).backward()
    if lacking in (comm.rank, EVERYBODY):
        dict(model.named_parameters())[LAST].grad = None
    before = _gradients(model)
    calls = [] if ledger is None else ledger.setdefault(comm.rank, [])
    fn(comm, list(model.parameters()), noted_ring(calls))
    return _Averaged(before, _gradients(model), calls, not np.array_equal(start, flat_parameters(model)))


def _check_average_all_gradients(fn: Answer, runner: Runner = None) -> Passed:
    cases = [(p, lacking, Ledger()) for p, lacking in CASES]
    in_all_cases(fn, _average, cases, _average_case, _check_means, _by_sizes)
    run, p = simulate(4, _average, fn, None, where="with 4 ranks"), 4
    sent, most = [e.nbytes for e in run.events if (e.op, e.rank) == ("send", 0)], cost.all_reduce(p, 8 * NUMBERS)
    if len(sent) > most.steps:
        raise Broken(f"""messages: The gradients are right, but with {p} ranks rank 0 sent {len(sent)} messages, and
            all_reduce needs {most.steps:g}: no question is needed before it. Zeros stand for what is missing.""")
    facts = [
        "the mean of all gradients, bit for bit the same on every rank, on 1, 2, 3, 4 and 5 simulated ranks",
        f"{_difference(run):.0e} at most from one rank with the whole batch, in two micro-batches",
        f"messages: {len(sent)} from each of {p} ranks, {sum(sent):,} bytes, for 4 tensors together",
    ]
    return Passed(*facts, *engine_facts(runner, _check_means, _average, fn, 0), run=run)


def _average_case(p: int, lacking: int | None, ledger: Ledger) -> str:
    if lacking is None:
        return f"with {counted(p, 'rank')}"
    who = "no rank has a gradient" if lacking == EVERYBODY else f"rank {lacking} has no gradient"
    return f"with {counted(p, 'rank')}, if {who} for {LAST},"


def _by_sizes(broken: Broken, where: str, lacking: int | None, ledger: Ledger) -> Reason | None:
    """Return which ranks gave all_reduce tensors of different sizes, if any did."""
    given = {r: calls[-1] for r, calls in sorted(ledger.items()) if calls}
    if len(set(given.values())) < 2:
        return None
    text = ", ".join(f"{n:,} by rank {r}" for r, n in given.items())
    return f"""sizes: {where} all_reduce is given different numbers of elements, {text}: they cannot be added. A rank
        without a gradient has to send zeros in its place, because another rank may have one."""


def _check_means(run: Results, where: str, lacking: int | None, ledger: Ledger | None = None) -> None:
    """Raise Broken unless every gradient is the mean over ranks, by one message, and nothing else has changed."""
    p, shapes = len(run), {name: param.shape for name, param in mlp(SIZES, seed=1).named_parameters()}
    before = [{name: np.zeros(shapes[name]) if g is None else g for name, g in r.before.items()} for r in run]
    means = {name: np.asarray(sum(b[name] for b in before) / p) for name in shapes}
    for name, mean in means.items():
        for r, left in enumerate(run):
            got = left.after[name]
            if got is None:
                if all(other.before[name] is None for other in run):
                    continue  # no rank has one: to leave it so is as good as zeros
                raise Broken(f"""hand back: {where} {name} of rank {r} still has no gradient, while the others have the
                    mean: rank {r} would not take their step, and the replicas drift apart.""")
            if not exactly(got, mean):
                a, b = got.reshape(-1), mean.reshape(-1)
                text = first_wrong(f"the gradient of {name}{{}} on rank {r}", a, b, np.isclose(a, b, 1e-10, 1e-10))
                raise because(_why_mean(name, r, run, before, means), f"{where} {text}.")
            if not np.array_equal(got, run[0].after[name]):
                raise Broken(f"""bitwise: {where} ranks 0 and {r} hold different bits in the gradient of {name}:
                    replicas drift apart.""")
    for r, left in enumerate(run):
        if left.moved:
            raise Broken(f"""parameters: {where} rank {r} changed a parameter: only gradients are averaged, the step is
                the optimizer's.""")
        if p > 1 and (why := _why_calls(left.calls, r, p)):
            raise Broken(f"messages: {where} the gradients are right, but {why}")


def _why_mean(
    name: str, r: int, run: Results, before: list[dict[str, np.ndarray]], means: dict[str, np.ndarray]
) -> Reason:
    """Return the Reason for the gradient `name` of rank r, which is not the mean."""
    p, got, mean, mine = len(run), run[r].after[name], means[name], before[r][name]
    who = sum(left.before[name] is not None for left in run)
    right = sum(exactly(run[r].after[other], value) for other, value in means.items())
    some = f" of {right} of {counted(len(means), 'parameter')}" if right else ""
    own = f"That is rank {r}'s own gradient"
    rows = (
        (p * mean, f"mean: That is the sum over {p} ranks: the step would be {p} times too long."),
        (mean / p, f"mean: It was divided by {p} twice."),
        (p * mean / 2, f"size: You divided by 2, but there are {p} ranks: comm.size."),
        (p * mean / max(who, 1), f"size: You divided by the {who} ranks that have one: all {p} count."),
        (mine, f"hand back: {own}, as it was: the mean has {'' if right else 'not '}come back into p.grad{some}."),
        (mine / p, f"sum: {own} divided by {p}: add the gradients of all ranks first."),
        (mine + mean, "hand back: The mean was added to the gradient that was there: it has to replace it."),
    )
    why = off_reason(got, mean, rows)
    everything = np.concatenate([m.reshape(-1) for m in means.values()])
    known = np.isclose(everything[None], got.reshape(-1, 1), 1e-10, 1e-10).any(axis=1)
    if why == "sum: " and known.all():
        return """order: That is the mean of another gradient: take gradients out in the order in which you packed them,
            each with its own number of elements."""
    return why


def _why_calls(calls: list[int], r: int, p: int) -> str:
    """Return what is wrong with the calls of the all_reduce that the answer was given; "" if nothing is."""
    if not calls:
        return f"""rank {r} never called the all_reduce that your function was given: the caller decides which one is
            used, perhaps the one of lesson 04."""
    if len(calls) > 1:
        return f"""rank {r} called all_reduce {len(calls)} times, for {", ".join(map(str, calls))} numbers: pack all of
            them into one flat tensor, and call it once. Each call costs 2(p-1) = {2 * (p - 1)} messages in a row."""
    return f"{calls[0]} numbers travel, and the gradients have {NUMBERS}." if calls[0] > NUMBERS else ""


def _difference(run: Results) -> float:
    """Return the largest difference between these gradients and the gradients of one rank with the whole batch."""
    model = mlp(SIZES, seed=1).double()
    x, y = (torch.cat(parts) for parts in zip(*map(_shard_of, range(len(run))), strict=True))
    mse_loss(model(x), y).backward()
    whole = _gradients(model)
    return max(float(np.abs(left.after[name] - whole[name]).max()) for left in run for name in whole)


# -- 6.3 ---------------------------------------------------------------------------------------------------------------

DRAWN = ([400, 40, 400, 40, 100, 10], 450, 120)  # (nbytes, limit, first): the case that the docstring draws
BUCKETS = (
    DRAWN,
    ([50, 50, 50, 50], 100, 50),  # what just fits, fits
    ([400, 40, 400, 40, 100, 10], 10_000, 10_000),
    ([10, 900, 10], 100, 50),  # larger than the limit: a bucket of its own
    ([10, 10, 900], 100, 50),  # and it is the first
    ([400, 40, 400, 40, 100, 10], 1, 1),
    ([5], 100, 1),
    ([], 100, 10),
)
RANDOM = 20  # more cases, of 1 to 40 gradients


def _bucket_cases() -> Iterator[tuple[list[int], int, int]]:
    """Yield (nbytes, limit, first) of every case, the one that the docstring draws first."""
    yield from BUCKETS
    for seed in range(RANDOM):
        generator = np.random.default_rng(seed)
        yield generator.integers(0, 1000, generator.integers(1, 41)).tolist(), 700, 300


def _pytorch_buckets(nbytes: list[int], limit: int, first: int) -> list[list[int]]:
    """Return the buckets of PyTorch's DDP: one closes after the gradient with which it reaches its limit."""
    buckets: list[list[int]] = []
    for index in reversed(range(len(nbytes))):
        if not buckets or sum(nbytes[i] for i in buckets[-1]) >= (first if len(buckets) == 1 else limit):
            buckets.append([])
        buckets[-1].append(index)
    return buckets


def _check_assign_buckets(fn: Answer) -> Passed:
    broken = None  # by the rule of the docstring; what follows PyTorch's in all cases is right as well
    for nbytes, limit, first in _bucket_cases():
        where = f"for nbytes = {_shown(nbytes)}, limit = {limit} and first = {first},"
        got = alone(fn, nbytes, limit, first, where=where, keep="nbytes")
        where = capital(where)
        if not isinstance(got, list) or not all(isinstance(bucket, list) for bucket in got):
            raise Broken(f"returns: {where} your function returned {shown(got)}: buckets are a list of lists.")
        if odd := [i for i in itertools.chain(*got) if type(i) is not int]:
            raise Broken(f"returns: {where} a bucket holds {odd[0]!r}: indices into nbytes are whole numbers.")
        where = f"{where} your buckets are {_shown(got)}:"
        _check_cover(got, len(nbytes), where)
        try:
            _check_sizes(got, nbytes, limit, first, where)
        except Broken as found:
            broken = broken or found
        if broken and got != _pytorch_buckets(nbytes, limit, first):
            raise broken
    rule = " by PyTorch's own rule: a bucket closes after the gradient with which it reaches its limit"
    right = f"right in {len(BUCKETS) + RANDOM} cases of up to 40 gradients{rule if broken else ''}"
    return Passed(right, _fact_about_a_gpt(fn))


def _shown(items: Sequence[object]) -> str:
    """Return a list as text, cut if it is long."""
    return f"{items}" if len(items) <= 8 else f"[{', '.join(map(str, items[:7]))}, ... {len(items)} numbers]"


def _check_cover(got: list[list[int]], n: int, where: str) -> None:
    """Raise Broken unless every index is in one bucket, in reverse order, and no bucket is empty."""
    indices = list(itertools.chain(*got))
    if [] in got:
        raise Broken(f"empty: {where} one of them is empty, and would be an empty message.")
    for i in indices:
        if not 0 <= i < n:
            raise Broken(f"cover: {where} there is no gradient {i}: indices go from 0 to {n - 1}.")
        if indices.count(i) > 1:
            raise Broken(f"split: {where} gradient {i} is in more than one place: it would be added twice.")
    lost = [i for i in range(n) if i not in indices]
    if lost:
        why = "every gradient has to travel"
        if indices and lost == list(range(len(lost))):
            why = "the last bucket was never put into the list"
            why = f"the loop ends one too early, or {why}" if len(lost) == 1 else why
        if lost == [n - 1]:
            why = "the loop begins one too late"
        which = f"gradient {lost[0]} is" if len(lost) == 1 else f"gradients {_shown(lost)} are"
        raise Broken(f"cover: {where} {which} in none of them, {len(indices)} of {n} are: {why}.")
    if indices == list(range(n)) and n > 1:
        raise Broken(f"""order: {where} they are in the order of registration. Backward goes the other way: gradient
            {n - 1} is ready first. Your first bucket waits for gradient 0, which is ready last.""")
    for a, b in itertools.pairwise(indices):
        if b != a - 1:
            raise Broken(f"""order: {where} after {a} comes {b}. Only neighbors share a bucket, from {n - 1} down to 0:
                a bucket waits for the last of its gradients, however early the others are.""")


def _check_sizes(got: list[list[int]], nbytes: list[int], limit: int, first: int, where: str) -> None:
    """Raise Broken for a bucket that holds too much, or less than it could."""
    for b, bucket in enumerate(got):
        most, which = (limit, "the limit") if b else (first, "first")
        total = sum(nbytes[i] for i in bucket)
        if len(bucket) > 1 and total > most:
            if b == 0 and total <= limit:
                raise Broken(f"""first: {where} the first bucket holds {total} bytes, and first is {most}: a small
                    first bucket leaves soon after backward has begun.""")
            raise Broken(f"""limit: {where} bucket {b}, {bucket}, holds {total} bytes, and {which} is {most}. Look
                whether a gradient fits before you put it in, not after.""")
        after = got[b + 1][0] if b + 1 < len(got) else None
        if after is not None and total + nbytes[after] <= most:
            raise Broken(f"""small: {where} bucket {b} holds {total} bytes, and gradient {after}, of {nbytes[after]},
                would have fitted: {which} is {most}. Each further bucket costs another latency.""")


def _fact_about_a_gpt(fn: Answer) -> str:
    """Return what it means for a real model, in one sentence."""
    nbytes = [p.nbytes for p in models.build("gpt").parameters()]
    got = fn(nbytes, 100_000, 10_000)
    return f"""a tiny GPT has {len(nbytes)} gradients of {sum(nbytes):,} bytes: with buckets of 100,000 they are
        {len(got)} messages per hop, the first one of {sum(nbytes[i] for i in got[0]):,} bytes"""


EXERCISES = (
    Exercise(
        "6.1", "all ranks start from rank 0's model", data_parallel.broadcast_parameters, 1, _check_broadcast_parameters
    ),
    Exercise(
        "6.2",
        "average all gradients, in one message",
        data_parallel.average_all_gradients,
        2,
        _check_average_all_gradients,
    ),
    Exercise("6.3", "cut the gradients into buckets", reducer.assign_buckets, 2, _check_assign_buckets),
)

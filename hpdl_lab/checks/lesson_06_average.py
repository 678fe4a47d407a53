"""Notebook 06, gradients: their mean over ranks, by one message per hop."""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import mse_loss

from ..collectives import cost, ring
from ..models.mlp import mlp
from ..parallel import data_parallel as reference
from .layer_part import nearly
from .ranks import Ledger, capital, count, number, on_engines, simulate, times
from .record import Broken, Exercise, Passed

SIZES = (5, 4, 3)  # of the layers: tensors of 20, 4, 12 and 3 numbers
SHARD = 4  # examples of each rank
LAST = "2.bias"
EVERYBODY = -1
CASES = (  # (ranks, the rank whose gradient of LAST is missing, or None, or EVERYBODY)
    (3, None),
    (2, None),
    (4, 1),
    (3, EVERYBODY),
    (1, None),
    (5, 4),
)
TOLERANCE = 1e-10


class Averaged(NamedTuple):
    """One rank after the answer.

    before, after: {name: the gradient as an array, or None}; calls: [numbers of every tensor given to all_reduce].
    moved: whether the answer changed a parameter.
    """

    before: dict
    after: dict
    calls: list
    moved: bool


def shard_of(rank):
    """(x, y) of one rank, different per rank."""
    generator = torch.Generator().manual_seed(rank)
    made = (torch.randn(SHARD, n, generator=generator, dtype=torch.float64) for n in (SIZES[0], SIZES[-1]))
    return tuple(made)


def call(comm, fn, lacking, ledger=None):
    """fn(comm, params, all_reduce) after the backward passes of two micro-batches; returns Averaged.

    ledger: {rank: calls}, which also outlives an answer that raises, on simulated ranks.
    """
    model, (x, y) = mlp(SIZES, seed=1).double(), shard_of(comm.rank)
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    for part in (slice(0, SHARD // 2), slice(SHARD // 2, SHARD)):
        (mse_loss(model(x[part]), y[part]) / 2).backward()
    if lacking in (comm.rank, EVERYBODY):
        dict(model.named_parameters())[LAST].grad = None
    before = gradients(model)
    calls = [] if ledger is None else ledger.setdefault(comm.rank, [])

    def noted(comm, x):
        calls.append(x.numel())
        return ring.all_reduce(comm, x)

    fn(comm, list(model.parameters()), noted)
    moved = not torch.equal(start, torch.nn.utils.parameters_to_vector(model.parameters()))
    return Averaged(before, gradients(model), calls, moved)


def gradients(model):
    return {name: None if p.grad is None else p.grad.numpy().copy() for name, p in model.named_parameters()}


def check_average_all_gradients(fn, runner=None):
    for p, lacking in CASES:
        where = case_of(p, lacking)
        ledger = Ledger()
        try:
            run = simulate(p, call, fn, lacking, ledger, where=where)
        except Broken as broken:
            raise by_sizes(ledger, broken, where) from None
        check_means(run, where)
        check_calls(run, where)
    run = simulate(4, call, fn, None, where="with 4 ranks")
    facts = [
        "the mean of all gradients, bit for bit the same on every rank, on 1, 2, 3, 4 and 5 simulated ranks",
        f"{difference(run):.0e} at most from one rank with the whole batch, in two micro-batches",
        check_messages(run, 4),
    ]
    if runner is not None:
        run = on_engines(runner, call, fn, 0)
        where = f"on {count(len(run), 'engine')}, where rank 0 has no gradient for {LAST},"
        check_means(run, where)
        check_calls(run, where)
        facts.append(f"engines: right on {count(len(run), 'MPI rank')}")
    return Passed(tuple(facts), run.events, len(run))


def case_of(p, lacking):
    """How a case is named in messages."""
    if lacking is None:
        return f"with {count(p, 'rank')}"
    who = "no rank has a gradient" if lacking == EVERYBODY else f"rank {lacking} has no gradient"
    return f"with {count(p, 'rank')}, where {who} for {LAST},"


def by_sizes(numbers, broken, where):
    """`broken`, or what is behind it: ranks that gave all_reduce tensors of different sizes."""
    first = {r: calls[-1] for r, calls in numbers.items() if calls}
    if len(set(first.values())) < 2:
        return broken
    told = ", ".join(f"{n:,} by rank {r}" for r, n in sorted(first.items()))
    message = (
        f"{capital(where)} all_reduce is given different numbers of elements, {told}: they cannot be added. A rank "
        "without a gradient has to send zeros in its place, since it cannot know what the others have."
    )
    return Broken("sizes", message, broken.detail)


def check_means(run, where):
    """Raise Broken unless every gradient is the mean over ranks, and nothing else has changed."""
    p, where = len(run), capital(where)
    before = [{name: np.zeros(shapes()[name]) if g is None else g for name, g in r.before.items()} for r in run]
    for name in before[0]:
        mean = sum(b[name] for b in before) / p
        for r, left in enumerate(run):
            got = left.after[name]
            if got is None:
                if all(other.before[name] is None for other in run):
                    continue  # nobody has one: to leave it so is as good as zeros
                message = (
                    f"{where} {name} of rank {r} still has no gradient, while the others have the mean: rank {r} would "
                    "not take their step, and the replicas drift apart."
                )
                raise Broken("hand back", message)
            if not np.allclose(got, mean, rtol=TOLERANCE, atol=TOLERANCE):
                i = int(np.argmax(~np.isclose(got, mean, rtol=TOLERANCE, atol=TOLERANCE).reshape(-1)))
                should, is_ = mean.reshape(-1)[i], got.reshape(-1)[i]
                failed, why = explain(name, r, run, before)
                message = f"{where} the gradient of {name}[{i}] on rank {r} should be {number(should)} and is "
                raise Broken(failed, f"{message}{number(is_)}. {why}".rstrip())
            if not np.array_equal(got, run[0].after[name]):
                message = (
                    f"{where} ranks 0 and {r} hold different bits in the gradient of {name}: replicas drift apart."
                )
                raise Broken("bitwise", message)
    for r, left in enumerate(run):
        if left.moved:
            message = f"{where} rank {r} changed a parameter: only gradients are averaged, the step is the optimizer's."
            raise Broken("parameters", message)


def shapes():
    return {name: tuple(p.shape) for name, p in mlp(SIZES, seed=1).named_parameters()}


def explain(name, r, run, before):
    """(invariant, sentence) for the gradient `name` of rank r, which is not the mean."""
    p, got = len(run), run[r].after[name]
    total, mine = sum(b[name] for b in before), before[r][name]
    who = [s for s in range(p) if run[s].before[name] is not None]
    for value, failed, why in (
        (total, "mean", f"That is the sum over {p} ranks: the step would be {p} times too long."),
        (total / p / p, "mean", f"It was divided by {p} twice."),
        (total / 2, "size", f"You divided by 2, but there are {p} ranks: comm.size."),
        (total / max(len(who), 1), "size", f"You divided by the {len(who)} ranks that have one: all {p} count."),
        (mine, "hand back", f"That is rank {r}'s own gradient, as it was: {handed_back(r, run, before)}."),
        (mine / p, "sum", f"That is rank {r}'s own gradient divided by {p}: add those of all ranks first."),
        (mine + total / p, "hand back", "The mean was added to the gradient that was there: it takes its place."),
    ):
        if np.allclose(got, value, rtol=TOLERANCE, atol=TOLERANCE):
            return failed, why
    if found := nearly(got, total / p):
        return found
    means = np.concatenate([sum(b[other] for b in before).reshape(-1) / p for other in before[0]])
    if np.isclose(means[None], got.reshape(-1)[:, None], rtol=TOLERANCE, atol=TOLERANCE).any(axis=1).all():
        return "order", (
            "That is the mean of another gradient: what was packed first has to be taken out first, each as many "
            "numbers as it has."
        )
    share = times(got, total / p)
    return ("sum", "") if share is None else ("mean", f"That is {number(share)} times the mean: what do you divide by?")


def handed_back(r, run, before):
    """How many gradients of rank r are the mean, in words."""
    means = {name: sum(b[name] for b in before) / len(run) for name in before[0]}
    right = sum(np.allclose(run[r].after[name], mean, rtol=TOLERANCE, atol=TOLERANCE) for name, mean in means.items())
    if not right:
        return "the mean has not come back into p.grad"
    return f"the mean has come back into p.grad of {right} of {count(len(means), 'parameter')}"


def check_calls(run, where):
    """Raise Broken unless the answer has given everything to the all_reduce that it was given, once."""
    p, n = len(run), sum(int(np.prod(shape)) for shape in shapes().values())
    if p == 1:
        return
    for r, left in enumerate(run):
        told = None
        if not left.calls:
            told = (
                f"The gradients are right, but rank {r} never called the all_reduce that your function was given: the "
                "caller decides which one is used, perhaps that of lesson 04."
            )
        elif len(left.calls) > 1:
            told = (
                f"The gradients are right, but rank {r} called all_reduce {len(left.calls)} times, for "
                f"{', '.join(map(str, left.calls))} numbers: pack all of them into one flat tensor, and call it once. "
                f"Each call costs 2(p-1) = {2 * (p - 1)} messages one after another, however small."
            )
        elif left.calls[0] > n:
            told = f"The gradients are right, but {left.calls[0]} numbers travel, and the gradients have {n}."
        if told:
            raise Broken("messages", f"{capital(where)} {told[0].lower()}{told[1:]}")


def check_messages(run, p):
    """Messages of each rank; raises Broken where other messages than those of all_reduce were sent. Returns a fact."""
    n = sum(int(np.prod(shape)) for shape in shapes().values())
    sent = [e.nbytes for e in run.events if (e.op, e.rank) == ("send", 0)]
    most = cost.all_reduce(p, 8 * n)
    if len(sent) > most.steps:
        message = (
            f"The gradients are right, but with {p} ranks rank 0 sent {len(sent)} messages, where all_reduce needs "
            f"{most.steps:g}: ask nobody before it. What is missing is zeros."
        )
        raise Broken("messages", message)
    return f"messages: {len(sent)} from each of {p} ranks, {sum(sent):,} bytes, for 4 tensors together"


def difference(run):
    """The largest difference between these gradients and those of one rank with the whole batch."""
    p, model = len(run), mlp(SIZES, seed=1).double()
    x, y = (torch.cat(parts) for parts in zip(*map(shard_of, range(p)), strict=True))
    mse_loss(model(x), y).backward()
    whole = gradients(model)
    return max(float(np.abs(left.after[name] - whole[name]).max()) for left in run for name in whole)


EXERCISES = (
    Exercise(
        id="6.2",
        title="average all gradients, in one message",
        reference=reference.average_all_gradients,
        stars=2,
        check=check_average_all_gradients,
        explanation=(
            "One flat tensor, one all_reduce: latency is paid once, not once per tensor, and a GPT has hundreds of "
            "them. Horovod calls it tensor fusion. And it sends zeros for what is missing, since nobody can know "
            "what the others have without asking, which would cost a message more."
        ),
    ),
)

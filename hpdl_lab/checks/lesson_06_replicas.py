"""Notebook 06, replicas: all ranks start from the same model."""

from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ..parallel import data_parallel as reference
from .ranks import capital, count, number, on_engines, simulate
from .record import Broken, Exercise, Passed
from .traffic import check_waits

RANKS = (3, 2, 1, 5)
FROZEN = "2.bias"
SPARE = 1000  # bytes beyond the model's own that an answer may send


class Replica(NamedTuple):
    """A model: {name: array} of its tensors before and after the answer; names of parameters that are other objects."""

    before: dict
    values: dict
    replaced: list


def replica(rank):
    """The model of one rank, built from a seed of its own: three layers, one of them with buffers, one bias frozen."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        for _ in range(rank + 1):  # so that its running statistics differ as well
            model(torch.randn(8, 4, dtype=torch.float64))
    model[2].bias.requires_grad_(False)
    return model


def values(model):
    """{name: copy as an array} of every parameter and buffer."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().numpy().copy() for name, tensor in tensors}


def call(comm, fn):
    """fn(comm, model) on this rank's replica; returns Replica."""
    model = replica(comm.rank)
    before, parameters = values(model), dict(model.named_parameters())
    fn(comm, model)
    replaced = [name for name, p in model.named_parameters() if p is not parameters[name]]
    return Replica(before, values(model), replaced)


def check_broadcast_parameters(fn, runner=None):
    for p in RANKS:
        where = f"with {count(p, 'rank')}"
        run = simulate(p, call, fn, where=where)
        check_replicas(run, where)
        check_waits(run.events, p)
    run = simulate(4, call, fn, where="with 4 ranks")
    facts = [
        "parameters, frozen parameters and buffers of rank 0, bit for bit, on 1, 2, 3 and 5 simulated ranks",
        check_bytes(run, 4),
    ]
    if runner is not None:
        run = on_engines(runner, call, fn)
        check_replicas(run, f"on {count(len(run), 'engine')}")
        facts.append(f"engines: the same on {count(len(run), 'MPI rank')}")
    return Passed(tuple(facts))


def check_replicas(run, where):
    """Raise Broken unless every rank holds rank 0's tensors, in the same parameters as before."""
    where = capital(where)
    before = [left.before for left in run]
    for r, left in enumerate(run):
        if left.replaced:
            message = (
                f"{where}, {left.replaced[0]} of rank {r} is another Parameter now: an optimizer made before still "
                "holds the old one, and would train what the model no longer uses. Write into the one that is there."
            )
            raise Broken("object", message)
        for name, expected in before[0].items():
            if not np.array_equal(left.values[name], expected):
                i = int(np.argmax(left.values[name].reshape(-1) != expected.reshape(-1)))
                got, right = left.values[name].reshape(-1)[i], expected.reshape(-1)[i]
                head = f"{where}, {name}[{i}] on rank {r} should be {number(right)}, as it was on rank 0, and is "
                failed, why = explain(name, r, run, before)
                raise Broken(failed, f"{head}{number(got)}. {why}".rstrip())


def explain(name, r, run, before):
    """(invariant, sentence) for the tensor `name` of rank r, which is not what rank 0 had."""
    got, mine = run[r].values[name], before[r][name]
    changed = [other for other in before[r] if not np.array_equal(run[r].values[other], before[r][other])]
    if not np.array_equal(got, mine) and np.allclose(got, sum(b[name] for b in before) / len(before)):
        return "value", "That is the mean over ranks: equal everywhere, but no layer was initialized for such values."
    for s in range(1, len(before)):
        if s != r and np.array_equal(got, before[s][name]):
            return "root", f"That is what rank {s} had: rank 0 is the root, for every rank."
    if all(np.array_equal(left.values[name], got) for left in run):
        return "value", "All ranks hold the same there, but not what rank 0 had: another seed is another model."
    if not np.array_equal(got, mine):
        return "value", ""
    if not changed:
        return "copy", f"Nothing in the model of rank {r} has changed: did what arrived go into a copy?"
    parameters = dict(replica(0).named_parameters())
    if name not in parameters and not set(changed) - set(parameters):
        return "buffers", (
            f"{name} is a buffer: a part of the model that no gradient reaches, so it stays different for ever. "
            "model.parameters() does not list it; model.buffers() does."
        )
    if name == FROZEN:
        return "frozen", f"{name} is frozen: it needs no gradient, but rank {r} computes with it all the same."
    right = sum(np.array_equal(run[r].values[other], value) for other, value in before[0].items())
    return "some", (
        f"That is what rank {r} had before, although {changed[0]} has arrived: {right} of {len(before[0])} tensors are "
        "those of rank 0, and every one must be."
    )


def check_bytes(run, p):
    """Raise Broken where much more was sent than the model once to every other rank. Returns a fact."""
    nbytes = sum(value.nbytes for value in run[0].before.values())
    sent, bound = sum(e.nbytes for e in run.events if e.op == "send"), (p - 1) * nbytes
    if sent > bound + SPARE:
        message = (
            f"The models are equal, but with {p} ranks {sent:,} bytes were sent, where {bound:,} are enough: rank 0's "
            f"{nbytes:,} once to each of {p - 1} others. What the others have, nobody needs."
        )
        raise Broken("bytes", message)
    return f"bytes: {sent:,} with {p} ranks, for a model of {nbytes:,}: it goes once to each of the others"


EXERCISES = (
    Exercise(
        id="6.1",
        title="all ranks start from rank 0's model",
        reference=reference.broadcast_parameters,
        stars=1,
        check=check_broadcast_parameters,
        explanation=(
            "Gradients that are averaged keep equal replicas equal; they do not make them so. From here on no "
            "parameter ever travels again: only gradients do. The library sends bytes, so that a mask of bools "
            "travels as well, and strategies first compare a digest of all models, to name a rank whose model differs."
        ),
    ),
)

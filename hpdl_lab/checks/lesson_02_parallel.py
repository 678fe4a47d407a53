"""Notebook 02: four ranks, each with its own gradient, take one common step."""

import numpy as np

from ..comm import PerRank
from ..parallel import averaging as reference
from . import answers_02 as answers
from .ranks import capital, count, number, on_engines, simulate
from .record import Broken, Exercise, Passed, WrongAnswer


def gradients(p, d):
    """(p, d) one gradient per rank; every number is a multiple of 840, so that means over 1 to 8 ranks are whole."""
    return np.random.default_rng([p, d]).integers(1, 1000, (p, d)) * 840.0


def call(comm, fn, g):
    """fn(comm, g); returns (what it returned, what it left in g)."""
    return fn(comm, g), g


def check_average_gradients(fn, runner=None):
    for p, d in ((4, 2), (2, 2), (3, 1), (5, 1001), (8, 10), (1, 2), (4, 0)):
        values, where = gradients(p, d), f"with {count(p, 'rank')} and gradients of {count(d, 'number')}"
        run = simulate(p, call, fn, PerRank(list(values)), where=where)
        check_mean(run, values, where)
    facts = ["the mean of the gradients, the same on every rank, for 1, 2, 3, 4, 5 and 8 simulated ranks"]
    if runner is not None:
        facts.append(check_on_engines(fn, runner))
    return Passed(tuple(facts))


def check_mean(run, values, where):
    p, where = len(values), capital(where)
    mean = values.mean(axis=0)
    for r, (out, left) in enumerate(run):
        if out is None:
            raise Broken(
                "returns", f"{where}, rank {r} returned nothing: return the gradient.", events=run.events, size=p
            )
        if getattr(out, "shape", None) != mean.shape:
            got = f"shape {out.shape}" if hasattr(out, "shape") else f"type {type(out).__name__}"
            message = f"{where}, rank {r} returned something of {got}: the gradient has shape {mean.shape}."
            raise Broken("returns", message, events=run.events, size=p)
        out = np.asarray(out, dtype=float)
        if not np.allclose(out, mean, rtol=1e-5):
            j = int(np.argmax(~np.isclose(out, mean, rtol=1e-5)))
            failed, why = explain(out, values, r, np.asarray(run[-1][0]))
            message = f"{where}, g[{j}] on rank {r} should be {number(mean[j])} and is {number(out[j])}. {why}"
            raise Broken(failed, message.rstrip(), events=run.events, size=p)
        if not np.array_equal(out, np.asarray(run[0][0])):
            message = f"{where}, ranks 0 and {r} hold different bits: replicas that round differently drift apart."
            raise Broken("bitwise", message, events=run.events, size=p)
        if not np.allclose(left, mean, rtol=1e-5):
            message = f"{where}, what rank {r} returns is right, but g was not overwritten with it."
            raise Broken("in place", message, events=run.events, size=p)


def explain(out, values, r, last):
    """(invariant, sentence) for a result of rank r that is not the mean; `last` is that of the last rank."""
    p, total = len(values), values.sum(axis=0)
    if np.allclose(out, total):
        return "mean", f"That is the sum of the {p} gradients: the step would be {p} times too long."
    if np.allclose(out * 4, total):
        return "size", f"You divided by 4, but there are {p} ranks: comm.size."
    if np.allclose(out * p, values[r]):
        return "sum", f"That is its own gradient divided by {p}: add those of all ranks first."
    if np.allclose(out * p * p, total):
        return "mean", f"It was divided by {p} twice."
    if np.allclose(out, values[r]) and np.allclose(last, values[-1]):
        return "sum", f"That is what rank {r} had before: nothing came from the others."
    for s in range(p):
        if np.allclose(out, values[s]):
            return "sum", f"That is the gradient of rank {s} alone."
    return "sum", ""


def check_on_engines(fn, runner):
    """The same on real ranks. Returns a fact."""
    run = on_engines(runner, call_own_gradient, fn)
    check_mean(run, gradients(len(run), 1001), f"on {count(len(run), 'engine')}")
    return f"engines: right on {count(len(run), 'MPI rank')}"


def call_own_gradient(comm, fn):
    return call(comm, fn, gradients(comm.size, 1001)[comm.rank])


EXERCISES = (
    Exercise(
        id="2.1",
        title="average the gradients of four ranks",
        reference=reference.average_gradients,
        stars=1,
        check=check_average_gradients,
        hints={
            "": (
                "Two things: bring the gradients of all ranks together, and make a mean of them. Every rank must end "
                "with it.",
                "comm.all_reduce(g) replaces g, on every rank, by the sum over all ranks.",
                "comm.all_reduce(g)\ng /= comm.size\nreturn g",
            ),
            "mean": (
                "You have the sum. What makes a mean of it?",
                "Divide by the number of ranks, once.",
                "comm.all_reduce(g)\ng /= comm.size\nreturn g",
            ),
            "in place": (
                "The caller looks at g, not only at what you return. Which line makes a new array?",
                "g / n is a new array; g /= n changes g itself.",
                "g /= comm.size\nreturn g",
            ),
            "deadlock": (
                "The table says which rank waits, and for whom. Is some line of yours run by one rank only?",
                "A collective such as comm.all_reduce must be called by every rank: the others wait for the one that "
                "does not.",
                "Call comm.all_reduce(g) outside of any `if comm.rank == ...`.",
            ),
        },
        wrong_answers=(
            WrongAnswer(answers.forgets_to_divide, "mean", "the step would be 4 times too long"),
            WrongAnswer(answers.divides_by_four, "size", "there are 2 ranks: comm.size"),
            WrongAnswer(answers.divides_its_own, "sum", "add those of all ranks first"),
            WrongAnswer(answers.divides_twice, "mean", "It was divided by 4 twice"),
            WrongAnswer(answers.takes_rank_0, "sum", "the gradient of rank 0 alone"),
            WrongAnswer(answers.does_nothing, "sum", "nothing came from the others"),
            WrongAnswer(answers.only_rank_0_calls, "deadlock", "never called all_reduce"),
            WrongAnswer(answers.divides_into_a_new_array, "in place", "g was not overwritten"),
            WrongAnswer(answers.averages_and_forgets, "returns", "returned nothing"),
            WrongAnswer(answers.averages_to_a_number, "returns", "the gradient has shape (2,)"),
        ),
        right_answers=(answers.divides_first, answers.by_gathering, answers.by_messages),
        explanation=(
            "Every rank ends with the same mean, so every rank takes the same step, and the copies of the model stay "
            "equal without ever being compared. Nothing else passes between the ranks: this one line is data "
            "parallelism."
        ),
    ),
)

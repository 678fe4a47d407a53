"""Notebook 02: four ranks, each with its own gradient, take one common step."""

import numpy as np

from ..comm import PerRank
from ..parallel import gradient_descent as reference
from .ranks import capital, count, kind, number, on_engines, simulate, unlike
from .record import Broken, Exercise, Passed
from .traffic import additions


def gradients(p, d):
    """(p, d) one gradient per rank: of both signs, and not whole, so that the order of additions shows."""
    return 100 * np.random.default_rng([p, d]).standard_normal((p, d))


def call(comm, fn, g):
    """fn(comm, g); returns (what it returned, what it left in g)."""
    return fn(comm, g), g


def check_average_gradients(fn, runner=None):
    for p, d in ((4, 2), (2, 2), (3, 1), (5, 1001), (8, 10), (1, 2), (4, 0)):
        values, where = gradients(p, d), f"with {count(p, 'rank')} and gradients of {count(d, 'number')}"
        try:
            run = simulate(p, call, fn, PerRank(list(values)), where=where)
        except Broken as broken:
            raise missed_by_a_loop(broken, where) from None
        check_mean(run, values, where)
    made = max(simulate(4, additions, fn, PerRank(list(gradients(4, 2)))))
    if made > 1:
        message = f"The mean is right, but every rank calls {made} collectives that add: one all_reduce is enough."
        raise Broken("steps", message)
    facts = ["the mean of the gradients, the same on every rank, for 1, 2, 3, 4, 5 and 8 simulated ranks"]
    if runner is not None:
        facts.append(check_on_engines(fn, runner))
    return Passed(tuple(facts))


def check_mean(run, values, where):
    where = capital(where)
    mean = values.mean(axis=0)
    for r, (out, left) in enumerate(run):
        if unlike(out, left):
            message = f"{where}, rank {r} returned {unlike(out, left)}: the gradient is {kind(left)}."
            raise Broken("returns", message)
        if not same(out, mean).all():
            j = int(np.argmin(same(out, mean)))
            failed, why = explain(out, values, r, np.asarray(run[-1][0]))
            message = f"{where}, g[{j}] on rank {r} should be {number(mean[j])} and is {number(out[j])}. {why}"
            raise Broken(failed, message.rstrip())
        if not np.array_equal(out, np.asarray(run[0][0])):
            message = f"{where}, ranks 0 and {r} hold different bits: replicas that round differently drift apart."
            raise Broken("bitwise", message)
        if not same(left, mean).all():
            message = f"{where}, what rank {r} returns is right, but g was not overwritten with it."
            raise Broken("in place", message)


def same(a, b):
    """Where a and b, (d,), are the same but for the rounding of float64 sums over a few ranks."""
    return np.isclose(a, b, rtol=1e-12, atol=1e-12 * np.abs(b).max(initial=0))


IMPRECISE = "The first digits are right: is something rounded, or float32, on its way?"


def missed_by_a_loop(broken, where):
    """The same failure; of a deadlock in which rank 0 sends to a rank whose own message it never received, why."""
    waits = {w.rank: w for w in getattr(broken.__cause__, "waits", ())}
    hub = waits.get(0)
    if hub is not None and (hub.state, hub.op) == ("waiting", "send"):
        other = waits[hub.peers[0]]
        if (other.state, other.op, other.peers) == ("waiting", "send", (0,)):
            broken.message = (
                f"{capital(where)} there is a deadlock: rank 0 sends to rank {other.rank} and has not received what "
                f"rank {other.rank} sent to it. Does a loop that receives leave out rank {other.rank}?"
            )
    return broken


def explain(out, values, r, last):
    """(invariant, sentence) for a result of rank r that is not the mean; `last` is that of the last rank."""
    p, total = len(values), values.sum(axis=0)
    if np.allclose(out * p, total, rtol=1e-3):
        return "precision", IMPRECISE
    if np.array_equal(out, np.round(out)):
        return "precision", "Those are whole numbers: / divides, // rounds down as well."
    if np.allclose(out, total):
        return "mean", f"That is the sum of the {p} gradients: the step would be {p} times too long."
    if np.allclose(out * 4, total):
        return "size", f"You divided by 4, but there are {p} ranks: comm.size."
    if np.allclose(out * p, values[r]):
        return "sum", f"That is its own gradient divided by {p}: add those of all ranks first."
    if np.allclose(out * p * p, total):
        return "mean", f"It was divided by {p} twice."
    for divisor in (p - 1, p + 1):
        if np.allclose(out * divisor, total):
            return "mean", f"You divided by {divisor}, but there are {p} ranks."
    for value, which in ((np.median(values, axis=0), "median"), (values.max(axis=0), "largest")):
        if p > 2 and np.allclose(out, value):
            return "mean", f"That is the {which} of the {p} gradients, not their mean."
    for s in range(p):
        if np.allclose(out * p, total - values[s]):
            return "loop", f"The gradient of rank {s} is missing in it: is a loop one step too short?"
        if np.allclose(out * p, total + values[s]):
            return "loop", f"The gradient of rank {s} is in it twice: is a loop one step too long?"
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
        explanation=(
            "Every rank ends with the same mean, so every rank takes the same step, and the copies of the model stay "
            "equal without ever being compared. Nothing else passes between the ranks: this one line is data "
            "parallelism."
        ),
    ),
)

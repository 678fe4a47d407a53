"""Notebook 02, parameter server: one rank holds the weights, and everything passes through it."""

import re

import numpy as np

from ..comm import PerRank
from ..parallel import gradient_descent as reference
from .lesson_02_parallel import IMPRECISE, gradients, missed_by_a_loop, same
from .ranks import ALONE, capital, count, in_company, kind, number, on_engines, simulate, unlike
from .record import Broken, Exercise, Passed
from .traffic import check_waits

RATE = 0.3
STALE = -3.0  # what a worker's weights hold before the server has sent new ones
CASES = ((4, 2), (2, 2), (3, 1), (5, 1001), (8, 10), (4, 0))  # (ranks, weights)


def inputs(p, d):
    """w: one (d,) array per rank, of which that of rank 0 counts; g: (p, d), one gradient per rank."""
    weights = 100 * np.random.default_rng([p, d, 2]).standard_normal(d)
    return [weights.copy()] + [np.full(d, STALE) for _ in range(p - 1)], gradients(p, d)


def expected_weights(weights, g):
    return weights[0] - RATE * g[1:].mean(axis=0)


def call(comm, fn, w, g):
    """fn(comm, w, g, RATE); returns (what it returned, what it left in w, what it left in g)."""
    return fn(comm, w, g, RATE), w, g


def check_server_step(fn, runner=None):
    for p, d in CASES:
        weights, g = inputs(p, d)
        where = f"with a server and {count(p - 1, 'worker')}"
        try:
            run = simulate(p, call, fn, PerRank(weights), PerRank(list(g)), where=where)
        except Broken as broken:
            raise beyond_the_workers(missed_by_a_loop(broken, where), p) from None
        check_weights(run, weights, g, capital(where))
    weights, g = inputs(8, 1000)
    run = simulate(8, call, fn, PerRank(weights), PerRank(list(g)), where="with a server and 7 workers")
    moved = check_server_traffic(run, 8, g[0].nbytes)
    facts = [
        "the step along the mean of the workers' gradients, for 1, 2, 3, 4 and 7 workers",
        f"with 7 workers and weights of 8,000 bytes, {moved:,} bytes go into the server, and {moved:,} out of it",
    ]
    if runner is not None:
        facts.append(check_on_engines(fn, runner))
    return Passed(tuple(facts), run.events, 8)


def beyond_the_workers(broken, p):
    """The same failure; of a server that talks to itself or to a rank that is not there, who its workers are."""
    if broken.failed == "raises" and re.search("rank 0 (sends to|receives from) (itself|rank)", broken.message):
        broken.message += f". The workers are ranks 1 to {p - 1}: where does the loop of the server begin and end?"
    return broken


def check_on_engines(fn, runner):
    """The same on real ranks. Returns a fact."""
    run = on_engines(runner, in_company, call_on_engine, fn)
    if run == [None]:
        return ALONE
    check_weights(run, *inputs(len(run), 1001), f"on {count(len(run), 'engine')}")
    return f"engines: right on {count(len(run), 'MPI rank')}, one of them the server"


def call_on_engine(comm, fn):
    weights, g = inputs(comm.size, 1001)
    return call(comm, fn, weights[comm.rank], g[comm.rank])


def check_weights(run, weights, g, where):
    """Raise Broken unless every rank returns and holds the new weights, and every worker its gradient as it was."""
    expected = expected_weights(weights, g)
    for r, (out, held, left) in enumerate(run):
        who = "the server" if r == 0 else f"rank {r}"
        if unlike(out, held):
            message = f"{where}, {who} returned {unlike(out, held)}: every rank returns w, {kind(held)}."
            raise Broken("returns", message)
        if not same(out, expected).all():
            j = int(np.argmin(same(out, expected)))
            failed, why = explain(out, expected, weights, g, r)
            message = f"{where}, w[{j}] on {who} should be {number(expected[j])} and is {number(out[j])}. {why}"
            raise Broken(failed, message.rstrip())
        if not same(held, expected).all():
            message = f"{where}, what {who} returns is right, but w was not overwritten with it."
            raise Broken("in place", message)
        if not np.array_equal(out, run[0][0]):
            message = f"{where}, rank {r} and the server hold different bits: send the weights, not the way to them."
            raise Broken("bitwise", message)
        if r > 0 and not np.array_equal(left, g[r]):
            message = f"{where}, rank {r} changed its gradient g: the caller may still need it."
            raise Broken("input", message)


def explain(out, expected, weights, g, r):
    """(invariant, sentence) for weights of rank r that are not the expected ones."""
    p, workers, w = len(g), len(g) - 1, weights[0]
    total, everybody = g[1:].sum(axis=0), g.sum(axis=0)
    if np.allclose(out, expected, rtol=1e-3):
        return "precision", IMPRECISE
    for value, failed, why in (
        (w - RATE * total, "mean", f"That is a step along the sum of {workers} gradients: divide by {workers}."),
        (
            w - RATE * total / p,
            "workers",
            f"You divided by {p}, the number of ranks. The server has no examples: comm.size - 1 is {workers}.",
        ),
        (
            w - RATE * everybody / p,
            "workers",
            "The gradient of rank 0 is in it, which has no examples: it does not count.",
        ),
        (w - RATE * everybody / workers, "workers", "The gradient of rank 0 is in it: only the workers' count."),
        (w + RATE * total / workers, "sign", "That is a step uphill: go against the gradient."),
        (w - total / workers, "rate", f"The rate is {RATE}, and was not used."),
        (w - RATE**2 * total / workers, "rate", "The rate was used twice."),
        (
            STALE - RATE * total / workers,
            "send back",
            "That is a step from the weights of a worker. Only the server's count: gradients go in, weights come out.",
        ),
        (
            w - RATE * total / 3,
            "size",
            f"You divided by 3, but here there is {count(workers, 'worker')}: comm.size - 1.",
        ),
    ):
        if np.allclose(out, value):
            return failed, why
    for s in range(1, p):
        if np.allclose(out, w - RATE * g[s]):
            return "sum", f"Only the gradient of rank {s} is in it: add those of all workers before the step."
        if np.allclose(out, w - RATE * (total - g[s]) / workers):
            return "loop", f"The gradient of rank {s} is missing in it: is a loop one step too short?"
        if np.allclose(out, w - RATE * (total + g[s]) / workers):
            return "loop", f"The gradient of rank {s} is in it twice: is a loop one step too long?"
    if r > 0 and np.allclose(out, STALE):
        return "send back", f"Those are the weights that rank {r} had before: the server's never arrived."
    if r > 0 and any(np.allclose(out, w - RATE * g[1 : s + 1].sum(axis=0) / workers) for s in range(p)):
        return "order", "The server sent weights before it had all gradients: first collect from all, then send to all."
    return "sum", ""


def check_server_traffic(run, p, nbytes):
    """Bytes into the server, which are as many as out of it. Raises Broken for detours and repetitions."""
    check_waits(run.events, p)
    for e in run.events:
        if e.op == "send" and 0 not in (e.rank, e.peer):
            message = (
                f"The result is right, but rank {e.rank} sends to rank {e.peer}: around a parameter server the workers "
                "talk to rank 0 only. (That spares the server work; in notebook 04 you go further that way.)"
            )
            raise Broken("peers", message)
    bound = (p - 1) * nbytes
    into = sum(e.nbytes for e in run.events if e.op == "send" and e.peer == 0)
    out = sum(e.nbytes for e in run.events if e.op == "send" and e.rank == 0)
    for moved, way, what in ((into, "into", "one gradient from"), (out, "out of", "the weights once to")):
        if moved > bound:
            message = (
                f"The result is right, but with {p - 1} workers {moved:,} bytes went {way} the server, where "
                f"{bound:,} are enough: {what} each worker."
            )
            raise Broken("bytes", message)
    return into


LAST_HINT = (
    "if comm.rank == 0:\n"
    "    total = 0 * w\n"
    "    arriving = new_like(w, w.shape)\n"
    "    for worker in range(1, comm.size):\n"
    "        total += comm.recv(arriving, worker)\n"
    "    ...   # the step, then comm.send(w, worker) to each of them\n"
    "else:\n"
    "    comm.send(g, 0)\n"
    "    comm.recv(w, 0)\n"
    "return w"
)

EXERCISES = (
    Exercise(
        id="2.2",
        title="a parameter server",
        reference=reference.server_step,
        stars=2,
        check=check_server_step,
        explanation=(
            "The workers hold nothing but a copy: whoever asks the server has the model. That is simple, and one "
            "worker more or less changes little. But all gradients meet at one door: p - 1 vectors in and p - 1 out "
            "per step, while every worker's own link carries one each way and waits."
        ),
    ),
)

"""Notebook 02, gossip: no server and no all-reduce; every rank averages with its neighbors on a graph."""

from collections import Counter

import numpy as np

from ..comm import PerRank
from ..parallel import gossip as graphs
from ..parallel import gossip as reference
from .lesson_02_parallel import IMPRECISE
from .ranks import capital, count, kind, number, on_engines, simulate, unlike
from .record import Broken, Exercise, Passed
from .traffic import check_waits

CASES = (("ring", 8), ("ring", 4), ("star", 5), ("wheel", 8), ("random", 8), ("ring", 2), ("ring", 3), ("ring", 1))
SHOWN = ("wheel", 8)
STEPS = 12  # of the run whose error is compared with the second eigenvalue


def inputs(p, n=10):
    """(p, n) numbers, different on every rank."""
    return np.random.default_rng([p, n]).integers(1, 1000, (p, n)) * 1.0


def call(comm, fn, x, graph, steps=1):
    """fn(comm, x, graph), `steps` times; returns (what it returned the last time, what it left in x)."""
    for _ in range(steps):
        out = fn(comm, x, graph)
    return out, x


def check_gossip_step(fn, runner=None):
    for name, p in CASES:
        graph, values = graphs.graph(name, p), inputs(p)
        where = f"on a {name} of {count(p, 'rank')}"
        try:
            run = simulate(p, call, fn, PerRank(list(values)), graph, where=where)
        except Broken as broken:
            raise one_neighbor_off(broken, graph, where) from None
        check_peers(run, graph, capital(where))
        check_step(run, values, graph, capital(where))
        check_messages(run, graph, capital(where))
        if (name, p) == SHOWN:
            shown = run.events
    facts = [f"one step is right on {len(CASES)} graphs: ring, star, wheel and random, 1 to 8 ranks", check_rate(fn)]
    if runner is not None:
        run = on_engines(runner, call_on_engine, fn)
        graph = graphs.graph("ring", len(run))
        check_step(run, inputs(len(run)), graph, f"on {count(len(run), 'engine')}")
        facts.append(f"engines: right on a ring of {count(len(run), 'MPI rank')}")
    return Passed(tuple(facts), shown, SHOWN[1])


def one_neighbor_off(broken, graph, where):
    """The same failure; of a deadlock in which a rank met too few of its neighbors, or too many, which rank that is."""
    for wait in getattr(broken.__cause__, "waits", ()):
        met = sum(times for op, _, times in wait.counts if op == "recv")
        degree = len(graph.neighbors[wait.rank])
        if wait.state == "finished" and met < degree:
            how = f"received from {met} of its {count(degree, 'neighbor')} and finished: the loop is too short"
        elif wait.state == "waiting" and met > degree:
            how = f"has {count(degree, 'neighbor')} and waits for message number {met}: the loop is too long"
        else:
            continue
        broken.message = f"{capital(where)} there is a deadlock: rank {wait.rank} {how}."
        break
    return broken


def call_on_engine(comm, fn):
    return call(comm, fn, inputs(comm.size)[comm.rank], graphs.graph("ring", comm.size))


def check_peers(run, graph, where):
    """Raise Broken where a rank talks to one that is not its neighbor."""
    for e in run.events:
        if e.op == "send" and e.peer not in graph.neighbors[e.rank]:
            known = ", ".join(map(str, graph.neighbors[e.rank])) or "none"
            message = (
                f"{where}, rank {e.rank} sends to rank {e.peer}, which is not its neighbor: graph.neighbors[{e.rank}] "
                f"are {known}. Gossip knows nobody else."
            )
            raise Broken("peers", message)


def check_step(run, values, graph, where):
    """Raise Broken unless every rank holds and returns its row of W x."""
    expected = graphs.metropolis(graph) @ values
    after = np.array([held for _, held in run])
    for r, (out, held) in enumerate(run):
        if unlike(out, held):
            message = f"{where}, rank {r} returned {unlike(out, held)}: return x, {kind(held)}."
            raise Broken("returns", message)
        if not np.allclose(held, expected[r], rtol=1e-9):
            if np.allclose(out, expected[r], rtol=1e-9):
                message = f"{where}, what rank {r} returns is right, but x was not overwritten with it."
                raise Broken("in place", message)
            i = int(np.argmax(~np.isclose(held, expected[r], rtol=1e-9)))
            failed, why = explain(after, values, graph, r)
            message = f"{where}, x[{i}] on rank {r} should be {number(expected[r, i])} and is {number(held[i])}. {why}"
            raise Broken(failed, message.rstrip())
        if not np.allclose(out, held, rtol=1e-9):
            message = f"{where}, x is right on rank {r}, but what is returned differs from it: return x."
            raise Broken("returns", message)


def explain(after, values, graph, r):
    """(invariant, sentence) for values after a step that are not W x; `after` and `values` are (p, n)."""
    p, near = graph.n, [list(who) for who in graph.neighbors]
    degree = [len(who) for who in near]
    w = graphs.metropolis(graph)

    def weighted(weight):
        """The values after a step with other weights: weight(i, j) for neighbors."""
        change = [sum((weight(i, j) * (values[j] - values[i]) for j in near[i]), 0 * values[i]) for i in range(p)]
        return values + np.array(change)

    if np.allclose(after, values):
        return "sum", "That is what it was before: nothing of the neighbors is in it."
    if np.allclose(after, w @ values, rtol=1e-3):
        return "precision", IMPRECISE
    if np.allclose(after, w @ w @ values):
        return "steps", "Those are two steps: one was asked for, the caller repeats it."
    if np.allclose(after, weighted(lambda i, j: 1 / (1 + degree[i]))):
        return "weights", (
            "That is the plain mean of a rank and its neighbors. " + moved(after, values, "Take the larger degree")
        )
    if np.allclose(after, [np.mean([values[j] for j in near[i]], axis=0) for i in range(p)]):
        return "weights", (
            "Those are the neighbors alone. A rank keeps a part of its own x, because the weight of a neighbor is "
            "1 / (1 + the larger degree)."
        )
    if np.allclose(after, weighted(lambda i, j: 1 / (1 + min(degree[i], degree[j])))):
        return "weights", "You took the smaller degree of the two: take the larger one, so that no rank gives too much."
    if np.allclose(after, 2 * values - w @ values):
        return "sign", "That is a step away from the neighbors: add weight * (theirs - mine)."
    for weight, which in (
        (lambda i, j: 1 / (1 + degree[j]), "1 / (1 + the neighbor's degree)"),
        (lambda i, j: 1 / (degree[i] + degree[j]), "1 / (the sum of the two degrees)"),
        (lambda i, j: 1 / (1 + max(degree)), "1 / (1 + the largest degree of the whole graph)"),
        (lambda i, j: 1 / p, "1 / (the number of ranks)"),
        (lambda i, j: 1 / 2, "1/2 for every neighbor"),
        (lambda i, j: 1 / 3, "1/3 for every neighbor"),
    ):
        if np.allclose(after, weighted(weight)):
            return "weights", f"That is what the weight {which} gives: use 1 / (1 + the larger of the two degrees)."
    if not np.allclose(after.sum(axis=0), values.sum(axis=0)):
        return "mean", moved(after, values, "Add weight * (theirs - mine), both from before the step")
    return "sum", (
        "The mean over all ranks is what it was, but these are not the weights of the docstring. Is what you send, and "
        "what you subtract, still the x from before the step?"
    )


def moved(after, values, advice):
    return (
        f"The mean over all ranks was {number(values.mean())} and is now {number(after.mean())}. {advice}: what rank i "
        "takes from j must be what j takes from i."
    )


def check_messages(run, graph, where):
    """Raise Broken unless each neighbor has been sent one message, and nobody has waited for all ranks."""
    check_waits(run.events, graph.n)
    if any(e.op == "barrier" for e in run.events):
        message = f"{where}, the result is right, but every rank waits in a barrier: gossip waits for neighbors only."
        raise Broken("peers", message)
    sent = Counter((e.rank, e.peer) for e in run.events if e.op == "send")
    for (a, b), times in sent.items():
        if times > 1:
            message = f"{where}, the result is right, but rank {a} sent {times} messages to rank {b}: one is enough."
            raise Broken("bytes", message)


def check_rate(fn):
    """The error of many steps against the second eigenvalue: a fact."""
    graph, values = graphs.graph("ring", 8), inputs(8)
    run = simulate(8, call, fn, PerRank(list(values)), graph, STEPS, where=f"in {STEPS} steps on a ring of 8 ranks")
    before, after = (np.linalg.norm(x - values.mean(axis=0)) for x in (values, np.array([held for _, held in run])))
    bound = (1 - graphs.spectral_gap(graphs.metropolis(graph))) ** STEPS
    if after > before * bound * 1.0001:
        message = f"One step is right, but {STEPS} of them are not: what does your function keep from step to step?"
        raise Broken("rate", message)
    return (
        f"after {STEPS} steps on a ring of 8 ranks {after / before:.3f} of the differences is left; the second "
        f"eigenvalue allows {bound:.3f}"
    )


LAST_HINT = (
    "before, arriving = copy_of(x), new_like(x, x.shape)\n"
    "for j in graph.neighbors[comm.rank]:\n"
    "    comm.sendrecv(before, j, arriving, j)\n"
    "    x += ... * (arriving - before)\n"
    "return x"
)

EXERCISES = (
    Exercise(
        id="2.3",
        title="gossip on a topology",
        reference=reference.gossip_step,
        stars=2,
        check=check_gossip_step,
        explanation=(
            "No rank knows more than its neighbors, and yet all approach the mean of all: every step is a "
            "multiplication by W, which keeps the mean and shrinks the rest, in each direction by an eigenvalue. The "
            "slowest direction has the second largest, so 1 - lambda2, the spectral gap, is the speed of a graph. Few "
            "links cost few bytes and many steps."
        ),
    ),
)

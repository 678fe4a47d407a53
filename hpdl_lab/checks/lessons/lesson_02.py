"""Notebook 02: ranks with a gradient each take a common step: by an all-reduce, through a server, by gossip."""

import re
from collections import Counter

import numpy as np

from ...comm import PerRank
from ...parallel import gossip as graphs
from ...parallel import gradient_descent
from ...units import counted
from ..ranks import ALONE, capital, in_company, kind, number, on_engines, simulate, unlike
from ..record import Broken, Exercise, Passed
from ..traffic import additions, check_waits


def gradients(p, d):
    """(p, d) one gradient per rank: of both signs, and not whole, so that the order of additions shows."""
    return 100 * np.random.default_rng([p, d]).standard_normal((p, d))


def call(comm, fn, g):
    """fn(comm, g); returns (what it returned, what it left in g)."""
    return fn(comm, g), g


def check_average_gradients(fn, runner=None):
    for p, d in ((4, 2), (2, 2), (3, 1), (5, 1001), (8, 10), (1, 2), (4, 0)):
        values, where = gradients(p, d), f"with {counted(p, 'rank')} and gradients of {counted(d, 'number')}"
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
    check_mean(run, gradients(len(run), 1001), f"on {counted(len(run), 'engine')}")
    return f"engines: right on {counted(len(run), 'MPI rank')}"


def call_own_gradient(comm, fn):
    return call(comm, fn, gradients(comm.size, 1001)[comm.rank])


RATE = 0.3
STALE = -3.0  # what a worker's weights hold before the server has sent new ones
CASES = ((4, 2), (2, 2), (3, 1), (5, 1001), (8, 10), (4, 0))  # (ranks, weights)


def inputs(p, d):
    """w: one (d,) array per rank, of which that of rank 0 counts; g: (p, d), one gradient per rank."""
    weights = 100 * np.random.default_rng([p, d, 2]).standard_normal(d)
    return [weights.copy()] + [np.full(d, STALE) for _ in range(p - 1)], gradients(p, d)


def expected_weights(weights, g):
    return weights[0] - RATE * g[1:].mean(axis=0)


def call_server(comm, fn, w, g):
    """fn(comm, w, g, RATE); returns (what it returned, what it left in w, what it left in g)."""
    return fn(comm, w, g, RATE), w, g


def check_server_step(fn, runner=None):
    for p, d in CASES:
        weights, g = inputs(p, d)
        where = f"with a server and {counted(p - 1, 'worker')}"
        try:
            run = simulate(p, call_server, fn, PerRank(weights), PerRank(list(g)), where=where)
        except Broken as broken:
            raise beyond_the_workers(missed_by_a_loop(broken, where), p) from None
        check_weights(run, weights, g, capital(where))
    weights, g = inputs(8, 1000)
    run = simulate(8, call_server, fn, PerRank(weights), PerRank(list(g)), where="with a server and 7 workers")
    moved = check_server_traffic(run, 8, g[0].nbytes)
    facts = [
        "the step along the mean of the workers' gradients, for 1, 2, 3, 4 and 7 workers",
        f"with 7 workers and weights of 8,000 bytes, {moved:,} bytes go into the server, and {moved:,} out of it",
    ]
    if runner is not None:
        facts.append(check_on_engines_server(fn, runner))
    return Passed(tuple(facts), run.events, 8)


def beyond_the_workers(broken, p):
    """The same failure; of a server that talks to itself or to a rank that is not there, who its workers are."""
    if broken.failed == "raises" and re.search("rank 0 (sends to|receives from) (itself|rank)", broken.message):
        broken.message += f". The workers are ranks 1 to {p - 1}: where does the loop of the server begin and end?"
    return broken


def check_on_engines_server(fn, runner):
    """The same on real ranks. Returns a fact."""
    run = on_engines(runner, in_company, call_on_engine, fn)
    if run == [None]:
        return ALONE
    check_weights(run, *inputs(len(run), 1001), f"on {counted(len(run), 'engine')}")
    return f"engines: right on {counted(len(run), 'MPI rank')}, one of them the server"


def call_on_engine(comm, fn):
    weights, g = inputs(comm.size, 1001)
    return call_server(comm, fn, weights[comm.rank], g[comm.rank])


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
            failed, why = explain_server(out, expected, weights, g, r)
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


def explain_server(out, expected, weights, g, r):
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
            f"You divided by 3, but here there is {counted(workers, 'worker')}: comm.size - 1.",
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


CASES_GOSSIP = (
    ("ring", 8),
    ("ring", 4),
    ("star", 5),
    ("wheel", 8),
    ("random", 8),
    ("ring", 2),
    ("ring", 3),
    ("ring", 1),
)
SHOWN = ("wheel", 8)
STEPS = 12  # of the run whose error is compared with the second eigenvalue


def inputs_gossip(p, n=10):
    """(p, n) numbers, different on every rank."""
    return np.random.default_rng([p, n]).integers(1, 1000, (p, n)) * 1.0


def call_gossip(comm, fn, x, graph, steps=1):
    """fn(comm, x, graph), `steps` times; returns (what it returned the last time, what it left in x)."""
    for _ in range(steps):
        out = fn(comm, x, graph)
    return out, x


def check_gossip_step(fn, runner=None):
    for name, p in CASES_GOSSIP:
        graph, values = graphs.graph(name, p), inputs_gossip(p)
        where = f"on a {name} of {counted(p, 'rank')}"
        try:
            run = simulate(p, call_gossip, fn, PerRank(list(values)), graph, where=where)
        except Broken as broken:
            raise one_neighbor_off(broken, graph, where) from None
        check_peers(run, graph, capital(where))
        check_step(run, values, graph, capital(where))
        check_messages(run, graph, capital(where))
        if (name, p) == SHOWN:
            shown = run.events
    facts = [
        f"one step is right on {len(CASES_GOSSIP)} graphs: ring, star, wheel and random, 1 to 8 ranks",
        check_rate(fn),
    ]
    if runner is not None:
        run = on_engines(runner, call_on_engine_gossip, fn)
        graph = graphs.graph("ring", len(run))
        check_step(run, inputs_gossip(len(run)), graph, f"on {counted(len(run), 'engine')}")
        facts.append(f"engines: right on a ring of {counted(len(run), 'MPI rank')}")
    return Passed(tuple(facts), shown, SHOWN[1])


def one_neighbor_off(broken, graph, where):
    """The same failure; of a deadlock in which a rank met too few of its neighbors, or too many, which rank that is."""
    for wait in getattr(broken.__cause__, "waits", ()):
        met = sum(times for op, _, times in wait.counts if op == "recv")
        degree = len(graph.neighbors[wait.rank])
        if wait.state == "finished" and met < degree:
            how = f"received from {met} of its {counted(degree, 'neighbor')} and finished: the loop is too short"
        elif wait.state == "waiting" and met > degree:
            how = f"has {counted(degree, 'neighbor')} and waits for message number {met}: the loop is too long"
        else:
            continue
        broken.message = f"{capital(where)} there is a deadlock: rank {wait.rank} {how}."
        break
    return broken


def call_on_engine_gossip(comm, fn):
    return call_gossip(comm, fn, inputs_gossip(comm.size)[comm.rank], graphs.graph("ring", comm.size))


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
            failed, why = explain_gossip(after, values, graph, r)
            message = f"{where}, x[{i}] on rank {r} should be {number(expected[r, i])} and is {number(held[i])}. {why}"
            raise Broken(failed, message.rstrip())
        if not np.allclose(out, held, rtol=1e-9):
            message = f"{where}, x is right on rank {r}, but what is returned differs from it: return x."
            raise Broken("returns", message)


def explain_gossip(after, values, graph, r):
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
    graph, values = graphs.graph("ring", 8), inputs_gossip(8)
    run = simulate(
        8, call_gossip, fn, PerRank(list(values)), graph, STEPS, where=f"in {STEPS} steps on a ring of 8 ranks"
    )
    before, after = (np.linalg.norm(x - values.mean(axis=0)) for x in (values, np.array([held for _, held in run])))
    bound = (1 - graphs.spectral_gap(graphs.metropolis(graph))) ** STEPS
    if after > before * bound * 1.0001:
        message = f"One step is right, but {STEPS} of them are not: what does your function keep from step to step?"
        raise Broken("rate", message)
    return (
        f"after {STEPS} steps on a ring of 8 ranks {after / before:.3f} of the differences is left; the second "
        f"eigenvalue allows {bound:.3f}"
    )


EXERCISES = (
    Exercise(
        "2.1", "average the gradients of four ranks", gradient_descent.average_gradients, 1, check_average_gradients
    ),
    Exercise("2.2", "a parameter server", gradient_descent.server_step, 2, check_server_step),
    Exercise("2.3", "gossip on a topology", graphs.gossip_step, 2, check_gossip_step),
)

"""Notebook 02: ranks agree on a step with an all-reduce, through a server, or by gossip."""

import re
from collections import Counter
from collections.abc import Callable

import numpy as np

from ...comm import Results
from ...comm.base import Comm
from ...parallel import gossip as graphs
from ...parallel import gradient_descent
from ...units import counted
from ..checkers import check_arrays, engine_facts, in_all_cases, reason, with_ranks
from ..ranks import number, simulate
from ..record import Answer, Broken, Drawing, Exercise, Passed, Reason, Runner
from ..traffic import additions, check_waits, in_barriers, miscount

IMPRECISE = "precision: The first digits are right: is something rounded on the way, or float32?"


def _gradients(p: int, d: int) -> np.ndarray:
    """Return (p, d) one gradient per rank: of both signs, and not whole, so that the order of additions shows."""
    return 100 * np.random.default_rng([p, d]).standard_normal((p, d))


# -- 2.1 ---------------------------------------------------------------------------------------------------------------


def _average(comm: Comm, fn: Answer, d: int) -> tuple[object, np.ndarray]:
    g = _gradients(comm.size, d)[comm.rank]
    return fn(comm, g), g


def _check_average_gradients(fn: Answer, runner: Runner = None) -> Passed:
    cases = ((4, 2), (2, 2), (3, 1), (5, 1001), (8, 10), (1, 2), (4, 0))
    in_all_cases(fn, _average, cases, _average_case, _check_mean, _missed_by_a_loop)
    made = max(simulate(4, lambda comm: additions(comm, lambda comm: _average(comm, fn, 2))))
    if made > 1:
        raise Broken(f"""steps: The mean is right, but every rank calls {made} collectives that add: one all_reduce is
            enough.""")
    facts = ["the mean of the gradients, the same on every rank, for 1, 2, 3, 4, 5 and 8 simulated ranks"]
    return Passed(*facts, *engine_facts(runner, _check_mean, _average, fn, 1001))


def _average_case(p: int, d: int) -> str:
    return f"{with_ranks(p)} and gradients of {counted(d, 'number')}"


def _check_mean(run: Results, where: str, d: int) -> None:
    values = _gradients(len(run), d)
    expected = [values.mean(axis=0)] * len(run)
    check_arrays(run, expected, where, "g", "the gradient is", lambda out, r: _why_mean(out, values, r, run[-1][0]))
    for r, (out, _) in enumerate(run):
        if not np.array_equal(out, run[0][0]):
            raise Broken(f"""bitwise: {where}, ranks 0 and {r} hold different bits: replicas that round differently
                drift apart.""")


def _missed_by_a_loop(broken: Broken, where: str, d: int) -> Reason | None:
    """Return why ranks wait, if rank 0 sends to a rank whose own message it never received."""
    waits = {w.rank: w for w in getattr(broken.__cause__, "waits", ())}
    hub = waits.get(0)
    if hub is not None and (hub.state, hub.op) == ("waiting", "send"):
        other = waits[hub.peers[0]]
        if (other.state, other.op, other.peers) == ("waiting", "send", (0,)):
            return f"""deadlock: {where} there is a deadlock: rank 0 sends to rank {other.rank} and has not received
                what rank {other.rank} sent to it. Does a loop that receives leave out rank {other.rank}?"""
    return None


def _why_mean(out: np.ndarray, values: np.ndarray, r: int, last: np.ndarray) -> Reason:
    """Return the Reason for a result of rank r that is not the mean; `last`: the result of the last rank."""
    p, total = len(values), values.sum(axis=0)
    if np.allclose(out * p, total, rtol=1e-3):
        return IMPRECISE
    if np.array_equal(out, np.round(out)):
        return "precision: Those are whole numbers: / divides, // rounds down as well."
    rows = [
        (total, f"mean: That is the sum of the {p} gradients: the step would be {p} times too long."),
        (total / 4, f"size: You divided by 4, but there are {p} ranks: comm.size."),
        (values[r] / p, f"sum: That is its own gradient divided by {p}: add the gradients of all ranks first."),
        (total / p / p, f"mean: It was divided by {p} twice."),
        *((total / n, f"mean: You divided by {n}, but there are {p} ranks.") for n in (p - 1, p + 1) if n),
    ]
    for value, which in ((np.median(values, axis=0), "median"), (values.max(axis=0), "largest")) if p > 2 else ():
        rows.append((value, f"mean: That is the {which} of the {p} gradients, not their mean."))
    for s in range(p):
        short, long = (total - values[s]) / p, (total + values[s]) / p
        rows.append((short, f"loop: The gradient of rank {s} is missing: is a loop one step too short?"))
        rows.append((long, f"loop: The gradient of rank {s} is in it twice: is a loop one step too long?"))
    if np.allclose(last, values[-1]):
        rows.append((values[r], f"sum: That is what rank {r} had before: nothing came from the others."))
    rows += [(values[s], f"sum: That is the gradient of rank {s} alone.") for s in range(p)]
    return reason(out, rows) or "sum: "


# -- 2.2 ---------------------------------------------------------------------------------------------------------------

RATE = 0.3
STALE = -3.0  # what a worker's weights hold before the server has sent new ones


def _weights(p: int, d: int) -> np.ndarray:
    """Return the weights of the server."""
    return 100 * np.random.default_rng([p, d, 2]).standard_normal(d)


def _serve(comm: Comm, fn: Answer, d: int) -> tuple[object, np.ndarray, np.ndarray]:
    """Return (what it returned, what it left in w, what it left in g)."""
    w, g = _weights(comm.size, d) if comm.rank == 0 else np.full(d, STALE), _gradients(comm.size, d)[comm.rank]
    return fn(comm, w, g, RATE), w, g


def _check_server_step(fn: Answer, runner: Runner = None) -> Passed:
    cases = ((4, 2), (2, 2), (3, 1), (5, 1001), (8, 10), (4, 0))  # (ranks, weights)
    in_all_cases(fn, _serve, cases, _server_case, _check_weights, _beyond_the_workers)
    run = simulate(8, _serve, fn, 1000, where="with a server and 7 workers")
    moved = _check_server_traffic(run, 8, 8000)
    facts = [
        "the step along the mean of the workers' gradients, for 1, 2, 3, 4 and 7 workers",
        f"with 7 workers and weights of 8,000 bytes, {moved:,} bytes go into the server, and {moved:,} out of it",
    ]
    say = "right on {}, one of them the server"
    facts += engine_facts(runner, _check_weights, _serve, fn, 1001, company=True, say=say)
    return Passed(*facts, run=run)


def _server_case(p: int, d: int) -> str:
    return f"with a server and {counted(p - 1, 'worker')}"


def _beyond_the_workers(broken: Broken, where: str, d: int) -> Reason | None:
    """Return who the workers are, if a server sends to itself or to a rank that is not there."""
    if broken.failed == "raises" and re.search("rank 0 (sends to|receives from) (itself|rank)", broken.message):
        return f"""raises: {broken.message}. The workers are ranks 1 to {where.split()[4]}: where does the loop of the
            server begin and end?"""
    return _missed_by_a_loop(broken, where, d)


def _check_weights(run: Results, where: str, d: int) -> None:
    """Raise Broken unless every rank returns and holds the new weights, and every worker its gradient as it was."""
    w, g = _weights(len(run), d), _gradients(len(run), d)
    expected = w - RATE * g[1:].mean(axis=0)

    check_arrays(
        run,
        [expected] * len(run),
        where,
        "w",
        "every rank returns w,",
        lambda out, r: _why_weights(out, expected, w, g, r),
        lambda r: f"rank {r}" if r else "the server",
    )
    for r, (out, _, left) in enumerate(run):
        if not np.array_equal(out, run[0][0]):
            raise Broken(f"""bitwise: {where}, rank {r} and the server hold different bits: send the new weights, not
                the change.""")
        if r > 0 and not np.array_equal(left, g[r]):
            raise Broken(f"input: {where}, rank {r} changed its gradient g: the caller may still need it.")


def _why_weights(out: np.ndarray, expected: np.ndarray, w: np.ndarray, g: np.ndarray, r: int) -> Reason:
    """Return the Reason for weights of rank r that are not the expected ones."""
    p, workers = len(g), len(g) - 1
    total, everybody = g[1:].sum(axis=0), g.sum(axis=0)
    if np.allclose(out, expected, rtol=1e-3):
        return IMPRECISE
    no_server = f"The server has no examples: comm.size - 1 is {workers}."
    stale = "That is a step from the weights of a worker. Step from the server's: gradients go in, weights come out."
    three = f"You divided by 3, but here there is {counted(workers, 'worker')}: comm.size - 1."
    rows = [
        (w - RATE * total, f"mean: That is a step along the sum of {workers} gradients: divide by {workers}."),
        (w - RATE * total / p, f"workers: You divided by {p}, the number of ranks. {no_server}"),
        (w - RATE * everybody / workers, "workers: The gradient of rank 0 is in it: add only the workers'."),
        (w + RATE * total / workers, "sign: That is a step uphill: go against the gradient."),
        (w - total / workers, f"rate: The rate is {RATE}, and was not used."),
        (w - RATE**2 * total / workers, "rate: The rate was used twice."),
        (STALE - RATE * total / workers, f"send back: {stale}"),
        (w - RATE * total / 3, f"size: {three}"),
    ]
    for s in range(1, p):
        only, short, long = g[s], (total - g[s]) / workers, (total + g[s]) / workers
        rows += [
            (w - RATE * only, f"sum: Only the gradient of rank {s} is in it: add all workers' gradients first."),
            (w - RATE * short, f"loop: The gradient of rank {s} is missing: is a loop one step too short?"),
            (w - RATE * long, f"loop: The gradient of rank {s} is in it twice: is a loop one step too long?"),
        ]
    if r > 0:
        rows.append((STALE, f"send back: Rank {r} had those weights before: the server's weights never arrived."))
        early = "The server sent weights before it had all gradients: first collect from all, then send to all."
        rows += [(w - RATE * g[1 : s + 1].sum(axis=0) / workers, f"order: {early}") for s in range(p)]
    return reason(out, rows) or "sum: "


def _check_server_traffic(run: Results, p: int, nbytes: int) -> int:
    """Return the bytes into the server, which are as many as out of it. Raises Broken for detours and repetitions."""
    check_waits(run.events, p)
    sends = [e for e in run.events if e.op == "send"]
    for e in sends:
        if 0 not in (e.rank, e.peer):
            raise Broken(f"""peers: The result is right, but rank {e.rank} sends to rank {e.peer}: around a parameter
                server the workers talk to rank 0 only.""")
    bound = (p - 1) * nbytes
    into, out = (sum(e.nbytes for e in sends if at(e) == 0) for at in (lambda e: e.peer, lambda e: e.rank))
    for moved, way, what in ((into, "into", "one gradient from"), (out, "out of", "the weights once to")):
        if moved > bound:
            raise Broken(f"""bytes: The result is right, but with {p - 1} workers {moved:,} bytes went {way} the server;
                {bound:,} are enough: {what} each worker.""")
    return into


# -- 2.3 ---------------------------------------------------------------------------------------------------------------

GRAPHS = ((8, "ring"), (4, "ring"), (5, "star"), (8, "wheel"), (8, "random"), (2, "ring"), (3, "ring"), (1, "ring"))
SHOWN = (8, "wheel")


def _values_of(p: int, n: int = 10) -> np.ndarray:
    """Return (p, n) numbers, different on every rank."""
    return np.random.default_rng([p, n]).integers(1, 1000, (p, n)) * 1.0


def _gossip(comm: Comm, fn: Answer, name: str) -> tuple[object, np.ndarray]:
    """Return (what fn returned, what it left in x)."""
    x, graph = _values_of(comm.size)[comm.rank], graphs.graph(name, comm.size)
    return fn(comm, x, graph), x


def _check_gossip_step(fn: Answer, runner: Runner = None) -> Passed:
    in_all_cases(fn, _gossip, GRAPHS, _gossip_case, _check_gossip, _one_neighbor_off)
    run = simulate(SHOWN[0], _gossip, fn, SHOWN[1])
    facts = [f"one step is right on {len(GRAPHS)} graphs: ring, star, wheel and random, 1 to 8 ranks"]
    facts += engine_facts(runner, _check_step, _gossip, fn, "ring", say="right on a ring of {}")
    return Passed(*facts, run=run)


def _gossip_case(p: int, name: str) -> str:
    return f"on a {name} of {counted(p, 'rank')}"


def _one_neighbor_off(broken: Broken, where: str, name: str) -> Reason | None:
    """Return which rank met too few of its neighbors, or too many, if that is why ranks wait."""
    waits = getattr(broken.__cause__, "waits", ())
    for wait in waits:
        met = sum(times for op, _, times in wait.counts if op == "recv")
        degree = len(graphs.graph(name, len(waits)).neighbors[wait.rank])
        how = None
        if wait.state == "finished" and met < degree:
            how = f"received from {met} of its {counted(degree, 'neighbor')} and finished: the loop is too short"
        elif wait.state == "waiting" and met > degree:
            how = f"has {counted(degree, 'neighbor')} and waits for message number {met}: the loop is too long"
        if how:
            return f"deadlock: {where} there is a deadlock: rank {wait.rank} {how}."
    return None


def _check_gossip(run: Results, where: str, name: str) -> None:
    """Raise Broken unless all is right, with one message to each neighbor, and without waiting for all ranks."""
    graph = graphs.graph(name, len(run))
    sent = Counter((e.rank, e.peer) for e in run.events if e.op == "send")
    for a, b in sent:
        if b not in graph.neighbors[a]:
            known = ", ".join(map(str, graph.neighbors[a])) or "none"
            raise Broken(f"""peers: {where}, rank {a} sends to rank {b}, which is not its neighbor: graph.neighbors[{a}]
                are {known}. Gossip sends to neighbors only.""")
    _check_step(run, where, name)
    check_waits(run.events, graph.n)
    if any(e.op == "barrier" for e in run.events):
        raise Broken(f"""peers: {where}, the result is right, but every rank waits in a barrier: gossip waits for
            neighbors only.""")
    for (a, b), times in sent.items():
        if times > 1:
            raise Broken(f"""bytes: {where}, the result is right, but rank {a} sent {times} messages to rank {b}: one is
                enough.""")


def _check_step(run: Results, where: str, name: str) -> None:
    """Raise Broken unless every rank holds and returns its row of W x."""
    graph, values = graphs.graph(name, len(run)), _values_of(len(run))
    after = np.array([held for _, held in run])
    check_arrays(
        run,
        graphs.metropolis(graph) @ values,
        where,
        "x",
        "return x,",
        lambda out, r: _why_gossip(after, values, graph),
        same=lambda a, b: np.isclose(a, b, rtol=1e-9),
    )


def _why_gossip(after: np.ndarray, values: np.ndarray, graph: graphs.Graph) -> Reason:
    """Return the Reason for values after a step that are not W x; `after` and `values` are (p, n)."""
    p, near = graph.n, [list(who) for who in graph.neighbors]
    degree = [len(who) for who in near]
    w = graphs.metropolis(graph)

    def weighted(weight: Callable[[int, int], float]) -> np.ndarray:
        """Return the values after a step with other weights: weight(i, j) for neighbors."""
        change = [sum((weight(i, j) * (values[j] - values[i]) for j in near[i]), 0 * values[i]) for i in range(p)]
        return values + np.array(change)

    if np.allclose(after, values):
        return "sum: That is the x from before the step: nothing from the neighbors is in it."
    if np.allclose(after, w @ values, rtol=1e-3):
        return IMPRECISE
    plain = "That is the plain mean of a rank and its neighbors. " + _moved(after, values, "Take the larger degree")
    alone = "Those are the neighbors alone. A rank keeps a part of its x: the weight is 1 / (1 + the larger degree)."
    smaller = "You took the smaller degree of the two: take the larger one, so that the weight is the same on both."
    others = (
        (lambda i, j: 1 / (1 + degree[j]), "1 / (1 + the neighbor's degree)"),
        (lambda i, j: 1 / (1 + max(degree)), "1 / (1 + the largest degree of the whole graph)"),
        (lambda i, j: 1 / p, "1 / (the number of ranks)"),
        (lambda i, j: 1 / 3, "1/3 for every neighbor"),
    )
    use = "use 1 / (1 + the larger of the two degrees)."
    rows = (
        (w @ w @ values, "steps: Those are two steps: one was asked for, the caller repeats it."),
        (weighted(lambda i, j: 1 / (1 + degree[i])), f"weights: {plain}"),
        ([np.mean([values[j] for j in near[i] or [i]], axis=0) for i in range(p)], f"weights: {alone}"),
        (weighted(lambda i, j: 1 / (1 + min(degree[i], degree[j]))), f"weights: {smaller}"),
        (2 * values - w @ values, "sign: That is a step away from the neighbors: add weight * (theirs - mine)."),
        *((weighted(weight), f"weights: That is what the weight {which} gives: {use}") for weight, which in others),
    )
    if found := reason(after, rows):
        return found
    if not np.allclose(after.sum(axis=0), values.sum(axis=0)):
        return "mean: " + _moved(after, values, "Add weight * (theirs - mine), both from before the step")
    return """sum: The mean over all ranks is unchanged, but the weights of the docstring give another x. Is the x that
        you send and subtract still the x from before the step?"""


def _moved(after: np.ndarray, values: np.ndarray, advice: str) -> str:
    return f"""The mean over all ranks was {number(values.mean())} and is now {number(after.mean())}. {advice}: what
        rank i takes from j must be what j takes from i."""


# -- 2.4 ---------------------------------------------------------------------------------------------------------------

HOPS = ((8, 0), (8, 1), (8, 2), (8, 4), (4, 1), (5, 2), (3, 1), (2, 0), (1, 0))  # (ranks, steps before)


def _one_peer(comm: Comm, fn: Answer, step: int) -> tuple[object, np.ndarray]:
    """Return (what fn returned, what it left in x)."""
    x = _values_of(comm.size)[comm.rank]
    return fn(comm, x, step), x


def _check_one_peer_step(fn: Answer, runner: Runner = None) -> Passed:
    in_all_cases(fn, _one_peer, HOPS, _hop_case, _check_one_peer)
    run = simulate(8, _one_peer, fn, 2)
    facts = [f"the mean with one rank, in {len(HOPS)} cases of 1 to 8 ranks; one message from each rank"]
    facts += engine_facts(runner, _check_hop, _one_peer, fn, 1)
    return Passed(*facts, run=run)


def _hop_case(p: int, step: int) -> str:
    return f"with {counted(p, 'rank')}, in step {step}"


def _check_one_peer(run: Results, where: str, step: int) -> None:
    """Raise Broken unless all is right, with one message from each rank, and no barrier."""
    _check_hop(run, where, step)
    check_waits(run.events, len(run))
    if why := in_barriers(run.events) or (miscount(run.events, len(run), 1) if len(run) > 1 else ""):
        raise Broken(f"steps: {where}, the result is right, but: {why}")


def _check_hop(run: Results, where: str, step: int) -> None:
    """Raise Broken unless every rank holds and returns the mean of its x and its peer's."""
    p, hop, values = len(run), graphs.one_peer_hop(len(run), step), _values_of(len(run))
    means = {k: (values + np.roll(values, -k, axis=0)) / 2 for k in range(1, p)}  # with the rank k places further on

    def why(out: np.ndarray, r: int) -> Reason:
        theirs = values[(r + hop) % p]
        rows = (
            (values[r], "sum: That is the x from before the step: nothing that arrived is in it."),
            (values[r] + theirs, "mean: That is the sum of two ranks, not their mean."),
            (values[r] / 2 + theirs, "mean: Only one of the two numbers is halved."),
            (theirs, "mean: That is the other rank's x alone."),
            (means.get(p - hop, values)[r], f"peer: That is the mean with the rank {hop} places back: it gets your x."),
            *((means[k][r], f"hop: The rank {k} places further on is in it, and not {hop}.") for k in means),
            (values.mean(axis=0), "peer: That is the mean of all ranks, and one of them was asked for."),
        )
        return reason(out, rows) or "sum: "

    check_arrays(run, means.get(hop, values), where, "x", "return x,", why)


EXERCISES = (
    Exercise(
        "2.1", "average the gradients of four ranks", gradient_descent.average_gradients, 1, _check_average_gradients
    ),
    Exercise(
        "2.2",
        "a parameter server",
        gradient_descent.server_step,
        2,
        _check_server_step,
        picture=Drawing("traffic", "Everything passes through rank 0"),
    ),
    Exercise(
        "2.3",
        "gossip on a topology",
        graphs.gossip_step,
        2,
        _check_gossip_step,
        picture=Drawing("traffic", "Your messages on a wheel: neighbors only"),
    ),
    Exercise(
        "2.4",
        "one neighbor at a time",
        graphs.one_peer_step,
        1,
        _check_one_peer_step,
        picture=Drawing("traffic", "Your messages in step 2: four places away"),
    ),
)

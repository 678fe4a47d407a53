"""Notebook 04: collectives on a ring, a broadcast in segments along a chain, the algorithm with the least cost."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from ...collectives import chain, cost, ring
from ...collectives.chunks import bounds
from ...collectives.dataflow import of_algorithm
from ...collectives.table import find_algorithm
from ...comm import Results
from ...comm.base import Comm
from ...comm.network import Switch
from ...trace import Event, seconds_text
from ...units import counted
from ..checkers import because, engine_facts, in_all_cases
from ..collective import ArrayAfter, Collective, call, check_collective
from ..ranks import SENTINEL, capital, case, compared_with, number, off_by, simulate
from ..record import Answer, Broken, Drawing, Exercise, Passed, Reason, Runner
from ..traffic import check_waits, in_barriers


def _own_row(values: np.ndarray, r: int) -> np.ndarray:
    return values[r]


def _sum_of_rows(values: np.ndarray) -> np.ndarray:
    return values.sum(axis=0)


def _everything(n: int, p: int, r: int) -> tuple[int, int]:
    return 0, n


def _only_own_chunk(values: np.ndarray, r: int) -> np.ndarray:
    """Return the values of rank r before an all-gather: its chunk, and nothing worth reading elsewhere."""
    p, n = values.shape
    start = np.full(n, SENTINEL)
    first, last = bounds(n, p, r)
    start[first:last] = values[r, first:last]
    return start


def _chunks_of_owners(values: np.ndarray) -> np.ndarray:
    """Return (n,) chunk r of row r, one after the other."""
    p, n = values.shape
    return np.concatenate([values[r, slice(*bounds(n, p, r))] for r in range(p)])


REDUCE_SCATTER = Collective(
    "reduce_scatter", _own_row, _sum_of_rows, bounds, ring.reduce_scatter, cost.reduce_scatter, "(p-1)/p"
)
ALL_GATHER = Collective(
    "all_gather",
    _only_own_chunk,
    _chunks_of_owners,
    _everything,
    ring.all_gather,
    cost.all_gather,
    "(p-1)/p",
    adds=False,
)
ALL_REDUCE = Collective("all_reduce", _own_row, _sum_of_rows, _everything, ring.all_reduce, cost.all_reduce, "2(p-1)/p")


CASES = (  # (ranks, elements, segments, root)
    (4, 12, 3, 0),
    (2, 1000, 4, 0),
    (8, 1000, 1, 0),
    (3, 1001, 4, 0),
    (5, 7, 10, 0),
    (5, 1000, 4, 2),  # of an even number of ranks, root - rank would do as well as rank - root
    (3, 0, 2, 0),
    (1, 10, 4, 0),
)
TIMED = (8, 1024, 16)  # ranks, elements, segments
ENGINE_CASES = ((1001, 4, 0), (1000, 1, 0), (7, 10, 0))  # (elements, segments, root)


def _starts(p: int, n: int, root: int) -> list[np.ndarray]:
    """Return the values of x on every rank before the call: something worth reading on the root only."""
    values = np.random.default_rng([p, n]).integers(-999, 1000, n).astype(float)
    return [values if r == root else np.full(n, SENTINEL) for r in range(p)]


def _call_broadcast(comm: Comm, fn: Answer, n: int, segments: int, root: int) -> ArrayAfter:
    """Call fn(comm, x, root, segments) on a tensor between guard elements; returns ArrayAfter."""
    return call(comm, lambda comm, x: fn(comm, x, root, segments), _starts(comm.size, n, root)[comm.rank])


def _broadcast_case(p: int, n: int, segments: int, root: int) -> str:
    return f"{case(p, n)}, {counted(segments, 'segment')} and root {root}".replace(" and", ",", 1)


def _check_broadcast(fn: Answer, runner: Runner = None) -> Passed:
    in_all_cases(fn, _call_broadcast, CASES, _broadcast_case, _check_copies)
    p, n, segments = TIMED
    one = partial(simulate, p, _call_broadcast, network=Switch(alpha=1.0, beta=0.0))  # a message takes 1 s
    run = one(fn, n, segments, 0, where="on a slow network")
    with compared_with(partial(one, chain.broadcast, n, segments, 0, evidence=False), run):
        check_waits(run.events, p)
        _check_chain(run.events, p, 4 * n, segments)
        took = _check_time(run, p, segments)
    facts = [
        f"copies, odd sizes, another root and guard elements: right in {len(CASES)} cases on 1, 2, 3, 4, 5 and 8 ranks",
        f"bytes: none of {p} ranks sends more than its vector of {4 * n:,} once",
        f"steps: {took} message times for {segments} segments along {p} ranks; one rank after the other takes "
        f"{segments * (p - 1)}",
    ]
    return Passed(*facts, *engine_facts(runner, _check_copies, _call_broadcast, fn, each=ENGINE_CASES), run=run)


def _check_copies(run: Results, where: str, n: int, segments: int, root: int) -> None:
    """Raise Broken unless every rank holds and returns what the root had, and no guard element has changed."""
    p, expected = len(run), _starts(len(run), n, root)[root]
    for r in sorted(range(p), key=lambda r: r != root):  # the root first: without its data no other rank can be right
        left = run[r]
        if left.broken_guard is not None:
            raise Broken(f"""bounds: {where}, rank {r} wrote outside x, at x[{left.broken_guard}]: x has the elements 0
                to {n - 1}.""")
        if not np.array_equal(left.x, expected):
            if left.out is not None and np.array_equal(left.out, expected):
                raise Broken(f"in place: {where}, what rank {r} returns is right, but x was not overwritten with it.")
            i = int(np.argmax(left.x != expected))
            message = f"{where}, x[{i}] on rank {r} should be {number(expected[i])} and is {number(left.x[i])}."
            events, lacking = getattr(run, "events", ()), int((left.x == SENTINEL).sum())
            came = sum(e.op == "recv" and e.rank == r for e in events)
            if r != root and lacking and 0 < came < segments <= n:
                raise Broken(f"""segment: {message} {counted(lacking, "element")} never arrived:
                    {_miscounted("received", r, came, segments)}""")
            raise because(_why_copy(left, r, root, i), message)
        if left.out is None or not np.array_equal(left.out, expected):
            what = "nothing" if left.kind == "NoneType" else f"something else ({left.kind})"
            raise Broken(f"returns: {where}, x is right on rank {r}, but your function returned {what}: return x.")


def _miscounted(what: str, r: int, messages: int, segments: int) -> str:
    """Return the sentence about a loop over segments that goes round too often, or not often enough."""
    text = f"rank {r} {what} {counted(messages, 'message')}, and there are {segments} segments"
    return f"{text}: {off_by(messages, segments, 'message')}."


def _why_copy(left: ArrayAfter, r: int, root: int, i: int) -> Reason:
    """Return the Reason for x[i], which is not what the root had."""
    if r == root:
        return f"root: The data come from rank {root}, the root: it only reads its x."
    if left.x[i] != SENTINEL:
        return "segment: That value belongs to another element: where in x does this segment begin?"
    if (left.x == SENTINEL).all():
        return f"order: Rank {r} still has its old values: did a rank send a segment on before it had arrived?"
    lacking = counted(int((left.x == SENTINEL).sum()), "element")
    return f"segment: The segment with the last {lacking} never arrived: cut x with chunk."


def _check_chain(events: list[Event], p: int, nbytes: int, segments: int) -> None:
    """Raise Broken if a rank sends to another than the next, or more than its vector."""
    for r in range(p):
        sends = [e for e in events if e.op == "send" and e.rank == r]
        strangers = [e.peer for e in sends if e.peer != (r + 1) % p]
        if strangers:
            raise Broken(f"""peers: The result is right, but rank {r} sends to rank {strangers[0]}: on a chain it passes
                on to the next, rank {(r + 1) % p}.""")
        sent = sum(e.nbytes for e in sends)
        if sent > nbytes and segments < len(sends) <= 2 * segments:
            raise Broken(f"segment: The result is right, but {_miscounted('sent', r, len(sends), segments)}")
        if sent > nbytes:
            raise Broken(f"""bytes: The result is right, but rank {r} sent {sent:,} bytes, and its vector has
                {nbytes:,}: send each segment once, and nothing else.""")


def _check_time(run: Results, p: int, segments: int) -> int:
    """Return the message times from begin to end. Raises Broken if links stand idle."""
    took, best = round(run.seconds), segments + p - 2
    if took <= best + 3:
        return took
    head = f"Result and bytes are right, but {segments} segments take {took} message times along {p} ranks: "
    if waits := in_barriers(run.events):
        why = waits
    elif took >= segments * (p - 1):
        why = "every rank receives all of x before it passes anything on."
    else:
        why = "while a rank passes a segment on, it receives nothing. isend starts a send without waiting for its end."
    raise Broken(f"steps: {head}{why} {best} are enough.")


NETWORKS = {  # name: (alpha s, beta s/byte)
    "shared memory": (1e-6, 1e-10),
    "InfiniBand": (2e-6, 2.5e-11),
    "1 Gbit/s Ethernet": (5e-5, 8e-9),
    "a long line": (1e-2, 8e-10),
}
RANKS = (4, 2, 3, 8, 13, 64, 1024)
SIZES = tuple(4**k for k in range(1, 15))  # bytes, 4 B to 256 MiB
TIE = 0.01  # relative: closer than that, either is right; the model is not better than that


SETS = (
    {"ring": cost.all_reduce, "tree": cost.tree},
    {"recursive_doubling": cost.recursive_doubling, "tree": cost.tree, "ring": cost.all_reduce},
    {"tree": cost.tree},
)


def _check_choose(fn: Answer) -> Passed:
    cases = [(p, n, where) for where in NETWORKS for p in RANKS for n in SIZES]
    for costs in SETS:
        algorithms = f"with {' and '.join(costs)} to choose from"
        (names,) = simulate(
            1, lambda comm, c: [fn(c, p, n, *NETWORKS[w]) for p, n, w in cases], costs, where=algorithms
        )
        for name, given in zip(names, cases, strict=True):
            _check_name(name, costs, *given)
    small, large = SIZES[0], SIZES[-1]
    turns = [_at_which_size(fn, p) for p in (4, 64)]
    return Passed(
        f"the least cost in {len(SETS) * len(cases):,} cases: {len(NETWORKS)} networks, {min(RANKS)} to "
        f"{max(RANKS):,} ranks, {small} bytes to {large // 2**20} MiB",
        f"on 1 Gbit/s Ethernet the tree is best for 4 ranks up to {turns[0]:,} bytes, for 64 up to {turns[1]:,}",
    )


def _at_which_size(fn: Answer, p: int) -> int:
    """Return the largest power of 2, in bytes, for which the answer still names the tree on 1 Gbit/s Ethernet."""
    sizes = [2**k for k in range(2, 28)]
    return max(n for n in sizes if fn(dict(SETS[0]), p, n, *NETWORKS["1 Gbit/s Ethernet"]) == "tree")


def _check_name(
    name: object, costs: Mapping[str, Callable[[int, int], cost.Cost]], p: int, nbytes: int, where: str
) -> None:
    """Raise Broken unless `name` costs the least of `costs`, or as much."""
    alpha, beta = NETWORKS[where]
    case = f"with {p:,} ranks, {nbytes:,} bytes and {where} (alpha {alpha:g} s, beta {beta:g} s/byte)"
    if name is None:
        raise Broken(f"returns: {capital(case)} your function returned nothing: return a name.")
    if not isinstance(name, str):
        raise Broken(f"returns: {capital(case)} your function returned {name!r}: return the name, such as 'ring'.")
    if name not in costs:
        known = ", ".join(map(repr, costs))
        raise Broken(f"name: {capital(case)} you say {name!r}, but costs has only {known}: choose a name in costs.")
    seconds = {other: price(p, nbytes).seconds(alpha, beta) for other, price in costs.items()}
    best = min(seconds, key=lambda other: seconds[other])
    if seconds[name] > seconds[best] * (1 + TIE):
        taken, least = costs[name](p, nbytes), costs[best](p, nbytes)
        message = f"""{capital(case)} you say {name}, which takes {seconds_text(seconds[name])}: {taken.steps} steps and
            {taken.nbytes:,.0f} bytes. {best} takes {seconds_text(seconds[best])}: {least.steps} steps and
            {least.nbytes:,.0f} bytes."""
        steps, moved = (taken.steps - least.steps) * alpha, (taken.nbytes - least.nbytes) * beta
        why = (
            "The steps decide here: each costs an alpha, however short." if steps > moved else "The bytes decide here."
        )
        raise Broken(f"cost: {message} {why}")


EXERCISES = (
    Exercise(
        "4.1",
        "reduce-scatter on a ring",
        ring.reduce_scatter,
        2,
        partial(check_collective, REDUCE_SCATTER),
        picture=Drawing("still", data=lambda: of_algorithm(find_algorithm("ring", "reduce_scatter"), 4)),
    ),
    Exercise("4.2", "all-gather on a ring", ring.all_gather, 2, partial(check_collective, ALL_GATHER)),
    Exercise(
        "4.3",
        "all-reduce: the two together",
        ring.all_reduce,
        2,
        partial(check_collective, ALL_REDUCE),
        picture=Drawing("animation", data=lambda: of_algorithm(find_algorithm("ring"), 4)),
    ),
    Exercise(
        "4.4",
        "segment pipelining on a chain",
        chain.broadcast,
        3,
        _check_broadcast,
        picture=Drawing("timeline", "Your segments along the chain, in virtual time"),
    ),
    Exercise("4.5", "choose by size", cost.choose, 2, _check_choose),
)

"""Notebook 04, segments: a broadcast along a chain that passes one segment on while it receives the next."""

import numpy as np

from ..collectives import chain
from ..comm import PerRank
from ..comm.network import Switch
from .collective import call
from .ranks import SENTINEL, capital, count, number, off_by, on_engines, simulate
from .record import Broken, Exercise, Passed
from .traffic import check_waits, in_barriers

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
ENGINE_CASES = ((1001, 4), (1000, 1), (7, 10))  # (elements, segments)


def starts(p, n, root):
    """What x holds on every rank before the call: something worth reading on the root only."""
    values = np.random.default_rng([p, n]).integers(-999, 1000, n).astype(float)
    return [values if r == root else np.full(n, SENTINEL) for r in range(p)]


def call_broadcast(comm, fn, start, root, segments):
    """fn(comm, x, root, segments) on a tensor between guard elements; returns Left."""
    return call(comm, lambda comm, x: fn(comm, x, root, segments), start)


def check_broadcast(fn, runner=None):
    for p, n, segments, root in CASES:
        where = f"with {count(p, 'rank')}, {count(n, 'element')}, {count(segments, 'segment')} and root {root}"
        values = starts(p, n, root)
        run = simulate(p, call_broadcast, fn, PerRank(values), root, segments, where=where)
        check_copies(run, values[root], capital(where), root, segments)
    p, n, segments = TIMED
    values = starts(p, n, 0)
    network = Switch(alpha=1.0, beta=0.0)  # on which a message takes 1 s, whatever its size
    run = simulate(p, call_broadcast, fn, PerRank(values), 0, segments, network=network, where="on a slow network")
    try:
        check_waits(run.events, p)
        check_chain(run.events, p, 4 * n, segments)
        took = check_time(run, p, segments)
    except Broken as broken:
        best = simulate(
            p, call_broadcast, chain.broadcast, PerRank(values), 0, segments, network=network, evidence=False
        )
        broken.expected = best.events
        raise
    facts = [
        f"copies, odd sizes, another root and guard elements: right in {len(CASES)} cases on 1, 2, 3, 4, 5 and 8 ranks",
        f"bytes: none of {p} ranks sends more than its vector of {4 * n:,} once",
        f"steps: {took} message times for {segments} segments along {p} ranks; one rank after the other takes "
        f"{segments * (p - 1)}",
    ]
    if runner is not None:
        facts.append(check_on_engines(fn, runner))
    return Passed(tuple(facts), run.events, p)


def check_copies(run, expected, where, root, segments):
    """Raise Broken unless every rank holds and returns what the root had, and no guard element has changed."""
    n, p = len(expected), len(run)
    for r in sorted(range(p), key=lambda r: r != root):  # the root first: what it lost, nobody can have
        left = run[r]
        if left.broken_guard is not None:
            message = f"{where}, rank {r} wrote outside x, at x[{left.broken_guard}]: x has the elements 0 to {n - 1}."
            raise Broken("bounds", message)
        if not np.array_equal(left.x, expected):
            if left.out is not None and np.array_equal(left.out, expected):
                message = f"{where}, what rank {r} returns is right, but x was not overwritten with it."
                raise Broken("in place", message)
            i = int(np.argmax(left.x != expected))
            message = f"{where}, x[{i}] on rank {r} should be {number(expected[i])} and is {number(left.x[i])}. "
            came, lacking = sum(e.op == "recv" and e.rank == r for e in run.events), int((left.x == SENTINEL).sum())
            if r != root and lacking and 0 < came < segments <= n:
                message += f"{count(lacking, 'element')} never arrived: {miscounted('received', r, came, segments)}"
                raise Broken("segment", message)
            raise Broken(*why_copy(left, expected, i, message, r, root))
        if left.out is None or not np.array_equal(left.out, expected):
            what = "nothing" if left.kind == "NoneType" else f"something else ({left.kind})"
            message = f"{where}, x is right on rank {r}, but your function returned {what}: return x."
            raise Broken("returns", message)


def miscounted(what, r, messages, segments):
    """The sentence about a loop over segments that goes round too often, or not often enough."""
    told = f"rank {r} {what} {count(messages, 'message')}, and there are {segments} segments"
    return f"{told}: {off_by(messages, segments, 'message')}."


def why_copy(left, expected, i, message, r, root):
    """(invariant, message) for an element that is not what the root had."""
    if r == root:
        return "root", f"{message}The data come from rank {root}, the root: it only reads its x."
    if left.x[i] != SENTINEL:
        return "segment", f"{message}That is another element: where does this segment belong?"
    if (left.x == SENTINEL).all():
        why = f"Rank {r} still has what was there before: was something sent on before it had arrived?"
        return "order", message + why
    k = int((left.x == SENTINEL).sum())
    return "segment", f"{message}The segment with the last {count(k, 'element')} never arrived: cut x with chunk."


def check_chain(events, p, nbytes, segments):
    """Raise Broken where a rank sends to another than the next, or more than its vector."""
    for r in range(p):
        sends = [e for e in events if e.op == "send" and e.rank == r]
        strangers = [e.peer for e in sends if e.peer != (r + 1) % p]
        if strangers:
            message = (
                f"The result is right, but rank {r} sends to rank {strangers[0]}: on a chain it passes on to the next, "
                f"rank {(r + 1) % p}."
            )
            raise Broken("peers", message)
        sent = sum(e.nbytes for e in sends)
        if sent > nbytes and segments < len(sends) <= 2 * segments:
            message = f"The result is right, but {miscounted('sent', r, len(sends), segments)}"
            raise Broken("segment", message)
        if sent > nbytes:
            message = (
                f"The result is right, but rank {r} sent {sent:,} bytes, and its vector has {nbytes:,}: each segment "
                "is to be sent once, and it alone."
            )
            raise Broken("bytes", message)


def check_time(run, p, segments):
    """Message times from begin to end. Raises Broken where links stand idle."""
    took, best = round(run.seconds), segments + p - 2
    if took <= best + 3:
        return took
    head = f"Result and bytes are right, but {segments} segments take {took} message times along {p} ranks: "
    if waits := in_barriers(run.events):
        why = waits
    elif took >= segments * (p - 1):
        why = "every rank has all of x before it passes anything on."
    else:
        why = "while a rank passes a segment on, nothing comes in. isend starts a send without waiting for its end."
    raise Broken("steps", f"{head}{why} {best} are enough.")


def check_on_engines(fn, runner):
    run = on_engines(runner, call_on_engine, fn)
    for r, lefts in enumerate(run):
        for (n, segments), left in zip(ENGINE_CASES, lefts, strict=True):
            if not np.array_equal(left.x, starts(len(run), n, 0)[0]):
                message = (
                    f"Right on simulated ranks, but wrong on the engines, on rank {r} with {count(n, 'element')} in "
                    f"{count(segments, 'segment')}: is a segment sent on before it has arrived?"
                )
                raise Broken("engines", message)
    return f"engines: right on {count(len(run), 'MPI rank')}"


def call_on_engine(comm, fn):
    return [call_broadcast(comm, fn, starts(comm.size, n, 0)[comm.rank], 0, segments) for n, segments in ENGINE_CASES]


LAST_HINT = (
    "behind, leaving = (comm.rank - root) % comm.size, []\n"
    "for k in range(segments):\n"
    "    piece = chunk(x, segments, k)\n"
    "    if behind > 0:\n"
    "        comm.recv(piece, ...)            # from the rank before\n"
    "    if behind < comm.size - 1:\n"
    "        leaving.append(comm.isend(piece, ...))   # to the rank behind\n"
    "and at the end wait for all that is leaving"
)

EXERCISES = (
    Exercise(
        id="4.4",
        title="segment pipelining on a chain",
        reference=chain.broadcast,
        stars=3,
        check=check_broadcast,
        explanation=(
            "The chain fills like a pipe: after p - 2 steps all links work at once, and each further step delivers one "
            "segment. (c + p - 2)(alpha + n/c beta) seconds for c segments: more of them overlap better, each costs an "
            "alpha, and the best c is sqrt((p - 2) n beta / alpha). The bytes have not changed. S-Caffe and NCCL "
            "pipeline like this; so do the stages of notebook 10, with micro-batches in the place of segments."
        ),
    ),
)

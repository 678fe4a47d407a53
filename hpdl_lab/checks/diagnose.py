"""Why is this number wrong? Each rule looks at what an answer left behind and names the mistake, or passes.

Rules that need more run the answer again on numbers that tell their own story: 8**r on rank r says how often each rank
was added, i + 1 at element i says where a result belongs.
"""

import numpy as np

from ..comm.errors import name_ranks
from .ranks import SENTINEL, number
from .record import Broken
from .traffic import miscount


def explain(collective, rerun, values, run, r, i):
    """(invariant, sentence) for x[i] on rank r. `rerun(values)` runs the answer again; run: Results of `Left`."""
    for rule in RULES:
        found = rule(collective, rerun, values, run, r, i)
        if found:
            return found
    return "sum" if collective.adds else "chunk", ""


def took_the_average(collective, rerun, values, run, r, i):
    p, n = values.shape
    whole, held = collective.whole(values), run[r].x
    first, last = collective.promised(n, p, r)
    if collective.adds and np.allclose(held[first:last] * p, whole[first:last], rtol=1e-5):
        return "sum", (
            f"It is the average: the sum divided by {p}. {collective.name} adds, and leaves dividing to its caller."
        )


def holds_one_ranks_data(collective, rerun, values, run, r, i):
    p, n = values.shape
    first, last = collective.promised(n, p, r)
    if not collective.adds:
        return None
    if np.array_equal(run[r].x[first:last], values[r, first:last]) and not np.array_equal(run[-1].x, values[r]):
        return "sum", f"Rank {r} holds its own data: nothing was added to it."
    for s in range(p):
        if np.array_equal(run[-1].x[first:last], values[s, first:last]):
            return "sum", f"Rank {p - 1} holds the data of rank {s}, not the sum over ranks."


def chunk_is_elsewhere(collective, rerun, values, run, r, i):
    """For reduce_scatter: the sum of chunk r is whole, but on another rank, the same way round for every rank."""
    p, n = values.shape
    whole = collective.whole(values)
    spans = [collective.promised(n, p, c) for c in range(p)]
    if n < p or any(span == (0, n) for span in spans):
        return None
    for shift in range(1, p):
        moved = [spans[(s + shift) % p] for s in range(p)]
        if all(np.array_equal(run[s].x[a:b], whole[a:b]) for s, (a, b) in enumerate(moved)):
            off = "one chunk" if shift in (1, p - 1) else f"{shift} chunks"
            return "chunk", f"Rank {r} holds the whole sum of chunk {(r + shift) % p} instead: you are off by {off}."


def steps_miscounted(collective, rerun, values, run, r, i):
    """Counted with 5 ranks, where one step more or less is not confused with none."""
    p = 5
    told = again(rerun, np.ones((p, 100)))
    why = miscount(told.events, p, collective.cost(p, 100).steps) if told else ""
    return ("steps", why) if why else None


def chunk_moved(collective, rerun, values, run, r, i):
    """The value is right, but it belongs to another element."""
    p, n = values.shape
    told = again(rerun, np.tile(np.arange(1.0, n + 1), (p, 1)))
    if told is None:
        return None
    scale = p if collective.adds else 1
    j = told[r].x[i] / scale - 1
    if j == i or not float(j).is_integer() or not 0 <= j < n:
        return None
    return "chunk", f"That is the value of x[{int(j)}]: rank {r} got another chunk there."


def counted_wrongly(collective, rerun, values, run, r, i):
    """How often each rank's contribution is in the value, read off its digits in base 8."""
    p, n = values.shape
    held = run[r].x[i]
    if not collective.adds:
        if held == SENTINEL:
            return "chunk", (
                f"The chunk to which x[{i}] belongs never arrived on rank {r}: {number(held)} is what was there before."
            )
        if (held - collective.whole(values)[i]) % SENTINEL == 0:
            return "chunk", (
                f"What arrived was added to the {number(SENTINEL)} that was there: all_gather replaces, it does "
                "not add."
            )
        return None
    told = again(rerun, np.tile(8.0 ** np.arange(p)[:, None], n))
    if told is None or not 0 <= told[r].x[i] < 8.0**p or not float(told[r].x[i]).is_integer():
        return None
    digits = [int(told[r].x[i]) // 8**s % 8 for s in range(p)]
    missing = [s for s, times in enumerate(digits) if times == 0]
    repeated = [f"rank {s}'s part counts {times} times" for s, times in enumerate(digits) if times > 1]
    parts = [f"the part of {name_ranks(missing)} is missing"] if missing else []
    if parts or repeated:
        return "sum", f"In it {', '.join(parts + repeated)}."


def again(rerun, values):
    """Another run of the same answer, or None where it fails on these numbers."""
    try:
        return rerun(values)
    except Broken:
        return None


RULES = (took_the_average, chunk_is_elsewhere, steps_miscounted, holds_one_ranks_data, chunk_moved, counted_wrongly)

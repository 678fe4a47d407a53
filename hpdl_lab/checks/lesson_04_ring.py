"""Notebook 04: reduce-scatter, all-gather, all-reduce on a ring."""

from functools import partial

import numpy as np

from ..collectives import cost, ring
from ..collectives.chunks import bounds
from .collective import Collective, check_collective
from .ranks import SENTINEL
from .record import Exercise


def own_row(values, r):
    return values[r]


def sum_of_rows(values):
    return values.sum(axis=0)


def own_chunk_of(n, p, r):
    return bounds(n, p, r)


def everything(n, p, r):
    return 0, n


def only_own_chunk(values, r):
    """What rank r holds before an all-gather: its chunk, and nothing worth reading elsewhere."""
    p, n = values.shape
    start = np.full(n, SENTINEL)
    first, last = bounds(n, p, r)
    start[first:last] = values[r, first:last]
    return start


def chunks_of_owners(values):
    """(n,) chunk r of row r, one after the other."""
    p, n = values.shape
    return np.concatenate([values[r, slice(*bounds(n, p, r))] for r in range(p)])


REDUCE_SCATTER = Collective(
    "reduce_scatter", own_row, sum_of_rows, own_chunk_of, ring.reduce_scatter, cost.reduce_scatter, "(p-1)/p"
)
ALL_GATHER = Collective(
    "all_gather", only_own_chunk, chunks_of_owners, everything, ring.all_gather, cost.all_gather, "(p-1)/p", adds=False
)
ALL_REDUCE = Collective("all_reduce", own_row, sum_of_rows, everything, ring.all_reduce, cost.all_reduce, "2(p-1)/p")

EXERCISES = (
    Exercise(
        id="4.1",
        title="reduce-scatter on a ring",
        reference=ring.reduce_scatter,
        stars=2,
        check=partial(check_collective, REDUCE_SCATTER),
        explanation=(
            "Follow chunk c. It leaves rank c+1 in step 0 with one contribution, picks up one more at every rank that "
            "it visits, and reaches rank c in step p-2 with all p of them. All p chunks travel at the same time, one "
            "behind the other, so every link carries one chunk in every step: each rank sends p-1 chunks of 1/p of "
            "the vector."
        ),
    ),
    Exercise(
        id="4.2",
        title="all-gather on a ring",
        reference=ring.all_gather,
        stars=2,
        check=partial(check_collective, ALL_GATHER),
        explanation=(
            "The same walk, without the addition. In step i every rank passes on the chunk that it got in step i-1, "
            "first its own. After p-1 steps each chunk has visited every rank. What arrives goes straight into its "
            "place in x, so no buffer is needed."
        ),
    ),
    Exercise(
        id="4.3",
        title="all-reduce: the two together",
        reference=ring.all_reduce,
        stars=2,
        check=partial(check_collective, ALL_REDUCE),
        explanation=(
            "After reduce_scatter every chunk of the sum exists once, on its own rank; all_gather hands the chunks "
            "round. Each of the two sends (p-1)/p of the vector per rank. Together 2(p-1)/p: less than two vectors "
            "for any number of ranks, which is why the ring scales. Its price is latency: 2(p-1) messages one after "
            "another."
        ),
    ),
)

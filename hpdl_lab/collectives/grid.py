"""All-reduce on a grid of ranks, d1 x d2: rings along the fast dimension, then along the slow one with a part only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm
from . import ring
from .part import ranks_of_part
from .steps import Round, among, edges, segment
from .widen import adds_in_float32

if TYPE_CHECKING:
    from torch import Tensor


@adds_in_float32
def all_reduce(comm: Comm, x: Tensor, inner: int | None = None) -> Tensor:
    """Add every rank's `x`, leaving the sum on every rank.

        inner = d1 = 3, d2 = 2               1. reduce-scatter in each row: column j holds chunk j, N/d1 elements
        row 0     0 -> 1 -> 2                2. all-reduce of that chunk in each column, which is the slow dimension
        row 1     3 -> 4 -> 5                3. all-gather in each row

    Ranks of a row are neighbors, such as the GPUs of a node. Over the slow dimension go only 2(N/d1)(d2 - 1)/d2.

    Args:    x: (N,) tensor, different per rank, overwritten with the sum.
             inner: ranks of a row, which must divide p; None: the largest divisor of p up to its square root.
    Returns: x, bitwise the same on every rank.
    Raises:  ValueError if inner does not divide p; CommTimeout if a rank does not answer.
    Steps: 2(d1 - 1) + 2(d2 - 1).   Bytes per rank: 2(p - 1)/p * N * itemsize.   Ref: Cho et al. 2017 (PowerAI DDL).
    """
    p, d1 = comm.size, width(comm.size, inner)
    i, j = divmod(comm.rank, d1)
    row, column = ranks_of_part(comm, range(i * d1, (i + 1) * d1)), ranks_of_part(comm, range(j, p, d1))
    ring.all_reduce(column, ring.reduce_scatter(row, x))
    return ring.all_gather(row, x)


def width(p: int, inner: int | None = None) -> int:
    """Return d1. Raises ValueError if p ranks make no grid with rows of `inner`."""
    if inner is None:
        return next(d for d in range(math.isqrt(p), 0, -1) if p % d == 0)
    if inner < 1 or p % inner:
        raise ValueError(f"{p} ranks make no grid with rows of {inner}: it must divide {p}")
    return inner


def all_reduce_steps(p: int, n: int, inner: int | None = None) -> Iterator[Round]:
    """Yield the schedule of all_reduce for n elements on p ranks."""
    d1 = width(p, inner)
    d2 = p // d1
    rows, cut = np.arange(p).reshape(d2, d1), edges(n, d1)
    yield from among(ring.reduce_scatter_steps(d1, n), rows)
    r = np.arange(p)
    i, j = np.divmod(r, d1)
    below = (r + d1) % p
    for k in range(d2 - 1):
        yield Round(r, below, *segment(cut[j], cut[j + 1], d2, (i - k - 1) % d2), add=True)
    for k in range(d2 - 1):
        yield Round(r, below, *segment(cut[j], cut[j + 1], d2, (i - k) % d2), add=False)
    yield from among(ring.all_gather_steps(d1, n), rows)

"""All-reduce around a ring: naive, then the one that is used.

Rank r talks only to its neighbors: it sends to r+1 and receives from r-1 (mod p). Cut the vector into p chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import copy_of, new_like
from .chunks import bounds, chunk
from .steps import Round, edges
from .widen import adds_in_float32

if TYPE_CHECKING:
    from torch import Tensor


@adds_in_float32
def all_reduce_naive(comm: Comm, x: Tensor) -> Tensor:
    """Add every rank's `x`, by passing whole vectors around the ring.

        0 --x0--> 1 --x1--> 2 --x2--> 0      step i: pass on what arrived in step i-1, add it to the total

    Every rank adds in another order, so that sums of floats may differ in their last bits from rank to rank.

    Args:    x: (N,) float tensor, different per rank, overwritten with the sum.
    Returns: x.
    Steps: p - 1.   Bytes per rank: (p - 1) * N * itemsize.   Ref: what MPI tutorials call the "naive ring".
    """
    p, r = comm.size, comm.rank
    passing, arriving = copy_of(x), new_like(x, x.shape)
    for _ in range(p - 1):
        comm.sendrecv(passing, (r + 1) % p, arriving, (r - 1) % p)
        x += arriving
        passing, arriving = arriving, passing
    return x


@adds_in_float32
def reduce_scatter(comm: Comm, x: Tensor) -> Tensor:
    """Add every rank's `x` around the ring, and leave chunk r of the sum on rank r.

    In each step, a rank sends one chunk to the rank on its right. The receiver adds its
    own numbers to this chunk.

        p = 3            rank 0      rank 1      rank 2
        step 0 sends     chunk 2     chunk 0     chunk 1
        step 1 sends     chunk 1     chunk 2     chunk 0
        sum at the end   chunk 0     chunk 1     chunk 2

    Args:    x: (N,) tensor, different per rank, overwritten; in the end only chunk r
             holds a result.
    Returns: view of chunk r of x, with ceil(N/p) elements at most.
    Raises:  ValueError if x is not contiguous or the ranks' sizes differ; CommTimeout
             if a neighbor does not answer.
    Steps: p - 1.   Bytes per rank: (p - 1)/p * N * itemsize.
    Ref: Patarasuk & Yuan 2009.
    """
    p, r = comm.size, comm.rank
    arriving = new_like(x, bounds(len(x), p, 0)[1])
    for i in range(p - 1):
        mine, theirs = chunk(x, p, r - i - 1), chunk(x, p, r - i - 2)
        theirs += comm.sendrecv(mine, (r + 1) % p, arriving[: len(theirs)], (r - 1) % p)
    return chunk(x, p, r)


def all_gather(comm: Comm, x: Tensor) -> Tensor:
    """Copy every chunk of `x` to every rank; rank r begins with chunk r only.

    In each step, a rank sends one chunk to the rank on its right.

        p = 3            rank 0      rank 1      rank 2
        step 0 sends     chunk 0     chunk 1     chunk 2
        step 1 sends     chunk 2     chunk 0     chunk 1

    Args:    x: (N,) tensor; rank r reads its chunk r, and overwrites all other chunks.
    Returns: x, the same on every rank.
    Raises:  ValueError if x is not contiguous or the ranks' sizes differ; CommTimeout
             if a neighbor does not answer.
    Steps: p - 1.   Bytes per rank: (p - 1)/p * N * itemsize.
    Ref: Patarasuk & Yuan 2009.
    """
    p, r = comm.size, comm.rank
    for i in range(p - 1):
        comm.sendrecv(chunk(x, p, r - i), (r + 1) % p, chunk(x, p, r - i - 1), (r - 1) % p)
    return x


@adds_in_float32
def all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """Add every rank's `x`, and leave the sum on every rank.

    A rank sends 2(p - 1) chunks of 1/p of the vector: always less than two vectors.

    Args:    x: (N,) tensor, different per rank, overwritten with the sum.
    Returns: x, bitwise the same on every rank.
    Raises:  ValueError if x is not contiguous or the ranks' sizes differ; CommTimeout
             if a neighbor does not answer.
    Steps: 2(p - 1).   Bytes per rank: 2(p - 1)/p * N * itemsize.
    Ref: Patarasuk & Yuan 2009; Gibiansky 2017.
    """
    reduce_scatter(comm, x)
    return all_gather(comm, x)


def all_reduce_naive_steps(p: int, n: int) -> Iterator[Round]:
    """Yield the schedule of all_reduce_naive for n elements on p ranks."""
    r = np.arange(p)
    whole = np.zeros(p, np.int64), np.full(p, n)
    for i in range(p - 1):
        yield Round(r, (r + 1) % p, *whole, add=True, relay=i > 0)


def reduce_scatter_steps(p: int, n: int) -> Iterator[Round]:
    """Yield the schedule of reduce_scatter: rank r sends chunk r-i-1 in step i."""
    yield from _around(p, n, [-i - 1 for i in range(p - 1)], add=True)


def all_gather_steps(p: int, n: int) -> Iterator[Round]:
    """Yield the schedule of all_gather: rank r sends chunk r-i in step i."""
    yield from _around(p, n, [-i for i in range(p - 1)], add=False)


def all_reduce_steps(p: int, n: int) -> Iterator[Round]:
    """Yield the schedule of all_reduce."""
    yield from reduce_scatter_steps(p, n)
    yield from all_gather_steps(p, n)


def _around(p: int, n: int, shifts: list[int], add: bool) -> Iterator[Round]:
    """Yield a Round for each shift s: rank r sends chunk r+s (mod p) to rank r+1. No copy: views of two laps."""
    r, cut = np.arange(p), edges(n, p)
    right = (r + 1) % p
    first, last = np.tile(cut[:-1], 2), np.tile(cut[1:], 2)
    for s in shifts:
        yield Round(r, right, first[s % p : s % p + p], last[s % p : s % p + p], add)

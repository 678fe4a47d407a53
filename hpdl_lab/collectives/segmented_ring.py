"""The ring with chunks cut into segments: one segment is added while the next is on its way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import new_like
from . import ring
from .chunks import bounds, chunk
from .steps import Round, edges, segment
from .widen import adds_in_float32

if TYPE_CHECKING:
    from torch import Tensor


@adds_in_float32
def reduce_scatter(comm: Comm, x: Tensor, segments: int = 4) -> Tensor:
    """Leave on rank r the sum over ranks of chunk r of `x`: ring.reduce_scatter, whose adding hides behind messages.

        link    | segment 0 | segment 1 | segment 2 | segment 3 | segment 0 of the next chunk ...
        adding              | segment 0 | segment 1 | segment 2 | segment 3

    A segment must have been added before it is sent on, `segments` messages later: that is why two are the least.

    Args:    x: (N,) tensor, different per rank, overwritten: only chunk r holds a result.
             segments: of each chunk, at least 2, the same on every rank; cost.best_ring_segments says how many.
    Returns: view of chunk r of x, (ceil(N/p),) at most.
    Raises:  ValueError for fewer than 2 segments; CommTimeout if a neighbor does not answer.
    Steps: (p - 1) * segments.   Bytes per rank: (p - 1)/p * N * itemsize.   Ref: Patarasuk & Yuan 2009, segmented as
    in Open MPI's coll_base_allreduce.c.
    """
    _require_two(segments)
    p, r = comm.size, comm.rank
    longest = bounds(bounds(len(x), p, 0)[1], segments, 0)[1]
    spare = new_like(x, longest), new_like(x, longest)
    to_add = None
    for k in range((p - 1) * segments):
        i, s = divmod(k, segments)
        mine, theirs = chunk(chunk(x, p, r - i - 1), segments, s), chunk(chunk(x, p, r - i - 2), segments, s)
        arriving = spare[k % 2][: len(theirs)]
        received, sent = comm.irecv(arriving, (r - 1) % p), comm.isend(mine, (r + 1) % p)
        if to_add is not None:
            add(*to_add)  # while the messages are on their way
        received.wait()
        sent.wait()
        to_add = theirs, arriving
    if to_add is not None:
        add(*to_add)
    return chunk(x, p, r)


@adds_in_float32
def all_reduce(comm: Comm, x: Tensor, segments: int = 4) -> Tensor:
    """Add every rank's `x`, leaving the sum on every rank: the segmented reduce_scatter, then ring.all_gather.

    Nothing is added in an all-gather, so its chunks stay whole and cost p - 1 latencies only.

    Args:    x: (N,) tensor, different per rank, overwritten with the sum; segments: as in reduce_scatter.
    Returns: x, bitwise the same on every rank.
    Raises:  as reduce_scatter.
    Steps: (p - 1) * (segments + 1).   Bytes per rank: 2(p - 1)/p * N * itemsize.   Ref: as reduce_scatter.
    """
    reduce_scatter(comm, x, segments)
    return ring.all_gather(comm, x)


def add(x: Tensor, y: Tensor) -> None:
    """Do x += y: a function, because += on a name inside a tuple is none."""
    x += y


def _require_two(segments: int) -> None:
    if segments < 2:
        raise ValueError(f"adding hides behind messages with 2 segments or more, got {segments}: 1 is ring.all_reduce")


def _reduce_scatter_steps(p: int, n: int, segments: int = 4) -> Iterator[Round]:
    """Yield the schedule of reduce_scatter for n elements on p ranks."""
    _require_two(segments)
    r, cut = np.arange(p), edges(n, p)
    for i in range(p - 1):
        c = (r - i - 1) % p
        for s in range(segments):
            yield Round(r, (r + 1) % p, *segment(cut[c], cut[c + 1], segments, s), add=True)


def all_reduce_steps(p: int, n: int, segments: int = 4) -> Iterator[Round]:
    """Yield the schedule of all_reduce."""
    yield from _reduce_scatter_steps(p, n, segments)
    yield from ring.all_gather_steps(p, n)

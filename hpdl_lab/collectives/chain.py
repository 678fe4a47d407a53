"""Collectives along a chain of ranks, cut into segments that follow each other like wagons of a train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import new_like
from .chunks import bounds, chunk
from .steps import Round, segment
from .widen import adds_in_float32

if TYPE_CHECKING:
    from torch import Tensor


def broadcast(comm: Comm, x: Tensor, root: int = 0, segments: int = 4) -> Tensor:
    """Copy `x` from rank `root` to every rank, in segments along a chain of ranks.

    Rank 1 sends each segment on while it receives the next segment: in steps 1 and 2,
    both links are busy.

        p = 3      0 -> 1       1 -> 2
        step 0     segment 0
        step 1     segment 1    segment 0
        step 2     segment 2    segment 1
        step 3                  segment 2

    Args:    x: (N,) tensor, read on the root, overwritten on all other ranks.
             root, segments: the same on every rank; chunk(x, segments, k) is a view
             of segment k.
    Returns: x, the same on every rank.
    Raises:  ValueError if the ranks' sizes differ; CommTimeout if a rank does not
             answer.
    Steps: segments + p - 2.   Bytes per rank: N * itemsize, none on the last rank.
    Ref: Awan et al. 2017 (S-Caffe).
    """
    require_segments(segments)
    ### BEGIN SOLUTION
    distance, leaving = (comm.rank - root) % comm.size, []  # how far behind the root
    for k in range(segments):
        piece = chunk(x, segments, k)
        if distance > 0:
            comm.recv(piece, (comm.rank - 1) % comm.size)
        if distance < comm.size - 1:
            leaving.append(comm.isend(piece, (comm.rank + 1) % comm.size))
    for work in leaving:
        work.wait()
    return x
    ### END SOLUTION


def broadcast_by_steps(comm: Comm, x: Tensor, root: int = 0, segments: int = 4) -> Tensor:
    """Do `broadcast` in steps that all ranks take together, as `broadcast_steps` lists them."""
    require_segments(segments)
    p, v = comm.size, (comm.rank - root) % comm.size  # v: how far behind the root
    for step in range(segments + p - 2):
        works, comes, goes = [], step - (v - 1), step - v  # which segments, if there are such
        if v > 0 and 0 <= comes < segments:
            works.append(comm.irecv(chunk(x, segments, comes), (comm.rank - 1) % p))
        if v < p - 1 and 0 <= goes < segments:
            works.append(comm.isend(chunk(x, segments, goes), (comm.rank + 1) % p))
        for work in works:
            work.wait()
    return x


@adds_in_float32
def reduce(comm: Comm, x: Tensor, root: int = 0, segments: int = 4) -> Tensor:
    """Leave on rank `root` the sum of every rank's `x`: broadcast backwards, each adds its own before it passes on.

        p = 3      2 -> 1       1 -> 0
        step 0     segment 0
        step 1     segment 1    segment 0
        step 2     segment 2    segment 1
        step 3                  segment 2

    Args:    x: (N,) tensor, different per rank, overwritten: on the root with the sum, elsewhere with a partial one.
             root, segments: as in broadcast.
    Returns: x.
    Raises:  as broadcast.
    Steps: segments + p - 2.   Bytes per rank: N * itemsize, the root none.   Ref: Awan et al. 2017 (S-Caffe's chunked
    chain).
    """
    require_segments(segments)
    p, v = comm.size, (comm.rank - root) % comm.size  # v: how far behind the root
    spare = new_like(x, bounds(len(x), segments, 0)[1])
    for step in range(segments + p - 2):
        works, comes, goes = [], step - (p - 2 - v), step - (p - 1 - v)
        theirs = x[:0]
        if v < p - 1 and 0 <= comes < segments:
            theirs = chunk(x, segments, comes)
            works.append(comm.irecv(spare[: len(theirs)], (comm.rank + 1) % p))
        if v > 0 and 0 <= goes < segments:
            works.append(comm.isend(chunk(x, segments, goes), (comm.rank - 1) % p))
        for work in works:
            work.wait()
        theirs += spare[: len(theirs)]
    return x


def require_segments(segments: int) -> None:
    if segments < 1:
        raise ValueError(f"a vector is cut into at least 1 segment, got {segments}")


def broadcast_steps(p: int, n: int, root: int = 0, segments: int = 4) -> Iterator[Round]:
    """Yield the schedule of broadcast for n elements on p ranks."""
    for v, first, last in _along(np.arange(p - 1), 0, p, n, segments):
        yield Round((v + root) % p, (v + 1 + root) % p, first, last, add=False)


def reduce_steps(p: int, n: int, root: int = 0, segments: int = 4) -> Iterator[Round]:
    """Yield the schedule of reduce."""
    for v, first, last in _along(p - 1 - np.arange(1, p), p - 1, p, n, segments):
        yield Round((v + root) % p, (v - 1 + root) % p, first, last, add=True)


def _along(
    hops: np.ndarray, begin: int, p: int, n: int, segments: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield, for each step, (senders, first, last). The sender `hops` away from `begin` starts so much later."""
    require_segments(segments)
    for step in range(segments + p - 2):
        s = step - hops
        sends = hops[(s >= 0) & (s < segments)]
        first, last = segment(np.zeros_like(sends), n, segments, step - sends)
        yield np.abs(begin - sends), first, last

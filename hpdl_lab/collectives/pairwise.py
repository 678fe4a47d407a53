"""All-to-all by pairs that meet once each, as the players of a tournament do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import copy_into, new_like
from .chunks import chunk
from .steps import Round

if TYPE_CHECKING:
    from torch import Tensor


def all_to_all(comm: Comm, x: Tensor) -> Tensor:
    """Bring chunk s of rank r's `x` to chunk r of rank s, for all r and s: the transpose of a matrix of chunks.

        p = 4     round 0: 0 <-> 3, 1 <-> 2      round 1: 0 <-> 1, 2 <-> 3      round 2: 0 <-> 2, 1 <-> 3

    In a meeting each gives the chunk that is the other's, and puts what it gets in the place of what it gave.

    Args:    x: (N,) tensor, different per rank, overwritten; p must divide N.
    Returns: x: chunk s is what rank s had in chunk r.
    Raises:  ValueError if p does not divide N; CommTimeout if a rank does not answer.
    Steps: p - 1; p if p is odd, since then one rank pauses in each.   Bytes per rank: (p - 1)/p * N * itemsize.
    Ref: Thakur, Rabenseifner & Gropp 2005 (pairwise exchange).
    """
    p = comm.size
    _require_equal_chunks(p, len(x))
    for i in range(tournament_rounds(p)):
        peer = int(_opponents(p, i)[comm.rank])
        if peer != comm.rank:
            theirs = chunk(x, p, peer)
            theirs[:] = comm.sendrecv(theirs, peer, new_like(x, len(theirs)), peer)
    return x


def all_to_all_v(comm: Comm, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send another number of rows of `x` to each rank, and put the rows that come from each one below the other.

        p = 2    rank 0: x = [ a | b c ], sent (1, 2)      ->  [ a | d e f ], received (1, 3)
                 rank 1: x = [ d e f |  ], sent (3, 0)     ->  [ b c |  ],    received (2, 0)

    Args:    x: (sum of sent, ...) contiguous tensor, different per rank, which stays as it is; sent[r]: how many rows
             go to rank r, those for rank 0 first; received[r]: how many come from there, which rank r has as
             sent[comm.rank]: all_to_all of the sizes tells.
    Returns: (sum of received, ...) tensor.
    Raises:  ValueError if x has other rows than are sent, or a message another size than is expected.
    Steps: all messages are started at once; none if there are no rows.   Bytes per rank: of the rows for others.
    Ref: MPI_Alltoallv; Hwang et al. 2023 (Tutel), arXiv:2206.03382.
    """
    if len(x) != sum(sent):
        raise ValueError(f"rank {comm.rank} has {len(x):,} rows, and sends {sum(sent):,}: {list(sent)}")
    out = new_like(x, (sum(received), *x.shape[1:]))
    from_, to = _offsets(received), _offsets(sent)
    copy_into(out[from_[comm.rank] : from_[comm.rank + 1]], x[to[comm.rank] : to[comm.rank + 1]])
    others = [r for r in range(comm.size) if r != comm.rank]
    works = [comm.irecv(out[from_[r] : from_[r + 1]], r) for r in others if received[r]]
    works += [comm.isend(x[to[r] : to[r + 1]], r) for r in others if sent[r]]
    for work in works:
        work.wait()
    return out


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Return the begin of each part, and the end of the last: (1, 3) -> [0, 1, 4]."""
    return [0, *itertools.accumulate(sizes)]


def tournament_rounds(p: int) -> int:
    """Return the rounds of a tournament in which every two of p players meet once."""
    return p - 1 if p % 2 == 0 else (p if p > 1 else 0)


def _opponents(p: int, i: int) -> np.ndarray:
    """Return (p,) whom each rank meets in round i; itself: it pauses.

    Ranks 0 to m - 1 meet so that the sum of the two is i modulo the odd m. One of them would meet itself; if p is
    even it meets rank p - 1 = m.
    """
    m = p - 1 + p % 2
    r = np.arange(m)
    peers = (i - r) % m
    if p % 2:
        return peers
    alone = i * (p // 2) % m  # twice this is i modulo m
    peers[alone] = m
    return np.append(peers, alone)


def _require_equal_chunks(p: int, n: int) -> None:
    if n % p:
        raise ValueError(f"all_to_all on {p} ranks swaps equal chunks: {p} must divide the {n:,} elements")


def all_to_all_steps(p: int, n: int) -> Iterator[Round]:
    """Yield the schedule of all_to_all for n elements on p ranks."""
    _require_equal_chunks(p, n)
    size = n // p
    for i in range(tournament_rounds(p)):
        peers = _opponents(p, i)
        r = np.flatnonzero(peers != np.arange(p))
        to = peers[r]
        yield Round(r, to, to * size, (to + 1) * size, add=False, into=r * size)

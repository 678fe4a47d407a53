"""All-to-all by pairs that meet once each, as the players of a tournament do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import new_like
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
    Raises:  ValueError where p does not divide N; CommTimeout if a rank does not answer.
    Steps: p - 1; p where p is odd, since then one rank pauses in each.   Bytes per rank: (p - 1)/p * N * itemsize.
    Ref: Thakur, Rabenseifner & Gropp 2005 (pairwise exchange).
    """
    p = comm.size
    require_equal_chunks(p, len(x))
    for i in range(rounds_of(p)):
        peer = int(opponents(p, i)[comm.rank])
        if peer != comm.rank:
            theirs = chunk(x, p, peer)
            theirs[:] = comm.sendrecv(theirs, peer, new_like(x, len(theirs)), peer)
    return x


def rounds_of(p: int) -> int:
    """Rounds of a tournament in which every two of p players meet once."""
    return p - 1 if p % 2 == 0 else (p if p > 1 else 0)


def opponents(p: int, i: int) -> np.ndarray:
    """(p,) whom each rank meets in round i; itself: it pauses.

    Ranks 0 to m - 1 meet so that the sum of the two is i modulo the odd m. One of them would meet itself; where p is
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


def require_equal_chunks(p: int, n: int) -> None:
    if n % p:
        raise ValueError(f"all_to_all on {p} ranks swaps equal chunks: {p} must divide the {n:,} elements")


def all_to_all_steps(p: int, n: int) -> Iterator[Round]:
    """The schedule of all_to_all for n elements on p ranks: an iterator of steps.Round."""
    require_equal_chunks(p, n)
    size = n // p
    for i in range(rounds_of(p)):
        peers = opponents(p, i)
        r = np.flatnonzero(peers != np.arange(p))
        to = peers[r]
        yield Round(r, to, to * size, (to + 1) * size, add=False, into=r * size)

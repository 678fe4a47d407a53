"""Collectives along a binomial tree: few steps, whole vectors. The choice for small messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import new_like
from .steps import Round
from .widen import adds_in_float32

if TYPE_CHECKING:
    from torch import Tensor


@adds_in_float32
def reduce(comm: Comm, x: Tensor, root: int = 0) -> Tensor:
    """Leave on rank `root` the sum of every rank's `x`: in each step half of the ranks that are left hand over theirs.

        step 0    0 <- 1    2 <- 3    4 <- 5    6 <- 7       (p = 8, root 0; other roots are numbered from the root)
        step 1    0 <------ 2         4 <------ 6
        step 2    0 <---------------- 4

    Args:    x: (N,) tensor, different per rank, overwritten: on the root with the sum, elsewhere with a partial one.
             root: the same on every rank.
    Returns: x.
    Raises:  ValueError if the ranks' sizes differ; CommTimeout if a rank does not answer.
    Steps: ceil(log2 p).   Bytes per rank: N * itemsize, the root none.   Ref: Thakur, Rabenseifner & Gropp 2005.
    """
    p, v = comm.size, (comm.rank - root) % comm.size
    arriving = new_like(x, x.shape)
    bit = 1
    while bit < p and not v & (bit >> 1):
        if v & bit:
            comm.send(x, (v - bit + root) % p)
        elif v + bit < p:
            comm.recv(arriving, (v + bit + root) % p)
            x += arriving
        bit <<= 1
    return x


def broadcast(comm: Comm, x: Tensor, root: int = 0) -> Tensor:
    """Copy `x` of rank `root` to every rank: reduce backwards, so that in each step twice as many ranks have it.

        step 0    0 ----------------> 4                      (p = 8, root 0; other roots are numbered from the root)
        step 1    0 ------> 2         4 ------> 6
        step 2    0 -> 1    2 -> 3    4 -> 5    6 -> 7

    Args:    x: (N,) tensor, read on the root, overwritten elsewhere; root: the same on every rank.
    Returns: x, the same on every rank.
    Raises:  ValueError if the ranks' sizes differ; CommTimeout if a rank does not answer.
    Steps: ceil(log2 p).   Bytes per rank: the root sends ceil(log2 p) * N * itemsize, the others less; p - 1 vectors
    in all.   Ref: Thakur, Rabenseifner & Gropp 2005.
    """
    p, v = comm.size, (comm.rank - root) % comm.size
    for bit in reversed(bits_below(p)):
        if v % (2 * bit) == bit:
            comm.recv(x, (v - bit + root) % p)
        elif v % (2 * bit) == 0 and v + bit < p:
            comm.send(x, (v + bit + root) % p)
    return x


@adds_in_float32
def all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """Add every rank's `x`, leaving the sum on every rank: reduce to rank 0, then broadcast from there.

    Args:    x: (N,) tensor, different per rank, overwritten with the sum.
    Returns: x, bitwise the same on every rank.
    Raises:  as reduce.
    Steps: 2 ceil(log2 p).   Bytes per rank: rank 0 sends ceil(log2 p) * N * itemsize, the others less; 2(p - 1) vectors
    in all.   Ref: Thakur, Rabenseifner & Gropp 2005.
    """
    reduce(comm, x)
    return broadcast(comm, x)


def bits_below(p: int) -> list[int]:
    """Return 1, 2, 4, ... below p: the distances in a binomial tree of p ranks."""
    return [1 << k for k in range((p - 1).bit_length())]


def reduce_steps(p: int, n: int, root: int = 0) -> Iterator[Round]:
    """Yield the schedule of reduce for n elements on p ranks."""
    for bit in bits_below(p):
        v = np.arange(bit, p, 2 * bit)
        yield Round((v + root) % p, (v - bit + root) % p, np.zeros_like(v), np.full_like(v, n), add=True)


def broadcast_steps(p: int, n: int, root: int = 0) -> Iterator[Round]:
    """Yield the schedule of broadcast."""
    for bit in reversed(bits_below(p)):
        v = np.arange(bit, p, 2 * bit)
        yield Round((v - bit + root) % p, (v + root) % p, np.zeros_like(v), np.full_like(v, n), add=False)


def all_reduce_steps(p: int, n: int) -> Iterator[Round]:
    """Yield the schedule of all_reduce."""
    yield from reduce_steps(p, n)
    yield from broadcast_steps(p, n)

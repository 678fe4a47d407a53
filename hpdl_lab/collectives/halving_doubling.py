"""All-reduce by recursive halving and doubling: the bytes of a ring in the steps of a tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import new_like
from .folding import fold, fold_steps, power_and_surplus, unfold, unfold_steps, unfolded_rank
from .steps import Round, edges
from .tree import bits_below
from .widen import adds_in_float32

if TYPE_CHECKING:
    from torch import Tensor


@adds_in_float32
def all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """Add every rank's `x`: swap halves, then quarters, ... until each rank has one chunk of the sum; then go back.

        p = 4     rank 0       rank 1       rank 2       rank 3         chunks for which the sum is under way
        start     0 1 2 3      0 1 2 3      0 1 2 3      0 1 2 3
        halve     0 1          0 1              2 3          2 3        0 <-> 2, 1 <-> 3 swap 2 chunks
        halve     0              1              2              3        0 <-> 1, 2 <-> 3 swap 1 chunk
        double    0 1          0 1              2 3          2 3        the same pairs backwards, nothing is added
        double    0 1 2 3      0 1 2 3      0 1 2 3      0 1 2 3

    Where p is no power of two, folding.fold comes before and folding.unfold after.

    Args:    x: (N,) tensor, different per rank, overwritten with the sum.
    Returns: x, bitwise the same on every rank.
    Raises:  ValueError if the ranks' sizes differ; CommTimeout if a rank does not answer.
    Steps: 2 log2 p; if p is no power of two 2 floor(log2 p) + 3.   Bytes per rank: 2(p - 1)/p * N * itemsize if p
    is a power of two.   Ref: Rabenseifner 2004.
    """
    power, surplus = power_and_surplus(comm.size)
    mine = fold(comm, x)
    if mine is not None:
        cut = edges(len(x), power)
        arriving = new_like(x, int(cut[(power + 1) // 2]))
        for bit in reversed(bits_below(power)):
            peer = int(unfolded_rank(mine ^ bit, surplus))
            ours, theirs = _blocks(x, cut, mine, bit)
            ours += comm.sendrecv(theirs, peer, arriving[: len(ours)], peer)
        for bit in bits_below(power):
            peer = int(unfolded_rank(mine ^ bit, surplus))
            ours, theirs = _blocks(x, cut, mine, bit)
            comm.sendrecv(ours, peer, theirs, peer)
    unfold(comm, x)
    return x


def _blocks(x: Tensor, cut: np.ndarray, mine: int, bit: int) -> tuple[Tensor, ...]:
    """Return views of x: the `bit` chunks that `mine` keeps when it parts from `mine ^ bit`, and the others."""
    first, other = mine - mine % bit, (mine ^ bit) - mine % bit
    return x[cut[first] : cut[first + bit]], x[cut[other] : cut[other + bit]]


def all_reduce_steps(p: int, n: int) -> Iterator[Round]:
    """Yield the schedule of all_reduce for n elements on p ranks."""
    power, surplus = power_and_surplus(p)
    i, cut = np.arange(power), edges(n, power)
    ranks = unfolded_rank(i, surplus)
    yield from fold_steps(p, n)
    for bit in reversed(bits_below(power)):
        first = (i ^ bit) - i % bit  # what the peer keeps
        yield Round(ranks, unfolded_rank(i ^ bit, surplus), cut[first], cut[first + bit], add=True)
    for bit in bits_below(power):
        first = i - i % bit
        yield Round(ranks, unfolded_rank(i ^ bit, surplus), cut[first], cut[first + bit], add=False)
    yield from unfold_steps(p, n)

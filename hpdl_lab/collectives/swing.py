"""All-reduce by Swing: the messages of halving and doubling, between ranks that are close on a ring or a torus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import new_like
from .folding import fold, fold_steps, power_and_surplus, unfold, unfold_steps, unfolded_rank
from .steps import Index, Round, edges
from .tree import bits_below
from .widen import adds_in_float32

if TYPE_CHECKING:
    from torch import Tensor


@adds_in_float32
def all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """Add every rank's `x`: swap halves with a neighbor, quarters with the rank on the other side, ...; then go back.

        p = 8      0   1   2   3   4   5   6   7      even ranks swing to +1, -1, +3, -5 ..., odd ones to -1, +1, -3 ...
        step 0     └───┘   └───┘   └───┘   └───┘      4 chunks each
        step 1     ┘   └───┘   └───┘   └───┘   └      2 chunks each, around the ring
        step 2     0 <-> 3   2 <-> 5   4 <-> 7   6 <-> 1      1 chunk each

    The largest messages have the shortest way: on a ring of links, halving_doubling sends them to the farthest rank.
    Where p is no power of two, folding.fold comes before and folding.unfold after.

    Args:    x: (N,) tensor, different per rank, overwritten with the sum.
    Returns: x, bitwise the same on every rank.
    Raises:  ValueError if the ranks' sizes differ; CommTimeout if a rank does not answer.
    Steps: 2 log2 p; if p is no power of two 2 floor(log2 p) + 3.   Bytes per rank: 2(p - 1)/p * N * itemsize if p
    is a power of two.   Ref: De Sensi et al. 2024, Swing: short-cutting rings for higher bandwidth allreduce.
    """
    power, surplus = power_and_surplus(comm.size)
    mine = fold(comm, x)
    if mine is not None:
        cut, place = edges(len(x), power), int(_places(power)[mine])
        arriving = new_like(x, int(cut[(power + 1) // 2]))
        ways = []  # (peer, the chunks that stay here, the chunks that the peer keeps) of each step
        for step, bit in enumerate(reversed(bits_below(power))):
            first, other = place - place % bit, (place ^ bit) - place % bit
            peer = int(unfolded_rank(_peer(mine, step, power), surplus))
            ways.append((peer, x[cut[first] : cut[first + bit]], x[cut[other] : cut[other + bit]]))
        for peer, ours, theirs in ways:
            ours += comm.sendrecv(theirs, peer, arriving[: len(ours)], peer)
        for peer, ours, theirs in reversed(ways):
            comm.sendrecv(ours, peer, theirs, peer)
    unfold(comm, x)
    return x


def _peer(i: Index, step: int, power: int) -> Index:
    """Return the number with which number i of a power of two swaps in this step; for ints and arrays."""
    distance = (1 - (-2) ** (step + 1)) // 3
    return (i + (1 - 2 * (i % 2)) * distance) % power


def _places(power: int) -> np.ndarray:
    """Return (power,) the chunk that each number keeps, so that what two of them swap is in one piece.

    A number and its peer part in a step; the numbers that they swap with later stay on their sides.
    """
    order = np.zeros(1, np.int64)
    for step in range(len(bits_below(power))):
        order = np.stack([order, _peer(order, step, power)], axis=1).reshape(-1)
    return np.argsort(order)


def all_reduce_steps(p: int, n: int) -> Iterator[Round]:
    """Yield the schedule of all_reduce for n elements on p ranks."""
    power, surplus = power_and_surplus(p)
    i, place, cut = np.arange(power), _places(power), edges(n, power)
    ranks, bits = unfolded_rank(i, surplus), bits_below(power)
    yield from fold_steps(p, n)
    for step, bit in enumerate(reversed(bits)):
        first = (place ^ bit) - place % bit  # what the peer keeps
        yield Round(ranks, unfolded_rank(_peer(i, step, power), surplus), cut[first], cut[first + bit], add=True)
    for step, bit in reversed(list(enumerate(reversed(bits)))):
        first = place - place % bit
        yield Round(ranks, unfolded_rank(_peer(i, step, power), surplus), cut[first], cut[first + bit], add=False)
    yield from unfold_steps(p, n)

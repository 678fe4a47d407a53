"""All-reduce by recursive doubling: the fewest steps there are. The choice for the smallest messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import new_like
from .folding import fold, fold_steps, power_and_surplus, unfold, unfold_steps, unfolded_rank
from .steps import Round
from .tree import bits_below
from .widen import adds_in_float32

if TYPE_CHECKING:
    from torch import Tensor


@adds_in_float32
def all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """Add every rank's `x`, leaving the sum on every rank: in each step pairs swap what they have and both add it.

        step 0    0 <-> 1    2 <-> 3    4 <-> 5    6 <-> 7        (p = 8) each holds the sum of 2 ranks
        step 1    0 <-> 2    1 <-> 3    4 <-> 6    5 <-> 7        ... of 4
        step 2    0 <-> 4    1 <-> 5    2 <-> 6    3 <-> 7        ... of 8

    Where p is no power of two, folding.fold comes before and folding.unfold after.

    Args:    x: (N,) tensor, different per rank, overwritten with the sum.
    Returns: x, bitwise the same on every rank, since a + b is b + a.
    Raises:  ValueError if the ranks' sizes differ; CommTimeout if a rank does not answer.
    Steps: log2 p; if p is no power of two floor(log2 p) + 3.   Bytes per rank: N * itemsize in each step.
    Ref: Thakur, Rabenseifner & Gropp 2005.
    """
    power, surplus = power_and_surplus(comm.size)
    mine = fold(comm, x)
    if mine is not None:
        arriving = new_like(x, x.shape)
        for bit in bits_below(power):
            peer = int(unfolded_rank(mine ^ bit, surplus))
            comm.sendrecv(x, peer, arriving, peer)
            x += arriving
    unfold(comm, x)
    return x


def all_reduce_steps(p: int, n: int) -> Iterator[Round]:
    """Yield the schedule of all_reduce for n elements on p ranks."""
    power, surplus = power_and_surplus(p)
    i = np.arange(power)
    yield from fold_steps(p, n)
    for bit in bits_below(power):
        yield Round(
            unfolded_rank(i, surplus), unfolded_rank(i ^ bit, surplus), np.zeros_like(i), np.full_like(i, n), add=True
        )
    yield from unfold_steps(p, n)

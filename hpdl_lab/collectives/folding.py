"""Any number of ranks for algorithms that need a power of two: the surplus ranks give away their vectors first.

p = 5, power = 4, surplus = 1       ranks 0 1 | 2  3  4
fold: 1 adds its vector to 0's      left  0     1  2  3   (their new numbers)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import new_like
from .chunks import chunk
from .steps import Index, Round

if TYPE_CHECKING:
    from torch import Tensor


def power_and_surplus(p: int) -> tuple[int, int]:
    """Return the largest power of two up to p, and how many ranks are too many."""
    power = 1 << (p.bit_length() - 1)
    return power, p - power


def unfolded_rank(i: Index, surplus: int) -> Any:
    """Return the rank that has number i after folding; for ints and arrays."""
    return i + np.minimum(i, surplus)


def fold(comm: Comm, x: Tensor) -> int | None:
    """Leave the sum of all vectors spread over a power of two of ranks; returns this rank's number, None: it is out.

    The ranks of each of the first pairs (0, 1), (2, 3), ... both add one half, so that the adding takes half the time;
    then the even rank gets the other half from the odd one, which is out.

    Steps: 2 if there are surplus ranks.   Bytes per rank: at most N * itemsize.   Ref: Rabenseifner & Traeff 2004.
    """
    r, surplus = comm.rank, power_and_surplus(comm.size)[1]
    if r >= 2 * surplus:
        return r - surplus
    lower, upper = chunk(x, 2, 0), chunk(x, 2, 1)
    if r % 2 == 0:
        lower += comm.sendrecv(upper, r + 1, new_like(x, len(lower)), r + 1)
        comm.recv(upper, r + 1)
        return r // 2
    upper += comm.sendrecv(lower, r - 1, new_like(x, len(upper)), r - 1)
    comm.send(upper, r - 1)
    return None


def unfold(comm: Comm, x: Tensor) -> None:
    """Give the result to the ranks that were out. Steps: 1 if there are any.   Bytes per rank: N * itemsize."""
    r, surplus = comm.rank, power_and_surplus(comm.size)[1]
    if r < 2 * surplus:
        comm.send(x, r + 1) if r % 2 == 0 else comm.recv(x, r - 1)


def fold_steps(p: int, n: int) -> Iterator[Round]:
    """Yield the schedule of fold for n elements on p ranks."""
    surplus = power_and_surplus(p)[1]
    if surplus:
        r = np.arange(2 * surplus)
        odd, half = r % 2, (n + 1) // 2  # the lower half is the longer one
        yield Round(r, r ^ 1, np.where(odd, 0, half), np.where(odd, half, n), add=True)
        odds = r[1::2]
        yield Round(odds, odds - 1, np.full(surplus, half), np.full(surplus, n), add=False)


def unfold_steps(p: int, n: int) -> Iterator[Round]:
    """Yield the schedule of unfold."""
    surplus = power_and_surplus(p)[1]
    if surplus:
        evens = np.arange(0, 2 * surplus, 2)
        yield Round(evens, evens + 1, np.zeros(surplus, np.int64), np.full(surplus, n), add=False)

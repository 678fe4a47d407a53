"""Gather and scatter along the binomial tree of tree.py: chunks of a rank and of those behind it travel together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm, Work
from .steps import Round, edges
from .tree import bits_below

if TYPE_CHECKING:
    from torch import Tensor


def gather(comm: Comm, x: Tensor, root: int = 0) -> Tensor:
    """Bring chunk r of rank r's `x` to rank `root`, for every r.

        step 0    0 <-1- 1       2 <-3- 3      4 <-5- 5      6 <-7- 7      (p = 8, root 0: which chunks travel)
        step 1    0 <--2, 3----- 2             4 <--6, 7---- 6
        step 2    0 <--4, 5, 6, 7------------- 4

    Args:    x: (N,) tensor, rank r holds chunk r of it; the chunks of ranks behind r in the tree are overwritten.
             root: the same on every rank.
    Returns: x, whole on the root.
    Raises:  ValueError if the ranks' sizes differ; CommTimeout if a rank does not answer.
    Steps: ceil(log2 p).   Bytes per rank: at most N/2 * itemsize, the root none.   Ref: Thakur, Rabenseifner & Gropp
    2005.
    """
    p, v = comm.size, (comm.rank - root) % comm.size
    for bit in bits_below(p):
        if v % (2 * bit) == bit:
            _wait_for([comm.isend(part, (v - bit + root) % p) for part in _subtree(x, p, v, bit, root)])
        elif v % (2 * bit) == 0 and v + bit < p:
            _wait_for([comm.irecv(part, (v + bit + root) % p) for part in _subtree(x, p, v + bit, bit, root)])
    return x


def scatter(comm: Comm, x: Tensor, root: int = 0) -> Tensor:
    """Bring chunk r of the root's `x` to rank r, for every r: gather backwards.

        step 0    0 --4, 5, 6, 7-------------> 4                           (p = 8, root 0: which chunks travel)
        step 1    0 --2, 3-----> 2             4 --6, 7----> 6
        step 2    0 -1-> 1       2 -3-> 3      4 -5-> 5      6 -7-> 7

    Args:    x: (N,) tensor, read on the root; chunk r of rank r, and of the ranks behind it, is overwritten.
             root: the same on every rank.
    Returns: x, in which chunk r is valid on rank r.
    Raises:  as gather.
    Steps: ceil(log2 p).   Bytes per rank: the root sends (p - 1)/p * N * itemsize, the others less.   Ref: as gather.
    """
    p, v = comm.size, (comm.rank - root) % comm.size
    for bit in reversed(bits_below(p)):
        if v % (2 * bit) == bit:
            _wait_for([comm.irecv(part, (v - bit + root) % p) for part in _subtree(x, p, v, bit, root)])
        elif v % (2 * bit) == 0 and v + bit < p:
            _wait_for([comm.isend(part, (v + bit + root) % p) for part in _subtree(x, p, v + bit, bit, root)])
    return x


def _wait_for(works: Iterable[Work]) -> None:
    for work in works:
        work.wait()


def _subtree(x: Tensor, p: int, v: int, bit: int, root: int) -> list[Tensor]:
    """Return the chunks of the ranks v, ..., v + bit - 1 counted from the root: one view of x, or two at its end."""
    cut = edges(len(x), p)
    first = (v + root) % p
    last = first + min(bit, p - v)
    if last <= p:
        return [x[cut[first] : cut[last]]]
    return [x[cut[first] :], x[: cut[last - p]]]


def gather_steps(p: int, n: int, root: int = 0) -> Iterator[Round]:
    """Yield the schedule of gather for n elements on p ranks."""
    for bit in bits_below(p):
        child, parent, first, last = _edges_of_tree(p, n, root, bit)
        yield Round(child, parent, first, last, add=False)


def scatter_steps(p: int, n: int, root: int = 0) -> Iterator[Round]:
    """Yield the schedule of scatter."""
    for bit in reversed(bits_below(p)):
        child, parent, first, last = _edges_of_tree(p, n, root, bit)
        yield Round(parent, child, first, last, add=False)


def _edges_of_tree(p: int, n: int, root: int, bit: int) -> tuple[np.ndarray, ...]:
    """Return the pairs of ranks of one step, and the elements between them: child, parent, first, last."""
    cut = edges(n, p)
    v = np.arange(bit, p, 2 * bit)
    begin = (v + root) % p
    end = begin + np.minimum(bit, p - v)
    first, last = cut[begin], cut[np.minimum(end, p)]
    wraps = np.flatnonzero(end > p)  # one pair at most
    v = np.concatenate([v, v[wraps]])
    first = np.concatenate([first, np.zeros_like(wraps)])
    last = np.concatenate([last, cut[end[wraps] - p]])
    return (v + root) % p, (v - bit + root) % p, first, last

"""Partners of gossip: graphs over ranks, the weights of their averages, and how fast the ranks agree.

Gossip: ranks average with their neighbors only, and agree in the end without any all-reduce.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..collectives.widen import adds_in_float32
from ..comm.base import Comm
from ..comm.buffers import copy_of, new_like

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from torch import Tensor


Edge = tuple[int, int]


class Graph(NamedTuple):
    """neighbors[i]: the ranks that rank i exchanges messages with, in ascending order; i is a neighbor of each."""

    name: str
    neighbors: tuple[tuple[int, ...], ...]

    @property
    def n(self) -> int:
        """The number of ranks."""
        return len(self.neighbors)


def _connected_at_random(n: int, seed: int) -> list[Edge]:
    """Return a random tree, so that every rank reaches every other in the end, and half as many edges again."""
    rng = random.Random(seed)
    tree = [(rng.randrange(i), i) for i in range(1, n)]
    return tree + [(rng.randrange(n), rng.randrange(n)) for _ in range(n // 2)]


GRAPHS: dict[str, Callable[[int, int], list[Edge]]] = {  # name: f(n, seed) -> pairs of ranks that are neighbors
    "ring": lambda n, _: [(i, (i + 1) % n) for i in range(n)],
    "wheel": lambda n, _: [(0, i) for i in range(1, n)] + [(1 + i, 1 + (i + 1) % (n - 1)) for i in range(n - 1)],
    "star": lambda n, _: [(0, i) for i in range(1, n)],
    "random": _connected_at_random,
    "exponential": lambda n, _: [(i, (i + (1 << k)) % n) for i in range(n) for k in range((n - 1).bit_length())],
    "complete": lambda n, _: [(i, j) for j in range(n) for i in range(j)],
}


def graph(name: str, n: int, seed: int = 0) -> Graph:
    """Return the Graph of this name over n ranks; `seed` chooses among the random ones.

    Raises:  ValueError, LookupError.
    """
    if name not in GRAPHS:
        raise LookupError(f"no graph is called {name!r}: {', '.join(GRAPHS)}")
    if n < 1:
        raise ValueError(f"a graph needs at least 1 rank, got {n}")
    sets: list[set[int]] = [set() for _ in range(n)]
    for i, j in GRAPHS[name](n, seed):
        if i != j:
            sets[i].add(j)
            sets[j].add(i)
    return Graph(name, tuple(tuple(sorted(neighbors)) for neighbors in sets))


def metropolis(graph: Graph) -> np.ndarray:
    """Return the (n, n) matrix W of one gossip step, x <- W x: rank i gives weight W[i, j] to rank j's x.

        W[i, j] = 1 / (1 + max(neighbors of i, neighbors of j))     for neighbors
        W[i, i] = what is left to 1

    Rows and columns add up to 1 and W is symmetric, so that the mean over ranks stays.   Ref: Xiao & Boyd 2004.
    """
    weights = np.zeros((graph.n, graph.n))
    for i, mine in enumerate(graph.neighbors):
        for j in mine:
            weights[i, j] = 1 / (1 + max(len(mine), len(graph.neighbors[j])))
        weights[i, i] = 1 - weights[i].sum()
    return weights


def lambda2(weights: np.ndarray) -> float:
    """Return the second largest absolute eigenvalue of a symmetric W: a step shrinks disagreement by it, or more."""
    if len(weights) == 1:
        return 0.0
    return float(np.sort(np.abs(np.linalg.eigvalsh(weights)))[-2])


def one_peer_hop(n: int, step: int) -> int:
    """Return how many places away the peer of a step is: 1, 2, 4, ... below n, then 1 again; 0 for one rank."""
    hops = (n - 1).bit_length()
    return 1 << step % hops if hops else 0


def disagreement(x: ArrayLike) -> float:
    """Return how far ranks are apart: the norm of x minus its mean over ranks. x: (ranks, ...), row i of rank i."""
    rows = np.asarray(x, dtype=np.float64)
    return float(np.linalg.norm(rows - rows.mean(axis=0)))


@adds_in_float32
def gossip_step(comm: Comm, x: Tensor, graph: Graph) -> Tensor:
    """Move `x` towards the x of the neighbors; the mean over all ranks stays the same.

        x of rank i  <-  x_i + sum over neighbors j of W_ij (x_j - x_i)

    On the right, every x is the x from before the step. The Metropolis weight W_ij is
    1 / (1 + the larger of the degrees of i and j), so W_ij and W_ji are equal.

    Every rank exchanges x with one neighbor after the other, in ascending order. This
    order cannot deadlock. Sort the pairs (i, j), i < j: first all pairs with i = 0, then
    with i = 1, ... Look at the first pair that has not exchanged x yet. Each of its two
    ranks has exchanged x with all neighbors lower than the partner. So both ranks are
    ready for each other.

    Args:    x: (N,) float array or tensor, different on every rank; overwritten.
             graph: gossip.Graph, the same on every rank. graph.neighbors[i] lists the
             neighbors of rank i, in ascending order.
    Returns: x.
    Raises:  only what comm raises: CommTimeout if a neighbor does not answer.
    Steps: one exchange per neighbor.   Bytes per rank: neighbors * N * itemsize.
    Ref: Xiao & Boyd 2004; Lian et al. 2017.
    """
    before, theirs = 1 * x, 0 * x
    for j in graph.neighbors[comm.rank]:
        comm.sendrecv(before, j, theirs, j)
        most = max(len(graph.neighbors[comm.rank]), len(graph.neighbors[j]))
        x += (theirs - before) / (1 + most)
    return x


@adds_in_float32
def one_peer_step(comm: Comm, x: Tensor, step: int) -> Tensor:
    """Average `x` with the x of one rank only: its peer of this step.

    The peer is 1, 2, 4, ... places further on. With p = 4 ranks (0 <- 1: rank 0 receives
    from rank 1):

        step 0: 0 <- 1, 1 <- 2, 2 <- 3, 3 <- 0
        step 1: 0 <- 2, 1 <- 3, 2 <- 0, 3 <- 1

    With 2^k ranks, every rank holds the mean over all ranks after k steps.

    Args:    x: (N,) float array or tensor, different on every rank; overwritten.
             step: the number of steps before this one, the same on every rank.
    Returns: x.
    Raises:  only what comm raises: ValueError if x is longer on one rank than on
             another, CommTimeout if a rank does not answer before the deadline.
    Steps: one exchange.   Bytes per rank: N * itemsize.
    Ref: Assran et al. 2019; Ying et al. 2021 (one-peer exponential graph).
    """
    p, r, hop = comm.size, comm.rank, one_peer_hop(comm.size, step)
    if p > 1:
        x += comm.sendrecv(copy_of(x), (r - hop) % p, new_like(x, x.shape), (r + hop) % p)
        x /= 2
    return x

"""The cost of a collective on paper: steps, bytes and seconds, as functions of p ranks and n bytes per rank.

alpha: s per message; beta: s per byte sent; gamma: s per byte reduced. A test holds these numbers equal to what traced
runs of the collectives of the same names did. Where chunks or segments cannot all have the same size, the longest one
has up to one element more than its share, which is not counted here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from . import double_tree as double_trees
from .folding import power_and_surplus
from .grid import width
from .hierarchical import GROUP
from .pairwise import tournament_rounds


class _Steps(Protocol):
    """Steps and bytes of one rank from beginning to end."""

    @property
    def steps(self) -> float: ...

    @property
    def nbytes(self) -> float: ...


Priced: TypeAlias = Callable[[int, int], _Steps]


@dataclass(frozen=True)
class Cost:
    """The price of one call. "In a row" is along the chain of messages that takes longest, which sets the time.

    steps: messages in a row; nbytes: bytes sent in a row; nbytes_reduced: bytes added in a row; nbytes_sent: bytes that
    the rank sends that sends most; nbytes_total: bytes sent by all ranks together.
    """

    steps: int
    nbytes: float
    nbytes_reduced: float = 0.0
    nbytes_sent: float = 0.0
    nbytes_total: float = 0.0

    def seconds(self, alpha: float, beta: float, gamma: float = 0.0) -> float:
        return self.steps * alpha + self.nbytes * beta + self.nbytes_reduced * gamma


def _alike(p: int, steps: int, nbytes: float, nbytes_reduced: float = 0.0) -> Cost:
    """Return the cost if every rank does the same, one message at a time."""
    return Cost(steps, nbytes, nbytes_reduced, nbytes, p * nbytes)


def all_reduce_naive(p: int, n: float) -> Cost:
    """Return the cost of whole vectors around the ring."""
    return _alike(p, p - 1, (p - 1) * n, (p - 1) * n)


def reduce_scatter(p: int, n: float) -> Cost:
    """Return the cost of the ring."""
    return _alike(p, p - 1, (p - 1) / p * n, (p - 1) / p * n)


def all_gather(p: int, n: float) -> Cost:
    """Return the cost of the ring; n is the size of the gathered vector."""
    return _alike(p, p - 1, (p - 1) / p * n)


def all_reduce(p: int, n: float) -> Cost:
    """Return the cost of the ring: reduce-scatter, then all-gather."""
    return _alike(p, 2 * (p - 1), 2 * (p - 1) / p * n, (p - 1) / p * n)


def segmented_ring(p: int, n: float, segments: int = 4) -> Cost:
    """Return the cost: adding, but for the last segment, hides behind messages, as long as gamma is not above beta."""
    return _alike(p, (p - 1) * (segments + 1), 2 * (p - 1) / p * n, n / (p * segments) if p > 1 else 0.0)


def grid(p: int, n: float, inner: int | None = None) -> Cost:
    """Return the cost of rings along both dimensions: bytes over the slow one are 2(n/d1)(d2 - 1)/d2 of these."""
    d1 = width(p, inner)
    return _alike(p, 2 * (d1 - 1) + 2 * (p // d1 - 1), 2 * (p - 1) / p * n, (p - 1) / p * n)


def reduce(p: int, n: float) -> Cost:
    """Return the cost of a binomial tree."""
    depth = _log2_up(p)
    return Cost(depth, depth * n, depth * n, n if p > 1 else 0, (p - 1) * n)


def broadcast(p: int, n: float) -> Cost:
    """Return the cost of a binomial tree: the root sends in every step."""
    depth = _log2_up(p)
    return Cost(depth, depth * n, 0.0, depth * n, (p - 1) * n)


def tree(p: int, n: float) -> Cost:
    """Return the cost of a binomial tree: reduce, then broadcast."""
    depth = _log2_up(p)
    return Cost(2 * depth, 2 * depth * n, depth * n, depth * n, 2 * (p - 1) * n)


def gather(p: int, n: float) -> Cost:
    """Return the cost of a binomial tree; n is the size of the gathered vector.

    A chunk travels as many hops as its rank has binary ones.
    """
    depth = _log2_up(p)
    most = max(p - 2 ** (depth - 1), 2 ** (depth - 2)) if p > 1 else 0
    hops = sum(r.bit_count() for r in range(p))
    return Cost(depth, (p - 1) / p * n, 0.0, most / p * n, hops / p * n)


def scatter(p: int, n: float) -> Cost:
    """Return the cost of a binomial tree; n is the size of the root's vector."""
    backwards = gather(p, n)
    return Cost(backwards.steps, backwards.nbytes, 0.0, backwards.nbytes, backwards.nbytes_total)


def all_to_all(p: int, n: float) -> Cost:
    """Return the cost of pairs; if p is odd a rank pauses once, and the others once wait for it."""
    return Cost(tournament_rounds(p), tournament_rounds(p) / p * n, 0.0, (p - 1) / p * n, (p - 1) * n)


def recursive_doubling(p: int, n: float) -> Cost:
    """Return the cost, folded if p is no power of two."""
    power, _ = power_and_surplus(p)
    steps = _log2_up(power)
    return _folded(p, n, _alike(power, steps, steps * n, steps * n))


def halving_doubling(p: int, n: float) -> Cost:
    """Return the cost, folded if p is no power of two."""
    power, _ = power_and_surplus(p)
    return _folded(p, n, _alike(power, 2 * _log2_up(power), 2 * (power - 1) / power * n, (power - 1) / power * n))


def _folded(p: int, n: float, inner: Cost) -> Cost:
    """Return `inner`, the cost for a power of two, with fold before and unfold after it if p is none."""
    _, surplus = power_and_surplus(p)
    if not surplus:
        return inner
    # fold: halves are swapped and added, one goes back; unfold: the vector goes back
    return Cost(
        inner.steps + 3,
        inner.nbytes + n / 2 + n / 2 + n,
        inner.nbytes_reduced + n / 2,
        inner.nbytes_sent + n / 2 + n,
        inner.nbytes_total + surplus * (3 * n / 2 + n),
    )


def double_tree(p: int, n: float, segments: int = 4) -> Cost:
    """Return an upper bound: in the first and in the last turn, up and down, a message of one color may be missing."""
    pair = double_trees.trees(p)
    turns, _ = double_trees.turns_of(pair, segments)
    colors = 1 if p == 2 else 2
    steps, size = 2 * turns * colors, n / 2 / segments
    halves = int((pair[0].sends_of_each() + pair[1].sends_of_each()).max())
    return Cost(steps, steps * size, steps / 2 * size, halves * n / 2, 2 * (p - 1) * n)


def chain_broadcast(p: int, n: float, segments: int = 4) -> Cost:
    """Return the cost of a train of segments."""
    steps = segments + p - 2 if p > 1 else 0
    return Cost(steps, steps * n / segments, 0.0, n if p > 1 else 0, (p - 1) * n)


def chain_reduce(p: int, n: float, segments: int = 4) -> Cost:
    """Return the cost of a train of segments, each added at every stop."""
    steps = segments + p - 2 if p > 1 else 0
    return Cost(steps, steps * n / segments, steps * n / segments, n if p > 1 else 0, (p - 1) * n)


def hierarchical(p: int, n: float, group: int = GROUP, segments: int = 4) -> Cost:
    """Return the cost of chains inside nodes of `group` ranks, a binomial tree between them."""
    group = min(group, p)
    chain, up = chain_broadcast(group, n, segments), _log2_up(-(-p // group))
    most = max(up + (group > 1), 2 * (group > 2))  # vectors, of rank 0, or of a rank amid a chain
    row = 2 * chain.nbytes + 2 * up * n
    return Cost(2 * chain.steps + 2 * up, row, row / 2, most * n, 2 * (p - 1) * n)


def parameter_server(p: int, n: float, servers: int = 1) -> Cost:
    """Return the cost, exact for one server; for several a lower bound, since ranks must take turns at all of them."""
    part = n / servers
    most = (p - 1 + servers - 1) * part
    return Cost(2 * (p - 1), 2 * (p - 1) * part, (p - 1) * part, most, 2 * (p - 1) * n)


def _log2_up(p: int) -> int:
    """Return ceil(log2 p), for whole p above 0."""
    return (p - 1).bit_length()


def best_segments(hops: int, nbytes: float, alpha: float, beta: float, gamma: float = 0.0) -> int:
    """Return the number of segments c that makes (c + hops)(alpha + nbytes/c (beta + gamma)) least, at least 1.

    Args:    hops: p - 2 for a chain; depth - 1, with nbytes of half a vector, for the double tree; alpha above 0.
    """
    best = math.sqrt(max(hops, 0) * nbytes * (beta + gamma) / alpha)
    near = max(1, math.floor(best))
    return min((near, near + 1), key=lambda c: (c + hops) * (alpha + nbytes / c * (beta + gamma)))


def best_ring_segments(p: int, nbytes: float, alpha: float, gamma: float) -> int:
    """Return the segments c, 2 at least, that make (p-1) c alpha + nbytes/(p c) gamma least: see segmented_ring."""
    if p < 2:
        return 2
    near = max(2, math.floor(math.sqrt(nbytes * gamma / (p * (p - 1) * alpha))))
    return min((near, near + 1), key=lambda c: (p - 1) * c * alpha + nbytes / (p * c) * gamma)


def busbw_factor(collective: str, p: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests has it: comparable to a link's speed for any p."""
    factors = {
        "all_reduce": 2 * (p - 1) / p,
        "reduce_scatter": (p - 1) / p,
        "all_gather": (p - 1) / p,
        "all_to_all": (p - 1) / p,
        "gather": (p - 1) / p,
        "scatter": (p - 1) / p,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    return factors[collective]


def fit_alpha_beta(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit seconds = alpha + beta * size by least squares on the relative errors.

    A relative error is the error of a time divided by that time.

    Args:    sizes: list of message sizes in bytes, at least two of them different.
             seconds: list of the times of these messages in one direction, all > 0.
    Returns: (alpha s, beta s/byte).
    """
    beta, alpha = np.polyfit(sizes, seconds, 1, w=1 / np.array(seconds))
    return float(alpha), float(beta)


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Return `fit_alpha_beta` of what was measured: neither number is below 0, as noise may have it.

    Raises:  ValueError unless there are two different sizes, and a time for each.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(
            f"a line needs two different sizes and a time for each: got {len(sizes)} sizes, {len(seconds)} times"
        )
    alpha, beta = fit_alpha_beta(sizes, seconds)
    if beta < 0:  # then a level line fits best
        alpha, beta = float(np.average(seconds, weights=1 / np.array(seconds) ** 2)), 0.0
    return max(alpha, 0.0), beta


def choose(costs: Mapping[str, Priced], p: int, nbytes: int, alpha: float, beta: float) -> str:
    """Name the algorithm that takes the least time on `p` ranks.

        algorithm      .steps        .nbytes
        ring           2(p - 1)      2(p - 1)/p * nbytes      many short steps
        tree           2 log2(p)     2 log2(p) * nbytes       few long steps

    Args:    costs: {name: cost}, such as {"ring": ring_cost, "tree": tree_cost}.
             cost(p, nbytes) returns a record: .steps counts the messages that follow
             one another, and .nbytes counts the bytes in these messages.
             p: ranks; nbytes: bytes of the vector; alpha: s per step; beta: s per byte.
    Returns: the name of the fastest algorithm, a key of `costs`.
    """
    seconds = {}
    for name, cost in costs.items():
        seconds[name] = cost(p, nbytes).steps * alpha + cost(p, nbytes).nbytes * beta
    return min(seconds, key=seconds.__getitem__)

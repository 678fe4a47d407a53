"""How long a schedule takes on a network: the answer of simulated ranks, for 16,384 ranks in seconds.

`sim.run(p, steps.execute, x, rounds, network=network)` follows every message with a coroutine. Here, as long as no two
messages of a round share a link, a round of 16,384 messages is a few vector operations. On networks where messages may
meet each other they are followed one by one, by the compiled module; overtaking.py is the same in Python, which the
tests hold equal and which is used where there is no compiled module. All make the same additions in the same order, so
their times are equal, bit by bit.
"""

import itertools
from typing import NamedTuple

import numpy as np

from ..comm.network import Follower, Switch
from .overtaking import follow

MOST_HELD = 8_000_000  # messages in memory, some 100 bytes each


class Evaluation(NamedTuple):
    """seconds: virtual s at which the last rank ends; clocks: (p,) the same of every rank."""

    seconds: float
    clocks: np.ndarray


def evaluate(rounds, p, itemsize, network=None):
    """Time a schedule on `p` ranks.

    Args:    rounds: iterable of steps.Round; itemsize: bytes per element as it travels; network: default Switch().
    Returns: Evaluation, equal to `.seconds` of sim.run and to every rank's clock at the end of it.
    Raises:  ValueError for ranks that are not 0 to p - 1 or send to themselves; for messages that take no time but
             share links, whose order is not defined; for more than MOST_HELD messages of rounds that the first ranks
             have passed and others have not begun.
    """
    if p < 1:
        raise ValueError(f"a schedule needs at least 1 rank, got {p}")
    network = network or Switch()
    batches = with_patterns(rounds, p, itemsize, network)
    clocks = np.zeros(p)
    if p > 1 and not may_meet(network, p):
        for pattern, nbytes in batches:
            if pattern.shares_ports:  # the rest is for the follower, which begins at these clocks
                batches = itertools.chain([(pattern, nbytes)], batches)
                break
            book(clocks, pattern, nbytes)
        else:
            return Evaluation(float(clocks.max()), clocks)
    clocks = follow_all(batches, clocks, network)
    return Evaluation(float(clocks.max()), clocks)


class Pattern:
    """Who sends to whom in a round, and what each message meets on its way: the same for many rounds in a row."""

    def __init__(self, source, dest, p, network):
        self.source, self.dest = source.copy(), dest.copy()
        low, high = min(source.min(), dest.min()), max(source.max(), dest.max())
        if low < 0 or high >= p or (source == dest).any():
            raise ValueError(f"a schedule for {p:,} ranks has ranks {low} to {high}, or one that sends to itself")
        self.route = network.routes(self.source, self.dest, p)
        self.shares_ports = any(np.bincount(ranks).max() > 1 for ranks in (source, dest))

    def is_of(self, source, dest):
        return np.array_equal(source, self.source) and np.array_equal(dest, self.dest)


def with_patterns(rounds, p, itemsize, network):
    """(Pattern, (T,) bytes) of every round that has messages."""
    pattern = None
    for round_ in rounds:
        if len(round_.source):
            if pattern is None or not pattern.is_of(round_.source, round_.dest):
                pattern = Pattern(round_.source, round_.dest, p, network)
            yield pattern, (round_.last - round_.first) * itemsize


def may_meet(network, p):
    """Whether a message may wait for one that neither of its ends waits for: on a link that is not a rank's own port,
    or at the port of a rank whose send has ended before its message has."""
    return bool(network.eager_nbytes) or len(network.routes(0, 1, p).links) > 2


def book(clocks, pattern, nbytes):
    """Add one round to `clocks`, of messages that share no port. Each begins when both its ends are ready."""
    source, dest, route = pattern.source, pattern.dest, pattern.route
    end = np.maximum(clocks[source], clocks[dest]) + route.alpha + nbytes * route.beta
    clocks[source] = np.maximum(clocks[source], end)
    clocks[dest] = np.maximum(clocks[dest], end)


def follow_all(batches, clocks, network):
    """(p,) s at which every rank ends that begins at `clocks`. Each message is followed for itself."""
    try:
        follower = Follower(network, clocks)
    except ImportError:
        return follow(in_memory(batches), clocks, network)
    for pattern, nbytes in batches:
        follower.add(pattern.source, pattern.dest, nbytes, pattern.route)
        require_few(follower.held, network)
    return follower.end()


def in_memory(batches):
    """`batches` as a list of (source, dest, nbytes)."""
    return [(pattern.source, pattern.dest, nbytes) for pattern, nbytes in batches]


def require_few(held, network):
    if held > MOST_HELD:
        raise ValueError(
            f"some ranks have nothing to do in so many rounds that {held:,} messages on {network} are in memory, "
            f"more than {MOST_HELD:,}: take fewer ranks"
        )

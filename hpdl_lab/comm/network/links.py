"""Links, routes over them, and the timetable in which messages book them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

Ranks: TypeAlias = int | np.ndarray  # one, or many as an array; also numbers of links
Seconds: TypeAlias = float | np.ndarray


class Link(NamedTuple):
    """A direction of a cable or a bus, from "rank 3" to "switch" or "leaf 0" to "spine 1"; beta: s per byte."""

    source: str
    dest: str
    beta: float


class Route(NamedTuple):
    """Way of a message: alpha (s), beta (s per byte), and the numbers of the links that it crosses.

    `links` holds the sender's port first and the receiver's port last, which carry no messages of other ranks. A place
    without a link has -1. All values may be numbers, for one message, or arrays of one shape, for many.
    """

    alpha: Seconds
    beta: Seconds
    links: tuple[Ranks, ...]


class Booked(NamedTuple):
    """A Route of numbers, without places that have no link."""

    alpha: float
    beta: float
    links: tuple[int, ...]


class _Wired(Protocol):
    """A network, as far as a Timetable uses it."""

    def link_count(self, size: int) -> int: ...

    def routes(self, source: Ranks, dest: Ranks, size: int) -> Route: ...


class Free(Protocol):
    """Times in s at which links become free, by their numbers."""

    def __getitem__(self, link: int, /) -> float: ...

    def __setitem__(self, link: int, seconds: float, /) -> None: ...


class Timetable:
    """Times in s at which each link becomes free, for one run of `size` ranks on `network`."""

    def __init__(self, network: _Wired, size: int) -> None:
        self.network, self.size = network, size
        self.free = [0.0] * network.link_count(size)

    def route(self, source: int, dest: int) -> Booked:
        """Return the route of every message from `source` to `dest`."""
        alpha, beta, links = self.network.routes(source, dest, self.size)
        return Booked(float(alpha), float(beta), tuple(int(link) for link in links if link >= 0))

    def book(self, route: Booked, nbytes: int, ready: float) -> float:
        """Book a message that is ready at `ready` (s); returns when it has arrived."""
        return book(self.free, route.links, route.alpha, nbytes * route.beta, ready)[1]


def book(free: Free, links: Sequence[int], alpha: float, seconds: float, ready: float) -> tuple[float, float]:
    """Book `links` for a message whose bytes take `seconds` alone; returns (when it begins, when it has arrived).

    Args:    free: when each link becomes free, which changes; links: as in Booked.
    predict/messages.py makes the same additions in the same order, so that both agree bitwise.
    """
    start = ready
    for link in links:
        if free[link] > start:
            start = free[link]
    end = start + alpha + seconds
    for link in links[1:-1]:
        free[link] = start + seconds
    free[links[0]] = free[links[-1]] = end
    return start, end

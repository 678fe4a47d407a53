"""Links, routes over them, and the timetable in which messages book them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Link(NamedTuple):
    """One direction of a cable or a bus, from "rank 3" to "switch" or "leaf 0" to "spine 1"; beta: s per byte."""

    source: str
    dest: str
    beta: float


class Route(NamedTuple):
    """What a message meets on its way: alpha (s), beta (s per byte), and the numbers of the links that it crosses.

    `links` holds the sender's port first and the receiver's port last, which carry no messages of other ranks. A place
    without a link has -1. All values may be numbers, for one message, or arrays of one shape, for many.
    """

    alpha: float
    beta: float
    links: tuple


class Timetable:
    """When each link becomes free, in s, for one run of `size` ranks on `network`."""

    def __init__(self, network: Any, size: int) -> None:
        self.network, self.size = network, size
        self.free = [0.0] * network.link_count(size)

    def route(self, source: int, dest: int) -> Route:
        """The route of every message from `source` to `dest`, without places that have no link."""
        alpha, beta, links = self.network.routes(source, dest, self.size)
        return Route(float(alpha), float(beta), tuple(int(link) for link in links if link >= 0))

    def book(self, route: Route, nbytes: int, ready: float) -> float:
        """Book a message that is ready at `ready` (s); returns when it has arrived."""
        return book(self.free, route.links, route.alpha, nbytes * route.beta, ready)[1]


def book(free: Any, links: Sequence[int], alpha: float, seconds: float, ready: float) -> tuple[float, float]:
    """Book `links` for a message whose bytes take `seconds` alone; returns (when it begins, when it has arrived).

    Args:    free: when each link becomes free, which changes; links: of a Route, those that there are.
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

"""The messages of a schedule on a network, followed one by one by the compiled module."""

import numpy as np

from ...features import compiled_module


class Follower:
    """Books messages in the order in which they become ready, as simulated ranks do, for millions of them a second.

    Rounds are given one after the other and held until every rank has passed them. csrc/follower.cpp makes the
    additions of Timetable.book in the same order.
    """

    def __init__(self, network, clocks):
        """clocks: (p,) s at which each rank begins, on a network without messages. ImportError without the module."""
        self._core, self._eager_nbytes = compiled_module(), network.eager_nbytes
        self._follower = self._core.Follower(clocks, network.link_count(len(clocks)))
        self._route = self._pattern = None

    def add(self, source, dest, nbytes, route):
        """The next round: rank source[t] sends nbytes[t] to dest[t]; int64 (T,) each. `route` is theirs.

        Raises ValueError for messages that take no time.
        """
        if route is not self._route:
            columns = [np.ascontiguousarray(link) for link in route.links]
            self._pattern = self._core.Pattern(source, dest, np.ascontiguousarray(route.alpha, float), columns)
            self._route = route
        eager = nbytes <= self._eager_nbytes if self._eager_nbytes else None
        self._follower.add(self._pattern, nbytes * route.beta, eager)

    @property
    def held(self):
        """Messages in memory, some 100 bytes each."""
        return self._follower.held

    def end(self):
        """Book what is left, after the last round; returns (p,) s at which every rank ends."""
        self._follower.end()
        return self._follower.clocks()

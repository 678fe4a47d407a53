"""A schedule followed message by message, in the order in which messages become ready.

The readable definition of what csrc/follower.cpp does 1,000 times faster: tests/test_evaluate.py holds them equal.
"""

import heapq
from collections import deque

import numpy as np


def follow(batches, clocks, network):
    """(p,) s at which every rank ends.

    Args: batches: list of (source, dest, nbytes), int64 (T,) each, one per round. clocks: (p,) s at which they begin.
    """
    if not batches:
        return clocks
    run = _Run(batches, clocks, network)
    for rank in range(len(clocks)):
        run.begin(rank)
    while run.ready:
        run.book(*heapq.heappop(run.ready))
    return np.array(run.clocks)


class _Run:
    """Messages are numbered over all rounds. What a rank still has to do is a queue of its rounds."""

    def __init__(self, batches, clocks, network):
        self.clocks, p = clocks.tolist(), len(clocks)
        self.timetable = network.timetable(p)
        self.source, self.dest, self.nbytes = (
            np.concatenate([batch[i] for batch in batches]).tolist() for i in range(3)
        )
        self.eager = [0 < network.eager_nbytes >= nbytes for nbytes in self.nbytes]
        count = len(self.source)
        self.posted = [None] * count  # by whichever end is there: (s, rank, number of its post)
        self.arrived = [None] * count  # of eager messages that no receive waits for yet
        self.todo = [deque() for _ in range(p)]  # of each rank: one list of (message, "receives") per round
        self.open = [0] * p  # messages for which each rank waits in its round
        self.posts = [0] * p
        self.ready = []  # heap of (s, rank of the later end, its post, message)
        number = 0
        for source, dest, _ in batches:
            mine = {}
            for ranks, receives in ((dest, True), (source, False)):
                for i, rank in enumerate(ranks.tolist(), start=number):
                    mine.setdefault(rank, []).append((i, receives))
            for rank, posts in mine.items():
                self.todo[rank].append(posts)
            number += len(source)

    def begin(self, rank):
        """Let `rank` post its next round, and all that follow as long as it need not wait."""
        while self.todo[rank] and not self.open[rank]:
            now = self.clocks[rank]
            for message, receives in self.todo[rank].popleft():
                self.posts[rank] += 1
                mine = (now, rank, self.posts[rank])
                if not self.eager[message]:
                    self.open[rank] += 1
                    other = self.posted[message]
                    if other is None:
                        self.posted[message] = mine
                    else:
                        later = max(mine, other)
                        heapq.heappush(self.ready, (*later, message))
                elif not receives:
                    heapq.heappush(self.ready, (*mine, message))
                elif self.arrived[message] is None:
                    self.posted[message] = mine
                    self.open[rank] += 1
                else:
                    self.clocks[rank] = max(self.clocks[rank], self.arrived[message])

    def book(self, now, _rank, _post, message):
        """Book a message that has become ready, and let go on who waited for it alone."""
        source, dest = self.source[message], self.dest[message]
        end = self.timetable.book(self.timetable.route(source, dest), self.nbytes[message], now)
        if not end > now:
            raise ValueError(
                f"messages that take no time have no order in which to share links: {self.timetable.network}"
            )
        if not self.eager[message]:
            self.finish(source, end)
            self.finish(dest, end)
        elif self.posted[message] is None:
            self.arrived[message] = end
        else:
            self.finish(dest, end)

    def finish(self, rank, end):
        self.clocks[rank] = max(self.clocks[rank], end)
        self.open[rank] -= 1
        if not self.open[rank]:
            self.begin(rank)

"""The time of a schedule on a network, as simulated ranks take it, for 16,384 ranks in seconds.

`sim.run(p, steps.execute, x, rounds, network=network)` follows every message with a coroutine. Here a round of 16,384
messages is a few vector operations: all are booked at once, on each link in the order in which they become ready. That
is right as long as no message of a later round is ready before one that has booked the same link. If one is, its
rounds become tasks of a graph (graph.py), which finds the order. Both make the same additions in the same order as
simulated ranks, so their times are equal, bit for bit.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from ..comm.network import Network, Switch
from .graph import Need, TaskGraph

if TYPE_CHECKING:
    from ..comm.network.links import Route

MOST_HELD = 8_000_000  # messages in memory, of rounds that may still turn out to be booked too early
MOST_TASKS = 2_000_000  # messages of a graph, about 1 kB each


class _Evaluation(NamedTuple):
    """seconds: virtual s at which the last rank ends; clocks: (p,) the same of every rank."""

    seconds: float
    clocks: np.ndarray


class _Held(NamedTuple):
    """A round that is booked: when its last message was ready, and when ranks and links were free before it."""

    last: float
    clocks: np.ndarray
    free: np.ndarray
    pattern: Pattern
    nbytes: np.ndarray


class RoundLike(Protocol):
    """The messages of a round (collectives.steps.Round): (T,) int64 each."""

    @property
    def source(self) -> np.ndarray: ...

    @property
    def dest(self) -> np.ndarray: ...

    @property
    def first(self) -> np.ndarray: ...

    @property
    def last(self) -> np.ndarray: ...


def predict_rounds(rounds: Iterable[RoundLike], p: int, itemsize: int, network: Network | None = None) -> _Evaluation:
    """Time a schedule on `p` ranks.

    Args:    itemsize: bytes per element as it travels; network: default Switch().
    Returns: Evaluation, equal to `.seconds` of sim.run and to every rank's clock at the end of it.
    Raises:  ValueError for ranks that are not 0 to p - 1 or send to themselves; for messages that take no time but
             share links, whose order is not defined; for more than MOST_HELD messages of rounds that the first ranks
             have passed and others have not begun; for more than MOST_TASKS messages that become tasks.
    """
    if p < 1:
        raise ValueError(f"a schedule needs at least 1 rank, got {p}")
    network = network or Switch()
    batches = with_patterns(rounds, p, itemsize, network)
    booking = _Booking(p, network)
    if network.eager_nbytes:  # a rank may be far ahead of its messages
        return ended(_deliver(batches, booking.clocks, booking.free, network))
    shared = p > 1 and len(_routes_between(network, 0, 1, p).links) > 2  # links that are not a rank's own
    held: deque[_Held] = deque()
    count = 0  # messages in `held`
    for pattern, nbytes in batches:
        before = (booking.clocks.copy(), booking.free.copy()) if shared else None
        last = booking.book(pattern, nbytes, network)
        if before is None:
            continue
        held.append(_Held(last, *before, pattern, nbytes))
        count += len(nbytes)
        _require_few(count, MOST_HELD, network)
        if last == np.inf:
            rest = itertools.chain([(one.pattern, one.nbytes) for one in held], batches)
            return ended(_deliver(rest, held[0].clocks, held[0].free, network))
        least = booking.clocks.min()
        while held and held[0].last < least:  # nothing that comes can be ready before it
            count -= len(held.popleft().nbytes)
    return ended(booking.clocks)


def _routes_between(network: Network, source: int | np.ndarray, dest: int | np.ndarray, p: int) -> Route:
    return cast("Route", network.routes(source, dest, p))  # None: of a network that has no links


def ended(clocks: np.ndarray) -> _Evaluation:
    return _Evaluation(float(clocks.max()), clocks)


class Pattern:
    """The senders and receivers of a round, and the routes of its messages: the same for many rounds in a row.

    links: (width, T), one more than the network has if there is none.
    crossed: the rows of it with a link that two messages take.
    """

    def __init__(self, source: np.ndarray, dest: np.ndarray, p: int, network: Network) -> None:
        self.source, self.dest = source.copy(), dest.copy()
        low, high = min(source.min(), dest.min()), max(source.max(), dest.max())
        if low < 0 or high >= p or (source == dest).any():
            raise ValueError(f"a schedule for {p:,} ranks has ranks {low} to {high}, or one that sends to itself")
        alpha, self.beta, links = _routes_between(network, self.source, self.dest, p)
        self.alpha = alpha + np.zeros(len(source))
        self.links = np.stack([np.broadcast_to(link, source.shape) for link in links])
        self.nobody = network.link_count(p)
        self.links = np.where(self.links < 0, self.nobody, self.links)
        count = np.bincount(self.links.ravel(), minlength=self.nobody + 1)
        count[self.nobody] = 0
        self.crossed = self.links[(count[self.links] > 1).any(axis=1)]

    @cached_property
    def routes(self) -> list[tuple[int, ...]]:
        """The links of each message."""
        return [tuple(link for link in links if link != self.nobody) for links in self.links.T.tolist()]

    def is_of(self, source: np.ndarray, dest: np.ndarray) -> bool:
        return np.array_equal(source, self.source) and np.array_equal(dest, self.dest)


Batch: TypeAlias = tuple[Pattern, np.ndarray]  # a round, and the bytes of each of its messages


def with_patterns(rounds: Iterable[RoundLike], p: int, itemsize: float, network: Network) -> Iterator[Batch]:
    """Yield the Batch of every round that has messages."""
    pattern = None
    for round_ in rounds:
        if len(round_.source):
            if pattern is None or not pattern.is_of(round_.source, round_.dest):
                pattern = Pattern(round_.source, round_.dest, p, network)
            yield pattern, (round_.last - round_.first) * itemsize


class _Booking:
    """The times, in s, at which each rank and link is free, and at which the last message on a link was ready."""

    def __init__(self, p: int, network: Network) -> None:
        self.clocks = np.zeros(p)
        self.free, self.latest = np.full((2, network.link_count(p) + 1), -np.inf)  # the last one stands for no link

    def book(self, pattern: Pattern, nbytes: np.ndarray, network: Network) -> float:
        """Book a round; returns when its last message was ready.

        If a message is ready before one that has booked its link, return infinity and book nothing.
        """
        source, dest, links, clocks = pattern.source, pattern.dest, pattern.links, self.clocks
        ready, seconds = np.maximum(clocks[source], clocks[dest]), nbytes * pattern.beta
        if not len(pattern.crossed) and len(links) == 2:
            end = ready + pattern.alpha + seconds
        elif (ready <= self.latest[links[1:-1]]).any():
            return float("inf")
        elif len(pattern.crossed):
            _require_time(pattern.alpha + seconds, network)
            end = np.empty(len(ready))
            for wave in self.waves(pattern, ready):
                end[wave] = self.take(links[:, wave], ready[wave], pattern.alpha[wave], seconds[wave])
        else:
            end = self.take(links, ready, pattern.alpha, seconds)
        np.maximum.at(clocks, source, end)
        np.maximum.at(clocks, dest, end)
        return float(ready.max())

    def take(self, links: np.ndarray, ready: np.ndarray, alpha: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """Book messages that share no link as Timetable.book does (comm/network/links.py); returns the ends."""
        start = np.maximum(ready, self.free[links].max(axis=0))
        end = start + alpha + seconds
        self.free[links[1:-1]] = start + seconds
        self.latest[links[1:-1]] = ready
        self.free[links[0]] = self.free[links[-1]] = end
        self.free[-1] = self.latest[-1] = -np.inf
        return end

    def waves(self, pattern: Pattern, ready: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the messages whose links no message before them takes; then the ones behind these, and so on.

        At equal times the message goes first whose later end has the lower rank; of one rank, the one that it posted
        first: its receives, then its sends, in the order of the rows.
        """
        source, dest, count = pattern.source, pattern.dest, len(ready)
        ends = self.clocks[source], self.clocks[dest]
        sender = (ends[0] > ends[1]) | ((ends[0] == ends[1]) & (source > dest))
        post = np.arange(count) + count * sender
        todo = np.lexsort((post, np.where(sender, source, dest), ready))
        first_user = np.empty(len(self.free), np.int64)
        while len(todo):
            links, numbers = pattern.crossed[:, todo], np.arange(len(todo))
            first_user[links.T[::-1].ravel()] = np.repeat(numbers[::-1], len(links))  # the first one writes last
            first = ((first_user[links] == numbers) | (links == pattern.nobody)).all(axis=0)
            yield todo[first]
            todo = todo[~first]


def _deliver(batches: Iterable[Batch], clocks: np.ndarray, free: np.ndarray, network: Network) -> np.ndarray:
    """Return (p,) s at which every rank ends if it begins at `clocks`. Each message is a task of a graph."""
    graph = TaskGraph()
    for link in np.flatnonzero(free > 0).tolist():
        graph.add(float(free[link]), links=(link,))
    exchange = Exchange(graph, [graph.add(clock) for clock in clocks.tolist()], network)
    for pattern, nbytes in batches:
        exchange.add(pattern, nbytes)
    last = [exchange.end(rank) for rank in range(len(clocks))]
    ends = graph.times()[1]
    return np.array([ends[task] for task in last], dtype=float)


class Exchange:
    """Rounds of messages as tasks of a graph.

    A round of a rank begins when its last one has ended: with all that it received, and sent. An eager message is ready
    when it is sent, and only its receiver waits for it.
    """

    def __init__(self, graph: TaskGraph, began: list[int], network: Network) -> None:
        """Begin with no round. began: per rank, the task behind which its round begins."""
        self.graph, self.began, self.network = graph, began, network
        self.pending: list[list[int]] = [[] for _ in began]  # per rank: messages for which it waits in its round
        self.posts, self.count = [0] * len(began), 0

    def end(self, rank: int, *others: int) -> int:
        """Return the task with which the rank's round has ended, and these others; its next one begins behind it."""
        if self.pending[rank] or others:
            needs = [Need(task) for task in (self.began[rank], *self.pending[rank], *others)]
            self.began[rank], self.pending[rank] = self.graph.add(0, needs), []
        return self.began[rank]

    def turns(self, ranks: list[int]) -> list[int]:
        """Return the turns of the next posts of these ranks."""
        turns = []
        for rank in ranks:
            self.end(rank)
            self.posts[rank] += 1
            turns.append(rank << 32 | self.posts[rank])
        return turns

    def add(self, pattern: Pattern, nbytes: np.ndarray) -> None:
        """Add the next round. Every rank posts its receives, then its sends, each in the order of the rows."""
        self.count += len(nbytes)
        _require_few(self.count, MOST_TASKS, self.network)
        seconds = nbytes * pattern.beta
        _require_time(pattern.alpha + seconds, self.network)
        theirs, mine = self.turns(pattern.dest.tolist()), self.turns(pattern.source.tolist())
        eager = nbytes <= self.network.eager_nbytes if self.network.eager_nbytes else np.zeros(len(nbytes), bool)
        columns = (pattern.source, pattern.dest, eager, seconds, pattern.alpha)
        rows = zip(*(column.tolist() for column in columns), pattern.routes, mine, theirs, strict=True)
        for source, dest, early, cost, latency, links, sends, receives in rows:
            needs = [Need(self.began[source], False, sends)]
            if not early:
                needs.append(Need(self.began[dest], False, receives))
            task = self.graph.add(cost, needs, links=links, latency=latency)
            self.pending[dest].append(task)
            if not early:
                self.pending[source].append(task)


def _require_time(seconds: np.ndarray, network: Network) -> None:
    if not (seconds > 0).all():
        raise ValueError(f"messages that take no time have no order in which to share links: {network}")


def _require_few(held: int, most: int, network: Network) -> None:
    if held > most:
        raise ValueError(
            f"some ranks have nothing to do in so many rounds that {held:,} messages on {network} are in memory, "
            f"more than {most:,}: take fewer ranks"
        )

"""How long a schedule takes on a network: the answer of simulated ranks, for all messages of a round at once.

`sim.run(p, steps.execute, x, rounds, network=network)` follows every message with a coroutine; here a round of 16,384
messages is a few vector operations. Both make the same additions in the same order, so their times are equal, bit by
bit. Rounds are booked one after the other. Messages become ready in another order where a message of a later round is
ready before one of an earlier round on the same link; that is looked for on every link that is not one rank's own, and
where it happens all is done again, message by message (overtaking.py).
"""

import itertools
from typing import NamedTuple

import numpy as np

from ..comm.network import Switch
from .overtaking import follow

MOST_MESSAGES = 4_000_000  # that are followed one by one: about 20 s
WIDE = 32  # to book rows together is worth it where they are more than one in so many


class Evaluation(NamedTuple):
    """seconds: virtual s at which the last rank ends; clocks: (p,) the same of every rank."""

    seconds: float
    clocks: np.ndarray


def evaluate(rounds, p, itemsize, network=None):
    """Time a schedule on `p` ranks.

    Args:    rounds: iterable of steps.Round; itemsize: bytes per element as it travels; network: default Switch().
    Returns: Evaluation, equal to `.seconds` of sim.run and to every rank's clock at the end of it.
    Raises:  ValueError for ranks that are not 0 to p - 1 or send to themselves; for messages that take no time but
             share links, whose order is not defined; for more than MOST_MESSAGES messages that overtake each other.
    """
    if p < 1:
        raise ValueError(f"a schedule needs at least 1 rank, got {p}")
    lockstep = Lockstep(network or Switch(), p)
    batches = ((r.source, r.dest, (r.last - r.first) * itemsize) for r in rounds)
    kept, messages = [], 0  # for the case that all must be done again
    for batch in batches:
        messages += len(batch[0])
        if lockstep.may_overtake and messages <= MOST_MESSAGES:
            kept.append(tuple(array.copy() for array in batch))  # a schedule may use its arrays again
        if len(batch[0]) and not lockstep.book(*batch):
            every = few_enough(itertools.chain(kept, batches), messages - sum(len(b[0]) for b in kept), lockstep)
            lockstep.clocks = follow(every, p, lockstep.network)
            break
    return Evaluation(float(lockstep.clocks.max()), lockstep.clocks)


def few_enough(batches, forgotten, lockstep):
    """`batches` as a list. Raises ValueError where, with those `forgotten`, they are too many to follow one by one."""
    every, messages = [], forgotten
    for batch in batches:
        messages += len(batch[0])
        if messages > MOST_MESSAGES:
            raise ValueError(
                f"on {lockstep.p:,} ranks of {lockstep.network} messages of later rounds overtake earlier ones on "
                f"shared links: they must be followed one by one, and are more than {MOST_MESSAGES:,}: take fewer ranks"
            )
        every.append(tuple(array.copy() for array in batch))
    return every


class Pattern:
    """Who sends to whom in a round, and what that means for links: the same for many rounds in a row."""

    def __init__(self, network, p, source, dest):
        self.source, self.dest = source.copy(), dest.copy()
        low, high = min(source.min(), dest.min()), max(source.max(), dest.max())
        if low < 0 or high >= p or (source == dest).any():
            raise ValueError(f"a schedule for {p:,} ranks has ranks {low} to {high}, or one that sends to itself")
        none = network.link_count(p)  # the number of the link that stands for "no link"
        route = network.routes(source, dest, p)
        self.alpha, self.beta = route.alpha, route.beta
        self.links = [np.where(link < 0, none, link) for link in route.links]
        uses = sum(np.bincount(link, minlength=none + 1) for link in self.links)
        self.contended = bool((uses[:none] > 1).any())
        # A port that only its own rank uses is free when that rank is ready, unless sends end before their messages do.
        between = [link for link in self.links[1:-1] if (link < none).any()]
        self.watched = [self.links[0], *between, self.links[-1]] if network.eager_nbytes else between
        self.one_out, self.one_in = (np.bincount(ranks).max() == 1 for ranks in (source, dest))


class Lockstep:
    """The clocks of `p` ranks and what is booked on every link, round after round."""

    def __init__(self, network, p):
        self.network, self.p = network, p
        self.clocks = np.zeros(p)
        links = network.link_count(p) + 1
        self.free = np.zeros(links)  # when each link becomes free, s; the last one stands for "no link"
        # Of what was booked last on each link: when it was ready, and the rank of its later end.
        self.ready, self.rank = np.zeros(links), np.full(links, -1)
        self.pattern = None
        two_ports = p < 2 or len(network.routes(0, 1, p).links) == 2
        self.may_overtake = bool(network.eager_nbytes) or not two_ports

    def book(self, source, dest, nbytes):
        """Book one round. False, and nothing useful, where a message would come before one of an earlier round."""
        pattern = self.pattern
        if pattern is None or not (np.array_equal(source, pattern.source) and np.array_equal(dest, pattern.dest)):
            pattern = self.pattern = Pattern(self.network, self.p, source, dest)
        begun, waited = self.clocks[source], self.clocks[dest]
        eager = (nbytes <= self.network.eager_nbytes) if self.network.eager_nbytes else None
        ready = np.maximum(begun, waited) if eager is None else np.where(eager, begun, np.maximum(begun, waited))
        seconds = nbytes * pattern.beta
        if not pattern.contended and not pattern.watched:
            end = ready + pattern.alpha + seconds
        else:
            if not (pattern.alpha + seconds > 0).all():
                raise ValueError(f"messages that take no time have no order in which to share links: {self.network}")
            by_sender = (begun > waited) | ((begun == waited) & (source > dest))  # whose end is the later one
            if eager is not None:
                by_sender |= eager
            rank = np.where(by_sender, source, dest)
            if not self.in_order(pattern, ready, rank):
                return False
            # A rank posts its receives, then its sends, each in the order of the rows.
            post = np.arange(len(source)) + len(source) * by_sender
            order = np.lexsort((post, rank, ready)) if pattern.contended else slice(None)
            end = self.share(pattern, ready, seconds, order)
            if pattern.watched:
                # A link may be first for one row and last for another: rows in order, so that the latest stays.
                links = np.stack([link[order] for link in pattern.watched], axis=1)
                self.ready[links.ravel()] = np.repeat(ready[order], links.shape[1])
                self.rank[links.ravel()] = np.repeat(rank[order], links.shape[1])
            self.ready[-1], self.rank[-1] = 0.0, -1
        if eager is None:
            latest(self.clocks, source, end, pattern.one_out)
        else:
            latest(self.clocks, source[~eager], end[~eager], pattern.one_out)
        latest(self.clocks, dest, end, pattern.one_in)
        return True

    def in_order(self, pattern, ready, rank):
        """Whether every message comes after what earlier rounds have booked on its links."""
        return not any(
            ((ready < self.ready[link]) | ((ready == self.ready[link]) & (rank < self.rank[link]))).any()
            for link in pattern.watched
        )

    def share(self, pattern, ready, seconds, order):
        """Book rows in `order`, together those of which each is the next on all its links; returns (T,) arrivals."""
        end, none = np.empty(len(ready)), len(self.free) - 1
        if not pattern.contended:
            self.take(pattern, pattern.watched, ready, seconds, order, end)
            return end
        next_ = np.empty(len(self.free), np.int64)
        while len(order):
            place = np.arange(len(order))
            next_[:] = len(order)
            for link in pattern.links:
                np.minimum.at(next_, link[order], place)
            may = np.ones(len(order), bool)
            for link in pattern.links:
                may &= (next_[link[order]] == place) | (link[order] == none)
            if may.sum() * WIDE < len(order):
                self.share_one_by_one(pattern, ready, seconds, order, end)
                break
            self.take(pattern, pattern.links, ready, seconds, order[may], end)
            order = order[~may]
        return end

    def take(self, pattern, links, ready, seconds, rows, end):
        """Book `rows`, no two of which share one of `links`; writes their arrivals into `end`."""
        start = ready[rows]
        for link in links:
            start = np.maximum(start, self.free[link[rows]])
        end[rows] = start + pattern.alpha[rows] + seconds[rows]
        for link in links:
            port = link is pattern.links[0] or link is pattern.links[-1]
            self.free[link[rows]] = end[rows] if port else start + seconds[rows]
        self.free[-1] = 0.0

    def share_one_by_one(self, pattern, ready, seconds, order, end):
        """The same for long queues on one link, such as the port of a parameter server."""
        free = self.free.tolist()
        links = np.stack(pattern.links, axis=1)[order].tolist()
        rows = zip(ready[order].tolist(), pattern.alpha[order].tolist(), seconds[order].tolist(), links, strict=True)
        arrivals = []
        for start, alpha, body, (first, *between, last) in rows:
            start = max(start, free[first], free[last], *[free[link] for link in between])
            arrival = start + alpha + body
            for link in between:
                free[link] = start + body
            free[first] = free[last] = arrival
            free[-1] = 0.0
            arrivals.append(arrival)
        end[order] = arrivals
        self.free[:] = free


def latest(clocks, ranks, end, one_each):
    """clocks[ranks[i]] = end[i] where that is later; `one_each`: no rank occurs twice."""
    if one_each:
        clocks[ranks] = np.maximum(clocks[ranks], end)
    else:
        np.maximum.at(clocks, ranks, end)

"""Whose contributions every chunk of every rank holds, before a collective, after each of its steps, and at the end.

One picture language for all of them: `held[r, c, q]` is how many times chunk c on rank r contains the data of rank q.
All zeros: nothing that matters. A single one: a copy. Several: a sum.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..collectives.steps import edges

COLLECTIVES = (
    "broadcast", "scatter", "gather", "all_gather", "reduce", "reduce_scatter", "all_reduce", "all_to_all"
)  # fmt: skip


class Move(NamedTuple):
    """Chunks first .. last-1 of rank `source` go to `dest`, which adds or stores them at chunk `into` and those after.

    first, into: -1 where unknown.
    """

    source: int
    dest: int
    first: int
    last: int
    into: int
    nbytes: int
    add: bool


class Step(NamedTuple):
    """Moves that happen at the same time, and `held` (p, k, p) after them."""

    moves: tuple
    held: np.ndarray


@dataclass(frozen=True)
class Story:
    """A collective on p ranks as k chunks that move.

    name: what the title says; nbytes: of a vector.
    starts: (k + 1,) first elements of the chunks, then the end.
    held: (p, k, p) before the first step; wanted: (p, k, p) at the end of a right one, zeros where nothing is asked.
    """

    name: str
    nbytes: int
    starts: np.ndarray
    held: np.ndarray
    wanted: np.ndarray
    steps: tuple

    @property
    def p(self):
        return len(self.held)

    @property
    def k(self):
        return len(self.starts) - 1

    @property
    def noun(self):
        """What a row is called: a chunk is one of p equal ones."""
        return "chunk" if np.array_equal(self.starts, edges(self.starts[-1], self.p)) else "part"

    @property
    def adds(self):
        """Whether data of several ranks is added: then cells count contributions, else they name the rank."""
        return bool((self.wanted.sum(axis=2) > 1).any())

    @property
    def reach(self):
        """How many columns the longest arrow crosses."""
        return max((abs(move.dest - move.source) for step in self.steps for move in step.moves), default=1)

    def vectors_sent(self):
        """(p,) bytes sent by each rank, over the bytes of a vector."""
        sent = np.zeros(self.p)
        for move in (move for step in self.steps for move in step.moves):
            sent[move.source] += move.nbytes
        return sent / self.nbytes

    def state(self, i):
        """`held` after `i` steps."""
        return self.steps[i - 1].held if i else self.held


def before_and_after(collective, p, root=0):
    """What a collective is: two (p, p, p) arrays of whose data is where, over the p chunks of every rank.

    Raises:  ValueError for a name that is none of COLLECTIVES.
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"no collective is called {collective!r}: there are {', '.join(COLLECTIVES)}")
    ranks = np.arange(p)
    everywhere, own, at_root, gathered = (np.zeros((p, p, p), np.int8) for _ in range(4))
    everywhere[ranks, :, ranks] = 1  # every rank holds a vector of its own
    own[ranks, ranks, ranks] = 1  # rank r holds chunk r
    at_root[root, :, root] = 1  # only the root holds anything
    gathered[:, ranks, ranks] = 1  # chunk c is rank c's, on every rank
    only_root = (ranks == root)[:, None, None].astype(np.int8)
    mine = np.eye(p, dtype=np.int8)[:, :, None]  # chunk r of rank r
    of_root = (ranks == root).astype(np.int8)
    ones = np.ones((p, p, p), np.int8)
    return {
        "broadcast": (at_root, ones * of_root),
        "scatter": (at_root, mine * of_root),
        "gather": (own, gathered * only_root),
        "all_gather": (own, gathered),
        "reduce": (everywhere, ones * only_root),
        "reduce_scatter": (everywhere, mine * ones),
        "all_reduce": (everywhere, ones),
        "all_to_all": (everywhere, gathered),
    }[collective]


def of_rounds(name, collective, rounds, p, n, itemsize=4):
    """The Story of a schedule, an iterable of collectives.steps.Round, on vectors of n elements."""
    rounds = list(rounds)
    before, after = before_and_after(collective, p)
    starts = starts_of(n, rounds, edges(n, p) if differ_by_chunk(before) or differ_by_chunk(after) else ())
    chunk_of = np.searchsorted(edges(n, p)[1:], starts[:-1], side="right")
    held = start = before[:, chunk_of]
    arrived, steps = {}, []  # (rank, first element): what it received in its last round, which relays pass on
    for round_ in rounds:
        after_round, arrives, moves = held.copy(), {}, []
        for source, dest, first, last, into in messages_of(round_):
            a, b = np.searchsorted(starts, (first, last))
            c = int(np.searchsorted(starts, into))
            cargo = arrived[source, first] if round_.relay else held[source, a:b]
            arrives[dest, first] = cargo
            after_round[dest, c : c + b - a] = cargo + (after_round[dest, c : c + b - a] if round_.add else 0)
            if b > a:
                moves.append(Move(source, dest, int(a), int(b), c, (last - first) * itemsize, bool(round_.add)))
        held, arrived = after_round, {k: v for k, v in arrived.items() if k[0] not in round_.dest} | arrives
        if moves:
            steps.append(Step(tuple(moves), held))
    return Story(name, n * itemsize, starts, start, after[:, chunk_of], tuple(steps))


def messages_of(round_):
    """The rows of a Round as (source, dest, first, last, into) of ints."""
    into = round_.first if round_.into is None else round_.into
    columns = (round_.source, round_.dest, round_.first, round_.last, into)
    return zip(*(column.tolist() for column in columns), strict=True)


def starts_of(n, rounds, more=()):
    """Sorted first elements of the parts that n elements fall into where messages begin and end, and the end."""
    found = {0, n, *(int(e) for e in more)}
    for _, _, first, last, into in (row for round_ in rounds for row in messages_of(round_)):
        found |= {first, last, into, into + last - first}
    return np.array(sorted(found))


def differ_by_chunk(held):
    """Whether the chunks of some rank hold different things, so that their borders must be seen."""
    return bool((held != held[:, :1]).any())

"""A collective step by step: which rank sends which elements to whom, and whose data each chunk holds afterwards.

`held[r, c, q]` is how many times chunk c on rank r contains the data of rank q. All zeros: nothing that matters. A
single one: a copy. Several: a sum.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .expected import COLLECTIVES
from .steps import Move, Round, edges

if TYPE_CHECKING:
    from .table import Algorithm

PER_CHUNK = 12  # elements of a vector in a picture: chunks can be cut into 2, 3, 4 or 6
SEGMENTS = 2  # of a pipelined algorithm: enough to see that one follows the other


@dataclass(frozen=True)
class Dataflow:
    """A collective on p ranks as k chunks that move.

    name: what the title says; nbytes: of a vector.
    starts: (k + 1,) first elements of the chunks, then the end.
    wanted: (p, k, p) at the end of a right one, zeros if nothing is asked.
    steps: messages that are under way at the same time; held: (p, k, p) before the first step, and after each.
    """

    name: str
    nbytes: int
    starts: np.ndarray
    wanted: np.ndarray
    steps: tuple[tuple[Move, ...], ...]
    held: tuple[np.ndarray, ...]

    @property
    def p(self) -> int:
        return len(self.wanted)

    @property
    def k(self) -> int:
        return len(self.starts) - 1

    @property
    def noun(self) -> str:
        """Name of a row: "chunk" if they are p equal ones, else "part"."""
        return "chunk" if np.array_equal(self.starts, edges(self.starts[-1], self.p)) else "part"

    @property
    def adds(self) -> bool:
        """True if data of several ranks is added."""
        return bool((self.wanted.sum(axis=2) > 1).any())

    @property
    def reach(self) -> int:
        """Number of ranks that the longest message crosses."""
        return max((abs(move.dest - move.source) for move in itertools.chain(*self.steps)), default=1)

    def chunks(self, move: Move) -> tuple[int, int, int]:
        """Return (first, last, into) of a message as numbers of chunks."""
        first, last, into = np.searchsorted(self.starts, (move.first, move.last, move.into)).tolist()
        return first, last, into

    def vectors_sent(self) -> np.ndarray:
        """Return (p,) bytes sent by each rank, over the bytes of a vector."""
        sent = np.zeros(self.p)
        for move in itertools.chain(*self.steps):
            sent[move.source] += move.nbytes
        return sent / self.nbytes


def of_algorithm(algorithm: Algorithm, p: int, **options: int) -> Dataflow:
    """Return the Dataflow of a record of the table on p ranks. Raises ValueError for an option that it has not."""
    known = inspect.signature(algorithm.steps).parameters
    if unknown := set(options) - set(known):
        raise ValueError(f"{algorithm} has no option {', '.join(sorted(unknown))}: {', '.join([*known][2:]) or 'none'}")
    if "segments" in known:
        options = {"segments": SEGMENTS} | options
    n = PER_CHUNK * p
    return of_rounds(str(algorithm), algorithm.collective, algorithm.steps(p, n, **options), p, n)


def of_rounds(name: str, collective: str, rounds: Iterable[Round], p: int, n: int, itemsize: int = 4) -> Dataflow:
    """Return the Dataflow of a schedule on vectors of n elements."""
    steps, states = [], [before_and_after(collective, p)[0][:, np.searchsorted(edges(n, p)[1:], np.arange(n), "right")]]
    arrived: dict[tuple[int, int], np.ndarray] = {}  # by rank and first element: its last round, which relays send on
    for round_ in rounds:
        before, held, arrives = states[-1], states[-1].copy(), {}
        moves = [move for move in round_.moves(itemsize) if move.last > move.first]
        for move in moves:
            sent = arrived[move.source, move.first] if round_.relay else before[move.source, move.first : move.last]
            arrives[move.dest, move.first] = sent
            there = held[move.dest, move.into : move.into + len(sent)]
            there[:] = there + sent if move.add else sent
        arrived = {key: sent for key, sent in arrived.items() if key[0] not in round_.dest} | arrives
        if moves:
            steps.append(moves)
            states.append(held)
    return of_states(name, collective, steps, states, itemsize)


def of_states(
    name: str, collective: str, steps: Sequence[Sequence[Move]], states: Sequence[np.ndarray], itemsize: int
) -> Dataflow:
    """Return the Dataflow of messages and of `held` (p, n, p) of every element before the first step and after each.

    A chunk of it is as long as all its elements have one fate.
    """
    p, n = states[0].shape[:2]
    before, after = before_and_after(collective, p)
    differ = any((held != held[:, :1]).any() for held in (before, after))  # so that their borders must be seen
    borders = {0, n, *(edges(n, p).tolist() if differ else ())}
    for move in itertools.chain(*steps):
        for first in (move.first, move.into):
            borders |= {first, first + move.last - move.first} if first >= 0 else set()
    for held in states:
        borders |= set((1 + np.flatnonzero((held[:, 1:] != held[:, :-1]).any(axis=(0, 2)))).tolist())
    starts = np.array(sorted(borders))
    firsts = starts[:-1]
    wanted = after[:, np.searchsorted(edges(n, p)[1:], firsts, "right")]
    return Dataflow(
        name, n * itemsize, starts, wanted, tuple(map(tuple, steps)), tuple(held[:, firsts] for held in states)
    )


def before_and_after(collective: str, p: int, root: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return whose data is where before and after a collective: two (p, p, p) arrays over p chunks of every rank.

    Raises:  ValueError if the name is none of COLLECTIVES.
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

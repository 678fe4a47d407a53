"""A collective as data: messages, round by round. It is drawn, counted, timed and executed.

A schedule is an iterator of Rounds, made as it is asked for, so that one of 16,384 ranks fits into memory.

    p = 3, ring        Round 0                     Round 1
    rank 0 -> 1        chunk 2, which 1 adds       chunk 1, which 1 adds
    rank 1 -> 2        chunk 0, which 2 adds       chunk 2, which 2 adds        ... two more, which are stored
    rank 2 -> 0        chunk 1, which 0 adds       chunk 0, which 0 adds
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import ArrayT, new_like
from .widen import adds_in_float32

Index: TypeAlias = int | np.ndarray  # of an element, or one for each message


class Move(NamedTuple):
    """A message: elements first:last of `source` go to `dest`, which adds or stores them at `into` and after.

    first, into: -1 if they are no part of the vector.
    """

    source: int
    dest: int
    first: int
    last: int
    into: int
    add: bool
    nbytes: int


class Round(NamedTuple):
    """Messages that may be under way at the same time: row t is one of them. int64 arrays, (T,) each.

    Rank source[t] sends elements first[t]:last[t] of its x to rank dest[t], which adds them to the same elements of its
    own x, or stores them there. What is sent is the value before the round. Every rank posts its receives, then its
    sends, each in the order of the rows, waits for all of them, and goes on with its own next round: ranks without a
    message in a round do not wait in it.

    add:   what arrives is added, else stored. Rows are added in their order.
    into:  (T,) first element of x at which the receiver puts what arrives, if that is not `first`; None: it is.
    relay: send on what this rank received in its last round, not what its x holds now.
    """

    source: np.ndarray
    dest: np.ndarray
    first: np.ndarray
    last: np.ndarray
    add: bool
    into: np.ndarray | None = None
    relay: bool = False

    def moves(self, itemsize: int) -> list[Move]:
        """Return the rows, for elements of `itemsize` bytes."""
        columns = self.source, self.dest, self.first, self.last, self.first if self.into is None else self.into
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Move(a, b, i, j, into, bool(self.add), (j - i) * itemsize) for a, b, i, j, into in rows]


def edges(n: int, p: int) -> np.ndarray:
    """Return (p + 1,) int64: chunk i of n elements in p chunks is edges[i]:edges[i + 1], cut as by chunks.bounds."""
    i = np.arange(p + 1, dtype=np.int64)
    small, extra = divmod(n, p)
    return i * small + np.minimum(i, extra)


def segment(first: Index, last: Index, segments: int, s: Index) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements of segment s if first:last is cut into `segments` as by chunks.bounds: ints or arrays."""
    small, extra = np.divmod(last - first, segments)
    begin = first + s * small + np.minimum(s, extra)
    return begin, begin + small + (s < extra)


def among(rounds: Iterable[Round], groups: np.ndarray) -> Iterator[Round]:
    """Yield the same schedule in several groups of ranks at a time: groups[g, i] is rank i of group g."""
    for round_ in rounds:
        columns = [np.tile(column, len(groups)) for column in (round_.first, round_.last)]
        yield round_._replace(
            source=groups[:, round_.source].reshape(-1),
            dest=groups[:, round_.dest].reshape(-1),
            first=columns[0],
            last=columns[1],
            into=None if round_.into is None else np.tile(round_.into, len(groups)),
        )


def execute(comm: Comm, x: ArrayT, rounds: Iterable[Round]) -> ArrayT:
    """Do on this rank what the schedule says. Every rank calls it with the same schedule.

    Args:    x: (N,) contiguous tensor or array, different per rank, overwritten; 16-bit floats are added in float32 and
             rounded once, and travel as float32 in schedules that add.
             rounds: iterable of Round, which is used up.
    Returns: x.
    Raises:  what comm raises: CommTimeout, Deadlock, ValueError.
    Steps, Bytes per rank: as in the schedule.
    """
    left = iter(rounds)
    begin = next(left, None)
    if begin is None:
        return x
    execute_in = adds_in_float32(_follow_rounds) if begin.add else _follow_rounds
    return execute_in(comm, x, begin, left)


def _follow_rounds(comm: Comm, x: ArrayT, begin: Round, rounds: Iterable[Round]) -> ArrayT:
    """Do the same as `execute`, from the round `begin` on."""
    arrived: dict[int, Any] = {}  # first element: what this rank received in its last round
    _follow_round(comm, x, begin, arrived)
    for round_ in rounds:
        _follow_round(comm, x, round_, arrived)
    return x


def _follow_round(comm: Comm, x: Any, round_: Round, arrived: dict[int, Any]) -> None:
    """Do one round. `arrived` is what the last one brought, and becomes what this one brings."""
    receives, sends = np.flatnonzero(round_.dest == comm.rank), np.flatnonzero(round_.source == comm.rank)
    works, buffers = [], []
    for t in receives:
        first, last = int(round_.first[t]), int(round_.last[t])
        buffers.append(new_like(x, last - first))  # of its own: x may be on its way out
        works.append(comm.irecv(buffers[-1], int(round_.source[t])))
    for t in sends:
        first, last = int(round_.first[t]), int(round_.last[t])
        works.append(comm.isend(arrived[first] if round_.relay else x[first:last], int(round_.dest[t])))
    for work in works:
        work.wait()
    if len(receives):
        arrived.clear()
    for t, buffer in zip(receives, buffers, strict=True):
        first = int(round_.first[t] if round_.into is None else round_.into[t])
        arrived[int(round_.first[t])] = buffer
        if round_.add:
            x[first : first + len(buffer)] += buffer
        else:
            x[first : first + len(buffer)] = buffer

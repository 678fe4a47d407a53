"""The steps of a function: it runs on simulated ranks with data that tells whose contribution it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from ..collectives.steps import edges
from ..comm import sim
from ..comm.base import PerRank, Results, Work
from ..comm.buffers import to_numpy
from ..comm.network import Switch
from ..engines.messages import Function
from ..plots.collective import Move, Step, Story, before_and_after, differ_by_chunk

if TYPE_CHECKING:
    from ..comm.buffers import Array
    from ..comm.sim.run import SimComm, SimWork

BASE = 8  # rank q contributes 8**q: the digits of a sum say how often each rank is in it, exactly up to 16 ranks
PER_CHUNK = 12  # elements: chunks can be cut into 2, 3, 4 or 6
NETWORK = Switch(alpha=1.0, beta=0.0)  # every message takes one second of virtual time: steps are seconds

States = list[tuple[int, np.ndarray]]  # (ns, vector) of one rank


class Message(NamedTuple):
    """An end of a message: its ranks, the place of its buffer in the vector (-1: elsewhere), its elements, its work."""

    source: int
    dest: int
    first: int
    values: np.ndarray
    nbytes: int
    work: SimWork

    @property
    def end(self) -> float:
        """Virtual s, when the message has ended."""
        return round(cast(float, self.work.end), 6)


class Watch:
    """A record of the messages of one rank, and of its vector whenever it calls the communicator."""

    def __init__(self, comm: SimComm, x: Array) -> None:
        self.x = to_numpy(x)
        self.clock = comm.trace.clock
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.states: States = []
        self.follow(comm)

    def follow(self, comm: SimComm) -> None:
        """Put this watch between `comm`, and what is split from it, and the function."""
        isend, irecv, split = comm.isend, comm.irecv, comm.split

        def watched_isend(x: Array, to: int) -> Work:
            self.note()
            work = isend(x, to)
            self.sent.append(self.message(x, comm.members[comm.rank], comm.members[to], work))
            return Watched(work, self)

        def watched_irecv(x: Array, source: int) -> Work:
            self.note()
            work = irecv(x, source)
            self.received.append(self.message(x, comm.members[source], comm.members[comm.rank], work))
            return Watched(work, self)

        def watched_split(color: object, key: object = 0) -> SimComm:
            part = split(color, key)
            self.follow(part)
            return part

        comm.isend, comm.irecv = watched_isend, watched_irecv  # pyrefly: ignore[bad-assignment]
        comm.split = watched_split

    def message(self, x: Array, source: int, dest: int, work: SimWork) -> Message:
        """Return the Message of an end that has just been posted."""
        values = to_numpy(x)
        offset = values.__array_interface__["data"][0] - self.x.__array_interface__["data"][0]
        inside = values.size and 0 <= offset < self.x.nbytes
        first = offset // self.x.itemsize if inside else 0 if values.size == self.x.size else -1
        return Message(source, dest, int(first), values.reshape(-1).copy(), values.nbytes, work)

    def note(self) -> None:
        """Keep the vector as it is now."""
        self.states.append((self.clock(), self.x.copy()))


class Watched(Work):
    """A message under way, around whose end the vector is noted."""

    def __init__(self, work: Work, watch: Watch) -> None:
        self.work, self.watch = work, watch

    def wait(self) -> None:
        self.watch.note()
        self.work.wait()
        self.watch.note()

    def test(self) -> bool:
        return self.work.test()


def story_of(fn: Function, p: int, collective: str) -> Story:
    """Return the Story of `fn(comm, x)` on p simulated ranks, from its messages and its vectors.

    Messages that end at the same virtual time are one step. Raises what `fn` raises.
    """
    import torch

    before, after = before_and_after(collective, p)
    n = PER_CHUNK * p
    chunk_of = np.arange(n) // PER_CHUNK
    vectors = [torch.as_tensor(encoded(before[r, chunk_of])) for r in range(p)]

    def watched(comm: SimComm, x: Array) -> tuple[list[Message], list[Message], States]:
        watch = Watch(comm, x)
        watch.note()
        result = fn(comm, x)
        if result is not None and np.size(to_numpy(result)) == n:
            watch.x = to_numpy(result).reshape(-1)
        watch.note()
        return watch.sent, watch.received, watch.states

    ranks = sim.run(p, watched, PerRank(vectors), network=NETWORK)
    pairs = [pair for sent in (rank[0] for rank in ranks) for pair in matched(sent, ranks)]
    ends = sorted({sent.end for sent, _ in pairs})
    states = [np.array([decoded(state_at(ranks[r][2], end), p) for r in range(p)]) for end in (0.0, *ends)]
    borders = edges(n, p) if differ_by_chunk(before) or differ_by_chunk(after) else (0, n)
    starts = starts_of(borders, pairs, states)
    steps = []
    for end, state in zip(ends, states[1:], strict=True):
        moves = [move_of(*pair, starts, state) for pair in pairs if pair[0].end == end]
        steps.append(Step(tuple(moves), state[:, starts[:-1]]))
    name = getattr(fn, "__name__", "<object>")
    name = "your function" if name.startswith("<") else name
    where = chunk_of[starts[:-1]]
    return Story(name, n * 8, starts, states[0][:, starts[:-1]], after[:, where], tuple(steps))


def matched(sent: list[Message], ranks: Results) -> Iterator[tuple[Message, Message]]:
    """Yield (send, receive) of each message in `sent`: messages between two ranks arrive in their order."""
    waiting: dict[int, Iterator[Message]] = {}
    for send in sent:
        arriving = waiting.setdefault(send.dest, iter([m for m in ranks[send.dest][1] if m.source == send.source]))
        yield send, next(arriving)


def state_at(states: States, end_s: float) -> np.ndarray:
    """Return the vector of a rank at a virtual time, from its notes (ns, vector)."""
    return next(x for t_ns, x in reversed(states) if t_ns <= end_s * 1e9 + 1)


def starts_of(
    borders: Sequence[int] | np.ndarray, pairs: list[tuple[Message, Message]], states: list[np.ndarray]
) -> np.ndarray:
    """Return the sorted first elements of the parts in which all elements have one fate, and the end."""
    found = set(int(e) for e in borders)
    for send, receive in pairs:
        for m in (send, receive):
            found |= {m.first, m.first + len(m.values)} if m.first >= 0 and len(m.values) else set()
    for state in states:
        found |= set((1 + np.flatnonzero((state[:, 1:] != state[:, :-1]).any(axis=(0, 2)))).tolist())
    return np.array(sorted(found))


def move_of(send: Message, receive: Message, starts: np.ndarray, state: np.ndarray) -> Move:
    """Return the Move of a message, given the (p, n, p) contributions after its step."""
    n = len(send.values)
    into = receive.first if receive.first >= 0 else send.first
    add = False
    if into >= 0:
        there = state[send.dest, into : into + n]
        add = not np.array_equal(there, decoded(send.values, len(state))[: len(there)])
    first, last, into = (int(np.searchsorted(starts, e)) if e >= 0 else -1 for e in (send.first, send.first + n, into))
    return Move(send.source, send.dest, first, last if first >= 0 else -1, into, send.nbytes, add)


def encoded(held: np.ndarray) -> np.ndarray:
    """Return (n,) float64 from (n, p) how often each rank contributes."""
    return held @ float(BASE) ** np.arange(held.shape[1])


def decoded(values: np.ndarray, p: int) -> np.ndarray:
    """Return (n, p) how often each rank contributes to each of (n,) values; -1 for values that are no such sums."""
    values = np.asarray(values, np.float64)
    good = np.isfinite(values) & (values >= 0) & (values < float(BASE) ** p) & (values == np.rint(values))
    whole = np.where(good, values, 0).astype(np.int64)
    digits = whole[:, None] // BASE ** np.arange(p, dtype=np.int64) % BASE
    return np.where(good[:, None], digits, -1).astype(np.int8)

"""The steps of a function: it runs on simulated ranks with data that tells whose contribution it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from ..collectives.dataflow import PER_CHUNK, Dataflow, before_and_after, of_states
from ..collectives.steps import Move
from ..comm import sim
from ..comm.base import PerRank, Results, Work
from ..comm.buffers import to_numpy
from ..comm.network import Switch
from ..engines.messages import Function

if TYPE_CHECKING:
    from ..comm.buffers import Array
    from ..comm.sim.run import SimComm, SimWork

BASE = 8  # rank q contributes 8**q: the digits of a sum say how often each rank is in it, exactly up to 16 ranks
NETWORK = Switch(alpha=1.0, beta=0.0)  # every message takes one second of virtual time: steps are seconds

States = list[tuple[int, np.ndarray]]  # (ns, vector) of one rank


class _MessageEnd(NamedTuple):
    """An end of a message. first: of its buffer, in the vector, -1 if it is elsewhere; values: what the buffer held."""

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


class _RankRecord:
    """A record of the messages of one rank, and of its vector whenever it calls the communicator."""

    def __init__(self, comm: SimComm, x: Array) -> None:
        self.x = to_numpy(x)
        self.clock = comm.trace.clock
        self.sent: list[_MessageEnd] = []
        self.received: list[_MessageEnd] = []
        self.states: States = []
        self.attach(comm)

    def attach(self, comm: SimComm) -> None:
        """Put this record between `comm`, and what is split from it, and the function."""
        isend, irecv, split = comm.isend, comm.irecv, comm.split

        def watched_isend(x: Array, to: int) -> Work:
            self.keep()
            work = isend(x, to)
            self.sent.append(self.message(x, comm.members[comm.rank], comm.members[to], work))
            return _NotedWork(work, self)

        def watched_irecv(x: Array, source: int) -> Work:
            self.keep()
            work = irecv(x, source)
            self.received.append(self.message(x, comm.members[source], comm.members[comm.rank], work))
            return _NotedWork(work, self)

        def watched_split(color: object, key: object = 0) -> SimComm:
            part = split(color, key)
            self.attach(part)
            return part

        comm.isend, comm.irecv = watched_isend, watched_irecv  # pyrefly: ignore[bad-assignment]
        comm.split = watched_split

    def message(self, x: Array, source: int, dest: int, work: SimWork) -> _MessageEnd:
        """Return the _MessageEnd of an end that has just been posted."""
        values = to_numpy(x)
        offset = values.__array_interface__["data"][0] - self.x.__array_interface__["data"][0]
        inside = values.size and 0 <= offset < self.x.nbytes
        first = offset // self.x.itemsize if inside else 0 if values.size == self.x.size else -1
        return _MessageEnd(source, dest, int(first), values.reshape(-1).copy(), values.nbytes, work)

    def keep(self) -> None:
        """Keep the vector as it is now."""
        self.states.append((self.clock(), self.x.copy()))


class _NotedWork(Work):
    """A message under way, around whose end the vector is noted."""

    def __init__(self, work: Work, record: _RankRecord) -> None:
        self.work, self.record = work, record

    def wait(self) -> None:
        self.record.keep()
        self.work.wait()
        self.record.keep()

    def test(self) -> bool:
        return self.work.test()


def dataflow_of(fn: Function, p: int, collective: str) -> Dataflow:
    """Return the Dataflow of `fn(comm, x)` on p simulated ranks, from its messages and its vectors.

    Messages that end at the same virtual time are one step. Raises what `fn` raises.
    """
    import torch

    n = PER_CHUNK * p
    begin = before_and_after(collective, p)[0].repeat(PER_CHUNK, axis=1)
    vectors = [torch.as_tensor(encoded(held)) for held in begin]

    def watched(comm: SimComm, x: Array) -> tuple[list[_MessageEnd], list[_MessageEnd], States]:
        record = _RankRecord(comm, x)
        record.keep()
        result = fn(comm, x)
        if result is not None and np.size(to_numpy(result)) == n:
            record.x = to_numpy(result).reshape(-1)
        record.keep()
        return record.sent, record.received, record.states

    ranks = sim.run(p, watched, PerRank(vectors), network=NETWORK)
    pairs = [pair for sent in (rank[0] for rank in ranks) for pair in _matched(sent, ranks)]
    ends = sorted({sent.end for sent, _ in pairs})
    states = [np.array([decoded(_state_at(ranks[r][2], end), p) for r in range(p)]) for end in (0.0, *ends)]
    steps = [
        [_move_of(*pair, state) for pair in pairs if pair[0].end == end]
        for end, state in zip(ends, states[1:], strict=True)
    ]
    name = getattr(fn, "__name__", "<object>")
    name = "your function" if name.startswith("<") else name
    return of_states(name, collective, steps, states, 8)


def _matched(sent: list[_MessageEnd], ranks: Results) -> Iterator[tuple[_MessageEnd, _MessageEnd]]:
    """Yield (send, receive) of each message in `sent`: messages between two ranks arrive in their order."""
    waiting: dict[int, Iterator[_MessageEnd]] = {}
    for send in sent:
        arriving = waiting.setdefault(send.dest, iter([m for m in ranks[send.dest][1] if m.source == send.source]))
        yield send, next(arriving)


def _state_at(states: States, end_s: float) -> np.ndarray:
    """Return the vector of a rank at a virtual time, from its notes (ns, vector)."""
    return next(x for t_ns, x in reversed(states) if t_ns <= end_s * 1e9 + 1)


def _move_of(send: _MessageEnd, receive: _MessageEnd, state: np.ndarray) -> Move:
    """Return the Move of a message, given the (p, n, p) contributions after its step."""
    n = len(send.values)
    into = receive.first if receive.first >= 0 else send.first
    add = False
    if into >= 0:
        there = state[send.dest, into : into + n]
        add = not np.array_equal(there, decoded(send.values, len(state))[: len(there)])
    return Move(send.source, send.dest, send.first, send.first + n, into, add, send.nbytes)


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

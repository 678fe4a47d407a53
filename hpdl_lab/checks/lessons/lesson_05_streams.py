"""Notebook 05: an all-reduce for which a stream waits, and the host does not."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...collectives import ring
from ...comm import Results
from ...comm.base import Comm
from ...comm.network import Switch
from ...kernels.streams import SHOWN, Stream, all_reduce_on_stream
from ...trace import Event
from ..checkers import engine_facts, in_all_cases, with_ranks
from ..ranks import number, simulate
from ..record import Answer, Broken, Drawing, Exercise, Passed, Runner

RANKS = (2, 3, 1, 4)
N, VECTORS = 12, 2  # elements of a vector, and how many of them are produced, reduced and consumed
PRODUCE, CONSUME, OTHER = 4.0, 1.0, 10.0  # s of virtual time; an addition is free
NETWORK = Switch(alpha=0.5, beta=0.0)  # s of a message
ON_ENGINES = 1e-2  # s of real time for each s of virtual time


class _Streamed(NamedTuple):
    """consumed: (VECTORS, N) what later work on the stream has read; held: the vectors at the end.

    host: s that each call of the answer took; begun, ended: s at which the first all-reduce began, and the other
    stream's second work ended, since the first launch. reduced: how often all_reduce was called.
    """

    consumed: np.ndarray
    held: np.ndarray
    host: list[float]
    begun: float
    ended: float
    reduced: int


def _contribution(rank: int, i: int) -> np.ndarray:
    """Return (N,) the vector i that rank produces."""
    return np.random.default_rng([rank, i]).integers(-99, 100, N).astype(float)


def _use_streams(comm: Comm, fn: Answer) -> _Streamed:
    """Launch, call the answer, launch, for each vector; a second stream works all the while."""
    stream, other, comm_stream = (
        Stream(part, name)
        for part, name in ((comm.split(comm.rank), "compute"), (comm.split(comm.rank), "other"), (comm, "comm"))
    )
    vectors, read = torch.zeros(VECTORS, N, dtype=torch.float64), torch.zeros(VECTORS, N, dtype=torch.float64)
    begun, ended, host, clock = [], [], [], comm.trace.clock
    comm.barrier()
    start = clock()

    def produce(comm: Comm, x: Tensor, values: Tensor) -> None:
        with comm.trace.span("produce"):
            _pause(comm, PRODUCE)
            x.copy_(values)

    def consume(comm: Comm, x: Tensor, into: Tensor) -> None:
        with comm.trace.span("consume"):
            into.copy_(x)
            _pause(comm, CONSUME)

    def all_reduce(comm: Comm, x: Tensor) -> Tensor:
        begun.append(comm.trace.clock() - start)
        with comm.trace.span("all_reduce"):
            return ring.all_reduce(comm, x)

    def elsewhere(comm: Comm) -> None:
        with comm.trace.span("other work"):
            _pause(comm, OTHER)
        ended.append(comm.trace.clock() - start)

    other.launch(elsewhere)
    for i in range(VECTORS):
        stream.launch(produce, vectors[i], torch.from_numpy(_contribution(comm.rank, i)))
        called = clock()
        with comm.trace.span("launch"):
            fn(comm_stream, vectors[i], stream, all_reduce)
        host.append((clock() - called) / 1e9)
        stream.launch(consume, vectors[i], read[i])
    other.launch(elsewhere)
    for each in (stream, other, comm_stream):
        each.synchronize()
    return _Streamed(read.numpy(), vectors.numpy(), host, min(begun, default=0) / 1e9, ended[-1] / 1e9, len(begun))


def _pause(comm: Comm, seconds: float) -> None:
    """Spend virtual time; on real ranks a little of the other kind."""
    comm.compute(seconds)
    if not comm.simulated:
        time.sleep(ON_ENGINES * seconds)


def _check_on_stream(fn: Answer, runner: Runner = None) -> Passed:
    def judge(run: Results, where: str) -> None:
        _check_sums(run, where)
        _check_host(run, where)

    run = in_all_cases(fn, _use_streams, [(p,) for p in RANKS], with_ranks, judge, network=NETWORK)
    facts = [
        "sums: later work on the stream reads them, with 1 to 4 simulated ranks",
        f"order: the first all-reduce begins after {number(run[0].begun)} s, when its vector has been produced",
        f"the host waits for nothing, and another stream needs only the {number(run[0].ended)} s of its own work",
    ]
    facts += engine_facts(runner, _check_sums, _use_streams, fn)
    return Passed(*facts, run=Results(run, _on_streams(run)))


def _on_streams(run: Results) -> list[Event]:
    """Return the events of a run that are drawn: the streams of rank 0."""
    return [e for e in run.events if e.rank == 0 and e.op in SHOWN]


def _check_sums(run: Results, where: str) -> None:
    """Raise Broken unless later work has read the sums, and they are what the vectors hold."""
    p = len(run)
    for r, left in enumerate(run):
        if left.reduced > VECTORS:
            raise Broken(f"""twice: {where}, rank {r} calls all_reduce {left.reduced} times for {VECTORS} vectors: the
                sums are added up once more.""")
        for i in range(VECTORS):
            parts = [_contribution(rank, i) for rank in range(p)]
            total, name = sum(parts), ("first", "second")[i]
            if not np.array_equal(left.held[i], total):
                if not left.reduced:
                    raise Broken(f"""launch: {where}, nothing is added up: launch all_reduce on comm_stream, which gives
                        it the communicator of all {p} ranks.""")
                raise Broken(_why_wrong(left, parts, i, r, where, name))
            if not np.array_equal(left.consumed[i], total):
                raise Broken(f"""order: {where}, the {name} vector of rank {r} holds the sum at the end, but later
                    work on the stream has read it before: for which event does the stream have to wait?""")


def _why_wrong(left: _Streamed, parts: list[np.ndarray], i: int, r: int, where: str, name: str) -> str:
    """Return the sentence about a vector that does not hold the sum at the end."""
    if np.array_equal(left.held[i], parts[r]) and left.begun >= PRODUCE:
        return f"""communicator: {where}, the {name} vector of rank {r} holds what this rank has produced: all_reduce
            ran among fewer ranks. Only the communicator of comm_stream has all of them."""
    return f"""early: {where}, the {name} vector of rank {r} does not hold the sum at the end: all_reduce began after
        {number(left.begun)} s, and a vector is produced after {number(PRODUCE)} s. Let comm_stream wait for an event
        that `stream` has recorded behind the work that produces x."""


def _check_host(run: Results, where: str) -> None:
    """Raise Broken if the host waited in the answer."""
    for r, left in enumerate(run):
        if (slow := max(left.host)) > 0:
            broken = Broken(f"""host: {where}, the sums are right, but your call took {number(slow)} s on rank {r}: the
                host waited. wait_event makes a stream wait, synchronize and wait() the host.""")
            best = simulate(len(run), _use_streams, all_reduce_on_stream, network=NETWORK, evidence=False)
            broken.events, broken.expected, broken.size = _on_streams(run), _on_streams(best), len(run)
            raise broken


EXERCISES = (
    Exercise(
        "5.5",
        "an all-reduce for which a stream waits",
        all_reduce_on_stream,
        2,
        _check_on_stream,
        picture=Drawing("timeline", "Your streams on rank 0, in virtual time"),
    ),
)

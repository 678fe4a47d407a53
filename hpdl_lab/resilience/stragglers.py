"""The rank that slows a synchronous training: found in the events of all ranks, and dropped by backup workers.

The lanes come from a training step on simulated ranks, so that waits are real consequences, in virtual time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from ..comm import PerRank, sim
from ..comm.base import Comm
from ..comm.inject import Injection
from ..comm.network import Switch
from ..trace import Event

NETWORK = Switch(alpha=2e-6, beta=1 / 125e6)  # 1 Gbit/s
SECONDS = {"input": 0.012, "forward": 0.010, "backward": 0.020, "update": 0.001}  # of one step, if nothing is slow
OPS = {"core": ("forward", "backward", "update"), "link": ("send",), "input": ("input",)}
GRADIENT_BYTES, LOG_S = 900_000, 0.001
Lanes = list[list[list[Event]]]


def find_straggler(lanes: Lanes, least: float = 1.2) -> tuple[int, str]:
    """Name the rank that slows a synchronous training, and the cause.

        one step, rank r:  | input | forward | backward | ring all-reduce | update |

        send on rank r       |---------===============|
        recv on rank r + 1             |==============|      ===  the message moves

    In each step of the ring, each rank sends to the next rank and receives from the
    rank before it. Chunks have different sizes. All ranks share one clock.
    For each cause, measure what a rank usually needs in a step:
      core:  seconds of "forward", "backward" and "update" together;
      input: seconds of "input";
      link:  seconds per byte of the messages that the rank sends. A message moves
             from the moment when both "send" and "recv" have begun, until "recv" ends.
    The factor of a rank, for one cause, is its need divided by the median need of all
    ranks. A straggler is a rank with a factor of `least` or more.

    Args:    lanes: lanes[rank][step] is the list of trace.Events of one step, in the
             order of their begin. Event.t0_ns and t1_ns are begin and end, in ns.
             "send" and "recv" also have peer and nbytes. If rank a sends to rank b,
             the k-th "send" of a and the k-th "recv" of b are the same message.
             Other events may occur. A single step may be slow on any rank.
    Returns: (rank, cause) of the largest factor; cause is "core", "input" or "link";
             a slow link belongs to the rank that sends. (-1, "none") if no factor
             reaches `least`.
    Ref: Dean & Barroso 2013, The Tail at Scale (why one slow part slows the whole).
    """
    worst, found = least, (-1, "none")
    for cause, ops in OPS.items():
        usual = []
        for steps in lanes:
            needs = []
            for step, events in enumerate(steps):
                mine = [e for e in events if e.op in ops]
                seconds: float = sum(e.t1_ns - e.t0_ns for e in mine)
                if cause == "link":
                    theirs = [e for e in lanes[mine[0].peer][step] if e.op == "recv"]
                    seconds = sum(got.t1_ns - max(e.t0_ns, got.t0_ns) for e, got in zip(mine, theirs, strict=True))
                    seconds /= sum(e.nbytes for e in mine)
                needs.append(seconds)
            usual.append(median(needs))
        factor = max(usual) / median(usual)
        if factor >= worst:
            worst, found = factor, (usual.index(max(usual)), cause)
    return found


def _train(comm: Comm, seconds: Sequence[dict[str, float]], chunks: Sequence[int]) -> None:
    """Train for len(seconds) steps: seconds[step] = {op: s} of this rank; chunks: bytes of each chunk of the ring."""
    p, r = comm.size, comm.rank
    x = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in chunks]  # of any values
    y = [torch.empty_like(chunk) for chunk in x]
    for step in seconds:
        for op, s in step.items():
            if op == "update":
                for i in (*range(1, p), *range(p - 1)):  # reduce-scatter, all-gather; nothing is added
                    comm.sendrecv(x[(r - i) % p], (r + 1) % p, y[(r - i - 1) % p], (r - 1) % p)
            with comm.trace.span(op):
                comm.compute(s)


def make_lanes(
    ranks: int,
    slow_rank: int = -1,
    cause: str = "none",
    factor: float = 1.0,
    *,
    seed: int = 15,
    steps: int = 9,
    jitter: float = 0.06,
    part: str = "",
    decoy: int = -1,
    big: int = -1,
) -> Lanes:
    """Return the lanes of a training on simulated ranks, as find_straggler takes them.

    Args:    cause, factor: of slow_rank's slowness, and how many times as long that part takes;
             jitter: ranks differ by up to this share in each step, and one rank a step stalls; 0: none does;
             part: the op that loses all that a slow core loses; decoy: a rank that is extremely slow in one step;
             big: the chunk of the ring that has 70% of the bytes.
    """
    rng = random.Random(seed)
    seconds = [[{"log": LOG_S} | SECONDS if r == 0 else dict(SECONDS) for _ in range(steps)] for r in range(ranks)]
    for r, mine in enumerate(seconds):
        fair = 1 + rng.uniform(-jitter, jitter) / 4
        for step in mine:
            for op in SECONDS:
                step[op] *= fair * (1 + rng.uniform(-jitter, jitter))
            if r == slow_rank and cause != "link":
                whole = sum(step[op] for op in OPS[cause])
                for op in OPS[cause]:
                    step[op] += (factor - 1) * ((op == part) * whole if part else step[op])
    for i in range(steps if jitter else 0):
        seconds[(seed + i) % ranks][i][rng.choice(("input", "forward", "backward"))] *= rng.uniform(2.5, 5)
    if decoy >= 0:
        seconds[decoy][rng.randrange(steps)][rng.choice(("input", "backward"))] *= 60
    shares = [0.7 if r == big else (0.3 if big >= 0 else 1) / (ranks - (big >= 0)) for r in range(ranks)]
    chunks = [int(GRADIENT_BYTES * share * (1 + rng.uniform(-jitter, jitter))) for share in shares]
    link = {(slow_rank, (slow_rank + 1) % ranks): 1 / (factor * NETWORK.beta)} if cause == "link" else {}
    events = sim.run(ranks, _train, PerRank(seconds), chunks, network=NETWORK, inject=Injection(links=link)).events
    return _cut([e for e in events if e.op in {*SECONDS, "log", "send", "recv"}], ranks)


def _cut(events: Sequence[Event], ranks: int) -> Lanes:
    """Return lanes[rank][step] = events in the order of their begin; a step ends with "update"."""
    lanes: Lanes = [[] for _ in range(ranks)]
    for rank, steps in enumerate(lanes):
        ended = True
        for e in sorted((e for e in events if e.rank == rank), key=lambda e: (e.t0_ns, e.step)):
            if ended:
                steps.append([])
            steps[-1].append(e)
            ended = e.op == "update"
    return lanes


def unknown(seed: int, ranks: int = 6) -> Lanes:
    """Return the lanes of a training with a straggler that is drawn by chance."""
    rng = random.Random(seed)
    return make_lanes(ranks, rng.randrange(ranks), rng.choice([*OPS]), rng.uniform(1.6, 2.5), seed=seed)


def steps_per_s(lanes: Lanes) -> float:
    """Return the steps per second of a training, in virtual time: all ranks are equally fast."""
    begin, end = lanes[0][0][0].t0_ns, max(steps[-1][-1].t1_ns for steps in lanes)
    return 1e9 * len(lanes[0]) / (end - begin)


class Backup(NamedTuple):
    """The speed of a training with backup workers, and its losses on common and on rare examples."""

    steps_per_s: float
    common: float
    rare: float

    def __str__(self) -> str:
        return f"{self.steps_per_s:.1f} steps/s, loss {self.common:.3f} on common, {self.rare:.3f} on rare examples"


def backup_workers(backups: int, slowdown: float = 1.0, ranks: int = 8, steps: int = 300, seed: int = 15) -> Backup:
    """Train a regression with SGD, and use only the first `ranks - backups` gradients of each step.

    The last rank owns all rare examples, and takes `slowdown` times as long. All others have the common ones.

    Args:    ranks: all of them, with the backups.   Ref: Chen et al. 2016, arXiv:1604.00981.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ranks, 32, 2)) * [1, 0]  # the second feature is 0 in common examples
    x[-1, :, 1] = rng.normal(size=32)
    y = x @ [2.0, -1.0] + 0.1 * rng.normal(size=(ranks, 32))
    seconds = 0.1 * rng.lognormal(0, 0.3, size=(steps, ranks))
    seconds[:, -1] *= slowdown
    w, clock = np.zeros(2), 0.0
    for took in seconds:
        first = np.argsort(took)[: ranks - backups]
        clock += took[first[-1]]
        w -= 0.2 * np.mean([x[r].T @ (x[r] @ w - y[r]) / 32 for r in first], axis=0)
    loss = ((x @ w - y) ** 2).mean(axis=1)
    return Backup(steps / clock, float(loss[:-1].mean()), float(loss[-1]))

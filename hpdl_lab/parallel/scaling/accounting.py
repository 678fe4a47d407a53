"""An account of the time of training steps, from their events alone: computing, communication, and what of it shows.

    own thread   | forward | backward        | wait | update |        step: first span to the end of "update"
    background             |-- all_reduce --------|                   communication; the part below "wait" is exposed

The spans "input", "forward", "backward", "add gradients" and "update" of lane "" make a step. A wait for what runs
in the background is the event "wait". Every other operation is communication, in whichever lane.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from torch import nn

from ...comm.base import Comm
from ...trace import Event

SPANS = ("input", "forward", "backward", "add gradients", "update")
LAST = "update"
OWN_WORK = (*SPANS, "compute", "injected delay")  # in which a rank waits for no other
Interval = tuple[int, int]  # ns


class Account(NamedTuple):
    """Shares of all steps of all ranks.

    steps: on each rank; seconds: of a step, mean.
    exposed: communication that nothing hides, over time; overlap: hidden communication over all communication (0 if
    there is none); imbalance: computing time of the rank with most over the mean, 1 if all have the same.
    """

    steps: int
    seconds: float
    exposed: float
    overlap: float
    imbalance: float


def account(events: Iterable[Event]) -> Account | None:
    """Return the Account of the training steps in `events`; None if there is no whole step.

    Args:    events: list of trace.Event of all ranks, in any order.
    """
    ranks: dict[int, list[Event]] = {}
    for event in events:
        ranks.setdefault(event.rank, []).append(event)
    times = [_rank_times(mine) for _, mine in sorted(ranks.items())]  # (steps, 4) per rank
    steps = min((len(rows) for rows in times), default=0)
    if not steps:
        return None
    total, communication, exposed, compute = np.array([rows[:steps].sum(axis=0) for rows in times]).T  # (ranks,) ns
    return Account(
        steps,
        float(total.mean()) / steps / 1e9,
        _share(exposed.sum(), total.sum()),
        _share(communication.sum() - exposed.sum(), communication.sum()),
        float(compute.max() / compute.mean()) if compute.mean() else 1.0,
    )


def _share(part: float, whole: float) -> float:
    """Return part / whole, 0 if there is none."""
    return float(part / whole) if whole else 0.0


def _rank_times(events: Sequence[Event]) -> np.ndarray:
    """Return (steps, 4) ns of one rank: whole steps, communication, exposed communication, computing."""
    talk = [e for e in events if e.op not in OWN_WORK]
    exposed = union((e.t0_ns, e.t1_ns) for e in talk if not e.lane)
    communication = union((e.t0_ns, e.t1_ns) for e in talk)  # waits too: only what is not exposed is hidden
    rows = []
    for begin, end in steps_of(events):
        seen, all_ = (sum(b - a for a, b in inside(pieces, begin, end)) for pieces in (exposed, communication))
        rows.append((end - begin, all_, seen, end - begin - seen))
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def steps_of(events: Iterable[Event]) -> list[Interval]:
    """Return [(begin, end)] ns of one rank's whole steps: from the first span after an "update" to the next's end."""
    begin: int | None = None
    found = []
    for event in sorted((e for e in events if not e.lane and e.op in SPANS), key=lambda e: (e.t0_ns, e.step)):
        begin = event.t0_ns if begin is None else begin
        if event.op == LAST:
            found.append((begin, event.t1_ns))
            begin = None
    return found


def union(pieces: Iterable[Interval]) -> list[Interval]:
    """Return the same time as intervals that do not overlap, in rising order."""
    joined: list[Interval] = []
    for begin, end in sorted(pieces):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > begin:
            joined.append((begin, end))
    return joined


def inside(pieces: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    """Return the parts of `pieces` between `begin` and `end`."""
    return [(max(a, begin), min(b, end)) for a, b in pieces if a < end and b > begin]


@contextmanager
def spending(comm: Comm, model: nn.Module, forward: float, backward: float) -> Generator[None]:
    """Let every forward of `model` within take `forward` seconds of virtual time, and every backward `backward`.

    The time is shared among the layers in proportion to their parameters. Real ranks, which take their own time, are
    not slowed down. Enter it before strategy.start: a gradient is ready when its layer's time has been spent.

    Args:    forward, backward: seconds; backward of all layers that have a trainable parameter.
    """
    total = sum(p.numel() for p in model.parameters())
    if not total:
        raise ValueError("a model without parameters has no layers that could share its time")
    handles = []
    for module in model.modules():
        for param in module.parameters(recurse=False):
            share = param.numel() / total
            handles.append(module.register_forward_hook(lambda *_, s=share * forward: comm.compute(s)))
            if param.requires_grad:
                spend = lambda *_, s=share * backward: comm.compute(s)  # noqa: E731
                handles.append(param.register_post_accumulate_grad_hook(spend))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

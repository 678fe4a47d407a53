"""Fair timing: all candidates take turns, sample by sample, so that whatever else the machine does meets all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..comm.base import Comm


SAMPLES = 21  # per row; each lasts
SAMPLE_NS = 4_000_000  # or one call, if that takes longer
SLOW_NS = 50_000_000  # a call that takes longer is not called once more before each sample
SLOW_SAMPLES = 5
SLOW = 0  # instead of a number of calls


def in_turns(
    comm: Comm, runs: Sequence[Callable[[], object]], samples: int = SAMPLES, sample_ns: float = SAMPLE_NS
) -> list[np.ndarray]:
    """Return, for each of `runs`, functions of no arguments, (samples,) ns per call of the slowest rank. Collective."""
    calls = [_calls_per_sample(comm, run, sample_ns) for run in runs]
    found: list[list[float]] = [[] for _ in runs]
    for i in range(samples):
        for run, n, times in zip(runs, calls, found, strict=True):
            if i < SLOW_SAMPLES or n != SLOW:
                times.append(sample(comm, run, n))
    return [slowest(comm, times) for times in found]


def _calls_per_sample(comm: Comm, run: Callable[[], object], sample_ns: float) -> int:
    """Return as many as fit into `sample_ns` on the slowest rank, after a few that warm up; SLOW for a slow one."""
    calls = 1
    for _ in range(3):
        took = float(slowest(comm, [sample(comm, run, calls)])[0])
        if took > SLOW_NS:
            return SLOW
        calls = max(1, min(100_000, int(sample_ns / max(took, 1.0))))
    return calls


def sample(comm: Comm, run: Callable[[], object], calls: int = SLOW) -> float:
    """Return ns per call, of `calls` in a row; before them one that fetches the tensor into the cache."""
    if calls != SLOW:
        run()
    comm.barrier()
    begin = time.perf_counter_ns()
    for _ in range(max(1, calls)):
        run()
    return (time.perf_counter_ns() - begin) / max(1, calls)


def slowest(comm: Comm, values: Sequence[float]) -> np.ndarray:
    """Return the greatest over ranks of each of `values`."""
    return np.asarray(comm.all_gather(np.array(values, dtype=np.float64))).max(axis=0)


def quartiles(values: Iterable[float]) -> list[float]:
    """Return [median, p25, p75]."""
    p25, median, p75 = statistics.quantiles([*values], n=4, method="inclusive")
    return [round(median, 4), round(p25, 4), round(p75, 4)]

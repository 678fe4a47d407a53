"""Checkpoints against failures: the best interval between them, and a simulated month that shows its gain.

The times between the failures of a job come from a Weibull distribution with shape 0.7: many are short, and a few are
very long. Schroeder & Gibson 2006, "A large-scale study of failures in high-performance computing systems", found
shapes of 0.7 to 0.8 at Los Alamos National Laboratory.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache

SHAPE = 0.7  # of the Weibull distribution; 1 would be failures at random moments, without memory
MONTH_S = 30 * 86_400.0


def checkpoint_interval(write_s: float, rank_mtbf_s: float, ranks: int, slowdown: float = 1.0) -> float:
    """Compute the checkpoint interval that gives the highest goodput.

        synchronous  |--train--|write|--train--|write|--train--X
                               ^     |interval ^

        background   |--train--|--slower--|--train--|--slower--|--train--X
                               ^     interval       ^

        ^ the state is copied     X a rank fails

    Goodput is useful time over wall time. Training that is lost and repeated is not
    useful. If one rank fails, the job stops. Then all ranks restart from the last
    checkpoint that is completely written. This checkpoint holds the state at the start
    of its write.

    With synchronous writes, the interval is the time from the end of one write to the
    start of the next write. With writes in the background, the interval is the time
    from the start of one write to the start of the next write. Only one checkpoint is
    written at a time, so this interval is at least write_s.

    Args:    write_s: seconds to write one checkpoint, much less than the time between
             two failures of the job; rank_mtbf_s: mean time between failures (MTBF) of
             one rank, in s; ranks: number of ranks, which fail independently;
             slowdown: share of the training speed that is lost during a write: 1 for
             a synchronous write, between 0 and 1 for a write in the background.
    Returns: the interval, in s.
    Ref: Young 1974; Daly 2006.
    """
    mtbf_s = rank_mtbf_s / ranks
    standstill_s = slowdown * write_s  # the training time that one write costs
    # A failure loses half an interval on average: minimize standstill_s / interval + interval / (2 * mtbf_s).
    best = math.sqrt(2 * standstill_s * mtbf_s)
    return max(best, write_s)


@lru_cache(maxsize=4096)
def _failures(mtbf_s: float, seed: int) -> tuple[float, ...]:
    """Make up the moments, in s, at which a job fails within a month: on average, mtbf_s after the failure before."""
    rng, scale = random.Random(seed), mtbf_s / math.gamma(1 + 1 / SHAPE)
    moments = [rng.weibullvariate(scale, SHAPE)]
    while moments[-1] < MONTH_S:
        moments.append(moments[-1] + rng.weibullvariate(scale, SHAPE))
    return tuple(moments[:-1])


def _simulate(
    interval_s: float,
    write_s: float,
    rank_mtbf_s: float,
    ranks: int,
    slowdown: float = 1.0,
    restart_s: float = 300.0,
    seed: int = 0,
) -> float:
    """Return the goodput of a simulated month, failure by failure.

    Args:    interval_s: above 0; in the background, a shorter one than write_s means that a write begins as soon as
             the write before ends; restart_s: seconds from a failure to the first step after it, and a failure during
             a restart begins it again; seed: of the failures, which are the same for all intervals; the others: see
             `checkpoint_interval`.
    Returns: useful training in seconds at full speed, over the seconds of the month.
    """
    cycle = interval_s + write_s if slowdown == 1 else max(interval_s, write_s)  # from write to write

    def trained(seconds: float) -> float:
        """Return the training in so many seconds after a start; each cycle ends with a write."""
        cycles, rest = divmod(seconds, cycle)
        return seconds - slowdown * (cycles * write_s + max(0.0, rest - (cycle - write_s)))

    useful, start = 0.0, 0.0
    for failure in _failures(rank_mtbf_s / ranks, seed):
        if written := max(0.0, failure - start) // cycle:
            useful += trained(written * cycle - write_s)  # the state of the last whole write, when that began
        start = failure + restart_s
    return (useful + trained(max(0.0, MONTH_S - start))) / MONTH_S


def goodput(
    interval_s: float,
    write_s: float,
    rank_mtbf_s: float,
    ranks: int,
    slowdown: float = 1.0,
    restart_s: float = 300.0,
    months: int = 40,
) -> float:
    """Return the mean of `_simulate` over so many months, each with its own failures."""
    given = write_s, rank_mtbf_s, ranks, slowdown, restart_s
    return sum(_simulate(interval_s, *given, seed) for seed in range(months)) / months

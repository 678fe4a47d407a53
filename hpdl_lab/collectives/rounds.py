"""An attendee's ping-pong, checked and timed on its ranks, which need no more of this package for it than this file."""

from typing import Any

import numpy as np

from ..comm.base import Comm
from .sweep import WrongAnswer, own_times

MOST_ROUNDS = 500  # per sample


def time_rounds(comm: Comm, fn: Any, sizes: Any, samples: Any, sample_ns: Any) -> None:
    """Check and time `fn` for each size; rank 0 reports {size, seconds (median, one way), p25, p75}."""
    buffer = comm.allocate((max(sizes),), "uint8")
    for size in sizes:
        x = buffer[:size]
        require_echo(comm, fn, x)
        times = one_way(comm, fn, x, samples, sample_ns)
        if comm.rank == 0:
            p25, median, p75 = (float(q) for q in np.percentile(times, (25, 50, 75)))
            comm.report(size=size, seconds=median, p25=p25, p75=p75)


def require_echo(comm: Comm, fn: Any, x: Any) -> None:
    """Raise WrongAnswer, on every rank, unless rank 1 gets what rank 0 has, and rank 0 gets it back."""
    x[:] = 7 + comm.rank
    fn(comm, x)
    wrong = int((x != 7).sum()) if comm.rank < 2 else 0
    for rank, count in enumerate(np.asarray(comm.all_gather(np.array([wrong]))).reshape(-1)):
        if count:
            raise WrongAnswer(
                f"ping-pong is not timed: rank 0 sent {len(x):,} bytes with the value 7, and after a round "
                f"{count:,} of those on rank {rank} are something else; lab.check says why"
            )


def one_way(comm: Comm, fn: Any, x: Any, samples: Any, sample_ns: Any) -> Any:
    """(samples,) s of half a round on this rank's clock; each sample is many rounds where time is real."""
    return own_times(comm, fn, x, samples, sample_ns, MOST_ROUNDS) / 2e9

"""The one stopwatch: warm up, repeat, and keep every time; the median and the quartiles are what is reported."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Seconds of every repeat, in the order in which they were taken."""

    times: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def quartiles(self) -> tuple[float, float]:
        """(p25, p75), between which half of the times lie."""
        if len(self.times) == 1:
            return self.times[0], self.times[0]
        p25, _, p75 = statistics.quantiles(self.times, n=4, method="inclusive")
        return p25, p75

    @property
    def spread(self) -> float:
        """The distance of the quartiles as a share of the median: 0.1 is 10%."""
        p25, p75 = self.quartiles
        return (p75 - p25) / self.median if self.median else 0.0


def measure(
    fn: Callable[[], object],
    *,
    warmup: int = 1,
    repeats: int = 10,
    seconds: float | None = None,
    calls: int = 1,
    barrier: Callable[[], object] | None = None,
    clock: Callable[[], int] = time.monotonic_ns,
) -> Measured:
    """Time `fn()`: `warmup` calls that do not count, then `repeats` samples.

    Args:    seconds: stop when the samples together have taken so long, after one sample at the earliest. Leave it
             None if all ranks must take as many samples.
             calls: in one sample, whose time is divided by them; for calls that are shorter than the clock's grain.
             barrier: called before every sample, so that ranks begin together. clock: ns; a rank's is comm.trace.clock.
    """
    for _ in range(warmup):
        fn()
    times: list[float] = []
    while len(times) < repeats and (not times or seconds is None or sum(times) * calls < seconds):
        if barrier is not None:
            barrier()
        begin = clock()
        for _ in range(calls):
            fn()
        times.append((clock() - begin) / calls / 1e9)
    return Measured(tuple(times))

"""Two laws of scaling, fitted to speedups: Amdahl's for the same work on more ranks, Gustafson's for more work.

Both say that a share s of the time on one rank does not become shorter with more of them.

    Amdahl      speedup(p) = 1 / (s + (1 - s) / p)       strong scaling: never above 1 / s
    Gustafson   speedup(p) = s + (1 - s) p               weak scaling: work done per time, over one rank's

p is counted from the fewest ranks of the curve, whose speedup is 1.   Ref: Amdahl 1967; Gustafson 1988.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from ...units import counted

LEAST_POINTS = 3  # one point has the speedup 1, and a line through the other one alone would always fit
NO_LAW = 0.3  # a residual above which the curve is said to be none of this law
LAWS = {"strong": "Amdahl", "weak": "Gustafson"}
FORMULAS = {"strong": "1 / (s + (1-s)/p)", "weak": "s + (1-s) p"}


class Fit(NamedTuple):
    """A law fitted to a curve.

    kind: "strong" or "weak"; source: of the curve, "measured" or "simulated"; points: their number.
    serial: the share s, 0 to 1; residual: root of the mean square of (law / curve - 1). None if points are too few.
    fewest: ranks with the speedup 1.
    """

    kind: str
    source: str
    points: int
    serial: float | None = None
    residual: float | None = None
    fewest: int = 1

    @property
    def law(self) -> str:
        """ "Amdahl" for strong scaling, "Gustafson" for weak."""
        return LAWS[self.kind]

    def speedup(self, ranks: int) -> float:
        """Return the speedup by the law for `ranks`, with the s of this fit."""
        return SPEEDUPS[self.kind](cast(float, self.serial), ranks / self.fewest)

    @property
    def formula(self) -> str:
        """The result in words, or how many points are missing."""
        if self.serial is None or self.residual is None:
            return f"{self.source}: {counted(self.points, 'point')}, a fit needs {LEAST_POINTS}"
        suffix = ": not this law" if self.residual > NO_LAW else ""
        return f"{self.source}: s = {self.serial:.2%}, residual {self.residual:.1%}{suffix}"

    def __str__(self) -> str:
        return f"{self.law} {self.formula}"


def amdahl(serial: float, p: float) -> float:
    """Return the speedup of the same work on p times as many ranks."""
    return 1 / (serial + (1 - serial) / p)


def gustafson(serial: float, p: float) -> float:
    """Return the speedup, as work per time, of p times the work on p times as many ranks."""
    return serial + (1 - serial) * p


SPEEDUPS = {"strong": amdahl, "weak": gustafson}


def fit(kind: str, ranks: Sequence[int], speedups: Sequence[float], source: str = "measured") -> Fit:
    """Fit the law of this kind of scaling by least squares on relative errors.

        Amdahl      1 / speedup = 1/p + s (1 - 1/p): a straight line through the times
        Gustafson   speedup = p - s (p - 1)

    Relative errors, because the many ranks would count for nothing in the times, and the few ones for nothing in the
    speedups.

    Args:    ranks, speedups: the points of the curve, in rising order of ranks; the first speedup is 1.
    Returns: Fit, without numbers if there are fewer than LEAST_POINTS points.
    """
    if len(ranks) < LEAST_POINTS:
        return Fit(kind, source, len(ranks))
    p = [rank / ranks[0] for rank in ranks]
    if kind == "strong":
        rows = [(1 - 1 / q, 1 / s - 1 / q, s) for q, s in zip(p, speedups, strict=True)]
    else:
        rows = [(q - 1, q - s, 1 / s) for q, s in zip(p, speedups, strict=True)]
    square = sum((weight * x) ** 2 for x, _, weight in rows)
    serial = sum(weight**2 * x * y for x, y, weight in rows) / square
    serial = min(1.0, max(0.0, serial))
    errors = [SPEEDUPS[kind](serial, q) / s - 1 for q, s in zip(p, speedups, strict=True)]
    residual = (sum(error**2 for error in errors) / len(errors)) ** 0.5
    return Fit(kind, source, len(ranks), serial, residual, ranks[0])

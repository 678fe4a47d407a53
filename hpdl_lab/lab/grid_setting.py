"""One setting of the picker: a grid of the given number of ranks, and how a step is taken on it."""

import math
from typing import NamedTuple

from ..parallel.grid.machine import grid_of
from ..parallel.grid.search import grids
from ..schedules import CATALOG

AXES = ("dp", "pp", "tp")


class Setting(NamedTuple):
    """Sizes of three axes, whose product is the number of ranks; micro_batches of each replica."""

    dp: int
    pp: int
    tp: int
    micro_batches: int
    recompute: bool = False
    schedule: str = "1f1b"

    @property
    def grid(self):
        return grid_of(self.dp, self.pp, self.tp)

    @property
    def options(self):
        """Of grid.model.predict and of HybridParallel."""
        return {"schedule": self.schedule, "micro_batches": self.micro_batches, "recompute": self.recompute}

    def __str__(self):
        return f"dp={self.dp}, pp={self.pp}, tp={self.tp}"


def require_whole(value, name):
    """Raise ValueError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def changed(setting, ranks, **wanted):
    """The setting nearest to `setting` that has what is wanted, on `ranks` ranks.

    Axes that are not said follow those that are, so that the product stays right: as little as can be, in factors.
    Args:    wanted: dp, pp, tp, micro_batches, recompute, schedule: any of them.
    Raises:  ValueError with the numbers where no grid of so many ranks has these axes.
    """
    axes = {axis: wanted[axis] for axis in AXES if axis in wanted}
    if unknown := set(wanted) - set(Setting._fields):
        raise ValueError(f"a grid has no {', '.join(sorted(unknown))}: {', '.join(Setting._fields)} can be set")
    for name in (*AXES, "micro_batches"):
        require_whole(wanted.get(name, 1), name)
    if (name := wanted.get("schedule", "1f1b")) not in CATALOG:
        raise ValueError(f"no schedule is called {name!r}: {', '.join(CATALOG)}")
    if not isinstance(again := wanted.get("recompute", False), bool):
        raise ValueError(f"recompute must be True or False, got {again!r}")
    fitting = [g for g in grids(ranks) if all(g[AXES.index(axis)] == size for axis, size in axes.items())]
    if not fitting:
        told = " x ".join(f"{axis}={size}" for axis, size in axes.items())
        raise ValueError(f"{told} does not fit {ranks:,} ranks: the product of dp, pp and tp must be {ranks:,}")
    nearest = min(fitting, key=lambda g: sum(abs(math.log2(a / b)) for a, b in zip(g, setting, strict=False)))
    return setting._replace(**{**wanted, **dict(zip(AXES, nearest, strict=True))})


def followed(before, after, moved):
    """The sentence about axes that changed because another one was moved; "" where none did."""
    others = [axis for axis in AXES if axis not in moved and getattr(before, axis) != getattr(after, axis)]
    if not others:
        return ""
    told = " and ".join(f"{axis} {getattr(before, axis)} -> {getattr(after, axis)}" for axis in others)
    ranks = after.dp * after.pp * after.tp
    return f"{told}, so that {after.dp} x {after.pp} x {after.tp} = {ranks:,} ranks"


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]

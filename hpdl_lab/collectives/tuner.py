"""From times, measured or predicted, to a selection: which algorithm is fastest for which message size."""

import itertools
import math

from ..predict.messages import evaluate
from .selector import Range, Selection
from .table import find


def predict(names, sizes, p, network, itemsize=4):
    """Yield the rows that `fastest` needs for all-reduces on p simulated ranks, from their schedules: p may be 16,384.

    Args:    names: of the table; sizes: bytes, whole elements of `itemsize`; network: of comm.network.
    """
    for size in sizes:
        for name in names:
            seconds = evaluate(find(name).steps(p, size // itemsize), p, itemsize, network).seconds
            yield {"name": name, "size": size, "time_us": seconds * 1e6, "p75_us": seconds * 1e6}


def fastest(rows):
    """The Selection that takes at every measured size what was fastest there.

    Between two measured sizes with different winners the border is their geometric mean. A winner stays where the next
    one is better by less than it varies (its median is below the other's upper quartile): so noise makes no borders.

    Args:    rows: of sweep.sweep or predict, at least one: dicts with name, size, time_us and p75_us.
    """
    winners = []  # (size, name) in rising order
    for size, group in itertools.groupby(sorted(rows, key=lambda row: row["size"]), key=lambda row: row["size"]):
        times = {row["name"]: row for row in group}
        best = min(times.values(), key=lambda row: row["time_us"])
        before = times.get(winners[-1][1]) if winners else None
        stays = before is not None and before["time_us"] <= best["p75_us"]
        winners.append((size, before["name"] if stays else best["name"]))
    if not winners:
        raise ValueError("nothing was measured, so nothing can be selected")
    ranges, first = [], 0
    for (size, name), (next_size, next_name) in itertools.pairwise(winners):
        if name != next_name:
            border = math.isqrt(size * next_size)
            ranges.append(Range(name, first, border))
            first = border + 1
    return Selection((*ranges, Range(winners[-1][1], first, None)))

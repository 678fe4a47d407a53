"""From measured times to a selection: which algorithm is fastest for which message size."""

import itertools
import math

from .selector import Range, Selection


def fastest(rows):
    """The Selection that takes at every measured size what was fastest there.

    Between two measured sizes with different winners the border is their geometric mean. A winner stays where the next
    one is better by less than it varies (its median is below the other's upper quartile): so noise makes no borders.

    Args:    rows: of sweep.sweep, at least one: dicts with name, size, time_us and p75_us.
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

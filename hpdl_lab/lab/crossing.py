"""Where two measured curves meet."""

import math


def crossing(one, other):
    """The size at which two curves of time over size meet, between the sizes that both have; None where they do not.

    Between two sizes a curve is a straight line in a picture with logarithmic axes. Of several crossings the last one
    counts: below it noise decides.

    Args:    one, other: {bytes: time > 0}, of the same unit.
    Returns: bytes, a whole number.
    """
    sizes = sorted(set(one) & set(other))
    gaps = [math.log(one[n] / other[n]) for n in sizes]
    for i in range(len(sizes) - 1, 0, -1):
        before, after = gaps[i - 1], gaps[i]
        if before * after < 0:
            part = before / (before - after)
            return round(sizes[i - 1] * (sizes[i] / sizes[i - 1]) ** part)
        if after == 0:
            return sizes[i]
    return None

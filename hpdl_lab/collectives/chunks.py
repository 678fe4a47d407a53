"""How a vector of n elements is cut into p chunks, one per rank."""


def bounds(n, p, i):
    """First and one-past-last element of chunk i mod p: sizes differ by one at most, the longer ones first."""
    i %= p
    small, extra = divmod(n, p)
    start = i * small + min(i, extra)
    return start, start + small + (i < extra)


def chunk(x, p, i):
    """View of chunk i mod p of the flat tensor or array `x`."""
    start, stop = bounds(x.shape[0], p, i)  # len(x) of a tensor costs six times as much
    return x[start:stop]

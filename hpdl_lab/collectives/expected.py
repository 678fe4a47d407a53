"""The input and the expected result of a collective, in small whole numbers, which every dtype adds exactly.

All of them work on a flat vector of n elements, as collectives/table.py has it; chunk r is rank r's.
"""

import numpy as np

from .chunks import bounds

ADDS = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
CHUNKED = ("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")  # a chunk of the vector for each rank
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all")
NOT_YET = 7  # where a result will be: no other value is as odd


def brought(collective: str, n: int, p: int, rank: int, root: int = 0) -> np.ndarray:
    """Return (n,) values that `rank` begins with: its own everywhere it has something to say, NOT_YET elsewhere."""
    values = np.full(n, NOT_YET)
    begin, end = bounds(n, p, rank) if collective in ("all_gather", "gather") else (0, n)
    if collective not in ("broadcast", "scatter") or rank == root:
        values[begin:end] = np.arange(begin, end) % 61 + rank
    return values


def expected_result(collective: str, n: int, p: int, rank: int, root: int = 0) -> tuple[int, np.ndarray]:
    """Return (first, values): what `rank` ends with, from element `first` on. No values on ranks that get nothing."""
    index = np.arange(n)
    begin, end = bounds(n, p, rank)
    if collective in ("reduce", "gather") and rank != root:
        return 0, index[:0]
    if collective in ADDS:
        total = p * (index % 61) + p * (p - 1) // 2
        return (begin, total[begin:end]) if collective == "reduce_scatter" else (0, total)
    if collective in ("all_gather", "gather"):
        return 0, index % 61 + _owners(n, p)
    if collective == "all_to_all":  # chunk s came from rank s, where it was chunk `rank`
        source = np.concatenate([index[slice(*bounds(n, p, rank))]] * p)
        return 0, source % 61 + _owners(n, p)
    whole = index % 61 + root
    return (begin, whole[begin:end]) if collective == "scatter" else (0, whole)


def _owners(n: int, p: int) -> np.ndarray:
    """Return (n,) the rank to whose chunk each element belongs."""
    return np.repeat(np.arange(p), [end - begin for begin, end in (bounds(n, p, r) for r in range(p))])

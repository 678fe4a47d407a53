"""The cut of a vector of n elements into p chunks, one per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..comm.buffers import ArrayT


def bounds(n: int, p: int, i: int) -> tuple[int, int]:
    """Return the first and one-past-last element of chunk i mod p: sizes differ by at most one, the longer first."""
    i %= p
    small, extra = divmod(n, p)
    start = i * small + min(i, extra)
    return start, start + small + (i < extra)


def chunk(x: ArrayT, p: int, i: int) -> ArrayT:
    """Return the view of chunk i mod p of the flat tensor or array `x`."""
    start, stop = bounds(x.shape[0], p, i)  # len(x) of a tensor costs six times as much
    return x[start:stop]  # pyrefly: ignore[bad-return]

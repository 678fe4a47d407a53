"""All-reduce along two binary trees at a time: the steps of a tree and the bytes of a ring. NCCL's construction."""

import functools
from typing import NamedTuple

import numpy as np

from ..comm.buffers import new_like
from .chunks import bounds, chunk
from .steps import Round, segment
from .widen import adds_in_float32


class Tree(NamedTuple):
    """parent: (p,) int64, of each rank, -1 for the root; depth: (p,) int64, distance from the root."""

    parent: np.ndarray
    depth: np.ndarray

    def children(self, rank):
        """The ranks below `rank`: two at most."""
        return np.flatnonzero(self.parent == rank).tolist()


@functools.lru_cache(maxsize=64)
def trees(p):
    """The two trees over p ranks. Ranks in the middle of one are leaves of the other.

        p = 8, first tree               second tree: its mirror image where p is even, shifted by one where p is odd
        0-----------4                             3-----------7
                   / \\                           / \\
                  2   6                         1   5
                 / \\ / \\                       / \\ / \\
                1  3 5  7                     0  2 4  6

    Ref: Sanders, Speck & Traeff 2009; NCCL's trees.cc.
    """
    first, r = parents(p), np.arange(p)
    if p % 2 == 0:
        mirrored = first[::-1]
        second = np.where(mirrored < 0, -1, p - 1 - mirrored)
    else:
        shifted = first[(r - 1) % p]
        second = np.where(shifted < 0, -1, (shifted + 1) % p)
    return Tree(first, depths(first)), Tree(second, depths(second))


def parents(p):
    """(p,) the parent of each rank in the first tree: its lowest 1 moves up a place, or vanishes if that is too far."""
    r = np.arange(p)
    bit = r & -r
    up = (r ^ bit) | (bit << 1)
    up = np.where(up >= p, r ^ bit, up)
    up[0] = -1
    return up


def depths(parent):
    """(p,) the distance of each rank from the root."""
    depth, node = np.zeros_like(parent), parent.copy()
    while (node >= 0).any():
        depth += node >= 0
        node = np.where(node >= 0, parent[node], -1)
    return depth


@adds_in_float32
def all_reduce(comm, x, segments=4):
    """Add every rank's `x`, leaving the sum on every rank: one half of it along each tree of `trees`, in segments.

    Up: a rank adds what its children send and passes the sum on, segment after segment; then down the same way. A rank
    of one tree's middle sends a half up and receives two; as a leaf of the other it sends the other half. So every link
    is used in both directions, which a single tree does not achieve.

    Args:    x: (N,) tensor, different per rank, overwritten with the sum.
             segments: of each half, the same on every rank; cost.best_segments says how many.
    Returns: x, bitwise the same on every rank.
    Raises:  ValueError for less than one segment; CommTimeout if a rank does not answer.
    Steps: 2(segments + depth - 1) rounds of 2 messages, depth <= ceil(log2 p).   Bytes per rank: at most 2 N * itemsize
    where p is even.   Ref: Sanders, Speck & Traeff 2009; NCCL 2.4.
    """
    halves = chunk(x, 2, 0), chunk(x, 2, 1)
    pair = trees(comm.size)
    rounds, depth = rounds_of(pair, segments)
    arriving = [[new_like(x, bounds(len(half), segments, 0)[1]) for _ in range(2)] for half in halves]

    for i in range(rounds):  # up
        receives, sends, sums = [], [], []
        for tree, half, spare in zip(pair, halves, arriving, strict=True):
            below, mine = i - (depth - tree.depth[comm.rank] - 1), i - (depth - tree.depth[comm.rank])  # segments
            for child, buffer in zip(tree.children(comm.rank), spare, strict=False):
                if 0 <= below < segments:
                    theirs = chunk(half, segments, int(below))
                    receives.append(comm.irecv(buffer[: len(theirs)], child))
                    sums.append((theirs, buffer))
            if tree.parent[comm.rank] >= 0 and 0 <= mine < segments:
                sends.append((chunk(half, segments, int(mine)), int(tree.parent[comm.rank])))
        for work in receives + [comm.isend(part, to) for part, to in sends]:
            work.wait()
        for theirs, buffer in sums:
            theirs += buffer[: len(theirs)]

    for i in range(rounds):  # down
        receives, sends = [], []
        for tree, half in zip(pair, halves, strict=True):
            above, mine = i - (tree.depth[comm.rank] - 1), i - tree.depth[comm.rank]
            if tree.parent[comm.rank] >= 0 and 0 <= above < segments:
                receives.append(comm.irecv(chunk(half, segments, int(above)), int(tree.parent[comm.rank])))
            if 0 <= mine < segments:
                sends += [(chunk(half, segments, int(mine)), child) for child in tree.children(comm.rank)]
        for work in receives + [comm.isend(part, to) for part, to in sends]:
            work.wait()
    return x


def rounds_of(pair, segments):
    """(rounds up, and again down; depth of the deeper tree). Raises ValueError for less than one segment."""
    if segments < 1:
        raise ValueError(f"a half is cut into at least 1 segment, got {segments}")
    depth = int(max(tree.depth.max() for tree in pair))
    return segments + depth - 1 if depth else 0, depth


def all_reduce_steps(p, n, segments=4):
    """The schedule of all_reduce for n elements on p ranks: an iterator of steps.Round."""
    pair = trees(p)
    rounds, depth = rounds_of(pair, segments)
    middle = (n + 1) // 2
    for down in (False, True):
        for i in range(rounds):
            edges = [
                tree_messages(tree, first, last, segments, i, depth, down)
                for tree, first, last in zip(pair, (0, middle), (middle, n), strict=True)
            ]
            below, above, first, last = (np.concatenate(columns) for columns in zip(*edges, strict=True))
            source, dest = (above, below) if down else (below, above)
            yield Round(source, dest, first, last, add=not down)


def tree_messages(tree, first, last, segments, i, depth, down):
    """The messages of one tree in round i: lower ranks, upper ranks, and the elements first:last of their segments."""
    s = i - (tree.depth - 1 if down else depth - tree.depth)
    below = np.flatnonzero((tree.parent >= 0) & (s >= 0) & (s < segments))
    begin, end = segment(np.full(len(below), first), last, segments, s[below])
    return below, tree.parent[below], begin, end

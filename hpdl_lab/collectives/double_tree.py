"""All-reduce along two binary trees at a time: the steps of a tree and the bytes of a ring. NCCL's construction."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import new_like
from .chunks import chunk
from .steps import Round, segment
from .widen import adds_in_float32

if TYPE_CHECKING:
    from torch import Tensor


class Tree(NamedTuple):
    """A tree of ranks, (p,) int64 each: parent, -1 for the root; distance from the root; color of the way up.

    Colors are 0 and 1, so that in both trees together no rank has two ways down, or two ways up, of the same color.
    """

    parent: np.ndarray
    depth: np.ndarray
    color: np.ndarray

    def neighbors(self, rank: int) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
        """Return (parents, children) of `rank`, each a list for color 0 and one for color 1, of one rank at most.

        In both trees together it has no more than one parent and one child of a color.
        """
        parents: tuple[list[int], list[int]] = [], []
        children: tuple[list[int], list[int]] = [], []
        if self.parent[rank] >= 0:
            parents[self.color[rank]].append(int(self.parent[rank]))
        for child in np.flatnonzero(self.parent == rank).tolist():
            children[self.color[child]].append(child)
        return parents, children

    def sends_of_each(self) -> np.ndarray:
        """Return (p,) messages that each rank sends per segment: one up if it has a parent, one down to each child."""
        return (self.parent >= 0) + np.bincount(self.parent[self.parent >= 0], minlength=len(self.parent))


@functools.lru_cache(maxsize=64)
def trees(p: int) -> tuple[Tree, Tree]:
    """Return the two trees over p ranks. Ranks in the middle of one are leaves of the other.

        p = 8, first tree               second tree: its mirror image if p is even, shifted by one if it is odd
        0-----------4                             3-----------7
                   / \\                           / \\
                  2   6                         1   5
                 / \\ / \\                       / \\ / \\
                1  3 5  7                     0  2 4  6

    Ref: Sanders, Speck & Traeff 2009; NCCL's trees.cc.
    """
    first, r = _parents(p), np.arange(p)
    if p % 2 == 0:
        mirrored = first[::-1]
        second = np.where(mirrored < 0, -1, p - 1 - mirrored)
    else:
        shifted = first[(r - 1) % p]
        second = np.where(shifted < 0, -1, (shifted + 1) % p)
    color = _colors(first, second)
    return Tree(first, _depths(first), color[0]), Tree(second, _depths(second), color[1])


def _parents(p: int) -> np.ndarray:
    """Return (p,) the parent of each rank in the first tree: its lowest 1 moves up, or goes if that is too far."""
    r = np.arange(p)
    bit = r & -r
    up = (r ^ bit) | (bit << 1)
    up = np.where(up >= p, r ^ bit, up)
    up[0] = -1
    return up


def _depths(parent: np.ndarray) -> np.ndarray:
    """Return (p,) the distance of each rank from the root."""
    depth, node = np.zeros_like(parent), parent.copy()
    while (node >= 0).any():
        depth += node >= 0
        node = np.where(node >= 0, parent[node], -1)
    return depth


def _colors(*trees: np.ndarray) -> np.ndarray:
    """Return (2, p) a color for each rank's way up in each tree. Ways that must differ form paths and even circles."""
    color = np.full((len(trees), len(trees[0])), -1)
    ways = [(t, int(child)) for t, parent in enumerate(trees) for child in np.flatnonzero(parent >= 0)]
    at: dict[tuple[int, str], list[tuple[int, int]]] = {}  # (whom, as receiver or sender): its ways
    for t, child in ways:
        at.setdefault((int(trees[t][child]), "receives"), []).append((t, child))
        at.setdefault((child, "sends"), []).append((t, child))
    for way in ways:
        found = [(way, 0)] if color[way] < 0 else []
        while found:
            (t, child), c = found.pop()
            color[t, child] = c
            others = at[int(trees[t][child]), "receives"] + at[child, "sends"]
            found += [(other, 1 - c) for other in others if color[other] < 0]
    return color


@adds_in_float32
def all_reduce(comm: Comm, x: Tensor, segments: int = 4) -> Tensor:
    """Add every rank's `x`, leaving the sum on every rank: one half of it along each tree of `trees`, in segments.

        turn t, up:     children --segment t--> rank, which adds and sends segment t-1 --> parent      then down again
                        in each turn color 0 goes first, then color 1

    A rank in the middle of one tree receives its half twice and sends it up once; as a leaf of the other tree it sends
    that half up. So in each turn a link carries two messages out and two in, one of each color: no single tree does.

    Args:    x: (N,) tensor, different per rank, overwritten with the sum.
             segments: of each half, the same on every rank; cost.best_segments says how many.
    Returns: x, bitwise the same on every rank.
    Raises:  ValueError for less than one segment; CommTimeout if a rank does not answer.
    Steps: 4(segments + depth - 1), depth <= ceil(log2 p).   Bytes per rank: 2 N * itemsize at most, 2(p - 1) vectors in
    all.   Ref: Sanders, Speck & Traeff 2009; NCCL 2.4.
    """
    r, pair = comm.rank, trees(comm.size)
    turns, depth = turns_of(pair, segments)
    halves = zip(pair, (chunk(x, 2, 0), chunk(x, 2, 1)), strict=True)
    mine = [(half, int(tree.depth[r]), *tree.neighbors(r)) for tree, half in halves]
    for step, color in ((t, c) for t in range(turns) for c in (0, 1)):
        receives, sends = [], []
        for half, from_root, parents, children in mine:
            late = depth - from_root  # turns after the deepest rank
            receives += [(q, _piece(half, segments, step - late + 1)) for q in children[color]]
            sends += [(q, _piece(half, segments, step - late)) for q in parents[color]]
        _swap(comm, receives, sends, add=True)
    for step, color in ((t, c) for t in range(turns) for c in (0, 1)):
        receives, sends = [], []
        for half, late, parents, children in mine:  # turns after the root
            receives += [(q, _piece(half, segments, step - late + 1)) for q in parents[color]]
            sends += [(q, _piece(half, segments, step - late)) for q in children[color]]
        _swap(comm, receives, sends, add=False)
    return x


def turns_of(pair: tuple[Tree, ...], segments: int) -> tuple[int, int]:
    """Return (turns up, and again down; depth of the deeper tree). Raises ValueError for less than one segment."""
    if segments < 1:
        raise ValueError(f"a half is cut into at least 1 segment, got {segments}")
    depth = int(max(tree.depth.max() for tree in pair))
    return segments + depth - 1 if depth else 0, depth


def _piece(half: Tensor, segments: int, s: int) -> Tensor | None:
    """Return a view of segment s; None if there is no such segment: before the first, after the last."""
    return chunk(half, segments, s) if 0 <= s < segments else None


def _swap(
    comm: Comm, receives: list[tuple[int, Tensor | None]], sends: list[tuple[int, Tensor | None]], add: bool
) -> None:
    """Receive and send these (peer, view) at a time, if the view is not None; add, or store, what arrives."""
    coming = [(peer, view, new_like(view, len(view))) for peer, view in receives if view is not None]
    works = [comm.irecv(arriving, peer) for peer, _, arriving in coming]
    works += [comm.isend(view, peer) for peer, view in sends if view is not None]
    for work in works:
        work.wait()
    for _, view, arriving in coming:
        if add:
            view += arriving
        else:
            view[:] = arriving


def all_reduce_steps(p: int, n: int, segments: int = 4) -> Iterator[Round]:
    """Yield the schedule of all_reduce for n elements on p ranks."""
    pair, middle = trees(p), (n + 1) // 2
    turns, depth = turns_of(pair, segments)
    for down in (False, True):
        for step, color in ((t, c) for t in range(turns) for c in (0, 1)):
            columns = [
                _tree_messages(
                    tree, first, last, segments, step - (tree.depth - 1 if down else depth - tree.depth), color
                )
                for tree, first, last in zip(pair, (0, middle), (middle, n), strict=True)
            ]
            below, above, first, last = (np.concatenate(column) for column in zip(*columns, strict=True))
            source, dest = (above, below) if down else (below, above)
            yield Round(source, dest, first, last, add=not down)


def _tree_messages(
    tree: Tree, first: int, last: int, segments: int, s: np.ndarray, color: int
) -> tuple[np.ndarray, ...]:
    """Return the ways of one color on which a segment travels: lower ranks, upper ranks, elements first:last.

    s: (p,) which segment of first:last each rank has on its way up, below 0 or above the last if it has none.
    """
    below = np.flatnonzero((tree.parent >= 0) & (tree.color == color) & (s >= 0) & (s < segments))
    begin, end = segment(np.full(len(below), first), last, segments, s[below])
    return below, tree.parent[below], begin, end

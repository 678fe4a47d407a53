"""NCCL's two trees: both reach every rank, are not deep, and share the work."""

import math

import numpy as np
import pytest

from hpdl_lab.collectives.double_tree import trees


@pytest.mark.parametrize("p", [*range(1, 70), 127, 128, 1000, 1023])
def test_both_trees_are_valid_and_share_the_work(p):
    middles = []
    for tree in trees(p):
        assert np.count_nonzero(tree.parent < 0) == 1
        up = tree.parent >= 0
        assert (tree.depth[up] == tree.depth[tree.parent[up]] + 1).all() and tree.depth[~up] == 0
        assert tree.depth.max() <= math.ceil(math.log2(p))
        assert np.bincount(tree.parent[up], minlength=1).max(initial=0) <= 2
        middles.append(set(tree.parent[up].tolist()))
    assert len(middles[0] & middles[1]) == (p % 2 if p > 1 else 0)


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8, 13, 16, 33, 100])
def test_nobody_has_two_ways_of_one_color(p):
    for color in (0, 1):
        up = [(r, q) for tree in trees(p) for r in range(p) for q in tree.neighbors(r)[0][color]]
        down = [(r, q) for tree in trees(p) for r in range(p) for q in tree.neighbors(r)[1][color]]
        assert len({r for r, _ in up}) == len({q for _, q in up}) == len(up)
        assert sorted(up) == sorted((q, r) for r, q in down)
    assert sum(len(ways) for tree in trees(p) for r in range(p) for ways in tree.neighbors(r)[0]) == 2 * (p - 1)


def test_the_first_tree_is_that_of_the_picture_in_the_docstring():
    first, second = trees(8)
    assert first.parent.tolist() == [-1, 2, 4, 2, 0, 6, 4, 6]
    assert second.parent.tolist() == [1, 3, 1, 7, 5, 3, 5, -1]

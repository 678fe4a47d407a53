"""Sharing layers among stages: the most expensive stage is as cheap as it can be."""

import itertools
import random

import pytest

from hpdl_lab.parallel.pipeline.partition import partition


def largest(costs, sizes):
    ends = list(itertools.accumulate(sizes, initial=0))
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))


def least_of_all(costs, stages):
    """By trying every way to cut."""
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    return min(largest(costs, [b - a for a, b in itertools.pairwise([0, *cut, len(costs)])]) for cut in cuts)


@pytest.mark.parametrize("layers", range(1, 9))
def test_no_other_way_to_cut_is_better(layers):
    draw = random.Random(layers)
    for stages in range(1, layers + 1):
        for costs in (
            [1] * layers,
            [draw.randrange(10) for _ in range(layers)],
            [draw.random() for _ in range(layers)],
        ):
            sizes = partition(costs, stages)
            assert len(sizes) == stages and sum(sizes) == layers and min(sizes) >= 1
            assert largest(costs, sizes) == pytest.approx(least_of_all(costs, stages), abs=1e-12)


def test_equal_layers_are_shared_equally():
    assert partition([2.0] * 12, 4) == [3, 3, 3, 3]
    assert partition([5, 1, 1, 1, 4, 4], 3) == [2, 3, 1]  # of the docstring


@pytest.mark.parametrize(("layers", "stages"), [(3, 4), (0, 1), (3, 0), (3, -1)])
def test_each_stage_needs_a_layer(layers, stages):
    with pytest.raises(ValueError, match=f"{layers} layers cannot be shared by {stages} stages"):
        partition([1] * layers, stages)

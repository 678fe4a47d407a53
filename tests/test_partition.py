"""Sharing layers among stages: the most expensive stage is as cheap as it can be."""

import itertools

from hypothesis import example
from hypothesis import strategies as st

from hpdl_lab.parallel.pipeline.split import partition
from tests.properties import given
from tests.wording import raises


def largest(costs, sizes):
    ends = list(itertools.accumulate(sizes, initial=0))
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(-1, 9))
@example([5, 1, 1, 1, 4, 4], 3)
def test_no_other_way_to_cut_is_better(costs, stages):
    if not 1 <= stages <= len(costs):
        with raises(ValueError, f"{len(costs)} layers", f"{stages} stages"):
            partition(costs, stages)
        return
    sizes = partition(costs, stages)
    assert len(sizes) == stages and sum(sizes) == len(costs) and min(sizes) >= 1
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    others = ([b - a for a, b in itertools.pairwise([0, *cut, len(costs)])] for cut in cuts)
    assert largest(costs, sizes) == min(largest(costs, other) for other in others)
    assert len(set(costs)) > 1 or max(sizes) - min(sizes) <= 1 or largest(costs, sizes) == 0

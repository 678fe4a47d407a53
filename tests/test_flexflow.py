"""FlexFlow's search: each operator is split in its own way; what the chain finds, and what it times again."""

import random

import pytest

from hpdl_lab.comm.network import Switch
from hpdl_lab.parallel.grid.flexflow import (
    Operator,
    Split,
    Timeline,
    exhaustive,
    graph_of,
    metropolis,
    seconds_of,
    splits_of,
)
from tests.wording import raises

NETWORK = Switch(alpha=1e-5, beta=1e-9, flops_per_s=1e12)
MB = 1e6
# as in AlexNet: most arithmetic in convolutions, most parameters in dense layers
CHAIN = (
    Operator("conv", (), 64, 65_536, 3e9, 0.1 * MB),
    Operator("conv", (0,), 64, 1024, 5e9, 0.5 * MB),
    Operator("dense", (1,), 64, 1024, 0.5e9, 50 * MB),
)
TOWERS = (  # two independent ones with a parameter each, which meet
    Operator("left", (), 2, 4, 1e9, 50 * MB),
    Operator("right", (), 2, 4, 1e9, 50 * MB),
    Operator("left", (0,), 2, 3, 1e9, 50 * MB),
    Operator("right", (1,), 2, 3, 1e9, 50 * MB),
    Operator("sum", (2, 3), 2, 1, 1e6, 0),
)


def test_splits_are_all_that_give_equal_blocks():
    found = splits_of(Operator("o", (), 4, 6, 1, 1), 4)
    assert len(found) == len(set(found)) == 4 + 2 * 2 + 2  # one rank; two of samples or of features; 4 x 1 and 2 x 2
    assert [s for s in found if len(s.ranks) == 4] == [Split(2, 2), Split(4, 1)]
    assert {s.first for s in found if len(s.ranks) == 2} == {0, 2}
    assert Split(2, 2).rows(3, 4) == (2, 4) and list(Split(1, 2, 2).ranks) == [2, 3]


def test_a_step_by_hand():
    """Two ranks: a producer split by samples, a consumer by features, which needs all samples on both."""
    network = Switch(alpha=1.0, beta=0.5, flops_per_s=1.0)
    pair = Operator("a", (), 2, 3, 4.0, 8.0), Operator("b", (0,), 2, 2, 10.0, 8.0)
    whole = seconds_of(pair, (Split(2, 1), Split(1, 2)), network)
    computing, message, sums = 3 * 4 / 2 + 3 * 10 / 2, 2 * (1 + 1 * 3 * 4 * 0.5), 2 * (1 + 4 * 0.5)
    assert whole == 6 + message + 15 == computing + message and sums < message + 15  # which the sum of a's is under
    assert seconds_of(pair, (Split(2, 1), Split(2, 1)), network) == 6 + 15 + sums  # no message, and a sum at the end
    assert seconds_of(pair, (Split(1, 1, 0), Split(1, 1, 0)), network) == 12 + 30


@pytest.mark.parametrize("operators", [CHAIN, TOWERS])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_change_of_the_timeline_equals_timing_all_of_it(operators, ranks):
    ranks = 2 if operators is TOWERS else ranks
    draw, choices = random.Random(0), [splits_of(operator, ranks) for operator in operators]
    timeline = Timeline(operators, [Split(1, 1)] * len(operators), NETWORK)
    whole = 0
    for _ in range(150):
        k = draw.randrange(len(operators))
        seconds = timeline.change(k, draw.choice(choices[k]))
        graph, keys = graph_of(operators, timeline.splits, NETWORK)
        ends = graph.times()[1]
        assert timeline.ends == dict(zip(keys, ends, strict=True)) and seconds == max(ends)
        whole += len(keys)
    assert timeline.timed < 0.9 * whole


def test_a_long_chain_is_timed_again_only_behind_the_change():
    layers = tuple(Operator("o", (i - 1,) if i else (), 4, 4, 1e9, MB) for i in range(40))
    timeline = Timeline(layers, [Split(4, 1)] * 40, NETWORK)
    before = timeline.timed
    timeline.change(38, Split(1, 4))
    assert timeline.timed - before < 60 < len(timeline.ends)
    before = timeline.timed
    timeline.change(38, Split(1, 4))
    assert timeline.timed == before, "nothing has changed"


@pytest.mark.parametrize(("operators", "ranks"), [(CHAIN, 4), (TOWERS, 2)])
def test_the_chain_finds_what_is_fastest_of_all(operators, ranks):
    best, found = exhaustive(operators, ranks, NETWORK), metropolis(operators, ranks, NETWORK, steps=800)
    assert found.seconds == best.seconds == seconds_of(operators, found.splits, NETWORK)
    assert len(found.tried) == 800 and min(found.tried) == found.seconds
    assert found == metropolis(operators, ranks, NETWORK, steps=800), "the same seed"


def test_convolutions_split_samples_and_dense_layers_features():
    """Krizhevsky 2014, arXiv:1404.5997, by search; faster than data parallelism, and than one rank."""
    best = metropolis(CHAIN, 4, NETWORK, steps=800)
    conv, again, dense = best.splits
    assert conv.samples == again.samples == 4 and dense.samples == 1 and dense.features > 1
    assert best.seconds < 0.5 * seconds_of(CHAIN, [Split(4, 1)] * 3, NETWORK)
    assert best.seconds < 0.5 * seconds_of(CHAIN, [Split(1, 1)] * 3, NETWORK)


def test_independent_operators_go_to_different_ranks():
    """No gradient is summed where a tower with many parameters stays on one rank."""
    best = exhaustive(TOWERS, 2, NETWORK)
    left, right, more_left, more_right, _ = best.splits
    assert left == more_left and right == more_right and {left, right} == {Split(1, 1, 0), Split(1, 1, 1)}


def test_what_cannot_be_searched():
    with raises(ValueError, "64 samples", "conv", "3 ranks"):
        metropolis(CHAIN, 3, NETWORK)
    with raises(ValueError, "temperature", "0"):
        metropolis(CHAIN, 2, NETWORK, temperature=0)

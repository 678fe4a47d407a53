"""Gossip on graphs: spectral gaps, the mean, the speed of agreement, and the messages."""

import math

import numpy as np
import pytest
import torch

from hpdl_lab.comm import PerRank, sim
from hpdl_lab.parallel import gossip as graphs
from hpdl_lab.parallel.gossip import gossip_step, one_peer_step
from hpdl_lab.trace import bytes_sent
from tests.wording import raises

GAPS = {  # n: of the ring, the wheel, the star
    4: (0.666667, 1.0, 0.25),
    8: (0.195262, 0.313255, 0.125),
    16: (0.050747, 0.105727, 0.0625),
    32: (0.012810, 0.041485, 0.03125),
}
SIZES = [1, 2, 3, 4, 5, 8, 13, 16]


@pytest.mark.parametrize("n", GAPS)
def test_spectral_gaps(n):
    for name, gap in zip(("ring", "wheel", "star"), GAPS[n], strict=True):
        assert 1 - graphs.lambda2(graphs.metropolis(graphs.graph(name, n))) == pytest.approx(gap, abs=5e-7), name
    ring = 1 - graphs.lambda2(graphs.metropolis(graphs.graph("ring", n)))
    assert ring == pytest.approx(2 / 3 * (1 - math.cos(2 * math.pi / n)))
    assert 1 - graphs.lambda2(graphs.metropolis(graphs.graph("complete", n))) == pytest.approx(1)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", graphs.GRAPHS)
def test_a_graph_is_connected_and_its_weights_keep_the_mean(name, n):
    graph = graphs.graph(name, n)
    weights = graphs.metropolis(graph)
    assert graph.n == n and all(
        list(mine) == sorted(set(mine)) and i not in mine for i, mine in enumerate(graph.neighbors)
    )
    assert np.allclose(weights, weights.T) and np.allclose(weights.sum(0), 1) and (weights >= 0).all()
    assert (np.linalg.matrix_power(weights, n) > 0).all()  # everybody hears of everybody
    assert n == 1 or 1 - graphs.lambda2(weights) > 0


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", graphs.GRAPHS)
def test_a_step_on_ranks_is_one_of_the_matrix(name, n):
    graph = graphs.graph(name, n)
    x = np.random.default_rng(n).standard_normal((n, 5))
    run = sim.run(n, gossip_step, PerRank(list(x)), graph)
    assert np.allclose(np.stack(run), graphs.metropolis(graph) @ x, atol=1e-14)
    assert np.abs(np.mean(run, axis=0) - x.mean(0)).max() < 1e-12
    assert bytes_sent(run.events) == {i: 40 * len(mine) for i, mine in enumerate(graph.neighbors) if mine}


@pytest.mark.parametrize("n", SIZES)
def test_one_peer_at_a_time_averages_exactly_in_log2_n_steps(n):
    x = np.random.default_rng(n).integers(-99, 99, (n, 3)).astype(float)
    steps = (n - 1).bit_length()

    def walk(comm, mine):
        return [one_peer_step(comm, mine, step).copy() for step in range(steps)] or [mine]

    run = np.array(sim.run(n, walk, PerRank(list(x))))
    want = x
    for step in range(steps):
        want = (want + np.roll(want, -(1 << step), axis=0)) / 2
        assert np.allclose(run[:, step], want)
    assert np.abs(run[:, -1].mean(0) - x.mean(0)).max() < 1e-12
    if n & (n - 1) == 0:
        assert (run[:, -1] == x.mean(0)).all()


def test_16_bit_floats_are_rounded_once_per_step():
    graph = graphs.graph("complete", 5)
    x = [torch.full((3,), 256.0 + 2 * r, dtype=torch.bfloat16) for r in range(5)]
    for mixed in sim.run(5, gossip_step, PerRank(x), graph):
        assert mixed.dtype == torch.bfloat16 and (mixed == 260).all()


def test_mistakes_are_named():
    with raises(LookupError, "'weel'"):
        graphs.graph("weel", 4)
    with raises(ValueError, "1 rank", "0"):
        graphs.graph("ring", 0)

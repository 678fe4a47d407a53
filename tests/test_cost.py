"""The cost model against traced runs of every algorithm, and its own arithmetic."""

import numpy as np
import pytest

from hpdl_lab.collectives import cost, double_tree, segmented_ring
from hpdl_lab.collectives.table import ALGORITHMS, algorithm_names, find_algorithm
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.trace import bytes_sent

RANKS = [*range(1, 10), 13, 16]
DIVISIBLE = 8 * 16 * 9 * 5 * 7 * 13  # every number of ranks divides it, and their chunks into 8 segments
NETWORK = Switch(alpha=3e-6, beta=2e-9)


def traced(algorithm, p, network=NETWORK, n=DIVISIBLE, **options):
    """Results of one run on p ranks, of n bytes each."""
    return sim.run(p, lambda comm: algorithm.function(comm, np.zeros(n, np.uint8), **options) is None, network=network)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_bytes_steps_and_seconds_are_those_of_traced_runs(algorithm):
    for p in RANKS:
        expected, run = algorithm.cost(p, DIVISIBLE), traced(algorithm, p)
        sent = bytes_sent(run.events)
        assert max(sent.values(), default=0) == expected.nbytes_sent, p
        assert sum(sent.values()) == expected.nbytes_total, p
        steps = traced(algorithm, p, Switch(alpha=1.0, beta=0.0), n=0).seconds  # an empty message takes 1 s
        if algorithm.name == "double_tree":  # an upper bound
            hop = NETWORK.alpha + DIVISIBLE / 8 * NETWORK.beta
            assert expected.steps - 2 <= steps <= expected.steps, p
            assert -1e-9 <= expected.seconds(NETWORK.alpha, NETWORK.beta) - run.seconds <= 2 * hop + 1e-9, p
        else:
            assert steps == expected.steps, p
            assert run.seconds == pytest.approx(expected.seconds(NETWORK.alpha, NETWORK.beta), rel=1e-9), p


@pytest.mark.parametrize(
    ("name", "collective", "options"),
    [
        ("segmented_ring", "all_reduce", {"segments": 8}),
        ("double_tree", "all_reduce", {"segments": 1}),
        ("hierarchical", "all_reduce", {"group": 2, "segments": 1}),
        ("hierarchical", "all_reduce", {"group": 1}),
        ("hierarchical", "all_reduce", {"group": 16, "segments": 8}),
        ("grid", "all_reduce", {"inner": 1}),
        ("chain", "broadcast", {"segments": 8}),
        ("chain", "reduce", {"segments": 1}),
    ],
    ids=str,
)
def test_costs_follow_the_options(name, collective, options):
    algorithm = find_algorithm(name, collective)
    for p in (1, 2, 5, 9, 16):
        expected, run = algorithm.cost(p, DIVISIBLE, **options), traced(algorithm, p, **options)
        assert max(bytes_sent(run.events).values(), default=0) == expected.nbytes_sent, p
        assert sum(bytes_sent(run.events).values()) == expected.nbytes_total, p
        if name != "double_tree":
            assert run.seconds == pytest.approx(expected.seconds(NETWORK.alpha, NETWORK.beta), rel=1e-9), p


@pytest.mark.parametrize("servers", [2, 3, 5])
def test_several_parameter_servers_share_the_load_and_cost_no_less_than_their_links_allow(servers):
    algorithm, p, n = find_algorithm("parameter_server"), 9, 9 * 30_000
    expected, run = algorithm.cost(p, n, servers=servers), traced(algorithm, p, n=n, servers=servers)
    assert max(bytes_sent(run.events).values()) == expected.nbytes_sent
    assert sum(bytes_sent(run.events).values()) == expected.nbytes_total
    assert run.seconds >= expected.seconds(NETWORK.alpha, NETWORK.beta) * (1 - 1e-12)
    assert run.seconds < traced(algorithm, p, n=n, servers=servers - 1).seconds


def test_the_multi_ring_spares_the_slow_dimension():
    """d1 = 4 ranks in a row, d2 = 3 rows: 2(n/d1)(d2 - 1)/d2 bytes per rank between rows, 2n(1 - 1/p) in all."""
    n = 4 * 3 * 100
    run = sim.run(12, lambda comm: find_algorithm("grid").function(comm, np.zeros(n, np.uint8), inner=4) is None)
    between = bytes_sent([e for e in run.events if e.rank // 4 != e.peer // 4])
    assert set(between.values()) == {2 * n / 4 * 2 / 3} and len(between) == 12
    assert set(bytes_sent(run.events).values()) == {2 * n * 11 / 12}


def test_a_group_keeps_all_but_its_first_rank_inside():
    n, run = 1200, traced(find_algorithm("hierarchical"), 12, n=1200)
    between = bytes_sent([e for e in run.events if e.rank // 4 != e.peer // 4])
    assert set(between) == {0, 4, 8} and sum(between.values()) == 2 * (3 - 1) * n


def test_the_bounds_that_everybody_knows():
    n = 1 << 20
    for p in (2, 4, 8, 64, 1024):
        depth = p.bit_length() - 1
        best = 2 * n * (p - 1) / p
        assert [find_algorithm(name).cost(p, n).nbytes_sent for name in ("ring", "halving_doubling", "grid")] == [
            best
        ] * 3
        assert find_algorithm("halving_doubling").cost(p, n).steps == 2 * depth
        assert find_algorithm("recursive_doubling").cost(p, n).steps == depth
        assert find_algorithm("double_tree").cost(p, n).nbytes_sent <= 2 * n
    assert all(find_algorithm(name).cost(1, n).seconds(1, 1, 1) == 0 for name in algorithm_names())


@pytest.mark.parametrize("p", [3, 8, 13])
def test_the_best_number_of_segments_is_the_best_that_runs(p):
    n, network = 16_000, Switch(alpha=1e-6, beta=1e-9)

    def seconds(c):
        return traced(find_algorithm("chain", "broadcast"), p, network, n, segments=c).seconds

    best = cost.best_segments(p - 2, n, network.alpha, network.beta)
    assert best > 1
    assert seconds(best) <= min(seconds(c) for c in (1, best - 1, best + 1, 2 * best)) * (1 + 1e-3)
    assert cost.best_segments(p - 2, n, network.alpha, 0, network.beta) == best  # adding costs the same as sending


def test_the_best_number_of_segments_in_the_extremes():
    assert cost.best_segments(5, 0, 1e-6, 1e-9) == 1
    assert cost.best_segments(0, 1e9, 1e-6, 1e-9) == 1
    assert cost.best_ring_segments(1, 1e9, 1e-6, 1e-9) == cost.best_ring_segments(8, 4, 1e-6, 1e-9) == 2
    p, n, alpha, gamma = 4, 64 << 20, 1e-6, 1e-10
    best = cost.best_ring_segments(p, n, alpha, gamma)
    price = [cost.segmented_ring(p, n, c).seconds(alpha, gamma, gamma) for c in (best, best - 1, best + 1, 2)]
    assert best > 2 and min(price) == price[0]
    assert price[0] < cost.all_reduce(p, n).seconds(alpha, gamma, gamma)


def test_a_segmented_ring_hides_its_adding():
    """With adding as slow as sending: the ring pays for both, one after the other."""
    n, p, gamma = 1 << 16, 4, 1e-9
    network = Switch(alpha=1e-9, beta=1e-9)

    class Slow(np.ndarray):
        """Adding takes virtual time."""

        def __iadd__(self, other):
            self.comm.compute(seconds=self.nbytes * gamma)
            return super().__iadd__(other)

        def __array_finalize__(self, obj):
            self.comm = getattr(obj, "comm", None)

    def slow(function):
        def run(comm):
            x = np.zeros(n, np.uint8).view(Slow)
            x.comm = comm
            function(comm, x)

        return sim.run(p, run, network=network).seconds

    ring, segmented = slow(find_algorithm("ring").function), slow(segmented_ring.all_reduce)
    assert ring == pytest.approx(cost.all_reduce(p, n).seconds(1e-9, 1e-9, gamma), rel=1e-3)
    assert segmented == pytest.approx(cost.segmented_ring(p, n).seconds(1e-9, 1e-9, gamma), rel=0.05)
    assert segmented < 0.75 * ring


def test_the_double_tree_beats_the_tree_on_large_vectors_and_the_ring_on_many_ranks():
    p, n, network = 32, 1 << 20, Switch()
    seconds = {name: traced(find_algorithm(name), p, network, n).seconds for name in ("ring", "tree")}
    best = cost.best_segments(double_tree.turns_of(double_tree.trees(p), 1)[1] - 1, n / 2, network.alpha, network.beta)
    seconds["double_tree"] = traced(find_algorithm("double_tree"), p, network, n, segments=best).seconds
    assert seconds["double_tree"] < seconds["tree"] / 2
    small = {
        name: find_algorithm(name).cost(4096, 1024).seconds(network.alpha, network.beta)
        for name in ("ring", "double_tree")
    }
    assert small["double_tree"] < small["ring"] / 50


def test_alpha_and_beta_are_found_again():
    sizes = [8, 1024, 65536, 1 << 20]
    alpha, beta = cost.fit_alpha_beta(sizes, [5e-6 + 2e-9 * n for n in sizes])
    assert alpha == pytest.approx(5e-6, rel=1e-6)
    assert beta == pytest.approx(2e-9, rel=1e-6)


def test_a_fit_needs_two_sizes():
    with pytest.raises(ValueError, match="two different sizes"):
        cost.fit_link([8, 8], [1.0, 1.0])


def test_a_fit_is_never_negative():
    alpha, beta = cost.fit_link([8, 1024], [2e-6, 1e-6])
    assert alpha > 0 and beta == 0


def test_the_ring_never_sends_two_whole_vectors():
    assert [cost.all_reduce(p, 1000).nbytes for p in (1, 2, 4)] == [0, 1000, 1500]
    assert all(cost.all_reduce(p, 1000).nbytes < 2000 for p in range(1, 5000, 37))


def test_bus_bandwidth_factors():
    assert cost.busbw_factor("all_reduce", 4) == 1.5
    assert cost.busbw_factor("all_gather", 4) == 0.75
    assert cost.busbw_factor("broadcast", 4) == 1

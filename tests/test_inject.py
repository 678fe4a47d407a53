"""Slow ranks and slow links on purpose: the slowest sets the pace, and the trace says where time was lost."""

import numpy as np
import pytest

from hpdl_lab import lab
from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.comm.inject import OP, Injection
from hpdl_lab.comm.network import Switch
from tests.wording import raises

NETWORK = Switch(alpha=1e-6, beta=1e-9)


def around(comm, n, times=1):
    """Every rank sends `n` bytes one rank on, `times` times."""
    x, y = np.zeros(n, np.uint8), np.zeros(n, np.uint8)
    for _ in range(times):
        comm.sendrecv(x, (comm.rank + 1) % comm.size, y, (comm.rank - 1) % comm.size)


def lost(results):
    """Seconds that each rank lost: {rank: s}."""
    total = {}
    for e in results.events:
        if e.op == OP:
            total[e.rank] = total.get(e.rank, 0) + (e.t1_ns - e.t0_ns) / 1e9
    return total


def test_the_slowest_simulated_rank_sets_the_pace():
    x = np.ones(1000, "f4")
    steps = 2 * (4 - 1)
    fast = sim.run(4, ring.all_reduce, x, network=NETWORK)
    slow = sim.run(4, ring.all_reduce, x, network=NETWORK, inject=Injection({2: 0.005}))
    assert slow.seconds == pytest.approx(fast.seconds + steps * 0.005, rel=0.01)
    assert lost(slow) == {2: pytest.approx(steps * 0.005)}
    assert [e.op for e in slow.events].count("send") == [e.op for e in fast.events].count("send")
    assert all((a == b).all() for a, b in zip(slow, fast, strict=True))


def test_a_slow_simulated_link_slows_down_both_of_its_ends():
    n, slow = 100_000, Injection(links={(1, 2): 1e8})
    results = sim.run(4, around, n, network=NETWORK, inject=slow)
    extra = n / 1e8 - n * 1e-9
    assert results.seconds == pytest.approx(1e-6 + n / 1e8)
    assert lost(results) == {1: pytest.approx(extra), 2: pytest.approx(extra)}
    assert sim.run(4, around, n, network=NETWORK, inject=Injection(links={(2, 1): 1e8})).seconds == results.seconds
    assert lost(sim.run(4, around, n, network=NETWORK, inject=Injection(links={(1, 2): 1e12}))) == {}


def test_a_barrier_waits_for_the_slow_rank():
    results = sim.run(3, lambda comm: comm.barrier(), inject=Injection({0: 1.0}))
    assert results.seconds == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": -1, "delay": 1}, ("inject(rank=-1)", "0")),
        ({"rank": 1.5, "delay": 1}, ("inject(rank=1.5)",)),
        ({"rank": 1}, ("inject(rank=1, delay=None)",)),
        ({"delay": 1}, ("inject(rank=None, delay=1)",)),
        ({"rank": 1, "delay": -2}, ("inject(delay=-2)", "0")),
        ({"rank": 1, "delay": "2"}, ("inject(delay='2')",)),
        ({"link": (1, 1), "bandwidth": 1e8}, ("inject(link=(1", "1")),
        ({"link": 1, "bandwidth": 1e8}, ("inject(link=1)",)),
        ({"link": (0, 1)}, ("inject(link=(0", "1", "bandwidth=None")),
        ({"link": (0, 1), "bandwidth": 0}, ("inject(bandwidth=0)", "0")),
    ],
)
def test_what_cannot_be_injected_is_refused_with_its_number(wrong, message):
    with raises(ValueError, *message):
        lab.inject(**wrong)
    assert not lab.inject()


@pytest.mark.parametrize("inject", [Injection({4: 0.1}), Injection(links={(0, 9): 1e8})])
def test_a_rank_that_is_not_there_is_refused(inject):
    with raises(ValueError, "0", "3", "lab.inject"):
        sim.run(4, around, 1, inject=inject)


def test_what_was_injected_adds_up_until_it_is_cleared():
    try:
        lab.inject(rank=1, delay=0.005)
        assert str(lab.inject(link=[1, 2], bandwidth=1e8)) == (
            "rank 1 loses 5 ms before each message and collective; ranks 1 and 2 are joined by 0.1 GB/s"
        )
        assert lab.inject(link=(2, 1), bandwidth=1e9).links == {(2, 1): 1e9}
    finally:
        assert str(lab.inject()) == "nothing is slowed down"


def test_the_slowest_engine_sets_the_pace(cluster):
    slow = Injection({2: 0.02}, {(0, 1): 1e7})
    fast = cluster.run(around, 1000, 5)
    assert lost(fast) == {}
    results = cluster.run(around, 1000, 5, inject=slow)
    assert results.seconds > 0.1  # five times 20 ms, which everybody waits for
    told = lost(results)
    assert set(told) == {0, 1, 2} and told[2] >= 0.1 and told[0] >= 5e-4 and told[1] >= 5e-4
    meet = cluster.run(lambda comm: [comm.barrier() for _ in range(3)], inject=slow)
    assert set(lost(meet)) == {2} and meet.seconds > 0.06
    with raises(ValueError, "rank 2", "0", "1"):
        cluster.run(around, 1000, ranks=[0, 1], inject=slow)

"""The cost model's own arithmetic; test_ring.py compares it with traced runs."""

import pytest

from hpdl_lab.collectives import cost


def test_alpha_and_beta_are_found_again():
    sizes = [8, 1024, 65536, 1 << 20]
    alpha, beta = cost.fit_alpha_beta(sizes, [5e-6 + 2e-9 * n for n in sizes])
    assert alpha == pytest.approx(5e-6, rel=1e-6)
    assert beta == pytest.approx(2e-9, rel=1e-6)


def test_a_fit_needs_two_sizes():
    with pytest.raises(ValueError, match="two different sizes"):
        cost.fit_alpha_beta([8, 8], [1.0, 1.0])


def test_a_fit_is_never_negative():
    alpha, beta = cost.fit_alpha_beta([8, 1024], [2e-6, 1e-6])
    assert alpha > 0 and beta == 0


def test_the_ring_never_sends_two_whole_vectors():
    assert [cost.all_reduce(p, 1000).nbytes for p in (1, 2, 4)] == [0, 1000, 1500]
    assert all(cost.all_reduce(p, 1000).nbytes < 2000 for p in range(1, 5000, 37))


def test_bus_bandwidth_factors():
    assert cost.busbw_factor("all_reduce", 4) == 1.5
    assert cost.busbw_factor("all_gather", 4) == 0.75
    assert cost.busbw_factor("broadcast", 4) == 1

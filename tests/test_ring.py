"""The ring collectives on simulated ranks: sums, traffic and time against the cost model, over the grid of p and n."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from hpdl_lab.collectives import cost, ring
from hpdl_lab.collectives.chunks import bounds
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.trace import bytes_sent
from tests.properties import given

RANKS = st.integers(1, 17)
SIZES = st.integers(0, 40) | st.sampled_from([1000, 1001])


def vector(comm, n):
    return torch.arange(n, dtype=torch.float64) * (comm.rank + 1) + comm.rank


def total(p, n):
    return torch.arange(n, dtype=torch.float64) * (p * (p + 1) / 2) + p * (p - 1) / 2


@pytest.mark.parametrize("all_reduce", [ring.all_reduce_naive, ring.all_reduce])
@given(p=RANKS, n=SIZES)
def test_all_reduce_leaves_the_sum_on_every_rank(all_reduce, p, n):
    for x in sim.run(p, lambda comm: all_reduce(comm, vector(comm, n))):
        assert torch.equal(x, total(p, n))


@given(p=RANKS, n=SIZES)
def test_reduce_scatter_leaves_chunk_r_on_rank_r_and_all_gather_collects_the_chunks(p, n):
    def halves(comm):
        mine = ring.reduce_scatter(comm, vector(comm, n)).clone()
        x, (start, stop) = torch.full((n,), -1.0, dtype=torch.float64), bounds(n, p, comm.rank)
        x[start:stop] = mine
        return mine, ring.all_gather(comm, x)

    for r, (mine, x) in enumerate(sim.run(p, halves)):
        assert torch.equal(mine, total(p, n)[slice(*bounds(n, p, r))])
        assert torch.equal(x, total(p, n))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("name", ["all_reduce_naive", "reduce_scatter", "all_gather", "all_reduce"])
def test_bytes_steps_and_time_are_those_of_the_cost_model(name, p):
    n = 16 * 3 * 5 * 7  # elements: every p here divides it
    network = Switch(alpha=3e-6, beta=2e-9)
    results = sim.run(p, getattr(ring, name), np.zeros(n), network=network)
    expected = getattr(cost, name)(p, n * 8)
    sent = bytes_sent(results.events)
    for rank in range(p):
        assert sent.get(rank, 0) == expected.nbytes
        assert sum(e.op == "send" for e in results.events if e.rank == rank) == expected.steps
    assert results.seconds == pytest.approx(expected.seconds(network.alpha, network.beta), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "bfloat16", "float16"])
def test_every_dtype_and_bitwise_equal_ranks(dtype):
    x = torch.randint(-3, 4, (1001,), generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    results = sim.run(5, ring.all_reduce, x)
    assert all(torch.equal(r, 5 * x) for r in results)


def test_float_sums_stay_within_the_error_bound_and_are_the_same_on_every_rank():
    p, n = 7, 1001
    inputs = torch.randn(p, n, generator=torch.Generator().manual_seed(1))
    results = sim.run(p, lambda comm: ring.all_reduce(comm, inputs[comm.rank].clone()))
    bound = (p - 1) * 2**-24 * inputs.abs().sum(0).double()
    assert ((results[0].double() - inputs.double().sum(0)).abs() <= bound).all()
    assert all(torch.equal(r, results[0]) for r in results)


@given(n=st.integers(0, 2000), p=st.integers(1, 70))
def test_chunks_cover_the_vector_once(n, p):
    cuts = [bounds(n, p, i) for i in range(p)]
    assert cuts[0][0] == 0 and cuts[-1][1] == n
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    sizes = [b - a for a, b in cuts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert bounds(n, p, -1) == bounds(n, p, p - 1)

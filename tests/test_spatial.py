"""Images that are cut by rows: the rows around, the bytes of halos, and what is refused."""

import itertools

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

from hpdl_lab.comm import PerRank, sim
from hpdl_lab.parallel.tensor.spatial import edges_of, halo_exchange
from hpdl_lab.trace import bytes_sent
from tests.properties import given
from tests.wording import raises

B, C, W = 2, 3, 5
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4)  # (above, below) of each rank


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(x, edges, rank):
    return x[:, :, edges[rank] : edges[rank + 1]].clone()


@given(height=st.integers(1, 50), ranks=st.integers(1, 50))
def test_edges_are_equal_shares(height, ranks):
    assume(ranks <= height)
    edges = edges_of(height, ranks)
    heights = [end - first for first, end in itertools.pairwise(edges)]
    assert edges[0] == 0 and edges[-1] == height and max(heights) - min(heights) <= 1 and min(heights) >= 1


@given(rows=ROWS)
def test_halo_exchange_takes_the_rows_around(rows):
    p, image = len(rows), numbers(B, C, 13, W)
    edges = edges_of(13, p)
    padded = torch.cat([torch.zeros(B, C, 3, W), image, torch.zeros(B, C, 3, W)], 2).double()

    def exchange(comm):
        x = rows_of(image, edges, comm.rank)
        halo = halo_exchange(comm, x, rows)
        assert torch.equal(x, rows_of(image, edges, comm.rank))
        return halo

    run = sim.run(p, exchange)
    for rank, y in enumerate(run):
        above, below = rows[rank]
        assert torch.equal(y, padded[:, :, 3 + edges[rank] - above : 3 + edges[rank + 1] + below])
    sent = {r: (rows[r - 1][1] if r else 0) + (rows[r + 1][0] if r < p - 1 else 0) for r in range(p)}
    assert bytes_sent(run.events) == {r: n * B * C * W * 8 for r, n in sent.items() if n}


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda c: edges_of(2, c.size), ("2 rows", "3 ranks")),
        (lambda c: halo_exchange(c, numbers(B, C, 4, W), [(1, 1)] * 2), ("(above, below)", "3 ranks")),
        (lambda c: halo_exchange(c, numbers(B, C, 4, W), [1, 1, 1]), ("(above, below)", "[1, 1, 1]")),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank_before_the_first_message(call, facts):
    def refused(comm):
        with raises(ValueError, *facts):
            call(comm)
        assert not comm.trace.events

    sim.run(3, refused)


def test_a_strip_that_is_lower_than_the_halo_is_refused():
    strips = PerRank([numbers(B, C, 3, W), numbers(B, C, 1, W), numbers(B, C, 3, W)])
    with raises(ValueError, "2 rows", "rank 1", "1"):
        sim.run(3, lambda comm, x: halo_exchange(comm, x, [(2, 2)] * 3), strips)

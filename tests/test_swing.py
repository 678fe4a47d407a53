"""Swing on a ring of links: whom each rank meets, and what that saves. The tests of the family hold all the rest."""

import numpy as np
import pytest

from hpdl_lab.collectives.table import find_algorithm
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Ring


def test_a_rank_swings_from_side_to_side_as_in_the_paper():
    rounds = list(find_algorithm("swing").steps(16, 160))
    peers = [int(r.dest[0]) for r in rounds]
    assert peers == [1, 15, 3, 11, 11, 3, 15, 1]  # +1, -1, +3, -5, and back
    assert [int(r.last[0] - r.first[0]) for r in rounds] == [80, 40, 20, 10, 10, 20, 40, 80]
    assert all(np.array_equal(r.dest[r.dest], r.source) for r in rounds)  # pairs


def seconds(name, p, nbytes):
    function = find_algorithm(name).function
    return sim.run(p, lambda comm: function(comm, np.zeros(nbytes, np.uint8)) is None, network=Ring(1e-6, 1e-9)).seconds


@pytest.mark.parametrize("p", [8, 16])
def test_short_ways_pay_on_a_ring_of_links(p):
    """The bytes of halving and doubling, and less of its time; fewer steps than a ring, whose ways are the shortest."""
    for nbytes in (800, 80_000, 8_000_000):
        assert seconds("swing", p, nbytes) < 0.7 * seconds("halving_doubling", p, nbytes)
    assert seconds("swing", p, 800) < 0.8 * seconds("ring", p, 800)
    assert seconds("swing", p, 8_000_000) > seconds("ring", p, 8_000_000)

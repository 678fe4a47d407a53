"""Every algorithm of the table on real ranks is right; messages and bits: tests/test_collectives_family.py."""

import numpy as np
import pytest
import torch

from hpdl_lab.collectives.expected import brought, expected_result
from hpdl_lab.collectives.table import ALGORITHMS
from hpdl_lab.parallel import gossip as graphs
from hpdl_lab.parallel.gossip import gossip_step, one_peer_step

KINDS = [(n, torch.float32) for n in (0, 1, 7, 1001, 70_001)] + [(1001, torch.bfloat16), (1001, torch.int64)]
LARGE_TOO = ("ring", "segmented_ring", "double_tree", "grid")  # beyond what MPI buffers


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
def test_every_algorithm(run, algorithm):
    world = run()
    for size in range(world.size, world.rank, -1):
        comm = run(members=range(size)) if size < world.size else world
        for n, dtype in KINDS + [(400_003, torch.float32)] * (algorithm.name in LARGE_TOO):
            n *= size if algorithm.collective == "all_to_all" else 1
            x = torch.from_numpy(brought(algorithm.collective, n, size, comm.rank)).to(dtype)
            algorithm.function(comm, x)
            first, expected = expected_result(algorithm.collective, n, size, comm.rank)
            assert torch.equal(x[first : first + len(expected)], torch.from_numpy(expected).to(dtype)), (n, dtype)


@pytest.mark.parametrize("name", graphs.GRAPHS)
def test_gossip(comm, name):
    graph = graphs.graph(name, comm.size)
    x = torch.full((70_000,), float(comm.rank), dtype=torch.float64)
    for _ in range(3):
        gossip_step(comm, x, graph)
    want = np.linalg.matrix_power(graphs.metropolis(graph), 3) @ np.arange(comm.size)
    assert np.allclose(x.numpy(), want[comm.rank], atol=1e-12)


def test_gossip_with_one_peer_at_a_time(comm):
    x, want = torch.full((70_000,), float(comm.rank), dtype=torch.float64), np.arange(comm.size, dtype=float)
    for step in range(4):
        one_peer_step(comm, x, step)
        want = (want + np.roll(want, -graphs.one_peer_hop(comm.size, step))) / 2
    assert np.allclose(x.numpy(), want[comm.rank], atol=1e-12)

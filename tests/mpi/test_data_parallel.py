"""Data parallelism on real MPI ranks: the losses and the parameters of one process, step by step."""

import numpy as np
import pytest

from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim, world
from hpdl_lab.data import digits
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import DataParallel, DataParallelNaive
from hpdl_lab.parallel.training import Recipe, train


@pytest.fixture(scope="module")
def comm():
    return world(deadline=20)


@pytest.mark.filterwarnings("ignore:ranks .* built with other values:UserWarning", "ignore:rank 1 was built with other")
@pytest.mark.parametrize("strategy", [DataParallelNaive, DataParallel])
@pytest.mark.parametrize("all_reduce", [None, ring.all_reduce, ring.all_reduce_naive])
def test_these_ranks_equal_one(comm, all_reduce, strategy):
    recipe = Recipe(steps=6, batch=131, lr=0.1)  # a batch that 2, 3 and 4 ranks do not divide
    data = digits.load("float64")
    (one,) = sim.run(1, train, mlp(dtype="float64"), strategy(), data, recipe)
    mine = train(comm, mlp(seed=comm.rank, dtype="float64"), strategy(all_reduce), data, recipe)
    assert np.abs(np.array(mine.losses) - one.losses).max() < 1e-10
    assert (mine.parameters - one.parameters).abs().max() < 1e-10

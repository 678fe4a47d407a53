"""Training on many ranks: uneven and empty shards, an all_reduce of one's own, a row for every step."""

import numpy as np

from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.data import digits
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.training import Recipe, train


def test_uneven_and_empty_shards_are_weighted_rightly():
    p = 8
    # 1,437 examples in batches of 718: steps of 718, 718, 1: the last leaves all ranks but one without any.
    recipe, data = Recipe(steps=6, batch=718, lr=0.1), digits.load("float64")
    one, *_ = sim.run(1, train, mlp(dtype="float64"), DataParallel(), data, recipe)
    many = sim.run(p, train, mlp(dtype="float64"), DataParallel(ring.all_reduce), data, recipe)
    assert np.abs(np.array(many[p - 1].losses) - one.losses).max() < 1e-10
    assert (many[0].parameters - one.parameters).abs().max() < 1e-10


def test_an_all_reduce_that_works_in_place_and_returns_nothing_plugs_in_and_every_step_is_reported():
    def quiet(comm, x):
        ring.all_reduce(comm, x)

    found, want = (
        sim.run(2, train, mlp(), DataParallel(f), digits.load(), Recipe(steps=3)) for f in (quiet, ring.all_reduce)
    )
    assert found[0].losses == want[0].losses
    assert len(found.rows) == 3 and set(found.rows[0]) == {"rank", "step", "loss", "samples_per_s"}

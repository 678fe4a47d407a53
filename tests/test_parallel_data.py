"""Data parallelism is one big batch, step by step, whatever the ranks, the strategy and the all-reduce."""

import numpy as np
import pytest
import torch

from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.data import digits
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import DataParallel, DataParallelNaive
from hpdl_lab.parallel.training import Recipe, train

RECIPE = Recipe(steps=10, batch=50, lr=0.1)  # 1,437 mod 50 = 37 is not reached: see the uneven one below


@pytest.fixture(scope="module")
def data():
    return digits.load("float64")


@pytest.fixture(scope="module")
def alone(data):
    """One process, plain torch: no communicator, no strategy."""
    model = mlp(dtype="float64")
    optimizer = torch.optim.SGD(model.parameters(), lr=RECIPE.lr, momentum=RECIPE.momentum)
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(RECIPE.seed)).split(RECIPE.batch)
    losses = []
    for indices in order[: RECIPE.steps]:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data.train_x[indices]), data.train_y[indices])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("strategy", [DataParallelNaive, DataParallel])
@pytest.mark.parametrize("all_reduce", [None, ring.all_reduce, ring.all_reduce_naive])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_ranks_equal_one_process_step_by_step(p, all_reduce, strategy, data, alone):
    results = sim.run(p, train, mlp(dtype="float64"), strategy(all_reduce), data, RECIPE)
    losses, parameters = alone
    for trained in results:
        assert np.abs(np.array(trained.losses) - losses).max() < 1e-10
        assert (trained.parameters - parameters).abs().max() < 1e-10
        if all_reduce is not ring.all_reduce_naive:  # which adds in another order on every rank
            assert torch.equal(trained.parameters, results[0].parameters)


@pytest.mark.parametrize("p", [3, 4, 8])
def test_uneven_and_empty_shards_are_weighted_rightly(p, data):
    # 1,437 examples in batches of 718: steps of 718, 718, 1: the last leaves all ranks but one without any.
    recipe = Recipe(steps=6, batch=718, lr=0.1)
    one, *_ = sim.run(1, train, mlp(dtype="float64"), DataParallel(), data, recipe)
    many = sim.run(p, train, mlp(dtype="float64"), DataParallel(ring.all_reduce), data, recipe)
    assert np.abs(np.array(many[p - 1].losses) - one.losses).max() < 1e-10
    assert (many[0].parameters - one.parameters).abs().max() < 1e-10


def test_every_rank_starts_from_rank_0(data):
    models = sim.PerRank([mlp(seed=r, dtype="float64") for r in range(3)])
    with pytest.warns(UserWarning, match="ranks 1, 2 were built with other values than rank 0"):
        many = sim.run(3, train, models, DataParallel(), data, RECIPE)
    one = sim.run(1, train, mlp(seed=0, dtype="float64"), DataParallel(), data, RECIPE)
    assert (many[2].parameters - one[0].parameters).abs().max() < 1e-10


def test_naive_sends_a_message_per_parameter_and_flat_sends_one(data):
    def spans(strategy):
        events = sim.run(2, train, mlp(dtype="float64"), strategy(ring.all_reduce), data, Recipe(steps=1)).events
        return [e for e in events if e.op == "send" and e.rank == 1]

    naive, flat = spans(DataParallelNaive), spans(DataParallel)
    assert len(naive) - len(flat) == 5 * 2  # six parameter tensors against one, two hops each on two ranks


def test_an_all_reduce_that_works_in_place_and_returns_nothing_plugs_in(data):
    def quiet(comm, x):
        ring.all_reduce(comm, x)

    a = sim.run(2, train, mlp(dtype="float64"), DataParallel(quiet), data, Recipe(steps=3))
    b = sim.run(2, train, mlp(dtype="float64"), DataParallel(ring.all_reduce), data, Recipe(steps=3))
    assert a[0].losses == b[0].losses


def test_an_all_reduce_that_returns_something_else_is_refused(data):
    with pytest.raises(ValueError, match=r"given shape \(\d+,\) and returned float"):
        sim.run(2, train, mlp(), DataParallel(lambda comm, x: 1.0), digits.load(), Recipe(steps=1))
    with pytest.raises(ValueError, match=r"returned shape \(2,\)"):
        sim.run(2, train, mlp(), DataParallel(lambda comm, x: x[:2]), digits.load(), Recipe(steps=1))


def test_every_step_is_reported_in_a_row():
    results = sim.run(4, train, mlp(), DataParallel(ring.all_reduce), digits.load(), Recipe(steps=3))
    assert len(results.rows) == 3 and set(results.rows[0]) == {"rank", "step", "loss", "samples_per_s"}


def test_a_recipe_without_steps_is_refused():
    with pytest.raises(ValueError, match="0 steps of 128"):
        Recipe(steps=0)

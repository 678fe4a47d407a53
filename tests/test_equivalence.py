"""Truth: every synchronous strategy is one rank with the whole batch, step by step, in losses and in parameters.

The one rank is plain torch: no communicator, no strategy. All ranks are simulated here; those of tests/mpi are real.
"""

import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpdl_lab import data, models
from hpdl_lab.collectives import hierarchical, ring
from hpdl_lab.collectives.table import algorithm_names, find_algorithm
from hpdl_lab.comm import sim
from hpdl_lab.data.loading import shard_indices
from hpdl_lab.models.batch_norm import synchronized
from hpdl_lab.parallel.data_parallel import (
    DataParallel,
    DataParallelBucketed,
    DataParallelNaive,
    DataParallelOverlapped,
    Strategy,
)
from hpdl_lab.parallel.parameter_server import StaleSynchronous
from hpdl_lab.parallel.training import train_step

STEPS, BATCH = 4, 7  # a batch that no number of ranks above 1 divides
EXACT = 1e-10  # float64: of losses and parameters that are of order 1

SMALL = {"bucket_nbytes": 4000, "first_nbytes": 500}  # so that even the tiny models have several buckets
STRATEGIES = [
    DataParallelNaive(),
    DataParallel(),
    DataParallel(ring.all_reduce),
    DataParallel(hierarchical.all_reduce),
    DataParallelBucketed(**SMALL),
    DataParallelBucketed(ring.all_reduce, **SMALL),
    DataParallelOverlapped(**SMALL),
    DataParallelOverlapped(ring.all_reduce, **SMALL),
    StaleSynchronous(staleness=0),
]
ONE_OF_EACH = [next(s for s in STRATEGIES if type(s) is kind) for kind in dict.fromkeys(map(type, STRATEGIES))]


def optimizer_of(model):
    """With momentum, which remembers, and weight decay, which tells a gradient of zeros from none."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def alone(model, x, y, steps=STEPS, batch=BATCH):
    """[(loss, parameters)] of every step of plain torch on whole batches."""
    optimizer, course = optimizer_of(model), []
    for step in range(steps):
        some = slice(step * batch, (step + 1) * batch)
        optimizer.zero_grad()
        loss = cross_entropy(model(x[some]).flatten(0, -2), y[some].flatten())
        loss.backward()
        optimizer.step()
        course.append((loss.item(), flat(model)))
    return course


def together(comm, model, strategy, x, y, micro_batches=1, steps=STEPS, batch=BATCH):
    """The same of one of several ranks."""
    strategy.start(comm, model)
    optimizer, course = optimizer_of(model), []
    for step in range(steps):
        mine = shard_indices(torch.arange(step * batch, (step + 1) * batch), comm.rank, comm.size)
        part = train_step(comm, model, strategy, optimizer, x[mine], y[mine], batch, micro_batches)
        course.append((float(comm.all_reduce(torch.tensor([part], dtype=torch.float64))), flat(model)))
    strategy.finish(comm, model)
    strategy.stop()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    return course


def assert_same(course, truth, tolerance=EXACT):
    for step, ((loss, parameters), (true_loss, true_parameters)) in enumerate(zip(course, truth, strict=True)):
        assert abs(loss - true_loss) < tolerance, f"the loss of step {step}"
        assert (parameters - true_parameters).abs().max() < tolerance, f"the parameters after step {step}"


@functools.cache
def problem(name, dtype="float64"):
    """(x, y) of a data set that the model reads, and a function that builds the model."""
    wanted = models.MODELS[name].data
    whole = data.load(wanted, **({"block": 8} if wanted == "text" else {"dtype": dtype}))
    n = STEPS * BATCH
    fields = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1} if name == "deepseek" else {}
    return (whole.train_x[:n], whole.train_y[:n]), lambda: models.build_for(whole, name, "tiny", dtype=dtype, **fields)


@functools.cache
def truth(name, dtype="float64"):
    (x, y), build = problem(name, dtype)
    return alone(build(), x, y)


@pytest.mark.parametrize(("p", "micro_batches"), [(1, 3), (2, 1), (3, 3), (4, 1)])
def test_every_strategy_on_every_number_of_ranks(p, micro_batches):
    (x, y), build = problem("mlp")
    for strategy in STRATEGIES:
        for course in sim.run(p, together, build(), strategy, x, y, micro_batches):
            assert_same(course, truth("mlp"))


@pytest.mark.parametrize("name", [name for name in models.MODELS if name != "mlp"])
def test_every_strategy_on_every_model(name):
    (x, y), build = problem(name)
    for strategy in ONE_OF_EACH:
        for course in sim.run(3, together, build(), strategy, x, y, 2):
            assert_same(course, truth(name))


@pytest.mark.parametrize("algorithm", algorithm_names("all_reduce"))
def test_every_all_reduce_plugs_into_flat_and_overlapped(algorithm):
    (x, y), build = problem("mlp")
    for strategy in (DataParallel, functools.partial(DataParallelOverlapped, **SMALL)):
        for course in sim.run(3, together, build(), strategy(find_algorithm(algorithm).function), x, y):
            assert_same(course, truth("mlp"))


class Odd(nn.Module):
    """A weight that is used twice, a frozen one, one that no loss reaches, and one that few examples reach."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.tied = nn.Linear(64, 64, dtype=torch.float64)
            self.again = nn.Linear(64, 64, bias=False, dtype=torch.float64)
            self.frozen = nn.Linear(64, 64, dtype=torch.float64).requires_grad_(False)
            self.unused = nn.Linear(64, 3, dtype=torch.float64)
            self.seldom = nn.Linear(64, 64, dtype=torch.float64)
            self.out = nn.Linear(64, 10, dtype=torch.float64)
        self.again.weight = self.tied.weight
        self.register_buffer("mask", torch.ones(64, dtype=torch.bool))

    def forward(self, x):
        h = self.again(torch.tanh(self.frozen(self.tied(x * self.mask))))
        some = x[:, 20] > 0.5  # on a rank whose shard has no such example, `seldom` has no gradient
        if some.any():
            h = h + some.unsqueeze(1) * self.seldom(x)
        return self.out(torch.tanh(h))


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.filterwarnings("ignore:the loss does not depend on all parameters")
def test_tied_frozen_unused_and_seldom_used_parameters(p):
    (x, y), _ = problem("mlp")
    few = [bool((x[step * BATCH : (step + 1) * BATCH, 20] > 0.5).any()) for step in range(STEPS)]
    assert any(few), "no example of these uses the layer that few use"
    true_course = alone(Odd(), x, y)
    for strategy in ONE_OF_EACH:
        if strategy.synchronous:  # with messages from rank to rank nobody knows that a gradient is missing everywhere
            for course in sim.run(p, together, Odd(), strategy, x, y, 1 + p % 2):
                assert_same(course, true_course)


@pytest.mark.parametrize("strategy", ONE_OF_EACH, ids=repr)
def test_float32_differs_by_rounding_only(strategy):
    """1e-5 for losses and parameters of order 1, after 4 steps.

    The order of adding differs: that of examples in a product of matrices, by shards, and that over ranks. Each sum of
    k terms errs by at most k 2^-24 of the sum of their magnitudes: k = 7 examples here, so 4e-7 of a gradient below 1,
    of which momentum lets 4 steps of rate 0.1 add up to less than ten times that.
    """
    (x, y), build = problem("mlp", "float32")
    for course in sim.run(3, together, build(), strategy, x, y):
        assert_same(course, truth("mlp", "float32"), tolerance=1e-5)


def test_synchronized_batch_norm_equals_one_rank_and_that_of_shards_does_not():
    """As data.Strategy says: statistics of the shard make another network than those of the batch."""
    (x, y), _ = problem("cnn")

    def build():
        return models.build("cnn", "tiny", dtype="float64", norm="batch")

    def in_one_batch(comm, model):
        with synchronized(model, comm):
            return together(comm, model, DataParallelOverlapped(**SMALL), x, y)

    one = alone(build(), x, y)
    for course in sim.run(3, in_one_batch, build(), threads=True):
        assert_same(course, one)
    by_shards = sim.run(3, together, build(), DataParallel(), x, y)[0]
    assert abs(by_shards[-1][0] - one[-1][0]) > 1e-4
    assert "Batch norm takes its statistics from the shard" in Strategy.__doc__

"""Every strategy on real MPI ranks: the losses and the parameters of one process, and what the ranks disagree about."""

import pytest
import torch

from hpdl_lab import data, models
from hpdl_lab.collectives import hierarchical, native, ring
from hpdl_lab.data.loading import shard_indices
from hpdl_lab.models.batch_norm import synchronized
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.consensus import require_same
from hpdl_lab.parallel.data_parallel import (
    DataParallel,
    DataParallelBucketed,
    DataParallelNaive,
    DataParallelOverlapped,
)
from hpdl_lab.parallel.parameter_server import StaleSynchronous
from hpdl_lab.parallel.training import train_step

STEPS, BATCH = 3, 11  # 2, 3 and 4 ranks do not divide 11
SMALL = {"bucket_nbytes": 20_000, "first_nbytes": 2_000}
STRATEGIES = [
    DataParallelNaive(),
    DataParallel(),
    DataParallel(hierarchical.all_reduce),
    DataParallelBucketed(**SMALL),
    DataParallelOverlapped(**SMALL),
    DataParallelOverlapped(ring.all_reduce, **SMALL),
    DataParallelOverlapped(native.ring_all_reduce, **SMALL),
    DataParallelOverlapped(native.mpi_all_reduce, **SMALL),
    StaleSynchronous(staleness=0),
]


def course_of(model, strategy, x, y, comm=None, micro_batches=1):
    """[(loss, parameters)] of every step: of plain torch where there is no comm, else of one of its ranks."""
    optimizer, course = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(STEPS):
        some = torch.arange(step * BATCH, (step + 1) * BATCH) % len(y)
        if comm is None:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x[some]).flatten(0, -2), y[some].flatten())
            loss.backward()
            optimizer.step()
        else:
            mine = shard_indices(some, comm.rank, comm.size)
            part = train_step(comm, model, strategy, optimizer, x[mine], y[mine], BATCH, micro_batches)
            loss = comm.all_reduce(torch.tensor([part], dtype=torch.float64))
        course.append((loss.item(), torch.cat([p.detach().reshape(-1) for p in model.parameters()])))
    return course


def assert_these_ranks_equal_one(comm, strategy, name, whole, **fields):
    x, y = whole.train_x[:64], whole.train_y[:64]
    truth = course_of(models.build_for(whole, name, dtype="float64", **fields), None, x, y)
    model = models.build_for(whole, name, dtype="float64", **fields)
    strategy.start(comm, model)
    with synchronized(model, comm):
        course = course_of(model, strategy, x, y, comm, micro_batches=1 if fields else 2)
    strategy.finish(comm, model)
    strategy.stop()
    for (loss, parameters), (true_loss, true_parameters) in zip(course, truth, strict=True):
        assert abs(loss - true_loss) < 1e-10
        assert (parameters - true_parameters).abs().max() < 1e-10


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_these_ranks_equal_one(comm, strategy):
    assert_these_ranks_equal_one(comm, strategy, "mlp", data.load("digits", dtype="float64"))


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_overlap_on_transformers(comm, name):
    whole = data.load("text", block=8) if name == "gpt" else data.load("digit_images", dtype="float64")
    assert_these_ranks_equal_one(comm, DataParallelOverlapped(**SMALL), name, whole)


def test_batch_norm_in_one_batch_beside_buckets_under_way(comm):
    whole = data.load("digit_images", dtype="float64")
    assert_these_ranks_equal_one(comm, DataParallelOverlapped(**SMALL), "cnn", whole, norm="batch")


def test_another_model_on_the_last_rank_is_named(comm):
    if comm.size == 1:
        return
    sizes = (64, 32, 10) if comm.rank == comm.size - 1 else (64, 48, 10)
    with pytest.raises(ValueError, match=rf"0.weight is .*\(32, 64\) in float32 on rank {comm.size - 1}"):
        DataParallelOverlapped().start(comm, mlp(sizes))


def test_another_seed_of_the_data_is_named(comm):
    if comm.size > 1:
        with pytest.raises(ValueError, match="rank 0 has"):
            require_same(comm, "recipe", "seed 1" if comm.rank == 0 else "seed 2")


@pytest.mark.parametrize("strategy", [DataParallel(), DataParallelOverlapped(**SMALL)], ids=repr)
def test_nan_on_the_last_rank_is_named_on_all(comm, strategy):
    model = mlp()
    strategy.start(comm, model)
    x = torch.full((2, 64), float("nan") if comm.rank == comm.size - 1 else 1.0)
    model(x).sum().backward()
    with pytest.raises(FloatingPointError, match=rf"rank {comm.size - 1}: NaN in the gradient of 4.weight"):
        strategy.add_gradients(comm, model)
    strategy.stop()

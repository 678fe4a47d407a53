"""Training on real MPI ranks: transformers, batch norm and an input pipeline, each the losses of one process."""

import pytest
import torch

from hpdl_lab import data, models
from hpdl_lab.comm import sim, world
from hpdl_lab.data.loading import Reader, shifted
from hpdl_lab.parallel.data_parallel import DataParallel, DataParallelOverlapped
from hpdl_lab.parallel.precision import LossScale, Precision
from hpdl_lab.parallel.training import Recipe, train


@pytest.fixture(scope="module")
def comm():
    return world(deadline=20)


@pytest.mark.parametrize(
    ("name", "what", "fields", "reader", "recipe"),
    [
        ("gpt", "copy", {}, Reader(ahead=2), {"micro_batches": 2}),
        ("cnn", "digit_images", {}, Reader(seconds=1e-4, ahead=1, prepare=shifted), {"lr": 0.05}),
        ("vit", "digit_images", {}, None, {"optimizer": "adamw", "lr": 1e-3}),
    ],
    ids=["gpt", "cnn, augmented", "vit"],
)
def test_these_ranks_equal_one(comm, name, what, fields, reader, recipe):
    recipe = Recipe(**{"steps": 4, "batch": 53, "lr": 0.1, **recipe})  # a batch that 2, 3 and 4 ranks do not divide
    held = data.load(what, dtype="float64")
    (one,) = sim.run(
        1, train, models.build_for(held, name, dtype="float64", **fields), DataParallel(), held, recipe, reader
    )
    model = models.build_for(held, name, dtype="float64", **fields)
    mine = train(comm, model, DataParallel(), held, recipe, reader)
    assert mine.losses == pytest.approx(one.losses, abs=1e-9)
    assert float((mine.parameters - one.parameters).abs().max()) < 1e-8
    assert (mine.test_loss, mine.test_accuracy) == pytest.approx((one.test_loss, one.test_accuracy), abs=1e-9)


def test_input_waits_are_in_the_log_of_real_ranks(comm):
    held = data.load("copy", n=100)
    before = len(comm.trace.events)
    reader = Reader(seconds=1e-3)
    train(comm, models.build_for(held, "gpt"), DataParallel(), held, Recipe(steps=3, batch=30, lr=0.01), reader)
    waits = [e for e in comm.trace.events[before:] if e.op == "input"]
    assert len(waits) == 3
    assert all(e.t1_ns - e.t0_ns >= 1_000_000 * (30 // comm.size) for e in waits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_takes_the_same_steps_on_these_ranks_as_on_simulated_ones(comm, dtype):
    held, recipe = data.load("digits"), Recipe(steps=5, batch=53, lr=0.1)
    scale = LossScale(2.0**22, interval=2) if dtype == "float16" else None  # which overflows at first
    strategy = DataParallelOverlapped(precision=Precision(dtype, scale))
    simulated = sim.run(comm.size, train, models.build_for(held, "mlp"), strategy, held, recipe)[0]
    mine = train(comm, models.build_for(held, "mlp"), strategy, held, recipe)
    assert mine.losses == pytest.approx(simulated.losses, rel=2e-3)  # sums of 16 bits, in another order
    rows = comm.all_gather(mine.parameters)
    assert (rows == rows[0]).all() and mine.parameters.dtype == rows.dtype
    if dtype == "float16":
        scales = comm.all_gather(torch.tensor([strategy.precision.scaler.scale]))
        assert 0 < float(scales[0]) < 2.0**22 and (scales == scales[0]).all()

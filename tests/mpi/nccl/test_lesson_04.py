"""What notebook 04 runs on engines, on ranks whose tensors go through NCCL."""

import numpy as np

from hpdl_lab.checks.collective import ENGINE_SIZES, call_many, inputs
from hpdl_lab.checks.lessons.lesson_04 import ALL_REDUCE
from hpdl_lab.collectives import native, ring, sweep
from hpdl_lab.data import digits
from hpdl_lab.models.mlp import mlp
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.training import Recipe, train


def test_the_check_calls_the_answer(comm):
    for n, left in zip(ENGINE_SIZES, call_many(comm, ring.all_reduce, ALL_REDUCE, ENGINE_SIZES), strict=True):
        assert np.array_equal(left.x, inputs(comm.size, n).sum(0)) and left.broken_guard is None


def test_the_race(comm, fake):
    contenders = {
        "ring": ring.all_reduce,
        "NCCL": lambda comm, x: comm.nccl_all_reduce(x),
        "one pass": native.shm_all_reduce,
    }
    before = fake.fake_ticket()
    sweep.race(comm, contenders, [4096, 65536], samples=2, sample_ns=0)
    rows = [row for row in comm.rows if "name" in row]
    if comm.rank == 0:
        assert [row["name"] for row in rows] == ["ring", "NCCL", "one pass"] * 2
        assert not any(row["wrong"] for row in rows)
    assert fake.fake_ticket() > before


def test_training(comm):
    strategy, recipe = DataParallel(ring.all_reduce), Recipe(steps=4, batch=240)
    trained = train(comm, mlp(), strategy, digits.load("float32"), recipe)
    assert trained.losses[-1] < trained.losses[0]
    everyone = comm.all_gather(trained.parameters)
    assert all((parameters == everyone[0]).all() for parameters in everyone)

"""`lab.start(2, device="cuda")`: what notebook 04 does, on GPU engines. Skipped where engines or NCCL are missing."""

import pytest
import torch

from hpdl_lab import features
from hpdl_lab.bench import ddp
from hpdl_lab.collectives import ring
from hpdl_lab.comm import PerRank
from hpdl_lab.features import Missing, gpu

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def lab(a_gpu):
    pytest.importorskip("ipyparallel")
    try:
        features.mpiexec()
        gpu.require_gpu_transfer()
    except Missing as error:
        pytest.skip(str(error))
    from hpdl_lab import lab

    with lab.start(2, device="cuda"):
        yield lab


def where(comm, x):
    return comm.device, str(x.device)


def test_arguments_are_on_the_gpu_of_their_rank(lab):
    for device, of_x in lab.run(where, torch.ones(3), deadline=60):
        assert device.startswith("cuda:") and of_x == device


def test_a_ring_in_python(lab):
    results = lab.run(ring.all_reduce, PerRank([torch.full((1001,), r + 1.0) for r in range(2)]), deadline=60)
    assert all(x.device.type == "cpu" and (x == 3).all() for x in results)


def test_the_check_of_the_exercise(lab):
    from hpdl_lab.checks.exercises import EXERCISES  # noqa: F401 - a missing room would show here

    assert lab.check(ring.all_reduce)


def test_training_with_it(lab):
    trained = lab.train(all_reduce=ring.all_reduce, steps=30)
    assert trained.losses[-1] < trained.losses[0] and trained.drift < 1e-3


def test_the_race_of_04_with_nccl_in_it(lab):
    rows = lab.measure(ring.all_reduce, ["4KiB", "1MiB"], deadline=60).rows
    assert {"NCCL", "one pass", "MPI", "gloo"} <= {row["name"] for row in rows}
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in rows)


def test_a_step_by_ddp_on_nccl(lab):
    rows = ddp.ddp(2, "tiny", 4, 3, device="cuda")
    assert ddp.ON_NCCL in [row["name"] for row in rows] and not any(row["wrong"] for row in rows)

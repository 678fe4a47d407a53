"""Pipelines on real ranks: the loss and the gradients of the model as a whole, messages of any size."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import models, schedules
from hpdl_lab.comm import world
from hpdl_lab.mesh import DeviceMesh
from hpdl_lab.parallel.hybrid.model import HybridParallel
from hpdl_lab.parallel.pipeline.reports import TimedStage
from hpdl_lab.parallel.pipeline.run_schedule import run_schedule

TOKENS = torch.randint(80, (12, 7), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(12, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def comm():
    return world(deadline=20)


def loss_of(output, y):
    return cross_entropy(output.flatten(0, -2), y.flatten())


def case(name, ranks):
    """(model, x, y, layers) with two layers at least for each rank."""
    if name == "gpt":
        model = models.build("gpt", width=8, layers=2 * ranks, block=6, dtype="float64")
        return model, TOKENS[:, :-1], TOKENS[:, 1:], 2 * ranks + 4
    if name == "vit":
        model = models.build("vit", width=8, layers=2 * ranks, patch=4, dtype="float64")
        return model, IMAGES, TOKENS[:, 0] % 10, 2 * ranks + 5
    if name == "cnn":
        model = models.build("cnn", widths=(4,), blocks=2 * ranks, dtype="float64")
        return model, IMAGES, TOKENS[:, 0] % 10, 2 * ranks + 3
    model = models.build("mlp", features=8, hidden=(6,) * (2 * ranks), dtype="float64")
    return model, IMAGES[:, 0, 0], TOKENS[:, 0] % 10, 2 * ranks + 1


@pytest.mark.parametrize("model", ["mlp", "cnn", "gpt", "vit"])
def test_every_schedule_gives_the_gradients_of_the_model_as_a_whole(comm, model):
    model, x, y, layers = case(model, comm.size)
    want_loss = loss_of(model(x), y)
    want_loss.backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for name in schedules.CATALOG:
        m = 2 if name == "gems_mast" else comm.size * (1 if comm.size > 2 else 2)
        if 12 % m:
            continue  # the batch has 12 examples
        for recompute in (False, True) if name == "1f1b" else (False,):
            model.zero_grad()
            schedule = schedules.build(name, comm.size, m)
            mesh, costs = DeviceMesh(comm, pp=comm.size), [1] * layers
            pipeline = HybridParallel(model, mesh, x, schedule=schedule, recompute=recompute, costs=costs)
            loss = pipeline.step(x, y)
            off = [abs(loss - want_loss.item())]
            off += [float((p.grad - want[n]).abs().max()) for n, p in pipeline.named_parameters().items()]
            assert max(off) < 1e-12, name


def test_large_messages_under_way_both_ways_end(comm):
    """A megabyte each way between neighbors, more than any back end sends before it is received."""
    for name in ("gpipe", "1f1b", "interleaved", "zero_bubble_h1", "gems_master"):
        schedule = schedules.build(name, comm.size, 2 * comm.size)
        stages = {n: TimedStage(lambda seconds: None, shape=(2**18,)) for n in schedule.stages_of(comm.rank)}
        run_schedule(comm, schedule, stages)

"""Pipelines and meshes on engines: pairs of axes train as one rank, and what ends a step is one sentence."""

import pytest
import torch

from hpdl_lab import models, schedules
from hpdl_lab.engines.errors import RunFailed
from hpdl_lab.mesh import DeviceMesh
from hpdl_lab.parallel.hybrid.model import HybridParallel

TOKENS = torch.randint(80, (8, 7), generator=torch.Generator().manual_seed(0))
X, Y = TOKENS[:, :-1], TOKENS[:, 1:]


def train(comm, sizes, x, y, options):
    """(losses of two steps, the whole model's state) of a gpt on a mesh of engines."""
    model = models.build("gpt", vocabulary=12, block=6, layers=2, heads=2, width=8, dtype="float64")
    hybrid = HybridParallel(model, DeviceMesh(comm, **sizes), x, micro_batches=2, **options)
    optimizer = torch.optim.SGD(hybrid.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        losses.append(hybrid.step(x, y))
        optimizer.step()
    return losses, hybrid.state_dict()


def test_engines_train_on_every_pair_of_axes(cluster):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 12, (2, 8, 6), generator=draw).unbind()
    wanted = None
    for sizes, options in (
        ({"dp": 4}, {}),
        ({"dp": 2, "tp": 2}, {"sequence": True}),
        ({"pp": 2, "tp": 2}, {"schedule": "zero_bubble_h1", "recompute": True}),
    ):
        results = cluster.run(train, sizes, x, y, options)
        wanted = wanted or results[0]
        for losses, state in results:
            assert losses == pytest.approx(wanted[0], abs=1e-10)
            for name, tensor in state.items():
                torch.testing.assert_close(tensor, wanted[1][name], rtol=0, atol=1e-10)


def gpt():
    return models.build("gpt", width=8, layers=4, block=6, dtype="float64")


def step(comm, spoil=None):
    """The loss of one step of a pipeline."""
    schedule = schedules.build("1f1b", comm.size, 4)
    pipeline = HybridParallel(gpt(), DeviceMesh(comm, pp=comm.size), X, schedule=schedule, costs=[1] * 8)
    if spoil is not None:
        spoil(comm.rank, pipeline)
    return pipeline.step(X, Y)


def short_of_memory(rank, pipeline):
    """The layers of rank 2 have no memory for a second micro-batch."""
    if rank == 2:
        (stage,) = pipeline.stages.values()

        def allocate(module, inputs):
            if len(stage.saved) == 1:
                raise torch.OutOfMemoryError("Tried to allocate 8.00 GiB")

        next(m for m in stage.module.modules() if isinstance(m, torch.nn.LayerNorm)).register_forward_pre_hook(allocate)


def not_a_number(rank, pipeline):
    if rank == 1:
        with torch.no_grad():
            pipeline.parameters()[0].fill_(float("nan"))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            short_of_memory,
            "rank 2: OutOfMemoryError: rank 2 is out of memory in forward 1 stage 2, holding the activations of 1 "
            "micro-batch: recompute=True, smaller micro-batches or more stages need less (Tried to allocate 8.00 GiB)",
        ),
        (not_a_number, "ranks 0-3: FloatingPointError: rank 1: NaN or infinity in the parameter "),
    ],
)
def test_what_ends_a_step_is_one_sentence_and_engines_go_on(cluster, spoil, said):
    pids = cluster.run(process)
    with pytest.raises(RunFailed) as error:
        cluster.run(step, spoil, deadline=30)
    assert str(error.value).startswith(said)
    assert cluster.run(step, deadline=30)[3] > 0 and cluster.run(process) == pids  # the same engines


def process(comm):
    import os

    return os.getpid()

"""Pipelines on engines: every schedule on four MPI ranks, and what ends a step; test_times_on_engines.py: its time."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import models, schedules
from hpdl_lab.engines.errors import RunFailed
from hpdl_lab.mesh import DeviceMesh
from hpdl_lab.parallel.hybrid.model import HybridParallel

TOKENS = torch.randint(80, (8, 7), generator=torch.Generator().manual_seed(0))
X, Y = TOKENS[:, :-1], TOKENS[:, 1:]


def gpt():
    return models.build("gpt", width=8, layers=4, block=6, dtype="float64")


def loss_of(output, y):
    return cross_entropy(output.flatten(0, -2), y.flatten())


def steps(comm, names, spoil=None):
    """{schedule: (loss, {name: gradient})} of this rank."""
    found = {}
    for name in names:
        schedule = schedules.build(name, comm.size, 2 if name == "gems_mast" else 4)
        mesh = DeviceMesh(comm, pp=comm.size)
        pipeline = HybridParallel(gpt(), mesh, X, schedule=schedule, costs=[1] * 8)
        if spoil is not None:
            spoil(comm.rank, pipeline)
        found[name] = pipeline.step(X, Y), {n: p.grad for n, p in pipeline.named_parameters().items()}
    return found


def test_every_schedule_on_four_engines(cluster):
    model = gpt()
    loss = loss_of(model(X), Y)
    loss.backward()
    ranks = cluster.run(steps, list(schedules.CATALOG), deadline=30)
    for name in schedules.CATALOG:
        assert all(abs(mine[name][0] - loss.item()) < 1e-12 for mine in ranks)
        for mine in ranks:
            assert all((grad - model.get_parameter(n).grad).abs().max() < 1e-12 for n, grad in mine[name][1].items())
        assert set().union(*(mine[name][1] for mine in ranks)) == {n for n, _ in model.named_parameters()}


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
        cluster.run(steps, ["1f1b"], spoil, deadline=30)
    assert str(error.value).startswith(said)
    ((loss, _),) = cluster.run(steps, ["1f1b"], deadline=30)[3].values()
    assert loss > 0 and cluster.run(process) == pids  # the same engines


def process(comm):
    import os

    return os.getpid()

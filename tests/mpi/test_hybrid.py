"""Hybrid parallel training on real ranks: every mesh of however many there are, and messages of any size."""

import functools

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import models, schedules
from hpdl_lab.mesh import DeviceMesh
from hpdl_lab.parallel.grid.search import grids
from hpdl_lab.parallel.hybrid.model import HybridParallel
from hpdl_lab.parallel.pipeline.reports import TimedStage
from hpdl_lab.parallel.pipeline.run_schedule import run_schedule

DRAW = torch.Generator().manual_seed(3)
TOKENS = torch.randint(12, (12, 7), generator=DRAW)
IMAGES = torch.randn(12, 1, 4, 4, dtype=torch.float64, generator=DRAW)
CASES = {
    "mlp": ({"features": 16, "hidden": (12, 12, 12), "classes": 6}, IMAGES.flatten(1), TOKENS[:, 0] % 6),
    "cnn": ({"channels": 1, "classes": 6, "widths": (12, 12)}, IMAGES, TOKENS[:, 0] % 6),
    "gpt": ({"vocabulary": 12, "block": 6, "layers": 2, "heads": 12, "width": 12}, TOKENS[:, :-1], TOKENS[:, 1:]),
    "vit": (
        {"image": 4, "patch": 2, "channels": 1, "classes": 6, "layers": 2, "heads": 12, "width": 12},
        IMAGES,
        TOKENS[:, 0] % 6,
    ),
}

LONG = torch.randint(12, (12, 13), generator=DRAW)
ROUTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 4,
    "hidden": 8,
}
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2}
SHARED = {  # sequences and experts that 1, 2, 3 and 6 ranks share
    "deepseek": (
        {
            "vocabulary": 12,
            "block": 12,
            "layers": 2,
            "heads": 2,
            "width": 8,
            "first_k_dense_replace": 1,
            **ROUTED,
            **LATENT,
        },
        LONG[:, :-1],
        LONG[:, 1:],
    )
}


@functools.cache
def sequential(name):
    """(loss, {name: gradient}) of one rank."""
    fields, x, y = (CASES | SHARED)[name]
    model = models.build(name, dtype="float64", **fields)
    loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}


def require_equal(comm, name, sizes, **options):
    """Raise AssertionError unless two steps of this rank have the sequential model's loss and gradients."""
    fields, x, y = (CASES | SHARED)[name]
    mesh = DeviceMesh(comm, **sizes)
    hybrid = HybridParallel(models.build(name, dtype="float64", **fields), mesh, x, **options)
    want, wanted = sequential(name)
    for _ in range(2):
        assert abs(hybrid.step(x, y) - want) < 1e-10
        for key, p in hybrid.named_parameters().items():
            assert (p.grad - hybrid.state.part(key, wanted[key])).abs().max() < 1e-10, key


@pytest.mark.parametrize("name", CASES)
def test_every_mesh_of_these_ranks_equals_the_sequential_model(run, name):
    comm = run()
    for dp, pp, tp in grids(comm.size):
        if (comm.size > 4 and max(dp, pp, tp) > 2) or (name == "cnn" and tp == 3):  # its norms have 4 groups
            continue
        m = 2 if 12 // dp % 2 == 0 else 3
        require_equal(comm, name, {"dp": dp, "pp": pp, "tp": tp}, micro_batches=m)


@pytest.mark.parametrize("axis", ["cp", "ep"])
def test_sequences_and_experts_are_shared_by_these_ranks(run, axis):
    comm = run()
    if 6 % comm.size == 0:
        require_equal(comm, "deepseek", {axis: comm.size}, micro_batches=2, recompute=axis == "ep")


def test_options_give_the_same(run):
    comm = run()
    p = comm.size
    if 6 % p:
        return
    for sizes in ({"pp": p}, {"tp": p}):
        require_equal(comm, "gpt", sizes, micro_batches=2, schedule="gpipe", recompute=True)
    require_equal(comm, "gpt", {"tp": p}, micro_batches=2, sequence=True)
    for schedule, m in (("zero_bubble_h1", p), ("gems_master", 2), ("interleaved", p)):
        chunks = 1 if schedule == "interleaved" else None  # seven layers are not two for each of four ranks
        require_equal(comm, "gpt", {"pp": p}, micro_batches=m, schedule=schedule, chunks=chunks)


def test_what_cannot_be_ends_on_every_rank_alike_and_leaves_them_usable(run):
    comm = run()
    fields, x, _ = CASES["gpt"]
    for options, told in (({"micro_batches": 5}, "a batch of 12 cannot be cut"), ({"schedule": "no"}, "no schedule")):
        with pytest.raises(ValueError, match=told):
            HybridParallel(models.build("gpt", **fields), DeviceMesh(comm, dp=comm.size), x, **options)
    assert int(comm.all_reduce(torch.ones(1))) == comm.size


def test_large_messages_under_way_both_ways_end(comm):
    """A megabyte each way between neighbors, more than any back end sends before it is received."""
    for name in ("gpipe", "1f1b", "interleaved", "zero_bubble_h1", "zero_bubble_v", "dualpipe_v", "gems_master"):
        schedule = schedules.build(name, comm.size, 2 * comm.size)
        stages = {n: TimedStage(lambda seconds: None, shape=(2**18,)) for n in schedule.stages_of(comm.rank)}
        run_schedule(comm, schedule, stages)

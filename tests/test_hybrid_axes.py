"""Hybrid parallel training with cp and ep equals the sequential model, in mixtures with all other axes and ZeRO."""

import functools

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import models
from hpdl_lab.comm import sim
from hpdl_lab.mesh import DeviceMesh, Grid
from hpdl_lab.parallel import checkpoint
from hpdl_lab.parallel.experts import mixtures_of
from hpdl_lab.parallel.hybrid.model import HybridParallel
from hpdl_lab.parallel.optimizer_state import OptimizerState
from tests.wording import raises

BATCH, POSITIONS, VOCABULARY, STEPS = 8, 8, 12, 2
SIZE = {"vocabulary": VOCABULARY, "block": POSITIONS, "layers": 2, "heads": 4, "dtype": "float64"}
DRAW = torch.Generator().manual_seed(5)
X, Y = torch.randint(0, VOCABULARY, (2, BATCH, POSITIONS), generator=DRAW).unbind()


FIELDS = {
    "gpt": {"width": 16},
    "llama": {"width": 16, "kv_heads": 2, "hidden": 24},
    "deepseek": {
        "width": 16,
        "hidden": 24,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 12,
    }
    | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4},
}


def built(name):
    return models.build(name, **SIZE, **FIELDS[name])


@functools.cache
def sequential(name):
    """[(loss, {name: gradient})] of a few steps on one rank, and the state after them."""
    model = built(name)
    optimizer, told = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(X).flatten(0, 1), Y.flatten())
        loss.backward()
        told.append((loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}))
        optimizer.step()
        for layer in mixtures_of(model):
            layer.update_bias()
    return told, {n: t.clone() for n, t in model.state_dict().items()}


def train(comm, name, sizes, options):
    """[(loss, {name: (gradient, the sequential model's part)})] of every step, and the whole model's state."""
    mesh = DeviceMesh(comm, **sizes)
    hybrid = HybridParallel(built(name), mesh, X, **{"micro_batches": 2, "costs": None, **options})
    optimizer, told = torch.optim.Adam(hybrid.parameters(), lr=0.01), []
    for _, wanted in sequential(name)[0]:
        loss = hybrid.step(X, Y)
        mine = {n: p.grad.clone() for n, p in hybrid.named_parameters().items() if p.grad is not None}
        told.append((loss, {n: (grad, hybrid.state.part(n, wanted[n])) for n, grad in mine.items()}))
        optimizer.step()
        hybrid.update_biases()
    return told, hybrid.state_dict()


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("gpt", {"dp": 2, "cp": 2}, {}),
        ("gpt", {"tp": 2, "cp": 2}, {}),
        ("gpt", {"tp": 2, "cp": 2}, {"sequence": True}),
        ("llama", {"pp": 2, "cp": 2}, {"zero": 2, "schedule": "zero_bubble_h1"}),
        ("deepseek", {"dp": 2, "ep": 2}, {"zero": 1}),
        ("deepseek", {"pp": 2, "ep": 2}, {"recompute": True}),
        ("deepseek", {"pp": 2, "ep": 2}, {"schedule": "zero_bubble_h1"}),
        ("deepseek", {"pp": 2, "ep": 2}, {"schedule": "gems_master", "micro_batches": 4}),
        ("deepseek", {"pp": 2, "ep": 2}, {"schedule": "dualpipe", "micro_batches": 4}),
        ("deepseek", {"tp": 2, "ep": 2}, {"zero": 2}),
        ("deepseek", {"dp": 2, "ep": 2, "cp": 2}, {"zero": 1}),
        ("deepseek", {"dp": 2, "ep": 2, "cp": 2}, {"zero": 2}),
    ],
    ids=str,
)
def test_mixtures_with_cp_and_ep_equal_the_sequential_model(name, sizes, options):
    steps, state = sequential(name)
    seen = set()
    for told, whole in sim.run(Grid(**sizes).size, train, name, sizes, options, threads=True, trace=False):
        for (loss, gradients), (want, _) in zip(told, steps, strict=True):
            assert abs(loss - want) < 1e-10
            for gradient, wanted in gradients.values():
                torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-10)
            seen |= {*gradients}
        assert list(whole) == list(state)
        for key, tensor in state.items():
            torch.testing.assert_close(whole[key], tensor, rtol=0, atol=1e-10)
    assert seen == {*state} - {n for n in state if n.endswith("router.bias")} or options.get("zero")


def go_on(comm, sizes, path, zero):
    """Losses of two steps from the checkpoint at `path`, if there is one, and saved there."""
    hybrid = HybridParallel(built("deepseek"), DeviceMesh(comm, **sizes), X, micro_batches=2, costs=[1] * 5, zero=zero)
    optimizer = torch.optim.Adam(hybrid.parameters(), lr=0.01)
    whole = OptimizerState(hybrid, optimizer)
    first = checkpoint.restore(comm, path, hybrid, whole) if path.exists() else 0
    losses = []
    for _ in range(2):
        losses.append(hybrid.step(X, Y))
        optimizer.step()
        hybrid.update_biases()
    checkpoint.save(comm, path, hybrid, whole, first + 2)
    return losses


def test_a_checkpoint_goes_from_mesh_to_mesh_with_experts(tmp_path):
    unbroken, losses = [], []
    for _ in range(3):
        unbroken += sim.run(1, go_on, {"dp": 1}, tmp_path / "one", 0)[0]
    for ranks, sizes, zero in ((4, {"ep": 2, "cp": 2}, 1), (4, {"pp": 2, "ep": 2}, 2), (2, {"dp": 2}, 0)):
        losses += sim.run(ranks, go_on, sizes, tmp_path / "many", zero, threads=True)[ranks - 1]
    assert losses == pytest.approx(unbroken, abs=1e-10)


MLP = {"features": 12, "hidden": (16, 8), "classes": 6, "dtype": "float64"}


@pytest.mark.parametrize(
    ("name", "sizes", "shape", "told"),
    [
        ("mlp", {"cp": 2}, (8, 12), ("context_parallel", "Sequential")),
        ("mlp", {"cp": 2, "pp": 2}, (8, 12), ("context_parallel", "Sequential")),
        ("mlp", {"ep": 2}, (8, 12), ("Sequential", "MixtureOfExperts")),
        ("llama", {"cp": 2}, (8, 6), ("6 positions", "4 chunks")),
        ("deepseek", {"ep": 3}, (24, 8), ("experts", "4", "3 ranks")),
        ("deepseek", {"ep": 2}, (6, 8), ("6", "dp x ep = 1 x 2", "2 micro-batches")),
    ],
    ids=str,
)
def test_what_cannot_be_shared_is_said_on_every_rank(name, sizes, shape, told):
    def lay_out(comm):
        model = models.build("mlp", **MLP) if name == "mlp" else built(name)
        x = torch.zeros(shape, dtype=torch.float64 if name == "mlp" else torch.int64)
        with raises(ValueError, *told) as error:
            HybridParallel(model, DeviceMesh(comm, **sizes), x, micro_batches=2)
        return str(error.value)

    assert len(set(sim.run(Grid(**sizes).size, lay_out))) == 1


def test_a_sequence_that_is_cut_needs_an_answer_at_each_position():
    def step(comm):
        mesh = DeviceMesh(comm, cp=2)
        with raises(ValueError, "(8,)", "(8, 8)"):
            HybridParallel(built("gpt"), mesh, X, micro_batches=2, loss=lambda out, y: out.mean()).step(X, Y[:, 0])
        with raises(ValueError, "(8, 8, 12)"):
            HybridParallel(built("gpt"), mesh, X, micro_batches=2).step(X, Y[:, 0])

    sim.run(2, step, threads=True)

"""Hybrid parallel training equals the sequential model: every composition up to 2 x 2 x 2, on simulated ranks."""

import functools

import pytest
import torch
import torch.utils.checkpoint
from torch.nn.functional import cross_entropy

from hpdl_lab import models
from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.mesh import DeviceMesh
from hpdl_lab.parallel import checkpoint
from hpdl_lab.parallel.grid.machine import grid_of
from hpdl_lab.parallel.grid.measure import spec_of
from hpdl_lab.parallel.grid.model import predict_step
from hpdl_lab.parallel.hybrid.model import HybridParallel
from hpdl_lab.parallel.optimizer_state import OptimizerState
from hpdl_lab.parallel.tensor.ways import on_a_ring
from tests.wording import raises

BATCH, STEPS = 8, 2
FIELDS = {
    "mlp": {"features": 12, "hidden": (16, 8, 8), "classes": 6},
    "cnn": {"channels": 1, "classes": 6, "widths": (8, 8)},
    "gpt": {"vocabulary": 11, "block": 6, "layers": 3, "heads": 2, "width": 8},
    "llama": {"vocabulary": 11, "block": 6, "layers": 3, "heads": 4, "kv_heads": 2, "width": 8, "hidden": 12},
    "deepseek": {"vocabulary": 11, "block": 6, "layers": 3, "heads": 2, "width": 8, "hidden": 12}
    | {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 6,
        "q_lora_rank": 6,
        "kv_lora_rank": 4,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
    },
    "vit": {"image": 4, "patch": 2, "channels": 1, "classes": 6, "layers": 3, "heads": 2, "width": 8},
}
LAYERS = {"mlp": 4, "cnn": 5, "gpt": 7, "llama": 6, "deepseek": 6, "vit": 8}
SHAPES = {"mlp": (12,), "cnn": (1, 6, 6), "vit": (1, 4, 4)}


def batch_of(name):
    """x and y of one batch: the same on every rank."""
    draw = torch.Generator().manual_seed(5)
    if "vocabulary" in FIELDS[name]:
        return torch.randint(0, 11, (2, BATCH, 6), generator=draw).unbind()
    x = torch.randn(BATCH, *SHAPES[name], generator=draw, dtype=torch.float64)
    return x, torch.randint(0, 6, (BATCH,), generator=draw)


@functools.cache
def sequential(name):
    """[(loss, {name: gradient})] of a few steps on one rank, and the state after them."""
    model, (x, y) = models.build(name, dtype="float64", **FIELDS[name]), batch_of(name)
    optimizer, told = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        told.append((loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}))
        optimizer.step()
    return told, {n: t.clone() for n, t in model.state_dict().items()}


def laid_out(comm, name, sizes, **options):
    """A HybridParallel, and its batch. Layers cost the same: they are measured, which takes time, for costs=None."""
    model, (x, y) = models.build(name, dtype="float64", **FIELDS[name]), batch_of(name)
    options = {"micro_batches": 2, "costs": [1] * LAYERS[name], **options}
    return HybridParallel(model, DeviceMesh(comm, **sizes), x, **options), x, y


def train(comm, name, sizes, options):
    """[(loss, {name: (gradient, cut)})] of every step of this rank, and the whole model's state."""
    hybrid, x, y = laid_out(comm, name, sizes, **options)
    optimizer, told = torch.optim.Adam(hybrid.parameters(), lr=0.01), []
    for _ in range(STEPS):
        loss = hybrid.step(x, y)
        whole = {n: p for n, p in hybrid.named_parameters().items() if p.grad is not None}  # that are not in shards
        told.append((loss, {n: (p.grad.clone(), hybrid.state.cuts[n]) for n, p in whole.items()}))
        optimizer.step()
    return told, hybrid.state_dict()


def assert_equals_sequential(name, sizes, **options):
    size = sizes.get("dp", 1) * sizes.get("pp", 1) * sizes.get("tp", 1)
    results = sim.run(size, train, name, sizes, options, threads="tp" in sizes, trace=False)
    steps, state = sequential(name)
    seen = set()
    for told, whole in results:
        for (loss, gradients), (want, wanted) in zip(told, steps, strict=True):
            assert abs(loss - want) < 1e-10
            for key, (gradient, cut) in gradients.items():
                torch.testing.assert_close(gradient, cut.part(wanted[key]), rtol=0, atol=1e-10)
            seen |= {*gradients}
        assert list(whole) == list(state)
        for key, tensor in state.items():
            torch.testing.assert_close(whole[key], tensor, rtol=0, atol=1e-10)
    assert seen == {*steps[0][1]} or options.get("zero")  # every parameter is somewhere


@pytest.mark.parametrize("sizes", [{"dp": 2, "pp": 2}, {"dp": 2, "tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_every_two_axes_equal_the_sequential_model(sizes):
    measured = {} if "tp" in sizes else {"costs": None}
    assert_equals_sequential("gpt", sizes, **measured)


@pytest.mark.parametrize("name", FIELDS)
def test_all_three_axes_equal_the_sequential_model(name):
    assert_equals_sequential(name, {"dp": 2, "pp": 2, "tp": 2})


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero_bubble_h1", "gems_mast", "gems_master", "dualpipe"])
def test_every_schedule_equals_the_sequential_model(schedule):
    assert_equals_sequential("gpt", {"dp": 2, "pp": 2}, schedule=schedule)


@pytest.mark.parametrize(
    ("name", "dp", "options"),
    [
        ("gpt", 1, {"recompute": True}),
        ("gpt", 1, {"sequence": True}),
        ("gpt", 2, {"sequence": True, "recompute": True, "schedule": "zero_bubble_h1"}),
        ("gpt", 2, {"all_reduce": ring.all_reduce, "schedule": "gems_master", "micro_batches": 4}),
        ("vit", 1, {"recompute": True, "schedule": "interleaved"}),
        ("gpt", 2, {"zero": 1}),
        ("llama", 2, {"zero": 2}),
        ("deepseek", 2, {"zero": 1, "recompute": True}),
        ("gpt", 2, {"zero": 2, "sequence": True, "schedule": "gems_master", "micro_batches": 4}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_options_change_no_gradient(name, dp, options):
    assert_equals_sequential(name, {"dp": dp, "pp": 2, "tp": 2}, **options)


class RingMesh(DeviceMesh):
    """A mesh whose collectives over tp are those of a ring, whose bytes the model of grids counts."""

    def __getitem__(self, axis):
        return on_a_ring(super().__getitem__(axis)) if axis == "tp" else super().__getitem__(axis)


def traced_step(comm, name, grid, options, costs):
    """When the second step began, in ns, and how many bytes of parameters this rank holds."""
    model, (x, y) = models.build(name, dtype="float64", **FIELDS[name]), batch_of(name)
    mesh = RingMesh(comm, grid)
    hybrid = HybridParallel(model, mesh, x, all_reduce=ring.all_reduce, costs=costs, micro_batches=2, **options)
    hybrid.step(x, y)
    comm.barrier()
    begin = comm.trace.clock()
    hybrid.step(x, y)
    return begin, sum(p.nbytes for p in hybrid.parameters())


def bytes_by_axis(events, begins, grid):
    """[{axis: bytes sent}] of every rank since its step began."""
    sent = [dict.fromkeys(("dp", "pp", "tp", "cp", "ep", "shared"), 0) for _ in range(grid.size)]
    places = [grid.coordinates(rank) for rank in range(grid.size)]
    for e in events:
        if e.op != "send" or e.t0_ns < begins[e.rank] or e.nbytes <= 32:  # 32: the loss, once per step
            continue
        (*axes,) = (axis for axis in ("dp", "pp", "tp") if places[e.rank][axis] != places[e.peer][axis])
        sent[e.rank]["shared" if e.lane and axes != ["dp"] else axes[0]] += e.nbytes
    return sent


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {}),
        ("cnn", {}),
        ("vit", {"recompute": True}),
        ("gpt", {}),
        ("gpt", {"recompute": True, "schedule": "interleaved"}),
    ],
    ids=str,
)
def test_the_bytes_on_every_axis_are_those_predicted(name, options):
    """Exactly, on every rank. The vocabulary of this gpt is even, else its table is padded."""
    grid = grid_of(2, 2, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FIELDS["gpt"], "vocabulary", 12)
        x, _ = batch_of(name)
        spec = spec_of(models.build(name, dtype="float64", **FIELDS[name]), x[:2])
        costs = [layer.flops for layer in spec.layers]
        results = sim.run(8, traced_step, name, grid, options, costs, threads=True)
    predicted = predict_step(spec, grid, micro_batches=2, batch=BATCH, **options)
    sent = bytes_by_axis(results.events, [begin for begin, _ in results], grid)
    for rank, table in enumerate(sent):
        assert table == predicted.sent[grid.coordinates(rank)["pp"]], rank
        # over two ranks a ring sends each gradient just once; a tied one goes over four, in three halves
        _, held = results[rank]
        assert table["dp"] + table["shared"] * 2 / 3 == held


def test_the_all_reduce_of_a_partition_runs_beside_the_backward_of_others():
    """The last stage ends first: its gradients travel while the first one still computes."""

    def step(comm):
        hybrid, x, y = laid_out(comm, "mlp", {"dp": 2, "pp": 2}, all_reduce=ring.all_reduce, micro_batches=4)
        for stage in hybrid.stages.values():
            for param in stage.parameters():
                param.register_post_accumulate_grad_hook(lambda _: comm.compute(1e-3))
        hybrid.step(x, y)

    events = sim.run(4, step).events
    sends = [e for e in events if e.rank == 1 and e.op == "send" and e.lane == "background"]
    last = max(e.t1_ns for e in events if e.rank == 0 and e.op.startswith("backward"))
    assert sends and all(e.t1_ns <= last for e in sends)


# -- checkpoints between meshes ----------------------------------------------------------------------------------------


def go_on(comm, sizes, path, steps, save, zero=0):
    """Losses of `steps` steps from the checkpoint at `path`, if there is one; saved afterwards if asked for."""
    hybrid, x, y = laid_out(comm, "gpt", sizes, zero=zero)
    optimizer = torch.optim.Adam(hybrid.parameters(), lr=0.01)
    first = (
        checkpoint.restore(comm, path, hybrid, OptimizerState(hybrid, optimizer), {"seed": 1}) if path.exists() else 0
    )
    losses = []
    for _ in range(steps):
        losses.append(hybrid.step(x, y))
        optimizer.step()
    if save:
        checkpoint.save(comm, path, hybrid, OptimizerState(hybrid, optimizer), first + steps, {"seed": 1})
    return first, losses


def test_a_checkpoint_goes_from_mesh_to_mesh(tmp_path):
    path = tmp_path / "run"
    unbroken = sim.run(1, go_on, {"dp": 1}, tmp_path / "none", 6, False)[0][1]
    losses = []
    for ranks, sizes, zero in ((4, {"dp": 2, "pp": 2}, 2), (4, {"tp": 2, "dp": 2}, 1), (1, {"pp": 1}, 0)):
        parts = sim.run(ranks, go_on, sizes, path, 2, True, zero, threads="tp" in sizes)
        assert all(part == parts[0] for part in parts)
        first, found = parts[0]
        assert first == len(losses)
        losses += found
    assert losses == pytest.approx(unbroken, abs=1e-10)


def test_a_checkpoint_of_another_course_or_model_is_refused_on_every_rank(tmp_path):
    path = tmp_path / "run"
    sim.run(2, go_on, {"pp": 2}, path, 1, True)

    def other(comm, seed, name, told):
        hybrid, x, y = laid_out(comm, name, {"dp": 2})
        optimizer = torch.optim.Adam(hybrid.parameters())
        with raises(ValueError, *told):
            checkpoint.restore(comm, path, hybrid, OptimizerState(hybrid, optimizer), {"seed": seed})

    sim.run(2, other, 2, "gpt", ("seed 1", "2"))
    sim.run(2, other, 1, "mlp", ())


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "options", "told"),
    [
        ({"dp": 3}, {}, ("8", "dp=3", "2 micro-batches")),
        ({"dp": 2}, {"micro_batches": 3}, ("dp=2", "3 micro-batches", "6")),
        ({"pp": 8}, {"micro_batches": 8}, ("7 layers",)),
        ({"tp": 3}, {"micro_batches": 1}, ("3 ranks",)),
        ({"cp": 2}, {}, ("6 positions", "4 chunks", "2 ranks")),
        ({"ep": 2}, {}, ("GPT", "MixtureOfExperts")),
        ({"pp": 2}, {"costs": [1, 2]}, ("2 costs", "7 layers")),
        ({"dp": 2}, {"zero": 3}, ("zero=3", "micro-batch", "ZeRO3")),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_on_every_rank(sizes, options, told):
    def lay_out(comm):
        with raises(ValueError, *told) as error:
            laid_out(comm, "gpt", sizes, **options)
        return str(error.value)

    (size,) = sizes.values()
    assert len(set(sim.run(size, lay_out))) == 1


def test_batches_that_are_not_the_examples_are_refused():
    def step(comm):
        hybrid, x, y = laid_out(comm, "mlp", {"dp": 2})
        with raises(ValueError, "(8, 12)"):
            hybrid.step(x[:4], y[:4])
        with raises(ValueError):
            hybrid.step(x + comm.rank, y)

    sim.run(2, step)


def test_a_rank_without_memory_ends_the_others():
    """Not with a hang: the others are told which rank it was, and where."""

    def step(comm):
        hybrid, x, y = laid_out(comm, "mlp", {"dp": 2, "pp": 2}, all_reduce=ring.all_reduce)
        if comm.rank == 3:
            for stage in hybrid.stages.values():
                stage.module.register_forward_pre_hook(refuse)
        hybrid.step(x, y)

    with raises(MemoryError, "rank 3", "0", "stage 1") as error:
        sim.run(4, step)
    assert error.value.rank == 3


def refuse(*_):
    raise MemoryError("no room")


def negative(comm, x):
    return -ring.all_reduce(comm, x)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda model, mesh, x: HybridParallel(model, mesh.comm, x), ()),
        (lambda model, mesh, x: HybridParallel(model, mesh, x, all_reduce=negative), ("negative does not add up",)),
        (lambda model, mesh, x: HybridParallel(model, mesh, (x,)), ()),
        (lambda model, mesh, x: HybridParallel(model, mesh, x).step(x.float(), x[:, 0].long()), ("torch.float32",)),
        (lambda model, mesh, x: HybridParallel(model, mesh, x).load_state_dict({"no.weight": x}), ("no.weight",)),
    ],
    ids=["no mesh", "sign", "tuple", "dtype", "state"],
)
def test_other_mistakes_are_said_on_every_rank(wrong, told):
    def make(comm):
        model, (x, _) = models.build("mlp", dtype="float64", **FIELDS["mlp"]), batch_of("mlp")
        with raises((TypeError, ValueError), *told):
            wrong(model, DeviceMesh(comm, dp=2), x)

    sim.run(2, make)


class Layer(torch.nn.Module):
    """x + tanh(linear(x)); twice, each done again in backward: autograd adds to its gradient twice, not once."""

    def __init__(self, generator, twice):
        super().__init__()
        self.linear, self.twice = torch.nn.Linear(6, 6, dtype=torch.float64), twice
        self.linear.weight.data = torch.randn(6, 6, generator=generator, dtype=torch.float64)
        self.linear.bias.data.zero_()

    def forward(self, x):
        for _ in range(2 * self.twice):
            x = x + torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(self.linear(x)), x, use_reentrant=True)
        return x if self.twice else x + torch.tanh(self.linear(x))


class Tempered(torch.nn.Module):
    """Four layers, the first two of them frozen where asked for, and a scalar."""

    def __init__(self, twice=False, frozen=False):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layers = torch.nn.Sequential(*[Layer(generator, twice and i > 0) for i in range(4)])
        self.factor = torch.nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
        self.layers[:2].requires_grad_(not frozen)

    def forward(self, x):
        return self.layers(x) * self.factor


@pytest.mark.parametrize("options", [{"twice": True}, {"frozen": True}, {}], ids=["reentrant", "frozen", "scalar"])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD])
def test_other_models_train_and_are_saved_as_on_one_rank(options, optimizer, tmp_path):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 6, generator=draw, dtype=torch.float64), torch.randint(0, 6, (8,), generator=draw)

    def go(comm, sizes, steps, path, name):
        hybrid = HybridParallel(Tempered(**options), DeviceMesh(comm, **sizes), x, micro_batches=2, costs=[1] * 5)
        optimizer_of_rank = optimizer(hybrid.parameters(), lr=0.01)
        if path.exists():
            checkpoint.restore(comm, path, hybrid, OptimizerState(hybrid, optimizer_of_rank))
        losses = []
        for _ in range(steps):
            losses.append(hybrid.step(x, y))
            optimizer_of_rank.step()
        checkpoint.save(comm, tmp_path / name, hybrid, OptimizerState(hybrid, optimizer_of_rank), steps)
        return losses

    unbroken = sim.run(1, go, {"dp": 1}, 4, tmp_path / "none", "one")[0]
    first = sim.run(4, go, {"dp": 2, "pp": 2}, 2, tmp_path / "none", "a")[3]
    assert first + sim.run(2, go, {"dp": 2}, 2, tmp_path / "a", "b")[1] == pytest.approx(unbroken, abs=1e-10)


def test_optimizers_whose_state_has_another_shape_are_refused_on_every_rank(tmp_path):
    def save(comm):
        hybrid, x, y = laid_out(comm, "mlp", {"pp": 2})
        optimizer = torch.optim.Adafactor(hybrid.parameters())
        hybrid.step(x, y)
        optimizer.step()
        with raises(ValueError):
            checkpoint.save(comm, tmp_path / "run", hybrid, OptimizerState(hybrid, optimizer), 1)

    sim.run(2, save)


@pytest.mark.parametrize(("shape", "dtype"), [((8, 3), torch.int64), ((8, 6), torch.float64)])
def test_answers_that_do_not_fit_the_loss_are_refused_on_every_rank(shape, dtype):
    model, x, y = torch.nn.Linear(6, 6), torch.randn(8, 6), torch.zeros(shape, dtype=dtype)

    def step(comm):
        layers = torch.nn.Sequential(model, model)
        with raises(ValueError, "(8, 6)", "(8,)", "torch.int64", f"{shape}"):
            HybridParallel(layers, DeviceMesh(comm, pp=2), x, micro_batches=2, costs=[1, 1]).step(x, y)

    sim.run(2, step)


def test_reentrant_checkpoints_and_backward_in_two_halves_are_refused_in_a_sentence():
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.zeros(8).long()
    options = {"schedule": "zero_bubble_h1", "micro_batches": 2, "costs": [1] * 5}

    def step(comm):
        HybridParallel(Tempered(twice=True), DeviceMesh(comm, pp=2), x, **options).step(x, y)

    with raises(ValueError, "use_reentrant=True"):
        sim.run(2, step)

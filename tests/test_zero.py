"""ZeRO: the course of one rank, in as many bytes and messages as the paper counts, and sentences for what is wrong."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from hpdl_lab import data, models
from hpdl_lab.collectives import ring
from hpdl_lab.comm import PerRank, sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.data.loading import shard_indices
from hpdl_lab.mesh import DeviceMesh
from hpdl_lab.models.batch_norm import synchronized
from hpdl_lab.models.mlp import mlp
from hpdl_lab.models.transformer import Block
from hpdl_lab.parallel import checkpoint, training
from hpdl_lab.parallel.data_parallel import DataParallel
from hpdl_lab.parallel.hybrid.model import HybridParallel
from hpdl_lab.parallel.precision import LossScale, Precision
from hpdl_lab.parallel.recompute import recompute, recomputed
from hpdl_lab.parallel.scaling.accounting import account, spending
from hpdl_lab.parallel.tensor import model as tensor
from hpdl_lab.parallel.training import Recipe, train_step
from hpdl_lab.parallel.zero import ZeRO1, ZeRO2, ZeRO3
from tests.wording import raises

STEPS, BATCH = 3, 11  # which 2, 3, 4 and 5 ranks do not divide
READS = {
    "mlp": "digits",
    "cnn": "digit_images",
    "vit": "digit_images",
    "gpt": "text",
    "llama": "text",
    "deepseek": "text",
}
STAGES = [ZeRO1, ZeRO2, ZeRO3]
RING = {"reduce_scatter": lambda comm, x: ring.reduce_scatter(comm, x), "all_gather": ring.all_gather}


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3)


def flat_of(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(comm, model, strategy, make, x, y, micro_batches=1, steps=STEPS):
    """(losses, parameters) of the ranks of `comm`; of this one alone, by plain torch, where there is no strategy."""
    losses = []
    if strategy is not None:
        strategy.start(comm, model)
    optimizer = make(list(model.parameters())) if strategy is None else strategy.optimizer(model, make)
    for step in range(steps):
        some = torch.arange(step * BATCH, (step + 1) * BATCH) % len(y)
        if strategy is None:
            optimizer.zero_grad()
            loss = cross_entropy(model(x[some]).flatten(0, -2), y[some].flatten())
            loss.backward()
            optimizer.step()
        else:
            mine = shard_indices(some, comm.rank, comm.size)
            with synchronized(model, comm):
                part = train_step(comm, model, strategy, optimizer, x[mine], y[mine], BATCH, micro_batches)
            loss = comm.all_reduce(torch.tensor([part], dtype=torch.float64))
        losses.append(loss.item())
    if strategy is not None:
        strategy.finish(comm, model)
        strategy.stop()
    return losses, flat_of(model)


def examples(name, dtype="float64"):
    """(model, x, y) of a few examples."""
    whole = data.load(READS[name])
    x, y = whole.train_x[:40], whole.train_y[:40]
    small = {"layers": 2, "width": 16, "heads": 2} if name not in ("mlp", "cnn") else {}
    small |= {"kv_heads": 2} if name == "llama" else {}
    small |= {"n_routed_experts": 4, "n_group": 2, "topk_group": 1} if name == "deepseek" else {}
    return models.build_for(whole, name, dtype=dtype, **small), x.to(getattr(torch, dtype)) if small == {} else x, y


# -- the same course ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("make", [sgd, adamw])
def test_losses_and_parameters_are_those_of_one_rank(name, make):
    model, x, y = examples(name)
    x = x.double() if x.is_floating_point() else x
    losses, parameters = train(None, copy.deepcopy(model), None, make, x, y)
    several: list = [(1, ZeRO3()), (2, ZeRO1()), (4, ZeRO3(reshard_after_forward=True))]
    for p, strategy in several if make is sgd else [(2, ZeRO3()), (3, ZeRO2()), (5, ZeRO3())]:
        found = sim.run(p, train, model, strategy, make, x, y, 1 + p % 2, threads=True)
        for its_losses, its_parameters in found:
            assert its_losses == pytest.approx(losses, abs=1e-10), (p, strategy)
            assert (its_parameters - parameters).abs().max() < 1e-10, (p, strategy)


@pytest.mark.parametrize("strategy", [*[stage() for stage in STAGES], ZeRO3(reshard_after_forward=False)])
def test_the_same_bits_as_data_parallelism_where_sums_have_the_same_order(strategy):
    model, x, y = examples("gpt", "float32")
    want = sim.run(3, train, model, DataParallel(), adamw, x, y)
    found = sim.run(3, train, model, strategy, adamw, x, y, threads=True)
    assert all(torch.equal(parameters, want[0][1]) for _, parameters in found)
    assert [losses for losses, _ in found] == [losses for losses, _ in want]


class Odd(nn.Module):
    """A module used twice, weights tied across units, frozen ones and one without a gradient, two dtypes, a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.twice = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.blocks = nn.ModuleList([nn.Linear(6, 6), self.twice, nn.Sequential(nn.Linear(6, 6), nn.ReLU())])
        self.blocks[0].weight = self.first.weight
        self.adapter = nn.ModuleList([nn.Linear(6, 2), nn.Linear(2, 6)])
        self.unused, self.scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(7, dtype=torch.float32))
        self.register_buffer("steps", torch.zeros(1))
        self.blocks[2].requires_grad_(False)

    def forward(self, x):
        self.steps += 1
        x = self.blocks[0](self.first(x.double()))
        x = self.twice(torch.tanh(self.twice(x)))
        x = torch_checkpoint(self.blocks[2], x, use_reentrant=False) if x.requires_grad else self.blocks[2](x)
        return (x + self.adapter[1](self.adapter[0](x))) * self.scale.mean()


@pytest.mark.filterwarnings("ignore:the loss does not depend")
@pytest.mark.parametrize("strategy", [*[stage() for stage in STAGES], ZeRO3(reshard_after_forward=True)])
def test_parameters_that_are_tied_frozen_unused_and_used_twice(strategy):
    torch.manual_seed(0)
    model, x, y = Odd().double(), torch.randn(40, 6), torch.randint(6, (40,))
    model.scale.data = model.scale.data.float()

    def decayed(params):
        return torch.optim.AdamW([p for p in params if p.requires_grad], lr=0.01, weight_decay=0.1)

    losses, parameters = train(None, copy.deepcopy(model), None, decayed, x, y)
    for its_losses, its_parameters in sim.run(3, train, model, strategy, decayed, x, y, 2, threads=True):
        assert its_losses == pytest.approx(losses, abs=1e-7)  # a float32 scale
        assert (its_parameters - parameters).abs().max() < 1e-6


@pytest.mark.parametrize("stage", STAGES)
def test_clipping_is_by_the_norm_of_all_gradients(stage):
    model, x, y = examples("gpt")

    def clipped(comm, model):
        strategy = stage()
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, sgd)
        mine = shard_indices(torch.arange(BATCH), comm.rank, comm.size)
        train_step(comm, model, strategy, Unstepped(optimizer), x[mine], y[mine], BATCH)
        norm = strategy.clip_gradients(0.05)
        optimizer.step()
        strategy.finish(comm, model)
        return norm, flat_of(model)

    found = sim.run(3, clipped, model, threads=True)
    cross_entropy(model(x[:BATCH]).flatten(0, -2), y[:BATCH].flatten()).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    sgd(model.parameters()).step()
    for its_norm, parameters in found:
        assert norm > 0.05 and its_norm == pytest.approx(float(norm), rel=1e-9)
        assert (parameters - flat_of(model)).abs().max() < 1e-10


class Unstepped:
    """An optimizer whose step is taken elsewhere."""

    def __init__(self, optimizer):
        self.zero_grad = optimizer.zero_grad

    def step(self):
        pass


# -- bytes -------------------------------------------------------------------------------------------------------------


def a_step(comm, strategy, model, x, y, optimizer):
    """The gradients of one batch, and an update."""
    mine = shard_indices(torch.arange(BATCH), comm.rank, comm.size)
    train_step(comm, model, strategy, optimizer, x[mine], y[mine], BATCH)


def sent(p, strategy, model, x, y):
    """Bytes that a rank sends in the second of two steps, which knows the order of units."""

    def steps(comm, model, n):
        strategy = mine(comm)
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, sgd)
        for _ in range(n):
            train_step(comm, model, strategy, optimizer, x, y, BATCH)

    def mine(comm):
        return copy.copy(strategy)

    one, two = (sim.run(p, steps, model, n, threads=True).events for n in (1, 2))
    return (sum(e.nbytes for e in two if e.op == "send") - sum(e.nbytes for e in one if e.op == "send")) / p


@pytest.mark.parametrize(
    ("strategy", "times"),
    [
        (ZeRO1(**RING), 2),
        (ZeRO2(**RING), 2),
        (ZeRO3(**RING, reshard_after_forward=True), 3),
        (ZeRO3(**RING, reshard_after_forward=False), 2),
    ],
)
def test_traffic_is_2_or_3_times_the_parameters(strategy, times):
    """Beside the all_gather of 8 bytes by which ranks know that all is well, of which a hub sends more."""
    p, model = 4, mlp((64, 32, 16))  # 2048 + 32, 512 + 16 elements, which 4 divides
    psi = 4 * sum(param.numel() for param in model.parameters())
    consensus = (p - 1) * 8 * (1 + p) / p
    x, y = torch.randn(4, 64), torch.zeros(4, dtype=torch.int64)
    assert sent(p, strategy, model, x, y) - consensus == times * psi * (p - 1) / p


def test_the_last_unit_is_not_gathered_twice():
    p, model = 4, mlp((64, 32, 16))
    x, y = torch.randn(4, 64), torch.zeros(4, dtype=torch.int64)
    saved = sent(p, ZeRO3(**RING, reshard_after_forward=True), model, x, y) - sent(p, ZeRO3(**RING), model, x, y)
    assert saved == 4 * (512 + 16) * (p - 1) / p


@pytest.mark.parametrize("by", [None, recomputed])
def test_recomputation_gathers_a_unit_no_more_often(by):
    """Blocks that are computed again in backward are there already: the same bytes, the same course."""
    model, x, y = examples("gpt", "float32")
    plain, again = copy.deepcopy(model), copy.deepcopy(model)
    recompute(again, Block, by=by)
    assert sent(3, ZeRO3(**RING), again, x[:4], y[:4]) == sent(3, ZeRO3(**RING), plain, x[:4], y[:4])
    want = sim.run(3, train, plain, ZeRO3(), sgd, x, y, threads=True)
    found = sim.run(3, train, again, ZeRO3(), sgd, x, y, threads=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, want, strict=True))


@pytest.mark.parametrize("stage", STAGES)
def test_infinity_on_one_rank_skips_the_step_on_all(stage):
    """In float16: gradients of a loss that is scaled too much overflow on the rank with large inputs."""
    model = mlp((6, 4, 3))

    def steps(comm, model):
        strategy = stage(precision=Precision("float16", LossScale(scale=2.0**12)))
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, sgd)
        course = []
        for size in (1e4, 1e-1):
            optimizer.zero_grad()
            out = model(torch.full((2, 6), size if comm.rank == 1 else 0.1))
            strategy.scaled(out.sum()).backward()
            strategy.add_gradients(comm, model)
            optimizer.step()
            course.append((strategy.precision.skipped, strategy.precision.scaler.scale))
        strategy.finish(comm, model)
        return course, flat_of(model)

    found = sim.run(3, steps, model, threads=True)
    assert [course for course, _ in found] == [[(True, 2.0**11), (False, 2.0**11)]] * 3
    assert all(torch.equal(parameters, found[0][1]) for _, parameters in found)
    assert torch.isfinite(found[0][1]).all() and not torch.equal(found[0][1], flat_of(model))


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize(
    ("kind", "per_parameter"),
    [
        (DataParallel, lambda n: 16),
        (ZeRO1, lambda n: 4 + 12 / n),
        (ZeRO2, lambda n: 2 + 14 / n),
        (ZeRO3, lambda n: 16 / n),
    ],
)
def test_bytes_held_are_those_of_the_paper(kind, per_parameter, p):
    """After backward, or once gradients are in shards: whichever is more. The first step has made Adam's states."""
    model = models.build("gpt", layers=4, width=64, block=8, vocabulary=16)
    x = torch.zeros(2, 8, dtype=torch.int64)

    def steps(comm, model):
        strategy = kind(precision="bfloat16")
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, adamw)
        train_step(comm, model, strategy, optimizer, x, x, BATCH)
        model(x).sum().backward()
        held = [strategy.held(model, optimizer)]
        strategy.add_gradients(comm, model)
        return max(sum(held.values()) for held in [*held, strategy.held(model, optimizer)])

    parameters = sum(param.numel() for param in model.parameters())
    for held in sim.run(p, steps, model, threads=True):
        assert held / parameters == pytest.approx(per_parameter(p), rel=0.02)


def test_two_units_are_whole_at_a_time_and_gathers_hide_behind_computing():
    model, most = mlp((32,) * 9), []

    def steps(comm, model):
        strategy = ZeRO3(**RING)
        for layer in model:
            layer.register_forward_hook(lambda *_: note(strategy))
            for param in layer.parameters():
                param.register_post_accumulate_grad_hook(lambda _: note(strategy))
        with spending(comm, model, 1e-3, 2e-3):
            strategy.start(comm, model)
            optimizer = strategy.optimizer(model, sgd)
            for _ in range(3):
                train_step(
                    comm, model, strategy, optimizer, torch.randn(2, 32), torch.zeros(2, dtype=torch.int64), BATCH
                )

    def note(strategy):
        most.append(sum(flat.full.untyped_storage().nbytes() > 0 for unit in strategy.parts for flat in unit.flats))

    events = sim.run(2, steps, model, network=Switch(20e-6, 1e-9), threads=True).events
    assert max(most) == 2
    assert account(events).overlap > 0.6


# -- with other kinds of parallelism ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stage"), [*(("gpt", stage) for stage in STAGES), ("llama", ZeRO2), ("deepseek", ZeRO3)]
)
def test_a_model_that_tp_has_cut_is_sharded_over_dp(name, stage):
    model, x, y = examples(name)
    trained = copy.deepcopy(model)
    losses, _ = train(None, trained, None, adamw, x, y)

    def on_mesh(comm, model, trained):
        mesh = DeviceMesh(comm, dp=2, tp=2)
        found, parameters = train(mesh["dp"], tensor.shard(mesh["tp"], model), stage(), adamw, x, y)
        return found, (parameters - flat_of(tensor.shard(mesh["tp"], trained))).abs().max()

    for found, difference in sim.run(4, on_mesh, model, trained, threads=True):
        assert found == pytest.approx(losses, abs=1e-10)
        assert difference < 1e-10


def test_clipping_counts_what_every_tp_rank_holds_once():
    model, x, y = examples("gpt")

    def clipped(comm, model):
        mesh, strategy = DeviceMesh(comm, dp=2, tp=2), ZeRO2()
        part = tensor.shard(mesh["tp"], model)
        strategy.start(mesh["dp"], part)
        mine = shard_indices(torch.arange(BATCH), mesh["dp"].rank, 2)
        optimizer = strategy.optimizer(part, sgd)
        train_step(mesh["dp"], part, strategy, Unstepped(optimizer), x[mine], y[mine], BATCH)
        return strategy.clip_gradients(1e-3, mesh["tp"])

    found = sim.run(4, clipped, model, threads=True)
    cross_entropy(model(x[:BATCH]).flatten(0, -2), y[:BATCH].flatten()).backward()
    assert found == pytest.approx([float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))] * 4, rel=1e-9)


def test_gradients_in_parts_over_tp_are_refused():
    def start(comm):
        ZeRO1().start(comm.split(comm.rank), tensor.shard(comm, examples("gpt")[0], sequence=True))

    with raises(ValueError, "in parts over tp", "HybridParallel"):
        sim.run(2, start)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_ranks_of_a_pipeline_hold_shares_of_the_optimizer(zero):
    """With stages 1 and 2 every parameter is updated once over all ranks, else once on each replica."""
    model, x, y = examples("gpt")
    tied = model.tokens.weight.numel()

    def updated(comm, model):
        hybrid = HybridParallel(model, DeviceMesh(comm, dp=2, pp=2), x[:8], micro_batches=2, costs=[1] * 6, zero=zero)
        hybrid.step(x[:8], y[:8])
        return sum(p.numel() for p in hybrid.parameters()), sum(p.grad.numel() for p in hybrid.parameters())

    counts = sim.run(4, updated, model)
    parameters = sum(p.numel() for p in model.parameters())
    assert {sum(n) for n in zip(*counts, strict=True)} == {parameters if zero else 2 * parameters + 2 * tied}


# -- checkpoints -------------------------------------------------------------------------------------------------------


def course(comm, strategy, path, steps, resume=False, precision=None):
    """What training.train returns after `steps`, of which every third is kept in a checkpoint."""
    strategy = copy.copy(strategy)
    whole, name = data.load("digits"), str(path)
    recipe = Recipe(
        steps=steps, batch=20, lr=0.01, optimizer="adamw", checkpoint=name, checkpoint_every=3, resume=resume
    )
    return training.train(comm, mlp((64, 12, 10)), strategy, whole, recipe)


@pytest.mark.parametrize(
    ("before", "after"), [(ZeRO1(), ZeRO3()), (ZeRO3(), DataParallel()), (DataParallel(), ZeRO2()), (ZeRO3(), ZeRO3())]
)
def test_a_run_goes_on_with_another_number_of_ranks_and_another_stage(tmp_path, before, after):
    want = sim.run(2, course, before, tmp_path / "other.pt", 6, threads=True)[0]
    sim.run(3, course, before, tmp_path / "run.pt", 3, threads=True)
    found = sim.run(2, course, after, tmp_path / "run.pt", 6, True, threads=True)
    for one in found:
        assert one.losses == pytest.approx(want.losses[3:], abs=1e-5)
        assert (one.parameters - want.parameters).abs().max() < 1e-5


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_shards_of_every_rank_are_put_together(tmp_path, stage, precision):
    """What three ranks have written, each its own, is what two go on with; an older one goes away."""
    model, x, y = examples("gpt", "float32")
    path = str(tmp_path / "run.pt")

    def body(comm, model, strategy, steps, resume):
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, adamw)
        saved = strategy.stateful(model)
        first = checkpoint.restore(comm, path, saved, optimizer) if resume else 0
        for step in range(first, first + steps):
            a_step(comm, strategy, model, x, y, optimizer)
            if not resume:
                checkpoint.save_shards(comm, path, saved, optimizer, step + 1)
        return first, optimizer.state_dict(), strategy.stateful(model).state_dict()

    def kept():
        return sorted(file.name for file in tmp_path.iterdir())

    (_, optimizer, state), *_ = sim.run(3, body, model, stage(precision=precision), 2, False, threads=True)
    assert kept() == ["run.pt", *(f"run.pt.2.{rank}-of-3" for rank in range(3))]
    for other in (stage(precision=precision), DataParallel(precision=precision)):
        first, found, its_state = sim.run(2, body, model, other, 0, True, threads=True)[0]
        assert first == 2
        assert_same(its_state, state)
        assert_same(found, optimizer)


@pytest.mark.parametrize("stage", [*STAGES, DataParallel])
def test_shards_hold_float32_of_frozen_parameters_as_well(tmp_path, stage):
    model, path = mlp((6, 5, 3)), str(tmp_path / "run.pt")
    model[0].requires_grad_(False)
    wanted = copy.deepcopy(model.state_dict())

    def write(comm, model):
        strategy = stage(precision="bf16")
        strategy.start(comm, model)
        saved, optimizer = strategy.stateful(model), strategy.optimizer(model, sgd)
        (checkpoint.save if stage is DataParallel else checkpoint.save_shards)(comm, path, saved, optimizer, 1)

    def read(comm, strategy):
        model = mlp((6, 5, 3), seed=5)
        model[0].requires_grad_(False)
        strategy.start(comm, model)
        checkpoint.restore(comm, path, strategy.stateful(model), strategy.optimizer(model, sgd))
        return strategy.stateful(model).state_dict()

    sim.run(3, write, model, threads=True)
    for after in (ZeRO1(precision="bf16"), ZeRO3(precision="bf16"), DataParallel(precision="bf16")):
        for found in sim.run(2, read, after, threads=True):
            assert_same(found, wanted)


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_the_state_dict_of_the_model_itself_is_whole(stage, p):
    """Before the first step, between steps, and when the strategy has finished."""
    model, x, y = examples("gpt")
    wanted = copy.deepcopy(model)
    train(None, wanted, None, adamw, x, y, steps=1)

    def body(comm, model, strategy):
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, adamw)
        states = [strategy.stateful(model).state_dict()]
        mine = shard_indices(torch.arange(BATCH), comm.rank, comm.size)
        train_step(comm, model, strategy, optimizer, x[mine], y[mine], BATCH)
        states += [copy.deepcopy(model.state_dict())]
        strategy.finish(comm, model)
        states += [copy.deepcopy(model.state_dict())]
        loss = cross_entropy(model(x[:4]).flatten(0, -2), y[:4].flatten()).item()
        return *states, loss

    loss = cross_entropy(wanted(x[:4]).flatten(0, -2), y[:4].flatten()).item()
    for first, second, third, its_loss in sim.run(p, body, model, stage(), threads=True):
        assert_same(first, dict(model.state_dict()))
        assert_same(third, second)
        assert list(second) == list(wanted.state_dict())
        assert all((second[name] - tensor).abs().max() < 1e-10 for name, tensor in wanted.state_dict().items())
        assert its_loss == pytest.approx(loss, abs=1e-10)


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_loads_a_state_between_steps_goes_on_from_it(stage, precision):
    model, x, y = examples("gpt", "float32")

    def body(comm, model, loads):
        strategy = stage(precision=precision)
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if loads:
            a_step(comm, strategy, model, x, y, optimizer)
            model.load_state_dict(state)
        a_step(comm, strategy, model, x, y, optimizer)
        return strategy.stateful(model).state_dict()

    wanted = sim.run(3, body, model, False, threads=True)
    for found in sim.run(3, body, model, True, threads=True):
        assert_same(found, wanted[0])


@pytest.mark.parametrize(
    ("strategy", "asked"),
    [
        *((stage(), lambda strategy, model: model.state_dict()) for stage in (ZeRO1, ZeRO2)),
        *((stage(precision="bf16"), lambda strategy, model: strategy.stateful(model).shards()) for stage in STAGES),
        (DataParallel(precision="bf16"), lambda strategy, model: model.state_dict()),
    ],
)
def test_what_a_rank_has_it_saves_without_messages(strategy, asked):
    def body(comm, model, strategy, asks):
        strategy.start(comm, model)
        if asks:
            asked(strategy, model)

    quiet, loud = (sim.run(2, body, mlp((6, 4, 3)), strategy, asks, threads=True).events for asks in (False, True))
    assert len(quiet) == len(loud) > 0


def test_a_state_is_saved_while_the_next_unit_is_gathered():
    model = mlp((16, 8, 4, 2))

    def body(comm, model, saves):
        strategy, states = ZeRO3(precision="bf16"), []
        if saves:
            model[2].register_forward_pre_hook(lambda *_: states.append(copy.deepcopy(model.state_dict())))
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, adamw)
        for step in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            train_step(comm, model, strategy, optimizer, x, torch.zeros(4, dtype=torch.int64), BATCH)
        return states, strategy.stateful(model).state_dict()

    wanted = sim.run(2, body, model, False, threads=True)[0][1]
    for states, found in sim.run(2, body, model, True, threads=True):
        assert len(states) == 3
        assert_same(states[0], dict(model.state_dict()))
        assert_same(found, wanted)


def assert_same(a, b):
    """Two states of optimizers are the same."""
    if isinstance(a, dict | list):
        assert len(a) == len(b)
        assert isinstance(a, list) or {*a} == {*b}
        for key in a if isinstance(a, dict) else range(len(a)):
            assert_same(a[key], b[key])
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(("before", "after"), [(ZeRO3, ZeRO1), (ZeRO1, DataParallel), (DataParallel, ZeRO3)])
def test_masters_are_kept_as_well(tmp_path, before, after):
    """Beyond the bits of bfloat16: what goes on has the course of what has never stopped."""
    want = sim.run(2, course, before(precision="bfloat16"), tmp_path / "other.pt", 6, threads=True)[0]
    sim.run(2, course, before(precision="bfloat16"), tmp_path / "run.pt", 3, threads=True)
    found = sim.run(2, course, after(precision="bfloat16"), tmp_path / "run.pt", 6, True, threads=True)
    for one in found:
        assert (one.parameters - want.parameters).abs().max() < 1e-6


# -- what is wrong -----------------------------------------------------------------------------------------------------


def begun(strategy, p=2, model=None, then=lambda comm, strategy, model: None):
    """Start a strategy on p ranks, make its optimizer, and do something."""

    def body(comm, strategy, model):
        strategy.start(comm, model)
        strategy.optimizer(model, sgd)
        model(torch.randn(4, 6)).sum().backward()
        then(comm, strategy, model)
        strategy.stop()

    sim.run(p, body, strategy, model or mlp((6, 4, 3)), threads=True)


@pytest.mark.parametrize("stage", STAGES)
def test_tensors_that_were_replaced_are_named(stage):
    def cast(comm, strategy, model):
        model.double()
        strategy.add_gradients(comm, model)

    with raises(ValueError, "0.weight", stage.__name__, "model.to"):
        begun(stage(), then=cast)

    def saved(comm, strategy, model):
        strategy.add_gradients(comm, model)
        model[0].weight.data = torch.ones(4, 6)
        model.state_dict()

    with raises(ValueError, "0.weight", stage.__name__, "model.to"):
        begun(stage(precision="bf16"), then=saved)


def test_a_tensor_that_was_replaced_while_it_is_resharded_is_named():
    def between(comm, strategy, model):
        strategy.add_gradients(comm, model)
        model[0].weight.data = torch.ones(4, 6)
        model(torch.randn(4, 6))

    with raises(ValueError, "0.weight", "ZeRO3", "model.to"):
        begun(ZeRO3(), then=between)


@pytest.mark.parametrize(
    ("stage", "added"), [(ZeRO1, True), (ZeRO2, True), (ZeRO3, True), (ZeRO2, False), (ZeRO3, False)]
)
def test_gradients_that_are_in_shards_cannot_be_clipped_by_torch(stage, added):
    def clip(comm, strategy, model):
        if added:
            strategy.add_gradients(comm, model)
        assert all(p.grad.isnan().all() for p in model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with pytest.raises(RuntimeError):
        begun(stage(), then=clip)


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_of_the_models_parameters_is_refused(stage):
    def body(comm, strategy, model):
        strategy.start(comm, model)
        sgd(model.parameters())
        model(torch.randn(4, 6)).sum().backward()
        strategy.add_gradients(comm, model)

    with raises(ValueError, stage.__name__, "strategy.optimizer"):
        sim.run(2, body, stage(), mlp((6, 4, 3)), threads=True)


def test_a_checkpoint_of_two_groups_of_parameters_is_refused():
    def body(comm, strategy, model):
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, lambda params: sgd([{"params": [p]} for p in params]))
        strategy.stateful(model).state_dict()
        optimizer.state_dict()

    with raises(ValueError, "all 4 parameters", "one group", "1, 1, 1, 1"):
        sim.run(1, body, ZeRO3(), mlp((6, 4, 3)), threads=True)


def test_models_and_units_without_parameters_and_ranks_that_differ():
    with raises(ValueError, "Sequential owns no parameter"):
        sim.run(2, lambda comm: ZeRO2().start(comm, nn.Sequential(nn.ReLU())))
    with raises(ValueError, "unit 1", "ReLU", "owns no parameters"):
        begun(ZeRO3(units=lambda model: [model[0], model[1]]))
    with raises(ValueError, "not a module of the model"):
        begun(ZeRO3(units=lambda model: [nn.Linear(1, 1)]))
    with raises(ValueError, "0.weight", "rank 1"):
        sim.run(3, lambda comm, model: ZeRO1().start(comm, model), PerRank([mlp((6, 4)), mlp((6, 5)), mlp((6, 4))]))
    with raises(ValueError, "rank 0", "ZeRO1", "rank 1", "ZeRO2"):
        sim.run(2, lambda comm, strategy: strategy.start(comm, mlp((6, 4))), PerRank([ZeRO1(), ZeRO2()]))


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_names_rank_and_layer(stage):
    def body(comm, strategy, model):
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, sgd)
        x = torch.full((4, 6), float("nan") if comm.rank == 1 else 1.0)
        model(x).sum().backward()
        strategy.add_gradients(comm, model)
        optimizer.step()

    with raises(FloatingPointError, "rank 1", "NaN in the gradient of 2."):
        sim.run(2, body, stage(), mlp((6, 4, 3)), threads=True)

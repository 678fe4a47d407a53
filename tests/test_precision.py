"""Mixed precision: float32 masters, 16 bits on the wire, and a loss scale on which all ranks agree."""

import copy

import pytest
import torch
from torch import nn

from hpdl_lab.comm import sim
from hpdl_lab.models import cnn, gpt, mlp
from hpdl_lab.parallel import checkpoint
from hpdl_lab.parallel.compression import Cast
from hpdl_lab.parallel.data_parallel import (
    DataParallel,
    DataParallelBucketed,
    DataParallelNaive,
    DataParallelOverlapped,
)
from hpdl_lab.parallel.precision import DTYPES, LossScale, Precision, unscale_together
from hpdl_lab.parallel.training import train_step
from hpdl_lab.parallel.zero import ZeRO1, ZeRO2, ZeRO3
from tests.wording import raises

SIZES = [16, 32, 10]
BATCH_NORM = cnn.CNNConfig(1, 10, (4, 8), 1, "batch")
SGD = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)  # noqa: E731
ADAMW = lambda params: torch.optim.AdamW(params, lr=0.01)  # noqa: E731
STRATEGIES = [DataParallelNaive, DataParallel, DataParallelBucketed, DataParallelOverlapped, ZeRO1, ZeRO2, ZeRO3]


def batch(step, shape=(12, 16), classes=10):
    random = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=random), torch.randint(classes, shape[:1], generator=random)


def steps_of(comm, model, strategy, steps=4, trouble=(), make=SGD):
    """(parameters after each step, scales, the strategy's optimizer) of one rank; trouble: {(step, rank)} with NaN."""
    model = copy.deepcopy(model)
    strategy.start(comm, model)
    optimizer, course, scales = strategy.optimizer(model, make), [], []
    for step in range(steps):
        x, y = batch(step)
        mine = slice(comm.rank, None, comm.size)
        x, y = x[mine].clone(), y[mine]
        if (step, comm.rank) in trouble:
            x[0, 0] = float("inf")
        train_step(comm, model, strategy, optimizer, x, y, 12)
        course.append(torch.cat([p.detach().float().flatten() for p in model.parameters()]))
        scales.append(strategy.precision.scaler.scale if strategy.precision and strategy.precision.scaler else 1.0)
    strategy.stop()
    course.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return course, scales


def by_hand(dtype, scale=1.0, steps=4):
    """Masters of one rank after each step, without this package: a 16-bit copy computes, float32 is updated."""
    model = mlp.mlp(SIZES, seed=1)
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    low, optimizer = copy.deepcopy(model).to(dtype), SGD(masters)
    for step in range(steps):
        x, y = batch(step)
        low.zero_grad()
        loss = nn.functional.cross_entropy(low(x.to(dtype)).float(), y, reduction="sum") / 12
        (loss * scale).backward()
        for master, param in zip(masters, low.parameters(), strict=True):
            master.grad = param.grad.float() / scale
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, low.parameters(), strict=True):
                param.copy_(master)
    return torch.cat([master.detach().flatten() for master in masters])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_rank_takes_the_steps_of_a_loop_written_by_hand(dtype):
    precision = Precision(dtype, LossScale(256.0) if dtype == "float16" else None)
    ((course, _),) = sim.run(1, steps_of, mlp.mlp(SIZES, seed=1), DataParallel(precision=precision))
    assert torch.equal(course[-1], by_hand(getattr(torch, dtype), 256.0 if dtype == "float16" else 1.0))
    assert torch.equal(course[-1].to(getattr(torch, dtype)).float(), course[-2])  # what computes is the rounded master


@pytest.mark.parametrize("strategy", [DataParallel, DataParallelNaive, DataParallelOverlapped])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ranks_stay_equal_and_near_float32(strategy, dtype):
    model = mlp.mlp(SIZES, seed=1)
    wide = sim.run(1, steps_of, model, DataParallel())[0][0][-1]
    found = sim.run(3, steps_of, model, strategy(precision=Precision(dtype, LossScale(128.0))))
    assert all(torch.equal(course[-1], found[0][0][-1]) for course, _ in found)
    near = 0.05 if dtype == "bfloat16" else 0.01  # of the largest change
    assert (found[0][0][-1] - wide).abs().max() < near * (wide - by_start(model)).abs().max()


def by_start(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_gradients_are_clipped_without_the_scale():
    def clipped(comm, precision):
        model, strategy = mlp.mlp(SIZES, seed=1), DataParallel(precision=precision)
        strategy.start(comm, model)
        x, y = (part[comm.rank :: comm.size] for part in batch(0))
        strategy.scaled(nn.functional.cross_entropy(model(x), y, reduction="sum") / 12).backward()
        strategy.add_gradients(comm, model)
        grads = [p.grad for p in (strategy.masters if precision else strategy.params)]
        before, after = strategy.clip_gradients(0.5), torch.stack([g.norm() for g in grads]).norm()
        strategy.stop()
        return before, float(after)

    plain = sim.run(2, clipped, None)
    scaled = sim.run(2, clipped, Precision("float16", LossScale(128.0)))
    assert scaled[0] == scaled[1] and scaled[0][0] == pytest.approx(plain[0][0], rel=2e-3) and plain[0][0] > 0.5
    assert scaled[0][1] == pytest.approx(0.5, rel=1e-4)


def test_small_steps_add_up_in_the_masters_and_are_lost_without():
    model, make = mlp.mlp(SIZES, seed=1), lambda params: torch.optim.SGD(params, lr=1e-5)
    ((course, _),) = sim.run(1, steps_of, model, DataParallel(precision="bfloat16"), 4, (), make)
    moved, low = (course[-1] - by_start(model)).abs(), by_start(model).bfloat16().float()
    assert (moved > 0).float().mean() > 0.9  # the masters
    assert (course[-2] != low).float().mean() < 0.02  # their roundings


def test_half_the_bytes_travel_and_the_decision_is_one_number():
    model, n = mlp.mlp(SIZES, seed=1), sum(p.numel() for p in mlp.mlp(SIZES, seed=1).parameters())

    def sent(precision, steps):
        run = sim.run(2, steps_of, model, DataParallel(precision=precision), steps)
        return sum(e.nbytes for e in run.events if e.rank == 0 and e.op in ("send", "isend"))

    wide, bf16, fp16 = (sent(precision, 2) - sent(precision, 1) for precision in (None, "bfloat16", "float16"))
    assert 0 < wide - bf16 - 2 * n < 16  # a ring of two sends each of the n gradients once, and a flag
    assert fp16 - bf16 == 4


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_step_with_infinity_on_one_rank_is_skipped_by_all_and_halves_the_scale(size):
    precision = Precision("float16", LossScale(64.0, interval=2))
    strategy = DataParallel(precision=precision)
    found = sim.run(size, steps_of, mlp.mlp(SIZES, seed=1), strategy, 6, {(1, size - 1)})
    for course, scales in found:
        assert scales == [64, 32, 32, 64, 64, 128]
        assert torch.equal(course[0], course[1]) and not torch.equal(course[1], course[2])
        assert torch.equal(course[-1], found[0][0][-1])


@pytest.mark.parametrize("kind", [ZeRO1, ZeRO2, ZeRO3])
def test_shards_of_zero_skip_the_same_steps_and_end_as_data_parallel_does(kind):
    def trained(comm, strategy):
        model = mlp.mlp(SIZES, seed=1)
        strategy.start(comm, model)
        optimizer, scales = strategy.optimizer(model, SGD), []
        for step in range(5):
            x, y = (part[comm.rank :: comm.size].clone() for part in batch(step))
            if (step, comm.rank) == (1, 2):
                x[0, 0] = float("inf")
            train_step(comm, model, strategy, optimizer, x, y, 12)
            scales.append(strategy.precision.scaler.scale)
        strategy.finish(comm, model)
        strategy.stop()
        return by_start(model), scales

    precision = Precision("float16", LossScale(64.0, interval=2))
    whole = sim.run(3, trained, DataParallel(precision=precision))[0]
    for found, scales in sim.run(3, trained, kind(precision=precision), threads=True):
        assert scales == whole[1] == [64, 32, 32, 64, 64]
        assert (found - whole[0]).abs().max() < 1e-4  # sums of 16 bits, in another order


def test_bfloat16_without_a_scale_raises_as_float32_does():
    with raises(FloatingPointError, "NaN", "No rank has taken this step"):
        sim.run(2, steps_of, mlp.mlp(SIZES, seed=1), DataParallel(precision="bfloat16"), 2, {(1, 0)})


def test_a_scale_that_comes_down_in_vain_is_an_error_on_every_rank():
    every = {(step, 0) for step in range(4)}
    strategy = DataParallel(precision=Precision("float16", LossScale(4.0)))
    with raises(FloatingPointError, "scale 1", "learning rate"):
        sim.run(2, steps_of, mlp.mlp(SIZES, seed=1), strategy, 4, every)


def test_shards_that_differ_take_one_decision():
    def decide(comm):
        scaler, grads = LossScale(8.0, interval=1), [torch.full((2,), 8.0)] * (comm.rank < 2)
        good = unscale_together(comm, grads, scaler)
        if comm.rank == 1:
            grads[0][1] = float("nan")
        return good, scaler.scale, unscale_together(comm, grads, scaler), scaler.scale, [g.tolist() for g in grads][:1]

    found = sim.run(3, decide)
    assert {row[:4] for row in found} == {(True, 16.0, False, 8.0)}
    assert found[0][4] == [[1 / 16, 1 / 16]] and found[2][4] == []


@pytest.mark.parametrize(
    "build", [lambda: cnn.build(BATCH_NORM, seed=1), lambda: gpt.build(gpt.GPTConfig(20, 8, 2, 2, 16), seed=1)]
)
def test_norms_with_statistics_stay_in_float32_and_the_model_comes_back(build):
    model, precision = build(), Precision("bfloat16")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def look(comm):
        strategy = DataParallel(precision=precision)
        strategy.start(comm, model)
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
        strategy.stop()
        return dtypes

    (dtypes,) = sim.run(1, look)
    owners = {
        name for name, module in model.named_modules() if any(b.is_floating_point() for b in module.buffers(False))
    }
    for name, dtype in dtypes.items():
        assert dtype == (torch.float32 if name.rpartition(".")[0] in owners else torch.bfloat16)
    assert all(torch.equal(p, before[name]) and p.dtype == torch.float32 for name, p in model.named_parameters())


def test_a_run_goes_on_from_a_checkpoint_bit_by_bit(tmp_path):
    path = str(tmp_path / "run.ckpt")

    def run(comm, first, steps, save):
        model = mlp.mlp(SIZES, seed=1)
        strategy = DataParallel(precision=Precision("float16", LossScale(64.0, interval=2)))
        strategy.start(comm, model)
        optimizer = strategy.optimizer(model, lambda params: torch.optim.AdamW(params, lr=0.01))
        if first:
            assert checkpoint.restore(comm, path, model, optimizer) == first
        for step in range(first, steps):
            x, y = batch(step)
            train_step(comm, model, strategy, optimizer, x[comm.rank :: comm.size], y[comm.rank :: comm.size], 12)
            if step + 1 == save:
                checkpoint.save(comm, path, model, optimizer, save)
        scale = strategy.precision.scaler.scale
        strategy.stop()
        return by_start(model), scale

    whole = sim.run(2, run, 0, 5, 3)[0]
    again = sim.run(2, run, 3, 5, 0)[0]
    assert torch.equal(whole[0], again[0]) and whole[1] == again[1] == 256.0


# -- what is saved of a model ------------------------------------------------------------------------------------------


def tied_and_frozen():
    """A model of tokens whose table has two names, and of which a layer is frozen."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(20, 9), nn.Linear(9, 9), nn.LayerNorm(9), nn.Linear(9, 20, bias=False))
    model[3].weight = model[0].weight
    model[1].requires_grad_(False)
    return model


def conv():
    return cnn.build(BATCH_NORM, seed=1)


def assert_same_state(found, wanted):
    """Two state_dicts have the same names in the same order, shapes, dtypes and bits."""
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape and found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("build", [tied_and_frozen, conv])
def test_a_state_dict_has_the_names_shapes_and_bits_that_the_model_came_with(build, kind, size):
    def state_of(comm, precision):
        model, strategy = build(), kind(precision=precision)
        strategy.start(comm, model)
        computes = {name: p.dtype for name, p in model.named_parameters()}
        again = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert {name: p.dtype for name, p in model.named_parameters()} == computes
        prefixed = nn.Sequential(model).state_dict()
        assert all(torch.equal(prefixed[f"0.{name}"], tensor) for name, tensor in again.items())
        strategy.finish(comm, model)
        finished = copy.deepcopy(model.state_dict())
        strategy.stop()
        assert_same_state(model.state_dict(), again)
        assert_same_state(finished, again)
        return again

    for precision in ("bf16", "fp16", "fp32"):
        for found in sim.run(size, state_of, precision, threads=True):
            assert_same_state(found, build().state_dict())


def begun(comm, kind, precision, seed=1):
    """(model, strategy, optimizer) of a rank."""
    model = mlp.mlp(SIZES, seed=seed)
    strategy = kind(precision=Precision(precision, LossScale(256.0, interval=2) if precision == "fp16" else None))
    strategy.start(comm, model)
    return model, strategy, strategy.optimizer(model, ADAMW)


def stepped(comm, model, strategy, optimizer, steps):
    for step in steps:
        x, y = (part[comm.rank :: comm.size] for part in batch(step))
        train_step(comm, model, strategy, optimizer, x, y, 12)


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_state_dict_holds_what_the_optimizer_updates(precision, kind, size):
    def body(comm):
        model, strategy, optimizer = begun(comm, kind, precision)
        stepped(comm, model, strategy, optimizer, range(3))
        (group,) = optimizer.param_groups
        return copied(model), torch.cat([p.detach().flatten() for p in group["params"]])

    found = sim.run(size, body, threads=True)
    updated = [pieces for _, pieces in found] if kind in (ZeRO1, ZeRO2, ZeRO3) else [found[0][1]]
    for state, _ in found:
        whole = torch.cat([tensor.flatten() for tensor in state.values()])
        assert whole.dtype == torch.float32 and torch.equal(whole.sort()[0], torch.cat(updated).sort()[0])
        assert (whole.to(DTYPES[precision]).float() != whole).float().mean() > 0.9  # no 16 bits have them


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_state_dict_is_that_of_a_loop_written_by_hand(kind, dtype):
    def body(comm):
        model = mlp.mlp(SIZES, seed=1)
        strategy = kind(precision=Precision(dtype, LossScale(256.0) if dtype == "float16" else None))
        strategy.start(comm, model)
        stepped(comm, model, strategy, strategy.optimizer(model, SGD), range(4))
        return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])

    (found,) = sim.run(1, body, threads=True)
    assert torch.equal(found, by_hand(getattr(torch, dtype), 256.0 if dtype == "float16" else 1.0))


@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize(
    "kinds", [*((kind, kind) for kind in STRATEGIES), (ZeRO3, DataParallel), (DataParallel, ZeRO2)]
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_is_loaded_is_saved_again_bit_by_bit(precision, kinds, before, after):
    def save(comm):
        model, strategy, optimizer = begun(comm, kinds[0], precision)
        stepped(comm, model, strategy, optimizer, range(3))
        return copied(model)

    def load(comm, state):
        model, strategy, _ = begun(comm, kinds[1], precision, seed=2)
        model.load_state_dict(state)
        return copied(model)

    saved = sim.run(before, save, threads=True)[0]
    for again in sim.run(after, load, saved, threads=True):
        assert_same_state(again, saved)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_training_that_goes_on_from_a_state_dict_equals_one_without_a_break(precision, kind, size):
    def whole(comm):
        model, strategy, optimizer = begun(comm, kind, precision)
        stepped(comm, model, strategy, optimizer, range(6))
        return copied(model)

    def broken(comm):
        model, strategy, optimizer = begun(comm, kind, precision)
        stepped(comm, model, strategy, optimizer, range(3))
        state, its_optimizer = copied(model), copy.deepcopy(optimizer.state_dict())
        strategy.stop()
        model, strategy, optimizer = begun(comm, kind, precision, seed=2)
        model.load_state_dict(state)
        optimizer.load_state_dict(its_optimizer)
        stepped(comm, model, strategy, optimizer, range(3, 6))
        return copied(model)

    wanted = sim.run(size, whole, threads=True)
    for found, state in zip(sim.run(size, broken, threads=True), wanted, strict=True):
        assert_same_state(found, state)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_looking_at_a_state_dict_changes_no_step(kind):
    """Before forward, between forward and backward, and while gradients travel."""

    def body(comm, looks):
        model, strategy, optimizer = begun(comm, kind, "bf16")
        for step in range(3):
            x, y = (part[comm.rank :: comm.size] for part in batch(step))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / 12
            if looks:
                model.state_dict()
            loss.backward()
            if looks:
                model.state_dict()
            strategy.add_gradients(comm, model)
            if looks:
                model.state_dict()
            optimizer.step()
        return copied(model)

    for found, wanted in zip(sim.run(2, body, True, threads=True), sim.run(2, body, False, threads=True), strict=True):
        assert_same_state(found, wanted)


@pytest.mark.parametrize("kind", [DataParallel, ZeRO1, ZeRO2, ZeRO3])
def test_a_state_that_does_not_fit_is_named_and_the_model_computes_in_16_bits_as_before(kind):
    def body(comm):
        model, strategy, optimizer = begun(comm, kind, "bf16")
        state = copied(model) | {"2.bias": torch.zeros(3)}
        with pytest.raises(RuntimeError, match=r"2\.bias"):
            model.load_state_dict(state)
        stepped(comm, model, strategy, optimizer, range(1))
        return {p.dtype for p in model.parameters()}, copied(model)["2.bias"].shape

    assert sim.run(2, body, threads=True) == [({torch.bfloat16}, (10,))] * 2


@pytest.mark.parametrize("kind", [DataParallel, ZeRO1, ZeRO3])
def test_the_float32_of_frozen_parameters_is_held_and_counted(kind):
    def held(comm):
        model, strategy = mlp.mlp(SIZES, seed=1), kind(precision="bf16")
        model[0].requires_grad_(False)
        strategy.start(comm, model)
        found = strategy.held(model, strategy.optimizer(model, SGD))["optimizer"]
        return found, sum(p.numel() for p in model.parameters())

    found = sim.run(2, held, threads=True)
    whole = 4 * found[0][1] * (2 if kind is DataParallel else 1)
    assert sum(nbytes for nbytes, _ in found) == whole


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_precision_has_two_names_and_float32_is_none(kind):
    for short, long in (("bf16", "bfloat16"), ("fp16", "float16")):
        assert kind(precision=short).precision.dtype == kind(precision=long).precision.dtype == getattr(torch, long)
        assert repr(kind(precision=short)) == repr(kind(precision=long))  # by which ranks compare their strategies
    assert kind(precision="fp16").precision.scaler == LossScale() and kind(precision="bf16").precision.scaler is None
    for none in ("fp32", "float32", None):
        assert kind(precision=none).precision is None
    assert Cast("bf16") == Cast("bfloat16") and Cast("fp16") == Cast("float16")


def test_what_cannot_be_is_said():
    with raises(ValueError, "precision='float8'", *DTYPES):
        DataParallel(precision="float8")
    with raises(ValueError, "dtype='float32'", "float16", "bfloat16"):
        Precision("float32")
    with raises(ValueError, "scale", "0"):
        LossScale(0.0)
    with raises(ValueError, "float32", "float64"):
        sim.run(1, steps_of, mlp.mlp(SIZES, seed=1).double(), DataParallel(precision="bfloat16"))

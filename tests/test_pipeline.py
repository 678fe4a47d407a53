"""Pipelines of real models on simulated ranks: the gradients and the loss of the model as a whole, by any schedule."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpdl_lab import models, schedules
from hpdl_lab.comm import sim
from hpdl_lab.comm.errors import Deadlock
from hpdl_lab.parallel.pipeline.model import Pipeline
from hpdl_lab.parallel.pipeline.naive import do_backward, do_forward
from hpdl_lab.trace import bytes_sent

BATCH = 12
IMAGES = torch.randn(BATCH, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ROWS = IMAGES[:, 0, 0]
TOKENS = torch.randint(80, (BATCH, 7), generator=torch.Generator().manual_seed(0))
DIGITS = TOKENS[:, 0] % 10
CASES = {  # model, x, y
    "mlp": (models.build("mlp", features=8, hidden=(6,) * 7, dtype="float64"), ROWS, DIGITS),
    "cnn": (models.build("cnn", widths=(4, 4, 4), blocks=2, dtype="float64"), IMAGES, DIGITS),
    "gpt": (models.build("gpt", width=8, layers=4, block=6, dtype="float64"), TOKENS[:, :-1], TOKENS[:, 1:]),
    "vit": (models.build("vit", width=8, layers=3, patch=4, dtype="float64"), IMAGES, DIGITS),
}


class Skips(nn.Module):
    """A small U: what its first layer gives is used by its last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))
        self.head = nn.Linear(16, 10, dtype=torch.float64)

    def forward(self, x):
        first = y = self.layers[0](x)
        for layer in self.layers[1:]:
            y = layer(torch.tanh(y))
        return self.head(torch.cat([first, y + x], dim=1))


def loss_of(output, y):
    return cross_entropy(output.flatten(0, -2), y.flatten())


def one_rank(model, x, y):
    """(loss, {name: gradient}) of the model as a whole, with the whole batch."""
    model.zero_grad()
    loss = loss_of(model(x), y)
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return loss.item(), found


def costs_of(model):
    """Every layer costs the same: where the cuts are does not depend on the machine."""
    blocks = len(model.blocks) if hasattr(model, "blocks") else 0
    return [1] * (blocks + {"CNN": 3, "GPT": 4, "ViT": 5, "Skips": 5, "Sequential": 8, "Asks": 1}[type(model).__name__])


def one_step(comm, model, schedule, x, y, recompute=False, measured=False):
    """(loss, {name: gradient}, {name: buffer}) of this rank after one step of a pipeline."""
    example = x[: len(x) // getattr(schedule, "micro_batches", 1)]
    pipeline = Pipeline(comm, model, schedule, example, recompute, None if measured else costs_of(model))
    loss = pipeline.step(x, y, loss_of)
    buffers = {n: b.clone() for stage in pipeline.stages.values() for n, b in stage.module.named_buffers()}
    return loss, {name: p.grad for name, p in pipeline.named_parameters().items()}, buffers


def micro_batches(name, ranks):
    """As many as this schedule can have, of those that divide the batch."""
    return 2 if name == "gems_mast" else 6 if ranks == 3 else 4


def difference(ranks, want):
    """The largest over ranks, of the loss and of any gradient; every parameter must be on some rank."""
    loss, gradients = want
    assert set().union(*(found for _, found, _ in ranks)) == set(gradients)
    off = [abs(mine - loss) for mine, _, _ in ranks]
    return max(off + [float((g - gradients[n]).abs().max()) for _, found, _ in ranks for n, g in found.items()])


@pytest.mark.parametrize(
    ("case", "ranks"),
    [("mlp", 1), ("mlp", 2), ("mlp", 3), ("mlp", 4), ("cnn", 3), ("gpt", 2), ("gpt", 4), ("vit", 3)],
)
def test_every_schedule_gives_the_gradients_of_the_model_as_a_whole(case, ranks):
    model, x, y = CASES[case]
    want = one_rank(model, x, y)
    for name in schedules.CATALOG:
        schedule = schedules.build(name, ranks, micro_batches(name, ranks))
        assert difference(sim.run(ranks, one_step, model, schedule, x, y), want) < 1e-12, name


def test_values_that_skip_stages_and_measured_costs():
    torch.manual_seed(0)
    model = Skips()
    want = one_rank(model, ROWS, DIGITS)
    for name, ranks in (("1f1b", 4), ("zero_bubble_h1", 3), ("interleaved", 2), ("gems_master", 4)):
        schedule = schedules.build(name, ranks, micro_batches(name, ranks))
        found = sim.run(ranks, one_step, model, schedule, ROWS, DIGITS, False, True)
        assert difference(found, want) < 1e-12, name


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "gems_master"])
def test_recompute_is_bit_equal_and_buffers_change_once(name):
    """Also batch norm, whose running mean every forward changes: rank by rank what it is without recompute."""
    model = models.build("cnn", widths=(4, 4), blocks=1, norm="batch")
    schedule = schedules.build(name, 3, 4)
    both = [sim.run(3, one_step, model, schedule, IMAGES.float(), DIGITS, recompute) for recompute in (False, True)]
    for (loss, *found), (loss_again, *again) in zip(*both, strict=True):
        assert loss == loss_again
        for tensors, others in zip(found, again, strict=True):
            assert set(tensors) == set(others) and all(torch.equal(tensors[n], others[n]) for n in tensors)
    assert any(n.endswith("running_mean") for _, _, buffers in both[0] for n in buffers)


def test_who_shares_a_weight_has_bitwise_the_same_gradient():
    """Tied weights of a GPT on the first and the last rank; of GEMS's replicas, everything on two ranks."""
    model, x, y = CASES["gpt"]
    for name in ("1f1b", "gems_master"):
        found = sim.run(4, one_step, model, schedules.build(name, 4, 4), x, y)
        holders = {n: [g[n] for _, g, _ in found if n in g] for n, _ in model.named_parameters()}
        assert len(holders["tokens.weight"]) == 2
        assert all(
            len(gradients) == (2 if name == "gems_master" else 1) for n, gradients in holders.items() if "b" in n
        )
        assert all(torch.equal(g, gradients[0]) for gradients in holders.values() for g in gradients)
        assert len({loss for loss, _, _ in found}) == 1


def steps_of_training(comm, model, schedule, x, y, steps):
    pipeline = Pipeline(comm, model, schedule, x[: len(x) // schedule.micro_batches], costs=[1] * 6)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipeline.step(x, y, loss_of))
        optimizer.step()
    return losses


def test_training_goes_on_as_on_one_rank():
    model = models.build("gpt", width=8, layers=2, block=6, dtype="float64")
    x, y = TOKENS[:, :-1], TOKENS[:, 1:]
    want = sim.run(1, steps_of_training, model, schedules.build("gpipe", 1, 1), x, y, 5)[0]
    for name in ("interleaved", "gems_master"):
        for losses in sim.run(2, steps_of_training, model, schedules.build(name, 2, 4), x, y, 5):
            assert max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 1e-12
    assert want[4] < want[0]


def two_steps(comm, model, schedule, x, y):
    pipeline = Pipeline(comm, model, schedule, x[: len(x) // schedule.micro_batches], costs=costs_of(model))
    for _ in range(2):
        loss = pipeline.step(x, y, loss_of)
    return loss, {name: p.grad for name, p in pipeline.named_parameters().items()}, {}


def test_gradients_add_up_over_steps_as_on_one_rank():
    """Also those that are shared, which the first step has added over ranks already."""
    model, x, y = CASES["gpt"]
    loss, gradients = one_rank(model, x, y)
    twice = loss, {name: 2 * grad for name, grad in gradients.items()}
    for name in ("1f1b", "gems_master"):
        assert difference(sim.run(2, two_steps, model, schedules.build(name, 2, 4), x, y), twice) < 1e-12


def test_messages_are_those_of_the_boundaries_and_no_more():
    """m activations down and m gradients up each boundary, b s d numbers each; the tied weight once, both ways."""
    model, x, y = CASES["gpt"]
    schedule = schedules.build("1f1b", 3, 4)

    def traffic(steps):
        return bytes_sent(sim.run(3, several_steps, model, schedule, x, y, steps).events)

    once, twice = traffic(1), traffic(3)
    boundary, tied, all_reduce = 4 * (BATCH // 4) * 6 * 8 * 8, 80 * 8 * 8, 32  # of loss, flag and checksums
    sent = {rank: (twice[rank] - once[rank]) / 2 for rank in range(3)}
    assert sent == {0: boundary + tied + 2 * all_reduce, 1: 2 * boundary + all_reduce, 2: boundary + tied + all_reduce}


def several_steps(comm, model, schedule, x, y, steps):
    pipeline = Pipeline(comm, model, schedule, x[: len(x) // schedule.micro_batches], costs=[1] * 8)
    for _ in range(steps):
        pipeline.step(x, y, loss_of)


# -- what is wrong is said, by every rank ------------------------------------------------------------------------------


def every_rank_refuses(error, text, ranks, function, *args):
    """All ranks raise the same before any message of theirs has been received."""

    def tried(comm, *args):
        try:
            function(comm, *args)
        except error as raised:
            return str(raised), [e for e in comm.trace.events if e.op in ("send", "recv")]

    found = sim.run(ranks, tried, *args)
    assert all(said and text in said[0] for said in found), found
    return [events for _, events in found]


def test_bad_input_is_one_sentence_with_numbers_before_the_first_message():
    model, x, y = CASES["mlp"]

    def refused(text, schedule, model=model, x=x, y=y, ranks=3, error=ValueError):
        assert every_rank_refuses(error, text, ranks, one_step, model, schedule, x, y) == [[]] * ranks

    build = schedules.build
    refused("a Schedule is needed, got '1f1b': schedules.build(", "1f1b")
    refused("1f1b is a schedule for 4 ranks, and there are 3", build("1f1b", 4, 4))
    refused("Sequential has 8 layers (0, 2, 4, 6, 8, 10, 12, 14), which cannot", build("interleaved", 3, 6, 3))
    rows = list(build("gpipe", 3, 2).rows)
    rows[1] = tuple(reversed(rows[1]))
    refused("rank 1 does 1B1 before 1F1", schedules.Schedule("mine", 3, 3, 2, 1, tuple(rows)))
    rows[1] = build("gpipe", 3, 2).rows[1][:-1]
    refused("no rank does 1B1, nor 1I1 and 1W1", schedules.Schedule("mine", 3, 3, 2, 1, tuple(rows)))
    crossed = [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]
    refused("mine deadlocks: rank 0 waits at 0B0 for 1B0 of rank 1", schedules.from_strings(crossed, "mine"), ranks=2)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"model": "mlp"}, TypeError, "a model is an nn.Module; got something of str"),
        (
            {"example": [1, 2]},
            TypeError,
            "example is one tensor of examples, the same on every rank; got something of list",
        ),
        ({"partition": [4, 4]}, TypeError, r"partition=\[4, 4\]: a function partition\(costs, stages\) is needed"),
        ({"partition": lambda costs, stages: [4.5, 3.5]}, ValueError, r"the partition returned \[4.5, 3.5\]: how many"),
        ({"costs": [1] * 7 + [float("nan")]}, ValueError, "the cost of a layer is a number of at least 0, got nan"),
    ],
)
def test_what_is_no_model_no_example_or_no_cut_is_refused(options, error, text):
    model, x, _ = CASES["mlp"]
    given = {"model": model, "schedule": schedules.build("1f1b", 2, 4), "example": x[:3], "costs": [1] * 8} | options
    with pytest.raises(error, match=text):
        sim.run(2, lambda comm: Pipeline(comm, **given))


class Asks(nn.Linear):
    def __init__(self):
        super().__init__(8, 10, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def one_batch(comm, model, x, y, batch):
    """A pipeline made for `x`, which is then given another batch: batch(x, rank) -> (x, y)."""
    pipeline = Pipeline(comm, model, schedules.build("1f1b", comm.size, 4), x[: len(x) // 4], costs=[1] * 8)
    return pipeline.step(*batch(x, y, comm.rank), loss_of)


def a_step_with(comm, model, x, y, loss):
    pipeline = Pipeline(comm, model, schedules.build("1f1b", 2, 4), x[:3], costs=[1] * 8)
    return pipeline.step(x, y, loss)


@torch.no_grad()
def test_a_step_under_autocast_or_without_gradients():
    """Outputs of another dtype than the example's are refused where they are made; a step always has gradients."""
    model, x, y = CASES["mlp"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(
            ValueError, match="a stage has made .*bfloat16.*, and it was made for .*float32.*: autocast"
        ):
            sim.run(2, step_outside_of_autocast, copy.deepcopy(model).float(), x.float(), y)
    assert (
        difference(sim.run(2, one_step, model, schedules.build("1f1b", 2, 4), x, y), with_gradients(model, x, y))
        < 1e-12
    )


@torch.enable_grad()
def with_gradients(model, x, y):
    return one_rank(model, x, y)


def step_outside_of_autocast(comm, model, x, y):
    with torch.autocast("cpu", enabled=False):
        pipeline = Pipeline(comm, model, schedules.build("1f1b", 2, 4), x[:3], costs=[1] * 8)
    return pipeline.step(x, y, loss_of)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (lambda x, y, rank: (x[:10], y[:10]), "10 examples cannot be shared by 4 micro-batches of equal size"),
        (
            lambda x, y, rank: (x[:8], y[:8]),
            "of shape (2, 8) in float64: this pipeline was made for shape (3, 8) in fl",
        ),
        (
            lambda x, y, rank: (x.float(), y),
            "of shape (3, 8) in float32: this pipeline was made for shape (3, 8) in fl",
        ),
        (lambda x, y, rank: (x + (rank == 2), y), "the ranks do not agree on the batch: rank 2 has checksum "),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_every_rank(batch, text):
    model, x, y = CASES["mlp"]
    every_rank_refuses(ValueError, text, 3, one_batch, model, x, y, batch)


def test_a_loss_without_gradient_is_refused():
    model, x, y = CASES["mlp"]
    with pytest.raises(ValueError, match="the loss has no gradient: it was detached"):
        sim.run(2, a_step_with, model, x, y, lambda out, y: loss_of(out.detach(), y))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda rank, model, x: model[6].weight.data.fill_(float("nan")), "in the parameter 6.weight"),
        (lambda rank, model, x: x.fill_(float("inf")), "in the loss of micro-batch 0, 1, 2 and 1 more"),
        (
            lambda rank, model, x: model[6].weight.register_hook(lambda g: g * float("nan")),
            "in the gradient of 6.weight",
        ),
    ],
)
def test_nan_is_named_by_every_rank(spoil, text):
    model, x, y = CASES["mlp"]
    every_rank_refuses(FloatingPointError, text, 3, spoiled_step, model, x.clone(), y, spoil)


def spoiled_step(comm, model, x, y, spoil):
    spoil(comm.rank, model, x)
    return one_step(comm, model, schedules.build("1f1b", 3, 4), x, y)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, RuntimeError])
def test_out_of_memory_says_rank_stage_and_micro_batch(error):
    with pytest.raises(
        Exception, match="rank 1 is out of memory in forward 2 stage 1, holding the activations of 2 m"
    ) as e:
        sim.run(3, short_of_memory, *CASES["mlp"], error)
    assert type(e.value) is (MemoryError if error is RuntimeError else error) and e.value.rank == 1


def short_of_memory(comm, model, x, y, error):
    pipeline = Pipeline(comm, model, schedules.build("gpipe", 3, 4), x[:3], costs=[1] * 8)
    calls = []

    def third_time(module, given):
        calls.append(module)
        if len(calls) == 3:
            raise error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 GB")

    if comm.rank == 1:
        model[6].register_forward_pre_hook(third_time)
    return pipeline.step(x, y, loss_of)


# -- the naive one -----------------------------------------------------------------------------------------------------


def naive_step(comm, schedule, stages, xs, ys):
    """Carry out a row by do_forward and do_backward; returns this stage's gradients."""
    saved, stage = {}, stages[comm.rank]
    for action in schedule.rows[comm.rank]:
        if action.kind == "F":
            i = action.micro_batch
            x = xs[i] if schedule.is_first(action.stage) else torch.empty(len(xs[i]), 6, dtype=torch.float64)
            do_forward(comm, schedule, action, stage, saved, x, lambda out, i=i: loss_of(out, ys[i]) / len(xs))
        else:
            do_backward(comm, schedule, action, saved)
    assert not saved
    return [p.grad for p in stage.parameters()]


def test_the_naive_one_carries_out_gpipe_and_deadlocks_in_1f1b():
    model, x, y = CASES["mlp"]
    stages = [model[:4], model[4:10], model[10:]]
    found = sim.run(3, naive_step, schedules.build("gpipe", 3, 4), stages, x.chunk(4), y.chunk(4))
    _, want = one_rank(model, x, y)
    assert max((a - b).abs().max() for a, b in zip(sum(found, []), want.values(), strict=True)) < 1e-12
    with pytest.raises(Deadlock):
        sim.run(3, naive_step, schedules.build("1f1b", 3, 4), stages, x.chunk(4), y.chunk(4))

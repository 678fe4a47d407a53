"""Pipelines of real models on simulated ranks: the gradients and the loss of the model as a whole, by any schedule."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpdl_lab import models, schedules
from hpdl_lab.comm import sim
from hpdl_lab.comm.errors import Deadlock
from hpdl_lab.mesh import DeviceMesh
from hpdl_lab.parallel.hybrid.model import HybridParallel
from hpdl_lab.parallel.pipeline.naive import do_backward, do_forward
from hpdl_lab.trace import bytes_sent
from tests.wording import raises

BATCH = 12
IMAGES = torch.randn(BATCH, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ROWS = IMAGES[:, 0, 0]
TOKENS = torch.randint(80, (BATCH, 7), generator=torch.Generator().manual_seed(0))
DIGITS = TOKENS[:, 0] % 10
CASES = {  # model, x, y, layers
    "mlp": (models.build("mlp", features=8, hidden=(6,) * 7, dtype="float64"), ROWS, DIGITS, 8),
    "cnn": (models.build("cnn", widths=(4, 4, 4), blocks=2, dtype="float64"), IMAGES, DIGITS, 9),
    "gpt": (models.build("gpt", width=8, layers=4, block=6, dtype="float64"), TOKENS[:, :-1], TOKENS[:, 1:], 8),
    "vit": (models.build("vit", width=8, layers=3, patch=4, dtype="float64"), IMAGES, DIGITS, 8),
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


def pipeline_of(comm, model, schedule, x, layers=None, **options):
    """A pipeline over all ranks. Layers cost the same, or are measured: where the cuts are depends on the machine."""
    costs = None if layers is None else [1] * layers
    return HybridParallel(model, DeviceMesh(comm, pp=comm.size), x, schedule=schedule, costs=costs, **options)


def one_step(comm, model, schedule, x, y, layers, recompute=False):
    """(loss, {name: gradient}, {name: buffer}) of this rank after one step of a pipeline."""
    pipeline = pipeline_of(comm, model, schedule, x, layers, recompute=recompute)
    loss = pipeline.step(x, y)
    buffers = {n: b.clone() for stage in pipeline.stages.values() for n, b in stage.module.named_buffers()}
    return loss, {name: p.grad for name, p in pipeline.named_parameters().items()}, buffers


def micro_batches(name, ranks):
    """As many as this schedule can have, of those that divide the batch."""
    return 2 if name == "gems_mast" else 6 if ranks == 3 or name.startswith("dualpipe") else 4


def difference(ranks, want):
    """The largest over ranks, of the loss and of any gradient; every parameter must be on some rank."""
    loss, gradients = want
    assert set().union(*(found for _, found, _ in ranks)) == set(gradients)
    off = [abs(mine - loss) for mine, _, _ in ranks]
    return max(off + [float((g - gradients[n]).abs().max()) for _, found, _ in ranks for n, g in found.items()])


@pytest.mark.parametrize(("case", "ranks"), [("mlp", 1), ("mlp", 4), ("cnn", 3), ("gpt", 2), ("vit", 3)])
def test_every_schedule_gives_the_gradients_of_the_model_as_a_whole(case, ranks):
    model, x, y, layers = CASES[case]
    want = one_rank(model, x, y)
    for name in schedules.CATALOG:
        if name == "dualpipe" and ranks % 2:
            continue  # its halves meet between two ranks
        schedule = schedules.build(name, ranks, micro_batches(name, ranks))
        assert difference(sim.run(ranks, one_step, model, schedule, x, y, layers), want) < 1e-12, name


def test_values_that_skip_stages_and_measured_costs():
    torch.manual_seed(0)
    model = Skips()
    want = one_rank(model, ROWS, DIGITS)
    for name, ranks in (("1f1b", 4), ("zero_bubble_h1", 3), ("interleaved", 2), ("gems_master", 4)):
        schedule = schedules.build(name, ranks, micro_batches(name, ranks))
        assert difference(sim.run(ranks, one_step, model, schedule, ROWS, DIGITS, None), want) < 1e-12, name


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "gems_master"])
def test_recompute_is_bit_equal_and_buffers_change_once(name):
    """Also batch norm, whose running mean every forward changes: rank by rank what it is without recompute."""
    model = models.build("cnn", widths=(4, 4), blocks=1, norm="batch")
    schedule = schedules.build(name, 3, 4)
    both = [sim.run(3, one_step, model, schedule, IMAGES.float(), DIGITS, 5, recompute) for recompute in (False, True)]
    for (loss, *found), (loss_again, *again) in zip(*both, strict=True):
        assert loss == loss_again
        for tensors, others in zip(found, again, strict=True):
            assert set(tensors) == set(others) and all(torch.equal(tensors[n], others[n]) for n in tensors)
    assert any(n.endswith("running_mean") for _, _, buffers in both[0] for n in buffers)


def test_who_shares_a_weight_has_bitwise_the_same_gradient():
    """Tied weights of a GPT on the first and the last rank; of GEMS's replicas, everything on two ranks."""
    model, x, y, layers = CASES["gpt"]
    for name in ("1f1b", "gems_master", "dualpipe"):
        found = sim.run(4, one_step, model, schedules.build(name, 4, 4), x, y, layers)
        holders = {n: [g[n] for _, g, _ in found if n in g] for n, _ in model.named_parameters()}
        assert len(holders["tokens.weight"]) == 2
        assert all(len(gradients) == (1 if name == "1f1b" else 2) for n, gradients in holders.items() if "b" in n)
        assert all(torch.equal(g, gradients[0]) for gradients in holders.values() for g in gradients)
        assert len({loss for loss, _, _ in found}) == 1


def test_messages_are_those_of_the_boundaries_and_no_more():
    """m activations down and m gradients up each boundary, b s d numbers each; the tied weight once, both ways."""
    model, x, y, layers = CASES["gpt"]
    schedule = schedules.build("1f1b", 3, 4)

    def steps(comm, n):
        pipeline = pipeline_of(comm, model, schedule, x, layers)
        for _ in range(n):
            pipeline.step(x, y)

    once, thrice = (bytes_sent(sim.run(3, steps, n).events) for n in (1, 3))
    boundary, tied, all_reduce = 4 * (BATCH // 4) * 6 * 8 * 8, 80 * 8 * 8, 32  # of loss, flag and checksums
    sent = {rank: (thrice[rank] - once[rank]) / 2 for rank in range(3)}
    assert sent == {0: boundary + tied + 2 * all_reduce, 1: 2 * boundary + all_reduce, 2: boundary + tied + all_reduce}


# -- what is wrong is said, by every rank ------------------------------------------------------------------------------


def every_rank_refuses(error, text, ranks, function, *args):
    """All ranks raise the same."""

    def tried(comm, *args):
        with pytest.raises(error) as raised:
            function(comm, *args)
        return str(raised.value)

    assert all(text in said for said in sim.run(ranks, tried, *args))


def test_impossible_schedules_are_refused_with_the_numbers():
    build = schedules.build
    early, lost = ([*build("gpipe", 3, 2).rows] for _ in range(2))
    early[1], lost[1] = tuple(reversed(early[1])), lost[1][:-1]
    crossed = [["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]]
    model, x, y, layers = CASES["mlp"]
    for text, schedule, ranks in (
        ("for 4 ranks, and there are 3", build("1f1b", 4, 4), 3),
        ("8 layers", build("interleaved", 3, 6, 3), 3),
        ("rank 1 does 1B1 before 1F1", schedules.Schedule("mine", 3, 3, 2, 1, tuple(early)), 3),
        ("no rank does 1B1", schedules.Schedule("mine", 3, 3, 2, 1, tuple(lost)), 3),
        ("rank 0 waits at 0B0 for 1B0 of rank 1", schedules.from_strings(crossed, "mine"), 2),
    ):
        every_rank_refuses(ValueError, text, ranks, one_step, model, schedule, x, y, layers)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"partition": [4, 4]}, TypeError, ("partition=[4", "4]")),
        ({"partition": lambda costs, stages: [4.5, 3.5]}, ValueError, ("[4.5, 3.5]",)),
        ({"costs": [1] * 7 + [float("nan")]}, ValueError, ("got nan",)),
        ({"loss": lambda out, y: out.sum(1)}, ValueError, ("(3,)",)),
        ({"loss": lambda out, y: loss_of(out.detach(), y)}, ValueError, ("the loss has no gradient",)),
    ],
)
def test_what_is_no_cut_and_no_loss_is_refused(options, error, text):
    model, x, y, _ = CASES["mlp"]
    with raises(error, *text):
        sim.run(2, lambda comm: HybridParallel(model, DeviceMesh(comm, pp=2), x, **options).step(x, y))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda p, model, x: model[6].weight.data.fill_(float("nan")), "rank 1: NaN or infinity in the parameter 6.w"),
        (lambda p, model, x: x.fill_(float("inf")), "in the loss of micro-batch 0, 1, 2 and 1 more"),
        (lambda p, model, x: "6.weight" in p and p["6.weight"].register_hook(lambda g: g * torch.nan), "gradient of 6"),
    ],
)
def test_nan_is_named_by_every_rank(spoil, text):
    model, x, y, layers = CASES["mlp"]

    def spoiled_step(comm, model, x):
        spoil({}, model, x)
        pipeline = pipeline_of(comm, model, "1f1b", x, layers)
        spoil(pipeline.named_parameters(), model, x)
        pipeline.step(x, y)

    every_rank_refuses(FloatingPointError, text, 3, spoiled_step, model, x.clone())


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
    model, x, y, _ = CASES["mlp"]
    stages = [model[:4], model[4:10], model[10:]]
    found = sim.run(3, naive_step, schedules.build("gpipe", 3, 4), stages, x.chunk(4), y.chunk(4))
    _, want = one_rank(model, x, y)
    assert max((a - b).abs().max() for a, b in zip(sum(found, []), want.values(), strict=True)) < 1e-12
    with pytest.raises(Deadlock):
        sim.run(3, naive_step, schedules.build("1f1b", 3, 4), stages, x.chunk(4), y.chunk(4))

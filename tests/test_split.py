"""Cutting unchanged models into stages: what is written down, where it is cut, and what cannot be."""

import copy
import itertools

import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import relu

from hpdl_lab import models
from hpdl_lab.parallel.pipeline.split import Layers, partition
from tests.properties import given
from tests.wording import raises

EXAMPLES = {
    "mlp": (models.build("mlp", features=4, hidden=(6, 5, 7), dtype="float64"), torch.randn(2, 4, dtype=torch.float64)),
    "cnn": (models.build("cnn", norm="batch", dtype="float64"), torch.randn(2, 1, 8, 8, dtype=torch.float64)),
    "gpt": (models.build("gpt", width=8, block=6, dtype="float64"), torch.randint(80, (2, 6))),
    "llama": (models.build("llama", width=8, block=6, dtype="float64"), torch.randint(80, (2, 6))),
    "deepseek": (models.build("deepseek", width=8, block=6, dtype="float64"), torch.randint(80, (2, 6))),
    "vit": (models.build("vit", width=8, dtype="float64"), torch.randn(2, 1, 8, 8, dtype=torch.float64)),
}


def forward_and_backward(stages, x, halves=False):
    """The loss of the stages one after the other; gradients are added to their parameters."""
    for i, stage in enumerate(stages):
        x = stage.forward(0, x if isinstance(x, tuple) else (x,), square if i == len(stages) - 1 else None)
    gradients = ()
    for stage in reversed(stages):
        gradients = stage.input_gradient(0, gradients) if halves else stage.backward(0, gradients)
    for stage in stages if halves else ():
        stage.weight_gradient(0)
    return x[0]


def square(y):
    return y.square().sum()


def gradients_of(model):
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def equal(got, want, tolerance=0.0):
    return set(got) == set(want) and all((got[n] - want[n]).abs().max() <= tolerance for n in want)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("halves", [False, True])
def test_stages_do_what_the_model_does(name, halves):
    model, x = EXAMPLES[name]
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    layers = Layers(model, x)
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())  # to look is not to train
    want_loss = square(model(x))
    want_loss.backward()
    want = gradients_of(model)
    for stages in range(1, min(len(layers), 4) + 1):
        loss = forward_and_backward(layers.split(stages, [1] * len(layers)), x, halves)
        assert torch.equal(loss, want_loss)
        assert equal(gradients_of(model), want), stages


def test_layers_are_named_and_tied_weights_known():
    model, x = EXAMPLES["gpt"]
    assert Layers(model, x).names == ["tokens", "positions", "blocks.0", "blocks.1", "norm", "tokens.weight"]
    stages = Layers(model, x).split(3, costs=[1] * 6)
    assert stages[2].parameters()[-1] is model.tokens.weight
    assert stages[0].parameters()[0] is model.tokens.weight  # not a copy
    assert [n for n, _ in stages[1].module.named_parameters()][0] == "blocks.0.norm1.weight"
    assert "self.tokens" in stages[0].module.code  # a stage is Python that one can read
    backwards = Layers(model, x).split(3, [1] * 6, partition=lambda costs, stages: [1, 1, 4])
    assert [len(stage.parameters()) for stage in backwards] == [1, 1, 2 * 12 + 2 + 1]
    (spec,) = stages[0].gives
    assert spec == stages[1].takes[0] and (spec.shape, spec.requires_grad, spec.nbytes) == (
        (2, 6, 8),
        True,
        2 * 6 * 8 * 8,
    )


def test_python_inside_forward_may_look_at_shapes():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.table = torch.arange(4.0)  # neither a parameter nor a buffer
            self.register_buffer("mask", torch.tensor([True, False, True, True]))

        def forward(self, x):
            b, width = x.shape
            for i, layer in enumerate(self.layers):
                x = layer(x) if width > 2 else x
                x += self.table.to(x.dtype) * i
            torch.zeros(3, 3)  # of no use
            assert x.dim() == 2 and x.is_contiguous() and x.numel() == b * width
            x = x.view(b, -1).masked_fill(self.mask, 0.0)
            x[:, 0] = len(x)
            return x.T.mT.max(dim=1).values + torch.full((b,), 2.0)

    torch.manual_seed(0)
    model, x = Branches(), torch.randn(3, 4)
    stages = Layers(model, x).split(2, costs=[1, 1])
    (y,) = stages[1].forward(0, stages[0].forward(0, (x,)))
    assert torch.equal(y, model(x))


@pytest.mark.parametrize("recompute", [False, True])
def test_operations_in_place_leave_what_is_received(recompute):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.scale, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x):
            x = self.first(relu(x, inplace=True))
            x *= self.scale
            x = x.add_(self.shift)
            x[:, 0] = self.shift[0]
            return self.last(nn.functional.relu_(x))

    torch.manual_seed(0)
    model, x = InPlace(), torch.randn(3, 4)
    square(model(x.clone())).backward()
    want, before = gradients_of(model), x.clone()
    for stages in (1, 2, 4):
        parts = Layers(model, x).split(stages, costs=[1] * 5, recompute=recompute)
        forward_and_backward(parts, x)
        assert equal(gradients_of(model), want)
    assert torch.equal(x, before)


class Inside(nn.Module):
    """Writes into what it is given, where nobody looks."""

    def forward(self, x):
        return x.mul_(2.0) if x.sum() > -1e9 else x


@pytest.mark.parametrize("recompute", [False, True])
def test_what_skips_a_stage_may_be_written_into_there(recompute):
    """Also by a part of it, by a layer, and where the layers before are frozen."""

    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
            self.inside = nn.Sequential(Inside(), nn.Linear(6, 6, dtype=torch.float64))

        def forward(self, x):
            h = self.a(x)
            z = self.b(h.tanh())
            h[:, :3] *= 2.0
            return relu(self.c(z) + self.inside(h), inplace=True)

    torch.manual_seed(0)
    for frozen in (False, True):
        model, x = Later(), torch.randn(3, 6, dtype=torch.float64)
        model.a.requires_grad_(not frozen)
        square(model(x)).backward()
        want = {n: g for n, g in gradients_of(model).items() if g is not None}
        for stages in (1, 2, 3, 4):
            forward_and_backward(Layers(model, x).split(stages, recompute=recompute), x)
            assert equal({n: g for n, g in gradients_of(model).items() if g is not None}, want, 1e-12), stages


@pytest.mark.parametrize("stages", [1, 2])
def test_layers_keep_their_own_mode(stages):
    """Fine-tuning: a model in train mode, whose norm is frozen and whose first dropout is switched off."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.9), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Dropout(0.5)).train()
    model[1].eval(), model[2].eval()
    x, before = torch.randn(6, 4), model.state_dict()["2.running_mean"].clone()
    parts = Layers(model, x).split(stages)
    assert [m.training for m in model] == [True, False, False, True, True]
    for seed in range(3):  # what the last dropout draws is drawn alike
        torch.manual_seed(seed)
        want = model(x)
        torch.manual_seed(seed)
        y = (x,)
        for stage in parts:
            y = stage.forward(seed, y)
        assert torch.equal(y[0], want)
    assert torch.equal(model.state_dict()["2.running_mean"], before)


class AsksForValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


class UsesOwnFunction(AsksForValues):
    def forward(self, x):
        return self.linear(Own.apply(x))


class GoesByNumpy(AsksForValues):
    def forward(self, x):
        return self.linear(torch.from_numpy(x.detach().numpy() + 1))


class Replaces(AsksForValues):
    """A mean that moves, by a new tensor for every batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


@pytest.mark.parametrize(
    ("kind", "fact"),
    [
        (AsksForValues, "__bool__"),
        (UsesOwnFunction, "autograd"),
        (GoesByNumpy, "numpy"),
        (Replaces, "mean"),
    ],
)
def test_what_cannot_be_written_down_is_one_layer_or_refused(kind, fact):
    x = torch.randn(3, 4)
    with raises(ValueError, kind.__name__, fact):
        Layers(kind(), x).split(1)
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4))
    assert Layers(model, x).names == ["0", "1", "2"]  # inside another model it is a layer
    stages = Layers(model, x).split(3, costs=[1, 1, 1])
    alone = copy.deepcopy(model)
    for micro_batch in (x, -x):
        want = alone(micro_batch)
        y = (micro_batch,)
        for stage in stages:
            y = stage.forward(0, y)
        assert torch.equal(y[0], want)


def test_what_answers_otherwise_when_done_again_is_refused():
    class Casts(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    with raises(ValueError, "Casts", "1 stages"):
        Layers(Casts(4, 4), torch.ones(2, 4)).split(1)


def test_bad_input_is_named_with_numbers():
    model, x = EXAMPLES["mlp"]
    with raises(ValueError, "Sequential", "4 layers", "(0, 2, 4, 6)", "5 stages"):
        Layers(model, x).split(5)
    with raises(ValueError, "3 costs", "4 layers", "(0, 2, 4, 6)"):
        Layers(model, x).split(2, costs=[1, 2, 3])
    with raises(ValueError, "[4, 0]", "4 layers", "2 stages"):
        Layers(model, x).split(2, [1] * 4, partition=lambda costs, stages: [4, 0])
    with raises(ValueError, "ReLU"):
        Layers(nn.Sequential(nn.ReLU())[0], x).split(1)

    class Two(nn.Linear):
        def forward(self, x):
            return x, super().forward(x)

    with raises(ValueError):
        Layers(Two(4, 4), torch.ones(2, 4)).split(1)


class Tied(nn.Module):
    """One weight under two names; a mask of bools that two layers use; a buffer that forward replaces."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle = nn.Embedding(10, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, tokens):
        mask = tokens[..., None] > 4
        x = self.middle(self.embed(tokens).masked_fill(mask, 0.0))
        return self.head(x.masked_fill(mask, 1.0))


def test_a_weight_of_two_names_is_one_parameter():
    model, x = Tied(), torch.arange(10).view(2, 5)
    stages = Layers(model, x).split(3, costs=[1] * 3)
    assert stages[2].parameters()[0] is stages[0].parameters()[0]
    assert [spec.dtype for spec in stages[0].gives] == [torch.bool, torch.float32]


def test_costs_are_measured_and_leave_no_trace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 1000), nn.Linear(1000, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 2))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    costs = Layers(model, torch.randn(64, 8)).measured()
    assert len(costs) == 4 and min(costs) > 0 and costs[1] > costs[3]  # 1,000,000 weights against 2,000
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def largest(costs, sizes):
    ends = list(itertools.accumulate(sizes, initial=0))
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(-1, 9))
@example([5, 1, 1, 1, 4, 4], 3)
def test_no_other_way_to_cut_is_better(costs, stages):
    if not 1 <= stages <= len(costs):
        with raises(ValueError, f"{len(costs)} layers", f"{stages} stages"):
            partition(costs, stages)
        return
    sizes = partition(costs, stages)
    assert len(sizes) == stages and sum(sizes) == len(costs) and min(sizes) >= 1
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    others = ([b - a for a, b in itertools.pairwise([0, *cut, len(costs)])] for cut in cuts)
    assert largest(costs, sizes) == min(largest(costs, other) for other in others)
    assert len(set(costs)) > 1 or max(sizes) - min(sizes) <= 1 or largest(costs, sizes) == 0

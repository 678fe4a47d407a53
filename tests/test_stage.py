"""One stage on one rank: backward, its two halves, and the forward that is done again, bit by bit."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hpdl_lab import models
from hpdl_lab.models.batch_norm import BatchNorm
from hpdl_lab.parallel.grid.memory import SavedBytes
from hpdl_lab.parallel.pipeline.split import Layers
from hpdl_lab.parallel.pipeline.stage import Spec, Stage


class Tuple(nn.Sequential):
    """Layers whose output is a tuple, as that of a stage."""

    def forward(self, x):
        return (super().forward(x),)


class Recurrent(nn.Module):
    """Uses its layer twice, one after the other, and its scale once."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5, dtype=torch.float64)
        self.scale = nn.Parameter(torch.full((5,), 2.0, dtype=torch.float64))

    def forward(self, x):
        return (self.layer(torch.tanh(self.layer(x))) * self.scale,)


def stage_of(module, x, **options):
    """A stage in the middle of a pipeline."""
    takes = [Spec(tuple(x.shape), x.dtype, x.is_floating_point())]
    return Stage(module, takes, [Spec.of(out) for out in module(x)], **options)


def step(stage, x, halves=False, gradient=1.0):
    """(gradient of the input, {name: gradient}) of three micro-batches, all forwards before all backwards."""
    inputs = [x * (i + 1) for i in range(3)]
    outputs = [stage.forward(i, (part,)) for i, part in enumerate(inputs)]
    assert all(not out.requires_grad for (out,) in outputs)
    given = [(torch.full_like(out, gradient),) for (out,) in outputs]
    backward = stage.input_gradient if halves else stage.backward
    found = [backward(i, given[i])[0] for i in (1, 0, 2)]
    for i in (2, 1, 0) if halves else ():
        stage.weight_gradient(i)
    assert not stage.saved and not stage.deferred
    gradients = {name: p.grad for name, p in stage.module.named_parameters()}
    stage.module.zero_grad()
    return found, gradients


def same(a, b, tolerance=0.0):
    near = all((x - y).abs().max() <= tolerance for x, y in zip(a[0], b[0], strict=True))
    return near and all((a[1][name] - b[1][name]).abs().max() <= tolerance for name in a[1])


MODULES = {
    "linears": Tuple(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5), nn.LayerNorm(5)).double(),
    "without bias": Tuple(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 5, bias=False)).double(),
    "one layer, transposed": Tuple(nn.Linear(5, 5, bias=False)).double(),
    "used twice": Recurrent(),
    "frozen": Tuple(nn.Linear(5, 5), nn.Linear(5, 5)).double(),
    "nothing to learn": Tuple(nn.Tanh()),
    "attention": Tuple(models.transformer.Block(4, 2, causal=True), nn.Linear(4, 5)).double(),
}
MODULES["frozen"][0].requires_grad_(False)


@pytest.mark.parametrize("name", MODULES)
def test_two_halves_are_the_whole(name):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4) if name == "attention" else torch.randn(3, 5)
    module, x = MODULES[name], x.double()
    params = {n: p for n, p in module.named_parameters() if p.requires_grad}

    def learned(halves):
        found, gradients = step(stage_of(module, x), x, halves)
        return found, {n: gradients[n] for n in params}

    assert same(learned(True), learned(False), 1e-14)  # three micro-batches are added in another order


@pytest.mark.parametrize("first", [False, True])
def test_halves_do_no_work_twice(first):
    """A middle stage: forward, input and weight gradients of three products each, all of one size."""
    module = Tuple(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(32, 64)
    stage = stage_of(module, x)
    if first:  # the batch needs no gradient
        stage.takes = (Spec(tuple(x.shape), x.dtype, False),)
    counts = []
    for act in (
        lambda: stage.forward(0, (x,)),
        lambda: stage.input_gradient(0, (torch.ones(32, 64),)),
        lambda: stage.weight_gradient(0),
    ):
        before = [p.grad for p in module.parameters()]
        with FlopCounterMode(display=False) as counter:
            act()
        counts.append(counter.get_total_flops() / (2 * 32 * 64 * 64))
        if act.__code__.co_names[0] == "input_gradient":
            assert before == [None] * 6 and all((p.grad is not None) == first for p in module.parameters())
    assert counts == ([3, 5, 0] if first else [3, 3, 3])  # nobody waits for a first stage, which does all at once


def test_memory_is_given_back_after_both_halves():
    model, x = models.build("gpt", block=16, width=16), torch.randint(80, (2, 16))
    stages = Layers(model, x).split(2, costs=[1] * 6)
    with SavedBytes(model.parameters()) as saved:
        for _ in range(2):
            y = stages[0].forward(0, (x,))
            stages[1].forward(0, y, lambda out: out.square().sum())
            assert saved.now > 10_000
            stages[0].input_gradient(0, stages[1].input_gradient(0))
            for stage in stages:
                stage.weight_gradient(0)
            assert saved.now == 0


class Noisy(nn.Module):
    """Random numbers, and buffers that every forward changes: what recompute must not do twice."""

    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(2, 4, 3, padding=1), norm, nn.Dropout(0.3)

    def forward(self, x):
        return (self.drop(self.norm(self.conv(x))),)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm2d(4), lambda: BatchNorm(4)], ids=["torch's", "ours"])
def test_recompute_is_bit_equal_and_changes_buffers_once(norm, halves):
    torch.manual_seed(0)
    kept, again = Noisy(norm()), Noisy(norm())
    again.load_state_dict(kept.state_dict())
    x = torch.randn(3, 2, 6, 6)
    results, states, bytes_kept = [], [], []
    for module, recompute in ((kept, False), (again, True)):
        with torch.no_grad():
            stage = Stage(module, [Spec((3, 2, 6, 6), torch.float32, True)], [], recompute)
        torch.manual_seed(1)
        with SavedBytes(module.parameters()) as saved:
            results.append(step(stage, x, halves, gradient=0.5))
        states.append(torch.get_rng_state())
        bytes_kept.append(saved.most)
    assert same(*results)
    assert all(torch.equal(b, kept.state_dict()[n]) for n, b in again.state_dict().items())
    assert torch.equal(*states)  # what is drawn later is the same, too
    if not halves:
        assert bytes_kept[1] < 0.5 * bytes_kept[0]  # one micro-batch at a time instead of three

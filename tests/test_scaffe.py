"""S-Caffe's three designs: the same training, and the time that each formula says."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.parallel.scaffe import SCaffe, SCaffeOverlappedPropagation, SCaffeOverlappedReduction, step_seconds
from hpdl_lab.parallel.scaling.accounting import spending
from tests.wording import raises

DESIGNS = (SCaffe, SCaffeOverlappedPropagation, SCaffeOverlappedReduction)
NETWORK = Switch(beta=1e-9)
LAYERS, WIDTH, STEPS = 3, 64, 3


def train(comm, design, forward=0.0, backward=0.0):
    """(final parameters (N,), virtual s per step) of STEPS steps on 12 examples, shared by the ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).double()
    x, y = torch.randn(12, WIDTH).double(), torch.randint(0, WIDTH, (12,))
    mine = slice(comm.rank * 12 // comm.size, (comm.rank + 1) * 12 // comm.size)
    strategy = design()
    with spending(comm, model, forward, backward):
        strategy.start(comm, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        begun = comm.trace.clock()
        for _ in range(STEPS):
            optimizer.zero_grad()
            (cross_entropy(model(x[mine]), y[mine], reduction="sum") / 12).backward()
            strategy.add_gradients(comm, model)
            optimizer.step()
        seconds = (comm.trace.clock() - begun) / 1e9 / STEPS
        strategy.finish(comm, model)
        strategy.stop()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), seconds


@pytest.mark.parametrize("design", DESIGNS)
def test_every_design_is_one_rank_with_the_same_batch(design):
    alone = sim.run(1, train, SCaffe)[0][0]
    for p in (2, 3, 4):
        for parameters, _ in sim.run(p, train, design):
            assert float((parameters - alone).abs().max()) < 1e-10


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("design", DESIGNS)
def test_a_forward_between_add_gradients_and_the_step_leaves_nothing_old(design, training):
    """Somebody looks at the loss there: the parameters of that look must not be those of the next step."""

    def body(comm):
        torch.manual_seed(0)
        model, strategy, told = nn.Linear(3, 2).double(), design(), []
        strategy.start(comm, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.full((1, 3), comm.rank + 1.0, dtype=torch.float64)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            strategy.add_gradients(comm, model)
            with torch.set_grad_enabled(training):
                model(x)
            optimizer.step()
            with torch.no_grad():
                told.append(model(torch.ones(1, 3, dtype=torch.float64))[0, 0].item())
        strategy.finish(comm, model)
        strategy.stop()
        return told

    run = sim.run(3, body)
    assert run[1] == run[0] and run[2] == run[0] and len(set(run[0])) == 3


def test_each_takes_the_time_of_its_formula_and_the_next_one_takes_less():
    layer = torch.ones(WIDTH * (WIDTH + 1), dtype=torch.float64)
    b, r = (
        sim.run(4, lambda comm, op=op: getattr(comm, op)(layer), network=NETWORK).seconds
        for op in ("broadcast", "reduce")
    )
    measured, said = [], []
    for design in DESIGNS:
        measured.append(sim.run(4, train, design, 3e-3, 6e-3, network=NETWORK)[0][1])
        said.append(step_seconds(design, [b] * LAYERS, [1e-3] * LAYERS, [2e-3] * LAYERS, [r] * LAYERS))
    assert measured == pytest.approx(said, rel=0.005)
    assert measured[0] - measured[1] == pytest.approx((LAYERS - 1) * b, rel=0.15), (
        "hidden: all broadcasts but the first"
    )
    assert measured[1] - measured[2] == pytest.approx((LAYERS - 1) * r, rel=0.15), "hidden: all reductions but the last"


class Attention(nn.Module):
    """MultiheadAttention uses the weight of its child out_proj, which it does not call."""

    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(6, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.ParameterList([nn.Parameter(torch.randn(8, 1) / 3)])  # which cannot be called

    def forward(self, x):
        x = self.first(x)[:, None]
        return self.attention(x, x, x, need_weights=False)[0][:, 0] @ self.last[0]


class Borrowed(nn.Module):
    """Uses the weight of `last`, and calls `last` afterwards, or never."""

    def __init__(self, calls=False):
        super().__init__()
        self.calls, self.first, self.last = calls, nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = linear(self.first(x), self.last.weight)
        return self.last(x) if self.calls else x


class Apart(nn.Module):
    """Two dtypes in one layer, a layer that is never used, a buffer that counts examples."""

    def __init__(self):
        super().__init__()
        self.single, self.double_ = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3, 2).double())
        self.unused = nn.Linear(3, 3).double()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += len(x)
        return (x.float() @ self.single).double() @ self.double_


def rows(comm):
    """This rank's of 8 examples (8, 6)."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(5)).double()[comm.rank :: comm.size]


def stepping(comm, design, build, also=""):
    """(parameters after finish, buffers, outputs of evaluations) of STEPS steps with weight decay.

    also: "evaluates" after every step, "nan" in rank 1's input, "twice" backward, "one more" step on rank 1.
    """
    torch.manual_seed(0)
    model, strategy, x, outputs = build(), design(), rows(comm), []
    strategy.start(comm, model)
    strategy.start(comm, model)  # the second start replaces the first
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(STEPS + (comm.rank if also == "one more" else 0)):
        optimizer.zero_grad()
        y = model(x * (torch.nan if also == "nan" and comm.rank == 1 else 1))
        (y.pow(2).sum() / 8).backward()
        if also == "twice":
            model(x).sum().backward()
        strategy.add_gradients(comm, model)
        optimizer.step()
        if also == "evaluates":
            with torch.no_grad():
                outputs.append(model.eval()(torch.ones(1, 6).double()).sum())
            model.train()
    strategy.finish(comm, model)
    strategy.stop()
    return [p.detach().clone() for p in model.parameters()], list(model.buffers()), outputs


def difference(run, other):
    return max(float((a - b).abs().max()) for a, b in zip(run, other, strict=True))


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("build", [lambda: Attention().double(), Apart], ids=["attention", "apart"])
@pytest.mark.filterwarnings("ignore:the loss does not depend on all parameters")
def test_layers_that_are_used_without_a_call_mixed_dtypes_and_unused_layers_are_as_on_one_rank(design, build):
    alone = sim.run(1, stepping, SCaffe, build, "evaluates")[0]
    for run in (several := sim.run(3, stepping, design, build, "evaluates")):
        assert difference(run[0], alone[0]) < 1e-6, "parameters"
        assert difference(run[2], alone[2]) < 1e-6, "evaluations between steps, which every rank makes"
        assert [b.tolist() for b in run[1]] == [b.tolist() for b in several[0][1]], "rank 0's buffers"


def micro_batches(comm, design):
    """Gradients of rank 0 from two micro-batches, the first one inside accumulating()."""
    torch.manual_seed(0)
    model, strategy, x = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)), design(), rows(comm).float()
    strategy.start(comm, model)
    with strategy.accumulating():
        model(x).sum().backward()
    model(x).sum().backward()
    local = [p.grad.clone() for p in model.parameters()]
    strategy.add_gradients(comm, model)
    return local, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("design", DESIGNS)
def test_micro_batches_travel_after_the_last_one_and_only_then(design):
    run = sim.run(2, micro_batches, design)
    sums = [a + b for a, b in zip(run[0][0], run[1][0], strict=True)]
    assert difference(run[0][1], sums) < 1e-4
    assert run[1][1] == [None] * 4, "only rank 0 takes the step"


@pytest.mark.parametrize("design", DESIGNS)
def test_nan_on_one_rank_is_named_on_all_of_them(design):
    with raises(FloatingPointError, "rank 1", "NaN", "0.bias"):
        sim.run(2, stepping, design, lambda: nn.Sequential(nn.Linear(6, 2)).double(), "nan")


def test_a_weight_that_is_used_before_it_comes_is_an_error_and_never_stale():
    with raises(ValueError, "last.weight", "rank 0"):
        sim.run(2, stepping, SCaffeOverlappedPropagation, lambda: Borrowed().double())
    with raises(FloatingPointError, "rank 1", "NaN"):
        sim.run(2, stepping, SCaffeOverlappedPropagation, lambda: Borrowed(calls=True).double())
    sim.run(2, stepping, SCaffe, lambda: Borrowed(calls=True).double())

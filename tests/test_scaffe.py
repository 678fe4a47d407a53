"""S-Caffe's three designs: the same training, and the time that each formula says."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Switch
from hpdl_lab.parallel.scaffe import SCaffe, SCaffeOverlappedPropagation, SCaffeOverlappedReduction, step_seconds
from hpdl_lab.parallel.virtual_time import spending

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


def test_where_messages_take_longer_than_arithmetic_only_the_arithmetic_is_hidden():
    assert step_seconds(SCaffe, [4, 4], [1, 1], [1, 1], [4, 4]) == 4 + 4 + 1 + 1 + 1 + 1 + 4 + 4
    assert step_seconds(SCaffeOverlappedPropagation, [4, 4], [1, 1], [1, 1], [4, 4]) == 4 + 4 + 1 + 1 + 1 + 4 + 4
    assert (
        step_seconds(SCaffeOverlappedReduction, [4, 4], [1, 1], [1, 1], [4, 4], update=2) == 4 + 4 + 1 + 1 + 4 + 4 + 2
    )


def test_a_model_without_parameters_cannot_spend_time():
    with pytest.raises(ValueError, match="no layers that could share its time"), spending(None, nn.ReLU(), 1.0, 1.0):
        pass

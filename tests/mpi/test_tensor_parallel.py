"""Tensor, sequence and spatial parallel training on real ranks: the steps of one process, and what is sent."""

import copy
import functools

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import data, models
from hpdl_lab.collectives import native
from hpdl_lab.parallel.tensor.cuts import add_partial_gradients, gather_parameters, tensors_of
from hpdl_lab.parallel.tensor.model import tensor_parallel
from hpdl_lab.parallel.tensor.ways import Plugged, on_a_ring

EXACT = 1e-10
STEPS, BATCH, BLOCK = 3, 5, 12
TWELVE = {"heads": 12, "width": 24}
SETS = {
    "mlp": "digits",
    "cnn": "digit_images",
    **dict.fromkeys(("gpt", "llama", "deepseek"), "text"),
    "vit": "digit_images",
}

CASES = [  # name, fields, how it is cut
    ("mlp", {"hidden": (24, 36)}, {}),
    ("gpt", TWELVE, {}),
    ("gpt", TWELVE, {"sequence": True}),
    ("llama", {**TWELVE, "kv_heads": 6, "hidden": 36}, {}),
    ("deepseek", {"heads": 6, "width": 24, "hidden": 36, "moe_intermediate_size": 24}, {}),
    ("vit", TWELVE, {}),
    ("cnn", {"norm": "batch", "widths": (12, 24)}, {}),
]


@pytest.fixture(autouse=True)
def ranks_that_divide_twelve(comm):
    if 12 % comm.size or comm.size > 6:
        pytest.skip(f"12 heads and 12 positions are not for {comm.size} ranks")


@functools.cache
def data_for(name):
    return data.load(SETS[name], **({"block": BLOCK} if SETS[name] == "text" else {"dtype": "float64"}))


def problem(name, **fields):
    whole, n = data_for(name), STEPS * BATCH
    return models.build_for(whole, name, dtype="float64", **fields), whole.train_x[:n], whole.train_y[:n]


def losses_of(model, x, y, after=lambda: None):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01), []
    for step in range(STEPS):
        some = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad()
        loss = cross_entropy(model(x[some]).flatten(0, -2), y[some].flatten())
        loss.backward()
        after()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def assert_these_ranks_equal_one(comm, make, name, fields):
    model, x, y = problem(name, **fields)
    one = copy.deepcopy(model)
    true_losses = losses_of(one, x, y)
    mine = make(comm, model)
    losses = losses_of(mine, x, y, lambda: add_partial_gradients(comm, mine))
    assert (losses - true_losses).abs().max() < EXACT
    for theirs in comm.all_gather(losses):
        assert torch.equal(theirs, losses)
    for tensor, (known, true) in zip(gather_parameters(comm, mine).values(), tensors_of(one), strict=True):
        assert (tensor - true).abs().max() < EXACT, known


@pytest.mark.parametrize(("name", "fields", "options"), CASES)
def test_these_ranks_equal_one(comm, name, fields, options):
    def make(comm, model):
        return tensor_parallel(comm, model, **options)

    assert_these_ranks_equal_one(comm, make, name, fields)


@pytest.mark.parametrize("plug", [on_a_ring, lambda comm: Plugged(comm, all_reduce=native.ring_all_reduce)])
def test_other_collectives_plug_in(comm, plug):
    assert_these_ranks_equal_one(comm, lambda comm, model: tensor_parallel(plug(comm), model), "gpt", TWELVE)


def test_another_batch_on_the_last_rank_ends_with_the_numbers(comm):
    if comm.size == 1:
        return
    model, x, _ = problem("gpt", **TWELVE)
    mine = tensor_parallel(comm, model)
    with pytest.raises(ValueError, match="count"):
        mine(x[: BATCH - (comm.rank == comm.size - 1)])

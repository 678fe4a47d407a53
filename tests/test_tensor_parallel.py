"""Whole models on several ranks are the model of one rank: losses, gradients, steps, bytes, and states put together."""

import copy
import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hpdl_lab import data, models
from hpdl_lab.comm import sim
from hpdl_lab.models import deepseek
from hpdl_lab.models.gpt import SIZES
from hpdl_lab.models.mlp import count_parameters
from hpdl_lab.parallel.tensor.cuts import add_partial_gradients, cuts_of, gather_parameters, joined, tensors_of
from hpdl_lab.parallel.tensor.model import shard, tensor_parallel
from hpdl_lab.parallel.tensor.ways import Plugged, on_a_ring
from hpdl_lab.trace import bytes_sent
from tests.wording import raises

EXACT = 1e-10
STEPS, BATCH = 3, 5
SETS = {"mlp": "digits", "cnn": "digit_images", "gpt": "text", "vit": "digit_images"}
SETS |= {"llama": "text", "deepseek": "text"}
PLACE = SimpleNamespace(rank=0, size=2)  # enough of a communicator for what sends nothing
TWELVE = {"heads": 12, "width": 24}  # which 1, 2, 3 and 4 ranks divide


@functools.cache
def batches(name, dtype):
    whole = data.load(SETS[name], **({"block": 12} if SETS[name] == "text" else {"dtype": dtype}))
    n = STEPS * BATCH
    return whole, whole.train_x[:n], whole.train_y[:n]


def problem(name, dtype="float64", **fields):
    """(model, x, y): y as many as there are positions."""
    whole, x, y = batches(name, dtype)
    if name == "vit" and "image" in fields:
        x = x[:, :, : fields["image"], : fields["image"]].contiguous()
        return models.build("vit", dtype=dtype, **fields), x, y
    return models.build_for(whole, name, dtype=dtype, **fields), x, y


def course_of(model, x, y, after=lambda: None):
    """[loss] of STEPS steps with momentum and weight decay, and {name: gradient} of the last."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01), []
    for step in range(STEPS):
        some = slice(step * BATCH, (step + 1) * BATCH)
        optimizer.zero_grad()
        loss = cross_entropy(model(x[some]).flatten(0, -2), y[some].flatten())
        loss.backward()
        after()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.grad.clone() for name, p in model.named_parameters()}


@functools.cache
def truth(name, dtype="float64", fields=()):
    model, x, y = problem(name, dtype, **dict(fields))
    model = copy.deepcopy(model)
    losses, grads = course_of(model, x, y)
    return losses, grads, dict(tensors_of(model))


def on_ranks(comm, make, model, x, y):
    """The same of this rank's shard of `model`, with gradients and state put together."""
    mine = make(comm, model)
    losses, grads = course_of(mine, x, y, after=lambda: add_partial_gradients(comm, mine))
    cuts = cuts_of(mine)
    whole_grads = {name: joined(comm, grad, cuts[name]) for name, grad in grads.items()}
    return losses, whole_grads, gather_parameters(comm, mine)


def assert_same(found, true, tolerance=EXACT):
    losses, grads, state = found
    true_losses, true_grads, true_state = true
    assert max(abs(a - b) for a, b in zip(losses, true_losses, strict=True)) < tolerance
    assert list(grads) == list(true_grads) and list(state) == list(true_state)
    for name, grad in grads.items():
        assert (grad - true_grads[name]).abs().max() < tolerance, f"the gradient of {name}"
    for name, tensor in state.items():
        assert (tensor - true_state[name]).abs().max() < tolerance, name


by_tensor = tensor_parallel
by_sequence = functools.partial(tensor_parallel, sequence=True)


def absorbed(comm, model):
    return deepseek.absorb(tensor_parallel(comm, model))


CASES = [  # name, fields of the model, how it is cut, on how many ranks
    ("mlp", {"hidden": (24, 36)}, by_tensor, (1, 3, 4)),  # a pair, and one that is left
    ("mlp", {"hidden": (24,)}, by_tensor, (1, 2)),
    ("mlp", {"hidden": (12, 12, 12)}, by_tensor, (2, 3)),  # two pairs
    ("gpt", TWELVE, by_tensor, (2, 3)),  # 81 characters: an odd vocabulary, padded
    ("gpt", TWELVE, by_sequence, (1, 4)),
    ("llama", {**TWELVE, "kv_heads": 6, "hidden": 36}, by_tensor, (1, 3)),
    ("llama", {**TWELVE, "kv_heads": 2}, by_tensor, (2,)),
    ("deepseek", {"heads": 6, "width": 24, "hidden": 36, "moe_intermediate_size": 24}, by_tensor, (1, 3)),
    ("deepseek", {"heads": 6, "width": 24, "hidden": 36, "moe_intermediate_size": 24}, absorbed, (2,)),
    ("vit", TWELVE, by_tensor, (1, 3)),
    ("vit", {**TWELVE, "image": 6}, by_sequence, (1, 2)),  # 3 x 3 patches and the answer: 10 positions
    ("cnn", {}, by_tensor, (1, 4)),  # 4 groups of channels
    ("cnn", {"norm": "batch", "widths": (12, 24)}, by_tensor, (1, 3)),
]


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n][0]}-{n}")
def test_every_model_takes_the_steps_of_one_rank(number):
    name, fields, make, ranks = CASES[number]
    model, x, y = problem(name, **fields)
    before = copy.deepcopy(model.state_dict())
    for p in ranks:
        results = sim.run(p, on_ranks, make, model, x, y, threads=True)
        for found in results:
            assert_same(found, truth(name, fields=tuple(fields.items())))
            assert found[0] == results[0][0], "bitwise the same loss on every rank"
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def parameters_of_a_rank(p, vocabulary, block, layers, heads, width):
    """As TensorGPT says, and docs/tensor-parallel.md for GPT-2 small."""
    each = (12 * width**2 + 7 * width) // p + 6 * width
    return -(-vocabulary // p) * width + block * width + layers * each + 2 * width


def test_how_many_parameters_a_rank_holds():
    fields = {"vocabulary": 83, "block": 16, "layers": 3, "heads": 12, "width": 24}
    for p in (1, 2, 3, 4):
        mine = shard(SimpleNamespace(rank=p - 1, size=p), models.build("gpt", **fields))
        assert count_parameters(mine) == parameters_of_a_rank(p, **fields)
    told = Path(__file__).resolve().parent.parent.joinpath("docs", "tensor-parallel.md").read_text()
    paper = {name: getattr(SIZES["paper"], name) for name in fields}
    counts = [f"{parameters_of_a_rank(p, **paper):,}" for p in (1, 2, 3, 4, 6, 12)]
    assert f"| parameters per rank | {' | '.join(counts)} |" in told


# -- bytes -------------------------------------------------------------------------------------------------------------


def traffic_of(p, name, sequence, **fields):
    """[(collective, elements)] of rank 0 forward, the same backward, and {rank: bytes sent} on rings."""
    model, x, y = problem(name, **fields)

    def step(comm):
        told, ring = [], on_a_ring(comm)

        def note(collective):
            method = getattr(ring, collective)
            return lambda _, t: (told.append((collective, t.numel())), method(t))[1]

        names = ("all_reduce", "all_gather", "reduce_scatter")
        counted = Plugged(comm, **{collective: note(collective) for collective in names})
        mine = shard(counted, copy.deepcopy(model), sequence)
        loss = cross_entropy(mine(x[:BATCH]).flatten(0, -2), y[:BATCH].flatten())
        forward = len(told)
        loss.backward()
        return told[:forward], told[forward:]

    run = sim.run(p, step, threads=True)
    assert all(told == run[0] for told in run)
    return *run[0], bytes_sent(run.events)


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("name", ["gpt", "llama", "vit"])
def test_a_layer_sends_two_all_reduces_forward_and_two_backward(p, name):
    n = BATCH * (17 if name == "vit" else 12) * 24  # b s d
    fields = TWELVE | ({"kv_heads": 6, "hidden": 36} if name == "llama" else {})
    one, two = (traffic_of(p, name, False, layers=layers, **fields) for layers in (1, 2))
    for direction in (0, 1):
        assert one[direction].count(("all_reduce", n)) == (
            2 if name == "vit" else 3
        )  # and one at each end of a decoder
        assert two[direction].count(("all_reduce", n)) == one[direction].count(("all_reduce", n)) + 2
        assert len(two[direction]) == len(one[direction]) + 2
    per_layer = {rank: two[2][rank] - one[2][rank] for rank in range(p)}
    if n % p == 0:
        assert per_layer == {rank: 4 * 2 * (p - 1) * n // p * 8 for rank in range(p)}
    assert sum(per_layer.values()) == 4 * 2 * (p - 1) * n * 8


def test_a_layer_of_deepseek_adds_gradients_of_latents_in_one_message():
    """Forward as a gpt; backward what all heads share instead of x: the queries' latents, and the 16 + 8 of keys."""
    fields = {"heads": 6, "width": 24, "hidden": 36, "first_k_dense_replace": 3, "q_lora_rank": 20}
    one, two = (traffic_of(3, "deepseek", False, layers=layers, **fields) for layers in (1, 2))
    places = BATCH * 12
    assert two[0].count(("all_reduce", places * 24)) == one[0].count(("all_reduce", places * 24)) + 2
    more = [two[1].count(call) - one[1].count(call) for call in (("all_reduce", places * n) for n in (24, 20 + 24))]
    assert more == [1, 1] and len(two[1]) == len(one[1]) + 2


@pytest.mark.parametrize("p", [2, 3])
def test_sequence_parallel_sends_the_same_bytes(p):
    n = BATCH * 12 * 24
    layers = [[traffic_of(p, "gpt", sequence, layers=k, **TWELVE) for k in (1, 2)] for sequence in (False, True)]
    plain, by_positions = ({r: two[2][r] - one[2][r] for r in range(p)} for one, two in layers)
    assert plain == by_positions
    one, two = layers[1]
    for direction in (0, 1):
        more = [two[direction].count(call) - one[direction].count(call) for call in set(two[direction])]
        assert sorted(set(two[direction])) == sorted(
            {("all_gather", n // p), ("reduce_scatter", n)} | set(one[direction])
        )
        assert sum(more) == 4 and len(two[direction]) == len(one[direction]) + 4
    assert layers[0][0][2] == layers[1][0][2], "and so do both ends"


# -- refused -----------------------------------------------------------------------------------------------------------

REFUSED = [
    ("mlp", {"hidden": (64, 10)}, {}, ("64", "3 ranks")),
    ("gpt", {"heads": 4, "width": 24}, {}, ("4 heads", "24", "3 ranks")),
    ("llama", {"heads": 6, "kv_heads": 2, "width": 24}, {}, ("2 key heads", "3 ranks")),
    ("llama", {"heads": 6, "kv_heads": 3, "width": 24}, {"sequence": True}, ("sequence=True", "gpt, vit", "llama")),
    ("deepseek", {"heads": 4}, {}, ("4 heads", "3 ranks")),
    ("vit", TWELVE, {"sequence": True}, ("17 positions", "3 ranks")),
    ("cnn", {}, {}, ("convolution", "8", "3 ranks")),
    ("cnn", {}, {"sequence": True}, ("sequence=True", "gpt, vit", "cnn")),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_cannot_be_cut_is_refused_on_every_rank(number):
    name, fields, options, facts = REFUSED[number]
    model, _, _ = problem(name, **fields)

    def refused(comm):
        with raises(ValueError, *facts):
            tensor_parallel(comm, model, **options)
        assert not comm.trace.events

    sim.run(3, refused)


def test_other_models_are_refused():
    for model, facts in [
        (nn.LSTM(4, 4), ("LSTM", "mlp, cnn, gpt, llama, deepseek, vit")),
        (nn.Sequential(nn.Linear(6, 6), nn.Dropout()), ("layer 1", "Dropout")),
        (shard(PLACE, problem("gpt", **TWELVE)[0]), ("TensorGPT",)),
    ]:
        with raises(ValueError, *facts):
            shard(PLACE, model)


def test_a_sequence_that_the_ranks_do_not_divide_is_refused_before_the_first_message():
    model, x, _ = problem("gpt", **TWELVE)

    def call(comm):
        mine, before = shard(comm, copy.deepcopy(model), sequence=True), len(comm.trace.events)
        with raises(ValueError, "10 positions", "3 ranks", "10"):
            mine(x[:BATCH, :10])
        assert len(comm.trace.events) == before
        with raises(ValueError, "12 tokens", "13"):
            mine(torch.zeros(1, 13, dtype=torch.int64))

    sim.run(3, call)

"""What lesson 13 draws and measures of decoding: times with and without a cache, slots over steps, pages."""

import torch

from hpdl_lab import lab, models
from hpdl_lab.checks.lessons.lesson_13_serving import NEW, compared
from hpdl_lab.comm import sim
from hpdl_lab.inference import decode
from hpdl_lab.inference.engine import Engine
from hpdl_lab.plots import slots
from tests.wording import raises


def test_the_step_without_a_cache_says_the_same():
    x, qkv, out = torch.randn(2, 7, 12), torch.randn(36, 12), torch.randn(12, 12)
    keys, values = torch.zeros(2, 2, 3, 9, 4)
    for s in range(1, 8):
        new = decode.decode_step(x[:, :s], qkv, out, keys, values)
        torch.testing.assert_close(new, decode.without_cache(x[:, :s], qkv, out, keys, values), rtol=1e-4, atol=1e-4)


def test_a_layer_of_shards_is_a_block_of_a_gpt_without_biases():
    model = models.build("gpt", vocabulary=8, block=8, layers=1, heads=2, width=8, dtype="float64")
    (block,) = model.blocks
    x, seen = torch.randn(1, 8, dtype=torch.float64), []

    def attend(q, k, v):
        seen.append(q.shape)
        return v  # of one token that hears itself

    for linear in (block.attention.qkv, block.attention.out, block.mlp[0], block.mlp[2]):
        torch.nn.init.zeros_(linear.bias)
    shard = decode.Shard(
        block.attention.qkv.weight, block.attention.out.weight, block.mlp[0].weight, block.mlp[2].weight, attend
    )
    (y,) = sim.run(1, decode.tensor_parallel_decode, x, [shard])
    torch.testing.assert_close(y, block(x[:, None])[:, 0].detach(), rtol=1e-3, atol=1e-3)  # GELU by tanh there
    assert seen == [(1, 8)]


def test_times_are_drawn_with_guesses():
    ways = {"without a cache": decode.without_cache, "yours": decode.decode_step}
    times = decode.compare_decode_steps(ways, lengths=(1, 64), width=32, heads=2)
    shown = lab.show(times, prediction={"without a cache": 100, "yours": 2})
    assert shown.data is times and f"yours: token 64 takes {times.factor('yours'):.1f} times" in shown.text


def test_a_request_keeps_its_slot_and_no_slot_is_empty_before_the_last_ones():
    runs, count, least = compared()
    for steps in runs.values():
        rows = slots.slot_rows(steps, count)
        for request, new in enumerate(NEW):
            held = [row.count(request) for row in rows]
            assert max(held) == sum(held) == new
    assert len(runs["yours"]) < len(runs["static batching"]) and least == -(-sum(NEW) // count)
    rows = slots.slot_rows(runs["yours"], count)
    assert all(None not in [row[at] for row in rows] for at in range(20))


def test_pages_of_an_engine_are_shown():
    model = models.build("gpt", vocabulary=20, block=32, layers=1, heads=1, width=8)
    engine = Engine(model, slots=2, pages=12, page_size=4)
    stream = engine.submit([*range(10)], 6)
    next(stream)
    other = engine.submit([*range(9)], 6)
    next(other)
    shown = lab.show(engine)
    assert shown.text == f"{len(engine.pages.free)} free + {engine.pages.used} used = 12 pages of 4 tokens"
    assert "2 shared pages" in "".join(text.get_text() for text in shown.figure.texts)
    with raises(ValueError, "600", "512"):
        lab.show(Engine(model, slots=2, pages=600, page_size=4))

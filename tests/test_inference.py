"""The inference engine: the tokens of a plain loop without a cache, pages that add up, and streams that may be left."""

import math
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from hpdl_lab import models
from hpdl_lab.inference.cache import Chunk, PagedCache
from hpdl_lab.inference.engine import Engine, QueueFull
from hpdl_lab.inference.pages import Pages, reserve
from hpdl_lab.inference.quantize import Int8Linear, long_rows, quantize, weight_bytes
from hpdl_lab.inference.sampling import Sampling, draw
from hpdl_lab.inference.scheduler import Lengths, virtual_steps
from hpdl_lab.inference.speculative import Speculative, acceptance, expected_tokens
from hpdl_lab.models.deepseek import absorb
from tests.properties import given
from tests.wording import raises

VOCABULARY, BLOCK = 12, 32
FIELDS = {"vocabulary": VOCABULARY, "block": BLOCK, "layers": 2, "width": 16, "heads": 4}
MORE = {
    "gpt": {},
    "llama": {"kv_heads": 2, "hidden": 24},
    "deepseek": {
        "first_k_dense_replace": 1,
        "hidden": 24,
        "moe_intermediate_size": 8,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 6,
    },
}
KINDS = ["gpt", "llama", "deepseek", "absorbed"]
SAMPLED = Sampling(temperature=0.9, top_k=8, top_p=0.95, seed=5)


def small(kind, dtype="float64"):
    name = "deepseek" if kind == "absorbed" else kind
    model = models.build(name, seed=1, dtype=dtype, **FIELDS, **MORE[name]).eval()
    with torch.no_grad():
        for p in model.parameters():
            p *= 2  # so that tokens differ
    return absorb(model) if kind == "absorbed" else model


def plain(model, prompt, max_tokens, sampling):
    """The new tokens, by a forward of all tokens for each."""
    tokens, rng = [*prompt], sampling.generator()
    with torch.no_grad():
        for _ in range(max_tokens):
            tokens.append(draw(sampling.probabilities(model(torch.tensor([tokens]))[0, -1]), rng))
    return tokens[len(prompt) :]


def prompts_of(n, seed=0, longest=12):
    """Random ones, of which every other one begins with the same 8 tokens, and some are the same."""
    rng = random.Random(seed)
    common = [rng.randrange(VOCABULARY) for _ in range(8)]
    found = [common * (i % 2) + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))] for i in range(n)]
    return [*found[:-2], common, common]


def audit(engine):
    """Pages add up, each has as many holders as hold it, and no request has one that it does not need."""
    pages = engine.pages
    held = Counter(page for request in engine.running for page in request.pages)
    assert len(pages.free) + pages.used == pages.count == len(set(pages.free)) + len(held)
    assert not held.keys() & {*pages.free}
    assert pages.ref_counts == [held[page] for page in range(pages.count)]
    for request in engine.running:
        assert 0 <= len(request.pages) * pages.size - request.num_computed_tokens < pages.size
    assert not any(request.pages for request in engine.waiting)


# -- tokens -----------------------------------------------------------------------------------------------------------

SETTINGS = {
    "default": {},
    "alone": {"slots": 1},
    "pages of one token": {"page_size": 1, "slots": 3, "budget": 3},
    "chunks": {"page_size": 4, "slots": 4, "budget": 5},
    "preemption": {"page_size": 4, "pages": 9, "slots": 6, "budget": 9},
}


@pytest.fixture(scope="module")
def wanted():
    prompts = prompts_of(9)
    return {
        (kind, sampling): [plain(small(kind), p, 11, replace(sampling, seed=5 + i)) for i, p in enumerate(prompts)]
        for kind in KINDS
        for sampling in (Sampling(), SAMPLED)
    }


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_a_plain_loop(kind, setting, wanted):
    rows = []
    engine = Engine(small(kind), on_row=lambda row: [rows.append(row), audit(engine)], **SETTINGS[setting])
    for sampling in (Sampling(), SAMPLED):
        want = wanted[kind, sampling]
        assert len({*map(tuple, want)}) > 3
        assert engine.generate(prompts_of(9), 11, sampling) == want
    assert engine.pages.used == 0 and (engine.preempted > 0) == (setting == "preemption")
    assert max(row["tokens"] for row in rows) <= engine.budget and max(row["running"] for row in rows) <= engine.slots


def test_arrival_and_the_order_of_reading_change_nothing(wanted):
    prompts, rng = prompts_of(9), random.Random(2)
    for _ in range(3):
        engine = Engine(small("llama"), slots=3, page_size=4, pages=20, budget=6)
        order, streams, got = random.Random(rng.random()).sample(range(9), 9), {}, {i: [] for i in range(9)}
        while order or streams:
            if order and (not streams or rng.random() < 0.3):
                i = order.pop()
                streams[i] = engine.submit(prompts[i], 11, replace(SAMPLED, seed=5 + i))
            i = rng.choice([*streams])
            for token in streams[i]:
                got[i].append(token)
                if rng.random() < 0.4:
                    break
            else:
                del streams[i]
        assert [got[i] for i in range(9)] == wanted["llama", SAMPLED]


def test_streams_may_be_read_by_many_threads(wanted):
    engine = Engine(small("gpt"), slots=4, on_row=lambda row: row["step"] == 2 and engine.submit([1]))
    streams = [engine.submit(prompt, 11, replace(SAMPLED, seed=5 + i)) for i, prompt in enumerate(prompts_of(9))]
    with ThreadPoolExecutor(9) as pool:
        assert [*pool.map(list, streams)] == wanted["gpt", SAMPLED]
    audit(engine)


def test_a_model_is_as_it_was_after_a_step():
    model = small("gpt")
    before = [model.blocks[0].attention.attend, model(torch.tensor([[1, 2, 3]]))]
    Engine(model).generate([[1, 2, 3]])
    assert model.blocks[0].attention.attend is before[0] and torch.equal(model(torch.tensor([[1, 2, 3]])), before[1])


def test_stop_tokens_and_the_context_end_a_request(wanted):
    prompt, want = prompts_of(9)[1], wanted["gpt", SAMPLED][1]
    engine = Engine(small("gpt"))
    stop = want[4]
    got = [*engine.submit(prompt, 11, replace(SAMPLED, seed=6), stop=[stop])]
    assert got == want[: want.index(stop) + 1]
    assert len([*engine.submit([1], BLOCK - 1)]) == BLOCK - 1


# -- pages ------------------------------------------------------------------------------------------------------------


class Bigram(nn.Module):
    """Says the next token by the last one alone: as cheap as a model can be."""

    def __init__(self, vocabulary=7, block=64):
        super().__init__()
        self.block = block
        self.tokens = nn.Embedding(vocabulary, vocabulary)
        self.embed, self.blocks, self.logits = self.tokens, nn.Identity(), nn.Identity()
        table = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))
        self.tokens.weight = nn.Parameter(table, requires_grad=False)


def test_ten_thousand_requests_leave_nothing_behind():
    rng, n, refused, left = random.Random(0), 10_000, 0, []
    engine = Engine(Bigram(), slots=24, pages=40, page_size=2, budget=60, queue=30)
    following = engine.cache.model.tokens.weight.argmax(-1).tolist()
    step = engine.step
    while n:
        for _ in range(rng.randint(0, 24)):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 8))]
            try:
                stream = engine.submit(prompt, rng.randint(1, 6))
            except QueueFull:
                refused += 1
                break
            n = max(0, n - 1)
            fate = rng.random()
            if fate < 0.9:
                left.append((prompt[-1], stream))
            elif fate < 0.95:
                stream.close()  # others: garbage at once
        step()
        audit(engine)
        if len(left) > 200:
            for last, stream in left[:100]:
                for token in stream:
                    assert token == following[last]
                    last = token
                    if rng.random() < 0.02:
                        break  # the consumer has read enough
            del left[:100]
    left.clear()
    del stream
    engine.run()
    audit(engine)
    assert engine.pages.used == 0 and not engine.waiting and not engine.cancelled
    assert refused > 100 and engine.preempted > 100


def test_bytes_of_the_cache():
    for kind, numbers in (("gpt", 2 * 4 * 4), ("llama", 2 * 2 * 4), ("deepseek", 4 * (4 + 2 + 6)), ("absorbed", 8 + 2)):
        cache = PagedCache(small(kind), 3 * BLOCK // 8, 8)
        kept = sum(x.nbytes for attend in cache.attends for x in (attend.k, attend.v) if x is not None)
        assert cache.nbytes == kept == 2 * numbers * BLOCK * 3 * 8  # layers, numbers, tokens, requests, bytes
    v3 = {**FIELDS, **MORE["deepseek"], "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model = models.build("deepseek", **v3)
    assert PagedCache(absorb(model), 1, 1).token_bytes == 2 * 576 * 4


def test_a_prefix_is_read_and_kept_once():
    rows = []
    engine = Engine(small("llama"), page_size=4, on_row=rows.append)
    prompt = prompts_of(4)[1][:9]
    first = engine.submit(prompt, 8)
    next(first)
    second, third = engine.submit(prompt[:8], 8), engine.submit([*prompt[:4], 1, 1], 8)
    want = plain(engine.cache.model, prompt[:8], 8, Sampling())
    next(second)
    assert [row["tokens"] for row in rows] == [9, 1 + 1 + 2]  # a decode, the last token of 8, two after 4
    one, two, three = (stream.request.pages for stream in (first, second, third))
    assert one[0] == two[0] == three[0] and engine.pages.ref_counts[one[0]] == 3
    assert one[1] != two[1]  # its last token was written again: on a copy
    assert [want[0], *second] == want and len([*third]) == 8
    assert [*first] == plain(engine.cache.model, prompt, 8, Sampling())[1:]
    begin = len(rows)
    assert next(engine.submit(prompt, 8)) == plain(engine.cache.model, prompt, 1, Sampling())[0]
    assert rows[begin]["tokens"] == 1  # its pages were free, and nobody had taken them


def test_copy_on_write_leaves_the_other_as_it_was():
    pages = Pages(4, 2)
    one = []
    assert pages.allocate(one, 0, 4) == [] and one == [0, 1]
    two = pages.share([*one])
    assert pages.allocate(two, 3, 5) == [(1, 3)] and two == [0, 3, 2] and one == [0, 1]
    assert pages.ref_counts == [2, 1, 1, 1] and pages.allocate(one, 4, 5) is None and one == [0, 1]
    pages.release(two)
    assert pages.ref_counts == [1, 1, 0, 0] and pages.used == 2


@given(st.lists(st.integers(0, 20), unique=True), st.integers(0, 40), st.integers(0, 40), st.integers(1, 6))
def test_reserve_takes_all_or_nothing(free, held, tokens, size):
    pages, before = [*range(100, 100 + held)], [*free]
    done = reserve(free, pages, tokens, size)
    needed = max(0, math.ceil(tokens / size) - held)
    assert done == (needed <= len(before))
    assert pages[:held] == [*range(100, 100 + held)] and len(pages) - held == done * needed
    assert sorted(free + pages[held:]) == sorted(before)


# -- who runs ---------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_no_slot_is_idle_while_requests_wait(lengths, slots, more):
    budget = slots + more
    requests = [Lengths(*pair) for pair in lengths]
    steps = virtual_steps(requests, slots, budget)
    assert len(steps) >= math.ceil(sum(r.new for r in requests) / slots)
    read = Counter()
    first = {}
    for i, step in enumerate(steps):
        for request, count in step.items():
            first.setdefault(request, i)
            assert count >= (read[request] >= requests[request].prompt)  # who decodes never waits
            read[request] += count
        assert len(step) <= slots and sum(step.values()) <= budget
        waits = any(first.get(request, i + 1) > i for request in range(len(requests)))
        assert not waits or len(step) == slots or sum(step.values()) == budget
    assert [*first.values()] == sorted(first.values()) and [*first] == [*range(len(requests))]
    assert all(read[i] == r.prompt + r.new - 1 for i, r in enumerate(requests))


def test_decodes_go_on_while_a_long_prompt_is_read():
    rows = []
    engine = Engine(small("gpt"), budget=4, slots=3, on_row=rows.append)
    short, long = engine.submit([1, 2], 12), engine.submit([3] * 20, 4)
    assert len([*short]) == 12 and len(rows) == 12  # a token in each step
    assert [row["tokens"] for row in rows[:9]] == [4, 4, 4, 4, 4, 4, 4, 2, 2]
    assert len([*long]) == 4


def test_times_and_rows():
    rows, now = [], iter(range(1000))
    engine = Engine(small("gpt"), on_row=rows.append, clock=lambda: next(now))
    streams = [engine.submit([1, 2, 3], 3) for _ in range(2)]
    engine.run()
    assert [[*stream] for stream in streams] == [streams[0].request.output_tokens] * 2
    assert all(
        len(stream.request.times) == 4 and sorted(stream.request.times) == stream.request.times for stream in streams
    )
    assert rows[0] == {
        "step": 1, "running": 2, "waiting": 0, "tokens": 6, "free": 16 * 2 - 2, "preempted": 0, "seconds": 2
    }  # fmt: skip
    assert [row["running"] for row in rows] == [2, 2, 0] and rows[-1]["free"] == 32


# -- sampling ---------------------------------------------------------------------------------------------------------


def chi_square(counts, p):
    """Σ (found - expected)² / expected over expected - its mean, in standard deviations."""
    n, kept = sum(counts), [(c, q) for c, q in zip(counts, p, strict=True) if q]
    assert all(c == 0 for c, q in zip(counts, p, strict=True) if not q)
    value, freedom = sum((c - n * q) ** 2 / (n * q) for c, q in kept), len(kept) - 1
    return (value - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "sampling, kept",
    [(Sampling(1.0), 6), (Sampling(0.5), 6), (Sampling(1.5, top_k=3), 3), (Sampling(1.0, top_p=0.6), 2)],
)
def test_tokens_are_drawn_as_often_as_said(sampling, kept):
    logits = [0.1, 1.0, -0.5, 2.0, 0.9, -1.0]
    weights = [math.exp(x / sampling.temperature) for x in logits]
    order = sorted(range(6), key=lambda i: -weights[i])[:kept]
    p = [weights[i] / sum(weights[j] for j in order) if i in order else 0 for i in range(6)]
    assert sampling.probabilities(torch.tensor(logits)).tolist() == pytest.approx(p)
    rng = sampling.generator()
    found = Counter(draw(sampling.probabilities(torch.tensor(logits)), rng) for _ in range(4000))
    assert abs(chi_square([found[i] for i in range(6)], p)) < 4


def test_requests_of_one_batch_draw_by_their_own_seeds():
    engine = Engine(small("gpt"))
    one, two, three = (engine.submit([1, 2], 20, replace(SAMPLED, seed=seed)) for seed in (1, 2, 1))
    assert [*one] == [*three] != [*two]


# -- streams that are left, and what goes wrong -----------------------------------------------------------------------


def test_a_stream_that_is_left_frees_its_pages():
    engine = Engine(small("gpt"), slots=2)
    kept, closed, dropped = (engine.submit([1, 2, i], 20) for i in range(3))
    next(kept), next(closed)
    assert len(engine.running) == 2 and len(engine.waiting) == 1 and engine.pages.used == 2
    del dropped
    assert not engine.waiting
    with closed:
        next(closed)
    assert engine.pages.used == 1
    assert [*closed.request.output_tokens[2:]] == [*closed]  # what had come can still be read
    assert len([*kept]) == 19 and engine.pages.used == 0


def test_a_slow_consumer_keeps_nobody_waiting():
    engine = Engine(small("gpt"), slots=2)
    slow, fast, third = (engine.submit([1, 2, i], n) for i, n in ((0, 25), (1, 25), (2, 3)))
    next(slow)
    assert len([*fast]) == 25 and len(slow.request.output_tokens) == 25  # all there, and no slot is used any more
    assert len([*third]) == 3 and engine.pages.used == 0 and len([*slow]) == 24


def test_a_forward_that_fails_ends_those_that_run():
    engine = Engine(small("gpt"), slots=1)
    first, second = engine.submit([1, 2], 4), engine.submit([1, 3], 4)
    next(first)
    forward, engine.cache.forward = engine.cache.forward, lambda chunks: 1 / 0
    with pytest.raises(ZeroDivisionError):
        next(first)
    engine.cache.forward = forward
    with pytest.raises(ZeroDivisionError):
        next(first)
    assert engine.pages.used == 0 and len([*second]) == 4


def test_what_no_engine_can_do_is_said():
    engine = Engine(small("gpt"), slots=2, pages=3, page_size=8, queue=3)
    with raises(ValueError, "at least one token"):
        engine.submit([])
    with raises(ValueError, "12", "vocabulary", "0 to 11"):
        engine.submit([3, 12])
    with raises(ValueError, "30 tokens", "3 new", "32 tokens"):
        engine.submit([1] * 30, 3)
    with raises(ValueError, "20 tokens", "6 new", "3 pages of 8"):
        engine.submit([1] * 20, 6)
    with raises(ValueError, "max_tokens", "at least 1"):
        engine.submit([1], 0)
    with raises(ValueError, "top_p", "above 0"):
        Sampling(top_p=0)
    with raises(ValueError, "budget", "at least 16"):
        Engine(small("gpt"), budget=8)
    with raises(ValueError, "1,000,000,000,000 pages", "this machine has"):
        Engine(small("gpt"), pages=10**12)
    assert len([*engine.submit([1] * 20, 5)]) == 5
    streams = [engine.submit([1]) for _ in range(3)]
    with raises(QueueFull, "3 requests wait", "holds 3"):
        for _ in range(997):
            engine.submit([1])
    assert [len([*stream]) for stream in streams] == [16] * 3
    assert [len(tokens) for tokens in engine.generate([[1]] * 40, 2)] == [2] * 40


@pytest.mark.parametrize("counts", [[], [0], [3], [1, 1], [2, 1]])
def test_a_scheduler_that_gives_what_cannot_be_is_told_so(counts):
    engine = Engine(small("gpt"), slots=1, budget=2, schedule=lambda *_: counts)
    if counts == [3]:
        with raises(ValueError, "[3]", "[5]", "budget of 2"):
            next(engine.submit([1] * 5))
    elif counts:
        with raises(ValueError, str(counts)):
            next(engine.submit([1]))
    else:
        with raises(ValueError, "[]", "[1]"):
            next(engine.submit([1]))


def test_a_scheduler_that_lets_nobody_go_on_is_told_so():
    def prompts_only(running, waiting, slots, budget):
        return [0] * len(running) + [1] * bool(waiting)

    engine = Engine(small("gpt"), slots=2, pages=2, page_size=2, schedule=prompts_only)
    first, second = engine.submit([1], 4), engine.submit([2, 3, 1], 2)
    next(first)
    with raises(ValueError, "nothing to 1 running request", "no request can go on"):
        next(second)


def test_a_step_inside_of_a_step_is_refused():
    engine = Engine(small("gpt"), on_row=lambda row: engine.step())
    with raises(RuntimeError, "inside of a step"):
        next(engine.submit([1]))
    engine = Engine(small("gpt"), schedule=lambda *_: engine.submit([1]))
    with raises(RuntimeError, "cannot submit"):
        next(engine.submit([1]))


def test_other_weights_find_no_pages_of_those_before():
    model = small("gpt")
    engine, prompt = Engine(model, page_size=4), [5, 3, 8, 1, 9, 2, 4, 4, 1]
    engine.generate([prompt], 4)
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight *= -1
    assert engine.generate([prompt], 8)[0] == plain(model, prompt, 8, Sampling())


def test_nothing_stays_behind_if_a_prompt_of_many_is_refused():
    engine = Engine(small("gpt"), slots=2)
    with raises(ValueError, "token 500") as caught:
        engine.generate([[1], [2], [3], [500]], 30)
    assert caught.tb and not engine.step() and engine.steps == 0  # the traceback keeps their streams


@pytest.mark.parametrize("prompt", ["12", [1.5], 7, torch.ones(1, 3, dtype=torch.int64)])
def test_a_prompt_is_whole_numbers(prompt):
    with raises(TypeError, "whole numbers"):
        Engine(small("gpt")).submit(prompt)


def test_what_is_said_by_a_tensor_and_by_a_tiny_temperature():
    model = small("gpt")
    tokens = plain(model, [1], 8, Sampling())
    prompt, stop = torch.tensor([1]), torch.tensor([tokens[2]])
    assert Engine(model).generate([prompt], 8, stop=stop)[0] == tokens[: tokens.index(tokens[2]) + 1]
    assert Engine(model).generate([[1]], 8, Sampling(temperature=1e-310))[0] == tokens
    with raises(TypeError, "ViT"):
        Engine(models.build("vit"))
    with raises(TypeError, "sampling=0.8", "temperature=0.8"):
        Engine(model).submit([1], 8, 0.8)


def test_reading_is_no_training():
    model = models.build("deepseek", **FIELDS, **MORE["deepseek"])  # as it comes, in training mode
    Engine(model).generate([[1, 2, 3]], 4)
    assert not any(counts.sum() for name, counts in model.named_buffers() if name.endswith("counts"))


def test_every_token_has_its_logits():
    model = small("llama")
    tokens = torch.tensor([[5, 3, 8, 1, 9]])
    cache, held = PagedCache(model, 4, 2), []
    cache.pages.allocate(held, 0, 5)
    first = cache.forward([Chunk([5, 3], 0, held)], every=True)
    rest = cache.forward([Chunk([8, 1, 9], 2, held)], every=True)
    assert torch.allclose(torch.cat([first, rest]), model(tokens)[0], atol=1e-12)


# -- speculation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [1, 3, 7])
def test_a_draft_changes_no_token_of_greedy_decoding(gamma, wanted):
    for kind, draft in (("llama", "gpt"), ("gpt", "gpt")):
        fast = Speculative(small(kind), small(draft), gamma, page_size=4)
        for prompt, want in zip(prompts_of(9)[:6], wanted[kind, Sampling()], strict=False):
            assert [*fast.generate(prompt, 11)] == want
            assert [*fast.generate(prompt, 11, stop=want[3:4])] == want[: want.index(want[3]) + 1]
        if kind == draft:  # a perfect draft: all is kept
            assert fast.kept == fast.proposed > 0
        else:
            assert 0 < fast.kept < fast.proposed


def constant(weights, vocabulary):
    """A model that always says the same."""
    model = Bigram(vocabulary, block=256)
    model.tokens.weight.copy_(torch.tensor(weights).log().expand(vocabulary, -1))
    return model


def test_sampled_tokens_are_distributed_as_without_a_draft():
    model, draft = Bigram(3), Bigram(3)
    draft.tokens.weight.add_(torch.tensor([0.9, 0.0, -0.9]))
    fast, sampling = Speculative(model, draft, gamma=2), Sampling(0.8)
    found = Counter(tuple(fast.generate([0], 3, replace(sampling, seed=seed))) for seed in range(2000))
    p = sampling.probabilities(model.tokens.weight)  # (3, 3): of the next token by the last
    cells = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
    assert (
        abs(chi_square([found[cell] for cell in cells], [float(p[0, a] * p[a, b] * p[b, c]) for a, b, c in cells])) < 4
    )
    assert 0.2 < fast.kept / fast.proposed < 0.9


@pytest.mark.parametrize("gamma", [2, 4])
def test_tokens_per_iteration_are_those_expected(gamma):
    p, q = [0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]
    fast = Speculative(constant(p, 4), constant(q, 4), gamma)
    a = float(acceptance(torch.tensor(p), torch.tensor(q)))
    assert a == pytest.approx(0.7)
    found, iteration = [], fast.iteration
    fast.iteration = lambda tokens, n, *more: found.append((n, len(new := iteration(tokens, n, *more)))) or new
    for seed in range(5):
        list(fast.generate([0], 250, Sampling(1.0, seed=seed)))
    lengths = [length for n, length in found if n == gamma]
    chances = [a**kept * (1 - a) for kept in range(gamma)] + [a**gamma]  # of 1, 2, ... gamma + 1 tokens
    mean = sum(p * (kept + 1) for kept, p in enumerate(chances))
    assert expected_tokens(a, gamma) == pytest.approx(mean) == pytest.approx((1 - a ** (gamma + 1)) / (1 - a))
    sigma = math.sqrt(sum(p * (kept + 1 - mean) ** 2 for kept, p in enumerate(chances)) / len(lengths))
    assert abs(sum(lengths) / len(lengths) - mean) < 3 * sigma < 0.25


def test_expected_tokens_at_the_ends():
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens(0, 4) == 1 and expected_tokens(1, 4) == 5 and expected_tokens(0.3, 0) == 1


def test_a_draft_that_does_not_fit():
    with raises(ValueError, "7 tokens", "12"):
        Speculative(small("gpt"), Bigram())
    fast = Speculative(small("gpt"), small("gpt"))
    with raises(ValueError, "30 tokens", "9 new", "32 tokens"):
        next(fast.generate([1] * 30, 9))
    together = zip(fast.generate([1], 8), fast.generate([2], 8), strict=True)
    assert [[*new] for new in zip(*together, strict=True)] == Engine(small("gpt")).generate([[1], [2]], 8)
    with raises(ValueError, "at least one token"):
        next(fast.generate([]))


# -- int8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_int8_weights_have_a_quarter_of_the_bytes_and_say_nearly_the_same(kind):
    model, whole = small(kind, "float32"), quantize(small(kind, "float32"))
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    saved = sum(3 * m.weight.numel() - 4 * m.out_features for m in linears)
    assert linears and weight_bytes(model) - weight_bytes(whole) == saved
    tokens = torch.arange(20).view(2, 10) % VOCABULARY
    logits, near = model(tokens), whole(tokens)
    assert 0 < (near - logits).norm() < 0.1 * logits.norm()
    prompts = prompts_of(9)
    assert Engine(whole, slots=5, page_size=4, pages=15).generate(prompts, 8) == Engine(whole, slots=1).generate(
        prompts, 8
    )


def test_an_int8_layer_is_off_by_half_a_step():
    layer = nn.Linear(24, 9).requires_grad_(False)
    whole, x = Int8Linear(layer), torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))
    most = layer.weight.abs().amax(1, keepdim=True)
    assert ((whole.weight - layer.weight).abs() <= most / 254 * 1.001).all()
    for weight, rows in ((layer.weight, x[:1, :1]), (torch.zeros(9, 24), x)):  # one token; a layer that says nothing
        layer.weight.copy_(weight)
        bound = rows.abs().amax(-1, keepdim=True) * most.T * 24 / 127 * 1.01
        assert ((Int8Linear(layer)(rows) - layer(rows)).abs() <= bound).all()
    assert whole(x).shape == (2, 5, 9) and torch.equal(whole(x)[1, 2], whole(x[1:, 2:3])[0, 0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_int8_layer_of_16_bits(dtype):
    layer = nn.Linear(256, 32).requires_grad_(False)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    near = Int8Linear(layer.to(dtype))(x.to(dtype))
    assert near.dtype == dtype and (near - layer(x.to(dtype))).abs().max() < 0.05


def test_what_cannot_be_put_into_int8():
    with raises(ValueError, "no nn.Linear"):
        quantize(nn.Sequential(nn.Embedding(3, 3)))


def test_long_rows_change_strides_only():
    model, tokens = small("llama"), torch.arange(20).view(2, 10) % VOCABULARY
    before, logits = {name: p.clone() for name, p in model.named_parameters()}, model(tokens)
    long_rows(model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.blocks[0].mlp.up.weight.stride() == (1, 24) and model.blocks[0].mlp.down.weight.stride() == (24, 1)
    assert torch.allclose(model(tokens), logits, atol=1e-12)

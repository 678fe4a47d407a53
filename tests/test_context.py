"""Attention of a sequence that ranks share equals full attention; its bytes, its balance of work, and whole models."""

import copy
import functools

import pytest
import torch
from torch.nn.functional import cross_entropy

from hpdl_lab import models
from hpdl_lab.comm import sim
from hpdl_lab.comm.network import Ring
from hpdl_lab.models.attention import Causal, Full, grouped_query_attention
from hpdl_lab.parallel import context
from hpdl_lab.parallel.context import RingAttention, Ulysses, context_parallel, sequence_part
from hpdl_lab.parallel.scripts import attend_chunks
from hpdl_lab.trace import bytes_sent
from tests.wording import raises

B, H, KV, S, D, DV = 2, 4, 2, 24, 3, 5  # S: what twice 1, 2, 3 and 4 ranks divide
HOWS = ("ring", "zigzag", "ulysses")


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(heads=H, kv=KV, dtype=torch.float64):
    """q, k, v and a gradient of the output, of the whole sequence."""
    shapes = (heads, D), (kv, D), (kv, DV), (heads, DV)
    return [numbers(B, h, S, d, seed=seed, dtype=dtype) for seed, (h, d) in enumerate(shapes)]


def back_through(attend, tensors, grad):
    """The output of attend(q, k, v) and the gradients of all three."""
    leaves = [x.clone().requires_grad_(True) for x in tensors]
    out = attend(*leaves)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def attend_of(comm, how, causal):
    return Ulysses(comm, causal) if how == "ulysses" else RingAttention(comm, how == "zigzag", causal)


def on_ranks(p, how, causal, tensors, scale=None):
    """What back_through gives on each rank, for its positions; and the run."""

    def share(comm):
        *mine, grad = (sequence_part(comm, x, 2, how == "zigzag") for x in tensors)
        return back_through(functools.partial(attend_of(comm, how, causal), scale=scale), mine, grad)

    return sim.run(p, share, threads=True)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("p", "how"), [(p, how) for p in (1, 2, 3, 4) for how in HOWS if how != "ulysses" or KV % p == 0]
)
def test_output_and_gradients_are_those_of_full_attention(p, how, causal):
    *tensors, grad = qkv()
    scale = 0.3 if p == 3 else None
    right = back_through(functools.partial((Causal if causal else Full)(), scale=scale), tensors, grad)
    for rank, got in enumerate(on_ranks(p, how, causal, [*tensors, grad], scale)):
        places = context.positions_of(rank, p, S // p, how == "zigzag")
        for mine, whole in zip(got, right, strict=True):
            assert (mine - whole[:, :, places]).abs().max() < 1e-10


@pytest.mark.parametrize("how", HOWS)
def test_in_float32_it_is_right_to_five_digits(how):
    tensors = qkv(4, 4, torch.float32)
    right = back_through(Causal(), tensors[:3], tensors[3])
    for rank, got in enumerate(on_ranks(4, how, True, tensors)):
        places = context.positions_of(rank, 4, S // 4, how == "zigzag")
        for mine, whole in zip(got, right, strict=True):
            assert (mine - whole[:, :, places]).abs().max() < 1e-5


def test_merged_parts_are_the_whole_however_large_scores_are():
    tensors = [x * 1e3 for x in qkv()]
    right = grouped_query_attention(*tensors[:3])
    assert torch.allclose(context.partial_attention(*tensors[:3], True)[0], right)
    for rank, (out, *_) in enumerate(on_ranks(4, "zigzag", True, tensors)):
        assert torch.allclose(out, right[:, :, context.positions_of(rank, 4, S // 4, True)], rtol=1e-12)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8, 16])
def test_zigzag_balances_the_work_of_every_step(p):
    assert context.utilization(p, zigzag=False) == pytest.approx(p / (2 * p - 1))
    assert context.utilization(p, zigzag=True) == 1
    held = [c for rank in range(p) for c in context.chunks_of(rank, p, zigzag=True)]
    assert sorted(held) == list(range(2 * p))
    for zigzag in (False, True):
        total = sum(sum(context.work(rank, p, zigzag)) for rank in range(p))
        assert total == p * p / 2  # half of all pairs
    assert {tuple(context.work(rank, p, zigzag=True)) for rank in range(p)} == {(0.5,) * p}


@pytest.mark.parametrize("zigzag", [False, True])
def test_the_scheduled_work_is_the_work_that_is_done(zigzag):
    p = 4
    tensors = qkv()[:3]

    def rank(comm):
        holds = functools.partial(context.chunks_of, ranks=p, zigzag=zigzag)
        n, done = S // p // (1 + zigzag), []

        def attend(q, k, v, causal):
            done.append(q.shape[2] * k.shape[2] * (0.5 if causal else 1) / (S // p) ** 2)
            comm.compute(done[-1])  # a second for a block
            return context.partial_attention(q, k, v, causal)

        def read(c):
            return [x[:, :, c * n : (c + 1) * n] for x in tensors]

        context.attention_around_ring(comm, read, attend, True, holds)
        return sum(done)

    run = sim.run(p, rank, network=Ring(alpha=0.25, beta=0.0))
    assert list(run) == [sum(context.work(r, p, zigzag)) for r in range(p)]
    assert run.seconds == pytest.approx(
        2.0 if zigzag else 3.5
    )  # of hops none is to be seen: they are under way meanwhile


def test_the_notebooks_ring_is_full_attention_and_its_virtual_time_is_that_of_the_work():
    for contiguous, work, seconds in ((False, [6] * 3, 6), (True, [2, 6, 10], 10)):
        run = sim.run(3, attend_chunks, context.attention_around_ring, contiguous, 2, network=Ring(alpha=0.2, beta=0.0))
        assert max(part.off for part in run) < 1e-10 and [part.work for part in run] == work
        assert run.seconds == seconds and {part.nbytes for part in run} == {2 * 2 * (2 * 4 * 2 * 16) * 8}


@pytest.mark.parametrize("how", HOWS)
def test_each_rank_sends_the_bytes_of_the_docstring(how):
    p, tensors = 2, qkv()
    kv = B * KV * (S // p) * (D + DV) * 8
    ulysses = (p - 1) * B * (S // p) * (H * D + KV * (D + DV) + H * DV) * 8 // p
    forward, backward = (ulysses, ulysses) if how == "ulysses" else ((p - 1) * kv, 2 * (p - 1) * kv)

    def rank(comm):
        *mine, grad = (sequence_part(comm, x, 2, how == "zigzag") for x in tensors)
        mine = [x.requires_grad_(True) for x in mine]
        out = attend_of(comm, how, True)(*mine)
        sent = [sum(e.nbytes for e in comm.trace.events if e.op == "send")]
        out.backward(grad)
        return [*sent, sum(e.nbytes for e in comm.trace.events if e.op == "send") - sent[0]]

    assert list(sim.run(p, rank, threads=True)) == [[forward, backward]] * p


def test_the_bytes_of_a_ring_grow_with_its_hops_and_those_of_all_to_all_do_not():
    tensors = qkv(4, 4)
    for how, bytes_for in (
        ("zigzag", lambda p: 3 * (p - 1) * B * 4 * (S // p) * (D + DV) * 8),
        ("ulysses", lambda p: 2 * (p - 1) * B * (S // p) * 4 * (2 * D + 2 * DV) * 8 // p),
    ):
        run = on_ranks(4, how, True, tensors)
        assert bytes_sent(run.events) == dict.fromkeys(range(4), bytes_for(4))


@pytest.mark.parametrize(("p", "heads", "kv"), [(2, 4, 4), (3, 6, 6), (4, 4, 4), (2, 4, 2), (4, 8, 4), (4, 16, 4)])
def test_ulysses_sends_less_than_the_ring_only_on_more_ranks_than_queries_share_a_key_head_and_one(p, heads, kv):
    def forward(comm, how):
        tensors = (numbers(B, h, S // p, D) for h in (heads, kv, kv))
        attend_of(comm, how, True)(*tensors)

    ring, ulysses = (bytes_sent(sim.run(p, forward, how).events)[0] for how in ("ring", "ulysses"))
    assert ring / ulysses == pytest.approx(p / (heads // kv + 1))


def test_all_to_all_and_its_inverse_are_the_identity():
    x = numbers(B, 6, S, D)

    def rank(comm):
        mine = sequence_part(comm, x, 2)
        heads = context.to_heads(comm, mine)
        assert torch.equal(heads, x.tensor_split(comm.size, 1)[comm.rank])
        assert torch.equal(context.to_positions(comm, heads), mine)

    for p in (1, 2, 3):
        sim.run(p, rank)


GPT = {"vocabulary": 11, "block": S, "layers": 2, "heads": 4, "width": 16}
LLAMA = {"vocabulary": 11, "block": S, "layers": 2, "heads": 4, "kv_heads": 2, "width": 16, "hidden": 24}
DEEPSEEK = {"vocabulary": 11, "block": S, "layers": 2, "heads": 4, "width": 16}


def losses_of(comm, model, batches, how):
    """Of three steps: the batches of dp = comm.size/2 replicas, each on two ranks that share every sequence."""
    cp = comm.split(comm.rank // 2)
    dp = comm.size // 2
    model = context_parallel(cp, copy.deepcopy(model), how)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for tokens in batches:
        mine = tokens.chunk(dp)[comm.rank // 2]
        x, y = (sequence_part(cp, part, 1, how == "zigzag") for part in (mine[:, :-1], mine[:, 1:]))
        optimizer.zero_grad()
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        for p in model.parameters():
            comm.all_reduce(p.grad).div_(comm.size)  # the mean over dp x cp
        optimizer.step()
        losses.append(float(comm.all_reduce(loss.detach().clone())) / comm.size)
    return losses


@pytest.mark.parametrize(("name", "fields"), [("gpt", GPT), ("llama", LLAMA), ("deepseek", DEEPSEEK)])
@pytest.mark.parametrize(("ranks", "how"), [(2, "ring"), (2, "ulysses"), (4, "zigzag")])
def test_a_model_whose_sequences_are_shared_equals_one_rank(name, fields, ranks, how):
    model = models.build(name, dtype="float64", **fields)
    batches = [torch.randint(11, (4, S + 1), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    one, optimizer, right = copy.deepcopy(model), None, []
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
    for tokens in batches:
        optimizer.zero_grad()
        loss = cross_entropy(one(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        right.append(loss.item())
    for losses in sim.run(ranks, losses_of, model, batches, how, threads=True):
        assert losses == pytest.approx(right, abs=1e-10)


@pytest.mark.parametrize("p", [1, 2])
def test_backward_of_backward_is_refused(p):
    """Messages in backward are no part of a graph: a wrong gradient of a gradient would go unnoticed."""

    def penalty(comm):
        q, k, v = (sequence_part(comm, x, 2).requires_grad_() for x in qkv()[:3])
        for attend in (RingAttention(comm, zigzag=False), Ulysses(comm)):
            (grad,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                grad.sum().backward()

    sim.run(p, penalty, threads=True)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda c: sequence_part(c, numbers(2, 8)), ("8 positions", "3 ranks")),
        (lambda c: sequence_part(c, numbers(2, 9), zigzag=True), ("9 positions", "6 chunks", "3 ranks")),
        (lambda c: Ulysses(c)(*qkv()[:3]), ("heads", "3 ranks", "4")),
        (lambda c: Ulysses(c)(*qkv(6, 2)[:3]), ("heads of keys", "3 ranks", "2")),
        (lambda c: RingAttention(c)(*qkv(4, 3)[:3]), ("3 key heads", "4 query heads")),
        (lambda c: RingAttention(c)(*qkv()[:2], numbers(B, KV, 3, D)), ("(2, 4, 24, 3)", "(2, 2, 3, 3)")),
        (lambda c: RingAttention(c)(*(x[:, :, :5] for x in qkv()[:3])), ("zigzag", "5 positions")),
        (lambda c: context_parallel(c, models.build("gpt"), "striped"), ("'striped'", "'ulysses'")),
        (lambda c: context_parallel(c, models.build("vit")), ("ViT",)),
        (lambda c: context_parallel(c, models.build("mlp")), ("Sequential",)),
        (lambda c: context_parallel(c, models.build("gpt"))(torch.ones(1, 32).long()), ("64 tokens", "96")),
        (lambda c: context_parallel(c, models.build("llama"))(torch.ones(1, 32).long()), ("64 tokens", "96")),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_message(call, facts):
    def refused(comm):
        with raises(ValueError, *facts):
            call(comm)
        assert not comm.trace.events

    sim.run(3, refused)

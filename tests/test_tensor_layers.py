"""Layers on several ranks are those of torch, a table of tokens of any size included: results, gradients, bytes."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from hpdl_lab.comm import sim
from hpdl_lab.parallel.tensor.cuts import padded_shares
from hpdl_lab.parallel.tensor.linear import (
    column_linear,
    copy_to,
    gather_from,
    gather_sequence,
    linear_naive,
    reduce_from,
    row_linear,
    scatter_sequence,
    split_to,
)
from hpdl_lab.parallel.tensor.transformer import attention_heads, rows_of_heads
from hpdl_lab.parallel.tensor.vocabulary import VocabularyEmbedding, VocabularyLinear, vocabulary_cross_entropy
from hpdl_lab.parallel.tensor.ways import Plugged, on_a_ring
from hpdl_lab.trace import bytes_sent
from tests.wording import raises

EXACT = 1e-10
RANKS = [1, 2, 3, 4]
P = 12  # what 1, 2, 3 and 4 divide
VOCABULARIES = [1, 2, 5, 11, 12]  # smaller than the ranks, odd, and divided by them


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grads_of(y, weight, *leaves):
    """Gradients of sum(y * weight): every rank has the same y, and the loss depends on it once."""
    return torch.autograd.grad(y, leaves, weight)


def close(a, b):
    return a.shape == b.shape and (a - b).abs().max() < EXACT


# -- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", RANKS)
def test_scatter_sequence_is_the_transposed_of_gather_sequence(p):
    """<A x, y> = <x, A' y>, where the vectors are those of all ranks together."""

    def products(comm):
        x, y = numbers(2, P // p, 5, seed=comm.rank), numbers(2, P, 5, seed=10 + comm.rank)
        return (gather_sequence(comm, x) * y).sum(), (x * scatter_sequence(comm, y)).sum()

    left, right = zip(*sim.run(p, products), strict=True)
    assert abs(sum(left) - sum(right)) < EXACT


@pytest.mark.parametrize("p", RANKS)
def test_pairs_go_forward_and_back(p):
    def both_ways(comm):
        x, mine = numbers(3, P).requires_grad_(), numbers(3, P, seed=1 + comm.rank).requires_grad_()
        found = {}
        for name, pair, leaf in [
            ("copy_to", copy_to, x),
            ("reduce_from", reduce_from, mine),
            ("split_to", split_to, x),
            ("gather_from", gather_from, mine),
        ]:
            y = pair(comm, leaf)
            (grad,) = grads_of(y, numbers(*y.shape, seed=20 + comm.rank), leaf)
            found[name] = y.detach(), grad
        return found

    x, mine = numbers(3, P), [numbers(3, P, seed=1 + rank) for rank in range(p)]
    weights = {n: [numbers(3, n, seed=20 + rank) for rank in range(p)] for n in (P, P // p, P * p)}
    for rank, found in enumerate(sim.run(p, both_ways, threads=True)):
        assert torch.equal(found["copy_to"][0], x) and close(found["copy_to"][1], sum(weights[P]))
        assert close(found["reduce_from"][0], sum(mine)) and torch.equal(found["reduce_from"][1], weights[P][rank])
        assert torch.equal(found["split_to"][0], x.chunk(p, 1)[rank])
        assert torch.equal(found["split_to"][1], torch.cat(weights[P // p], 1))
        assert torch.equal(found["gather_from"][0], torch.cat(mine, 1))
        assert torch.equal(found["gather_from"][1], weights[P * p][rank].chunk(p, 1)[rank])


# -- linear layers ---------------------------------------------------------------------------------------------------


def collectives(fn, p, *args):
    """[(direction, collective, elements)] of rank 0, in order, and the bytes that each rank sends on rings."""

    def noted(comm, *args):
        told, direction, ring = [], ["forward"], on_a_ring(comm)

        def note(name):
            method = getattr(ring, name)
            return lambda _, x: (told.append((direction[0], name, x.numel())), method(x))[1]

        names = ("all_reduce", "all_gather", "reduce_scatter")
        y = fn(Plugged(comm, **{name: note(name) for name in names}), *args)
        direction[0] = "backward"
        y.sum().backward()
        return told

    run = sim.run(p, noted, *args, threads=True)
    assert all(told == run[0] for told in run)
    return run[0], bytes_sent(run.events)


def two_layers(comm, naive):
    """x (5, 12) -> 24 -> relu -> 12, cut by columns and then by rows; naively each by columns, and gathered."""
    p, r = comm.size, comm.rank
    x = numbers(5, P).requires_grad_()
    first, second = numbers(24, P, seed=1).chunk(p)[r], numbers(P, 24, seed=2)
    if naive:
        return linear_naive(comm, linear_naive(comm, x, first, None).relu(), second.chunk(p)[r], None)
    return row_linear(comm, column_linear(comm, x, first, None).relu(), second.chunk(p, 1)[r].contiguous(), None)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_column_and_a_row_cost_one_all_reduce_each_way(p):
    told, nbytes = collectives(two_layers, p, False)
    n = 5 * P
    assert told == [("forward", "all_reduce", n), ("backward", "all_reduce", n)]
    assert nbytes == {rank: 2 * 2 * (p - 1) * n * 8 // p for rank in range(p)}
    naive, naive_nbytes = collectives(two_layers, p, True)
    assert [name for _, name, _ in naive] == ["all_gather"] * 2 + ["all_reduce"] * 2
    assert naive_nbytes[0] > nbytes[0]


# -- vocabulary -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_embedding_and_logits_share_a_table(p, vocabulary):
    torch.manual_seed(vocabulary)
    table = nn.Embedding(vocabulary, 6, dtype=torch.float64)
    tokens = torch.arange(10).view(2, 5) % vocabulary
    x = table(tokens)
    true_logits = linear(x.tanh(), table.weight)
    g = numbers(2, 5, vocabulary)
    (true_grad,) = torch.autograd.grad(true_logits, table.weight, g)

    def shared(comm):
        mine = VocabularyEmbedding(comm, table)
        found = mine(tokens)
        logits = VocabularyLinear(comm, vocabulary)(found.tanh(), mine.weight)
        (grad,) = torch.autograd.grad(logits, mine.weight, g)
        return (
            found.detach(),
            logits.detach(),
            mine.cuts["weight"].join(comm.all_gather(grad)),
            grad,
            mine.cuts["weight"],
        )

    for rank, (found, logits, grad, mine, cut) in enumerate(sim.run(p, shared, threads=True)):
        assert close(found, x) and close(logits, true_logits) and close(grad, true_grad)
        padding = cut.places[rank] < 0
        assert mine[padding].abs().sum() == 0 and len(mine) == math.ceil(vocabulary / p)


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_vocabulary_cross_entropy(p, vocabulary, scale):
    """Also of logits whose exponentials would overflow."""
    whole = (scale * numbers(2, 5, vocabulary)).requires_grad_()
    targets = torch.arange(10).view(2, 5) % vocabulary
    true_loss = cross_entropy(whole.flatten(0, 1), targets.flatten())
    (true_grad,) = torch.autograd.grad(3 * true_loss, whole)

    def loss(comm):
        cut = padded_shares(comm, vocabulary, 2)
        mine = cut.part(whole).requires_grad_()
        value = vocabulary_cross_entropy(comm, mine, targets, vocabulary)
        (grad,) = torch.autograd.grad(3 * value, mine)
        return value.item(), cut.join(comm.all_gather(grad))

    results = sim.run(p, loss, threads=True)
    for value, grad in results:
        assert abs(value - true_loss.item()) < EXACT * scale and close(grad, true_grad)
        assert value == results[0][0]


def test_the_loss_sends_three_numbers_per_position_and_nothing_backward():
    def calls_of(comm):
        calls = []

        def noting(name):
            return lambda comm, x: (calls.append((name, x.numel())), getattr(comm, name)(x))[1]

        mine = padded_shares(comm, 9, 2).part(numbers(2, 5, 9)).requires_grad_()
        noted = Plugged(comm, **{name: noting(name) for name in ("all_reduce", "all_gather", "reduce_scatter")})
        vocabulary_cross_entropy(noted, mine, torch.zeros(2, 5, dtype=torch.int64), 9).backward()
        return calls

    assert sim.run(3, calls_of, threads=True) == [[("all_gather", 10), ("all_reduce", 20)]] * 3


# -- refused ---------------------------------------------------------------------------------------------------------


def table_of(comm, **options):
    return VocabularyEmbedding(comm, nn.Embedding(5, 4), **options)


NO_TOKENS = torch.zeros(2, dtype=torch.int64)
REFUSED = [
    (lambda c: column_linear(c, numbers(2, 7), numbers(4, 6), None), ("(2, 7)", "(4, 6)")),
    (lambda c: column_linear(c, numbers(2, 6), numbers(4, 6), numbers(3)), ("bias", "(3,)", "4 outputs")),
    (lambda c: row_linear(c, numbers(2, 6), numbers(6, 4), None), ("row_linear", "(2, 6)")),
    (lambda c: rows_of_heads(0, 3, 4, 24), ("4 heads", "24", "3 ranks")),
    (
        lambda c: attention_heads(c, numbers(1, 2, 8), numbers(8, 8), None, numbers(8, 4), None, 2, True),
        ("2 heads", "8 rows", "4 columns"),
    ),
    (lambda c: scatter_sequence(c, numbers(1, 7, 2)), ("7 positions", "3 ranks", "7")),
    (lambda c: split_to(c, numbers(2, 7)), ("(2, 7)", "3 ranks", "7")),
    (lambda c: table_of(c)(torch.tensor([[0, 5]])), ("0 to 5", "5", "0 to 4")),
    (lambda c: table_of(c)(torch.tensor([[-1, 2]])), ("-1 to 2",)),
    (lambda c: table_of(c, longest=4)(torch.zeros(1, 5, dtype=torch.int64)), ("4 tokens", "5")),
    (lambda c: table_of(c, sequence=True)(torch.zeros(1, 4, dtype=torch.int64)), ("3 ranks", "4")),
    (
        lambda c: vocabulary_cross_entropy(c, numbers(2, 3), NO_TOKENS, 10),
        ("(2, 3)", "10 tokens", "3 ranks", "(2, 4)"),
    ),
    (lambda c: vocabulary_cross_entropy(c, numbers(2, 4), torch.tensor([0, 10]), 10), ("0 to 10", "10")),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_does_not_fit_is_refused_on_every_rank_before_the_first_message(number):
    fn, facts = REFUSED[number]

    def refused(comm):
        with raises(ValueError, *facts):
            fn(comm)
        assert not comm.trace.events

    sim.run(3, refused)

"""The table of tokens, the logits and their loss on several ranks: of any size, padded where they do not divide it."""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from hpdl_lab.comm import sim
from hpdl_lab.parallel.tensor.cuts import padded_shares
from hpdl_lab.parallel.tensor.vocabulary import VocabularyEmbedding, VocabularyLinear, vocabulary_cross_entropy
from hpdl_lab.parallel.tensor.ways import Plugged

EXACT = 1e-10
RANKS = [1, 2, 3, 4]
VOCABULARIES = [1, 2, 5, 11, 12]  # smaller than the ranks, odd, and divided by them


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a, b):
    return a.shape == b.shape and (a - b).abs().max() < EXACT


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
        return found.detach(), logits.detach(), mine.cut.join(comm.all_gather(grad)), grad, mine.cut

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


def refused(comm, fn):
    with pytest.raises(ValueError) as caught:
        fn(comm)
    assert not comm.trace.events  # before the first message
    return str(caught.value)


def table_of(comm, **options):
    return VocabularyEmbedding(comm, nn.Embedding(5, 4), **options)


REFUSED = [
    (lambda c: table_of(c)(torch.tensor([[0, 5]])), "tokens go from 0 to 5, and a vocabulary of 5 from 0 to 4"),
    (lambda c: table_of(c)(torch.tensor([[-1, 2]])), "tokens go from -1 to 2"),
    (lambda c: table_of(c, longest=4)(torch.zeros(1, 5, dtype=torch.int64)), "reads 4 tokens at once, got 5"),
    (lambda c: table_of(c, sequence=True)(torch.zeros(1, 4, dtype=torch.int64)), "3 ranks do not divide 4"),
    (
        lambda c: vocabulary_cross_entropy(c, numbers(2, 3), torch.zeros(2, dtype=torch.int64), 10),
        r"logits of shape \(2, 3\) .* for 10 tokens on 3 ranks logits are \(2, 4\)",
    ),
    (
        lambda c: vocabulary_cross_entropy(c, numbers(2, 4), torch.tensor([0, 10]), 10),
        "tokens go from 0 to 10, and a vocabulary of 10",
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_does_not_fit_is_refused_on_every_rank(number):
    fn, message = REFUSED[number]
    for told in sim.run(3, lambda comm: refused(comm, fn)):
        assert re.search(message, told), told

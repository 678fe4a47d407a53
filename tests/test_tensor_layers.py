"""Layers on several ranks are the layers of torch: results, gradients, bytes, and what is refused."""

import re

import pytest
import torch
from torch.nn.functional import linear

from hpdl_lab.comm import PerRank, sim
from hpdl_lab.models.transformer import Attention
from hpdl_lab.parallel.tensor.linear import (
    all_gather_sequence,
    column_linear,
    copy_to,
    gather_from,
    gather_sequence,
    linear_naive,
    part,
    reduce_from,
    reduce_scatter_sequence,
    row_linear,
    scatter_sequence,
    sequence_parallel,
    split_to,
)
from hpdl_lab.parallel.tensor.transformer import attention_heads, rows_of_heads
from hpdl_lab.parallel.tensor.ways import Plugged, on_a_ring
from hpdl_lab.trace import bytes_sent

EXACT = 1e-10
RANKS = [1, 2, 3, 4]
P = 12  # what 1, 2, 3 and 4 divide


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


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("biased", [True, False])
def test_column_and_row_linear(p, biased):
    x, weight, bias, g = numbers(2, 3, P), numbers(24, P, seed=1), numbers(24, seed=2), numbers(2, 3, 24, seed=3)
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    true_y = linear(whole[0], whole[1], whole[2] if biased else None)
    true_grads = grads_of(true_y, g, *whole[: 2 + biased])

    def columns(comm, naive):
        mine = [x.clone(), weight.chunk(p)[comm.rank].clone(), bias.chunk(p)[comm.rank].clone()]
        leaves = [t.requires_grad_() for t in mine]
        y = (linear_naive if naive else column_linear)(comm, leaves[0], leaves[1], leaves[2] if biased else None)
        return y.detach(), grads_of(y, g if naive else g.chunk(p, -1)[comm.rank], *leaves[: 2 + biased])

    def rows(comm):
        mine = [x.chunk(p, -1)[comm.rank].clone(), weight.chunk(p, 1)[comm.rank].clone(), bias.clone()]
        leaves = [t.requires_grad_() for t in mine]
        y = row_linear(comm, leaves[0], leaves[1], leaves[2] if biased else None)
        return y.detach(), grads_of(y, g, *leaves[: 2 + biased])

    for naive in (False, True):
        for rank, (y, grads) in enumerate(sim.run(p, columns, naive, threads=True)):
            assert close(y, true_y if naive else true_y.chunk(p, -1)[rank])
            assert close(grads[0], true_grads[0])
            assert all(close(a, b.chunk(p)[rank]) for a, b in zip(grads[1:], true_grads[1:], strict=True))
    results = sim.run(p, rows, threads=True)
    for rank, (y, grads) in enumerate(results):
        assert close(y, true_y) and torch.equal(y, results[0][0])
        assert close(grads[0], true_grads[0].chunk(p, -1)[rank])
        assert close(grads[1], true_grads[1].chunk(p, 1)[rank])
        assert not biased or close(grads[2], true_grads[2])  # once, not p times


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


# -- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_heads(p, causal):
    torch.manual_seed(3)
    whole, x, g = Attention(24, 12, causal).double(), numbers(2, 5, 24), numbers(2, 5, 24, seed=1)
    leaf = x.clone().requires_grad_()
    true_y = whole(leaf)
    names = ("qkv.weight", "qkv.bias", "out.weight", "out.bias")
    params = dict(whole.named_parameters())
    true_x, *true_grads = grads_of(true_y, g, leaf, *(params[name] for name in names))

    def heads(comm):
        rows, columns = rows_of_heads(comm.rank, p, 12, 24), torch.arange(24).chunk(p)[comm.rank]
        mine = [x, params[names[0]][rows], params[names[1]][rows], params[names[2]][:, columns], params[names[3]]]
        leaves = [t.detach().clone().requires_grad_() for t in mine]
        y = attention_heads(comm, *leaves, heads=12 // p, causal=causal)
        return y.detach(), grads_of(y, g, *leaves), rows, columns

    for y, (x_grad, qkv, qkv_bias, out, out_bias), rows, columns in sim.run(p, heads, threads=True):
        assert close(y, true_y) and close(x_grad, true_x)
        assert close(qkv, true_grads[0][rows]) and close(qkv_bias, true_grads[1][rows])
        assert close(out, true_grads[2][:, columns]) and close(out_bias, true_grads[3])


# -- sequence --------------------------------------------------------------------------------------------------------


def by_positions(comm, x, separate):
    """A column and a row linear of 12 positions, of which this rank has its share, x (2, 12/p, 6)."""
    first, second = (
        part(comm, weight, dim) for weight, dim in ((numbers(24, 6, seed=1), 0), (numbers(6, 24, seed=2), 1))
    )

    def layer(whole):
        return linear(linear(whole, first).tanh(), second)

    if separate:
        return reduce_scatter_sequence(comm, layer(all_gather_sequence(comm, x)))
    return sequence_parallel(comm, x, layer)


def positions_of(comm):
    return part(comm, numbers(2, P, 6), 1).requires_grad_()


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("separate", [True, False])
def test_sequence_parallel(p, separate):
    x, g = numbers(2, P, 6).requires_grad_(), numbers(2, P, 6, seed=3)
    true_y = linear(linear(x, numbers(24, 6, seed=1)).tanh(), numbers(6, 24, seed=2))
    (true_grad,) = grads_of(true_y, g, x)

    def grads(comm):
        mine = positions_of(comm)
        y = by_positions(comm, mine, separate)
        return y.detach(), *grads_of(y, part(comm, g, 1), mine)

    for rank, (y, grad) in enumerate(sim.run(p, grads, threads=True)):
        assert close(y, true_y.chunk(p, 1)[rank]) and close(grad, true_grad.chunk(p, 1)[rank])


@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("separate", [True, False])
def test_sequence_parallel_sends_the_bytes_of_one_all_reduce_each_way(p, separate):
    told, nbytes = collectives(lambda comm: by_positions(comm, positions_of(comm), separate), p)
    n = 2 * P * 6
    assert told == [
        ("forward", "all_gather", n // p),
        ("forward", "reduce_scatter", n),
        ("backward", "all_gather", n // p),
        ("backward", "reduce_scatter", n),
    ]
    assert nbytes == {rank: 2 * 2 * (p - 1) * n * 8 // p for rank in range(p)}


# -- refused ---------------------------------------------------------------------------------------------------------


def refused(comm, fn):
    with pytest.raises(ValueError) as caught:
        fn(comm)
    assert not comm.trace.events  # before the first message
    return str(caught.value)


REFUSED = [
    (lambda c: column_linear(c, numbers(2, 7), numbers(4, 6), None), r"x of shape \(2, 7\) .* \(4, 6\) do not fit"),
    (lambda c: column_linear(c, numbers(2, 6), numbers(4, 6), numbers(3)), r"bias has shape \(3,\), .* 4 outputs"),
    (lambda c: row_linear(c, numbers(2, 6), numbers(6, 4), None), r"row_linear: x of shape \(2, 6\)"),
    (lambda c: row_linear(c, numbers(2, 6), numbers(6), None), r"weight of shape \(6,\) do not fit"),
    (lambda c: rows_of_heads(0, 3, 4, 24), "4 heads of a width of 24 cannot be shared equally by 3 ranks"),
    (lambda c: rows_of_heads(0, 8, 4, 24), "4 heads of a width of 24 cannot be shared equally by 8 ranks"),
    (lambda c: rows_of_heads(0, 2, 4, 26), "4 heads of a width of 26"),
    (lambda c: rows_of_heads(0, 2, 0, 24), "0 heads of a width of 24"),
    (
        lambda c: attention_heads(c, numbers(1, 2, 8), numbers(8, 8), None, numbers(8, 4), None, 2, True),
        "2 heads on this rank do not fit its qkv weight of 8 rows and an out of 4 columns",
    ),
    (
        lambda c: attention_heads(c, numbers(1, 2, 8), numbers(12, 8), None, numbers(8, 8), None, 2, True),
        "12 rows and an out of 8 columns",
    ),
    (lambda c: scatter_sequence(c, numbers(1, 7, 2)), "7 positions .*: 3 ranks do not divide 7"),
    (lambda c: split_to(c, numbers(2, 7)), r"shape \(2, 7\): 3 ranks do not divide 7"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_does_not_fit_is_refused_on_every_rank(number):
    fn, message = REFUSED[number]
    for told in sim.run(3, lambda comm: refused(comm, fn)):
        assert re.search(message, told), told


def test_ranks_with_different_batches_end_with_the_numbers():
    xs = PerRank([numbers(4, 6), numbers(5, 6), numbers(4, 6)])
    with pytest.raises(ValueError, match="counts differ: rank 1 sends 30 elements, rank 0 expects 24"):
        sim.run(3, lambda comm, x: row_linear(comm, x, numbers(6, 6), None), xs)

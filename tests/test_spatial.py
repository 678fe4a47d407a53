"""Convolutions of images that are cut by rows: the convolution of one rank, the bytes of halos, and what is refused."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.functional import conv2d

from hpdl_lab.comm import PerRank, sim
from hpdl_lab.parallel.tensor.spatial import convolve, edges_of, halo_exchange, halo_return, plan_of
from hpdl_lab.trace import bytes_sent

EXACT = 1e-10
B, C, W = 2, 3, 5
FEW = settings(max_examples=25, deadline=None, derandomize=True)
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4)  # (above, below) of each rank


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(x, edges, rank):
    return x[:, :, edges[rank] : edges[rank + 1]].clone()


@given(height=st.integers(1, 50), ranks=st.integers(1, 50))
def test_edges_are_equal_shares(height, ranks):
    assume(ranks <= height)
    edges = edges_of(height, ranks)
    heights = [end - first for first, end in itertools.pairwise(edges)]
    assert edges[0] == 0 and edges[-1] == height and max(heights) - min(heights) <= 1 and min(heights) >= 1


@FEW
@given(rows=ROWS)
def test_halo_exchange_takes_the_rows_around_and_halo_return_is_its_transposed(rows):
    """<A x, y> = <x, A' y>, where the vectors are those of all ranks together."""
    p, image = len(rows), numbers(B, C, 13, W)
    edges = edges_of(13, p)
    padded = torch.cat([torch.zeros(B, C, 3, W), image, torch.zeros(B, C, 3, W)], 2).double()

    def exchange(comm):
        x = rows_of(image, edges, comm.rank)
        halo = halo_exchange(comm, x, rows)
        assert torch.equal(x, rows_of(image, edges, comm.rank))
        return halo

    def products(comm):
        x, halo = rows_of(image, edges, comm.rank), exchange(comm)
        y = numbers(*halo.shape, seed=1 + comm.rank)
        back = halo_return(comm, y, rows)
        assert back.shape == x.shape
        return (halo * y).sum(), (x * back).sum()

    run = sim.run(p, exchange)
    for rank, y in enumerate(run):
        above, below = rows[rank]
        assert torch.equal(y, padded[:, :, 3 + edges[rank] - above : 3 + edges[rank + 1] + below])
    sent = {r: (rows[r - 1][1] if r else 0) + (rows[r + 1][0] if r < p - 1 else 0) for r in range(p)}
    assert bytes_sent(run.events) == {r: n * B * C * W * 8 for r, n in sent.items() if n}
    left, right = zip(*sim.run(p, products), strict=True)
    assert abs(sum(left) - sum(right)) < EXACT


def my_rows(comm, image, weight, bias, stride, padding):
    """y, edges, and gradients of x and of this rank's part of those of weight and bias."""
    edges = edges_of(image.shape[2], comm.size)
    leaves = [t.clone().requires_grad_() for t in (rows_of(image, edges, comm.rank), weight, bias)]
    y, out = convolve(comm, leaves[0], edges, *leaves[1:], stride, padding)
    g = rows_of(numbers(B, len(weight), out[-1], y.shape[3], seed=9), out, comm.rank)
    return y.detach(), out, torch.autograd.grad(y, leaves, g)


@FEW
@given(
    p=st.integers(1, 4),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    padding=st.integers(0, 4),
    height=st.sampled_from([12, 13, 17]),
)
def test_a_convolution_of_rows_is_the_convolution(p, kernel, stride, padding, height):
    edges = edges_of(height, p)
    try:
        plan = plan_of(edges, kernel, stride, min(padding, kernel - 1))
    except ValueError:
        assume(False)
    leaves = [numbers(B, C, height, W + 4), numbers(4, C, kernel, kernel, seed=1), numbers(4, seed=2)]
    how = stride, min(padding, kernel - 1)
    run = sim.run(p, my_rows, *leaves, *how, threads=True)
    y = conv2d(*(leaf.requires_grad_() for leaf in leaves), *how)
    x_grad, weight_grad, bias_grad = torch.autograd.grad(y, leaves, numbers(*y.shape, seed=9))
    for rank, (mine, out, (mine_x, *_)) in enumerate(run):
        assert out == plan.edges
        assert (mine - rows_of(y, out, rank)).abs().max() < EXACT
        assert (mine_x - rows_of(x_grad, edges, rank)).abs().max() < EXACT
    assert (sum(grads[1] for _, _, grads in run) - weight_grad).abs().max() < EXACT
    assert (sum(grads[2] for _, _, grads in run) - bias_grad).abs().max() < EXACT


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_a_halo_is_half_a_kernel(kernel):
    """With stride 1 and the image's size kept: floor(k/2) rows from and to each neighbor, forward and backward."""
    half, p = kernel // 2, 3
    image, weight, bias = numbers(B, C, 12, W), numbers(4, C, kernel, kernel), numbers(4)
    assert plan_of(edges_of(12, p), kernel, 1, half).rows == [(half, half)] * p

    def both_ways(comm):
        edges = edges_of(12, comm.size)
        x = rows_of(image, edges, comm.rank).requires_grad_()
        convolve(comm, x, edges, weight, bias, 1, half)[0].sum().backward()

    row = B * C * W * 8
    sent = {r: 2 * half * row * ((r > 0) + (r < p - 1)) for r in range(p)}
    assert bytes_sent(sim.run(p, both_ways, threads=True).events) == {r: n for r, n in sent.items() if n}


def test_stride_2_needs_no_more_rows_than_its_kernels_overlap():
    """A 3 x 3 kernel that begins at every other row, of shares of even height: only the row above."""
    assert plan_of(edges_of(16, 4), 3, 2, 1) == ((0, 2, 4, 6, 8), [(1, 0)] * 4, [0] * 4)


def conv(comm, height, kernel, stride=1, padding=0, edges=None, x=None):
    edges = edges_of(height, comm.size) if edges is None else edges
    x = rows_of(numbers(B, C, height, 9), edges, comm.rank) if x is None else x
    return convolve(comm, x, edges, numbers(4, C, kernel, kernel), None, stride, padding)


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda c: edges_of(2, c.size), ("2 rows", "3 ranks")),
        (lambda c: conv(c, 6, 7, padding=3), ("rank 1", "3 rows from rank 0", "has 2")),
        (lambda c: conv(c, 3, 3, stride=2, padding=1), ("makes 2", "rank 1")),
        (lambda c: conv(c, 6, 3, x=numbers(B, C, 6, 9)), ("(2, 3, 6, 9)", "(b, c, 2, w)")),
        (lambda c: halo_exchange(c, numbers(B, C, 4, W), [(1, 1)] * 2), ("(above, below)", "3 ranks")),
        (lambda c: halo_exchange(c, numbers(B, C, 4, W), [1, 1, 1]), ("(above, below)", "[1, 1, 1]")),
        (lambda c: conv(c, 6, 3, stride=0), ("stride 0",)),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank_before_the_first_message(call, facts):
    def refused(comm):
        with pytest.raises(ValueError) as caught:
            call(comm)
        assert not comm.trace.events
        return str(caught.value)

    for text in sim.run(3, refused):
        assert all(fact in text for fact in facts), text


def test_a_strip_that_is_lower_than_the_halo_is_refused():
    strips = PerRank([numbers(B, C, 3, W), numbers(B, C, 1, W), numbers(B, C, 3, W)])
    with pytest.raises(ValueError, match="halo of 2 rows from rank 1, which has 1"):
        sim.run(3, lambda comm, x: halo_exchange(comm, x, [(2, 2)] * 3), strips)

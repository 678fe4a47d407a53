"""Convolutions of images that are cut by rows: the convolution of one rank, the bytes of halos, and what is refused."""

import itertools
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

from hpdl_lab.comm import PerRank, sim
from hpdl_lab.parallel.tensor.cuts import add_partial_gradients
from hpdl_lab.parallel.tensor.spatial import (
    SpatialConvolution,
    convolve,
    convolve_naive,
    edges_of,
    halo_exchange,
    halo_return,
    plan_of,
)
from hpdl_lab.trace import bytes_sent

EXACT = 1e-10
B, C, W = 2, 3, 5


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows_of(x, edges, rank):
    return x[:, :, edges[rank] : edges[rank + 1]].clone()


@pytest.mark.parametrize("height", [1, 2, 7, 8, 13])
def test_edges_are_equal_shares(height):
    for ranks in range(1, height + 1):
        edges = edges_of(height, ranks)
        heights = [end - first for first, end in itertools.pairwise(edges)]
        assert edges[0] == 0 and edges[-1] == height and max(heights) - min(heights) <= 1 and min(heights) >= 1


ROWS = [  # (above, below) of each rank
    [(0, 0)],
    [(2, 1)],
    [(1, 1), (1, 1)],
    [(0, 2), (3, 0)],
    [(1, 1), (1, 1), (1, 1)],
    [(1, 2), (0, 1), (2, 0)],
    [(0, 0), (0, 0), (0, 0), (0, 0)],
    [(2, 2), (2, 2), (2, 2), (2, 2)],
]


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_halo_exchange_takes_the_rows_around(rows):
    p, image = len(rows), numbers(B, C, 13, W)
    edges = edges_of(13, p)
    padded = torch.cat([torch.zeros(B, C, 3, W), image, torch.zeros(B, C, 3, W)], 2).double()

    def exchange(comm):
        x = rows_of(image, edges, comm.rank)
        before = x.clone()
        y = halo_exchange(comm, x, rows)
        assert torch.equal(x, before)
        return y

    run = sim.run(p, exchange)
    for rank, y in enumerate(run):
        above, below = rows[rank]
        assert torch.equal(y, padded[:, :, 3 + edges[rank] - above : 3 + edges[rank + 1] + below])
    sent = {r: (rows[r - 1][1] if r else 0) + (rows[r + 1][0] if r < p - 1 else 0) for r in range(p)}
    assert bytes_sent(run.events) == {r: n * B * C * W * 8 for r, n in sent.items() if n}


@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_halo_return_is_the_transposed_of_halo_exchange(rows):
    """<A x, y> = <x, A' y>, where the vectors are those of all ranks together."""
    p = len(rows)
    edges = edges_of(13, p)

    def products(comm):
        x = rows_of(numbers(B, C, 13, W), edges, comm.rank)
        halo = halo_exchange(comm, x, rows)
        y = numbers(*halo.shape, seed=1 + comm.rank)
        back = halo_return(comm, y, rows)
        assert back.shape == x.shape and torch.equal(y, numbers(*halo.shape, seed=1 + comm.rank))
        return (halo * y).sum(), (x * back).sum()

    left, right = zip(*sim.run(p, products), strict=True)
    assert abs(sum(left) - sum(right)) < EXACT


def one_rank(image, weight, bias, stride, padding):
    leaves = [t.clone().requires_grad_() for t in (image, weight, bias)]
    y = conv2d(*leaves, stride, padding)
    return y.detach(), torch.autograd.grad(y, leaves, numbers(*y.shape, seed=9))


def my_rows(comm, image, weight, bias, stride, padding):
    """y, edges, and gradients of x and of this rank's part of those of weight and bias; y of convolve_naive."""
    edges = edges_of(image.shape[2], comm.size)
    leaves = [t.clone().requires_grad_() for t in (rows_of(image, edges, comm.rank), weight, bias)]
    y, out = convolve(comm, leaves[0], edges, *leaves[1:], stride, padding)
    g = rows_of(numbers(B, len(weight), out[-1], y.shape[3], seed=9), out, comm.rank)
    naive, naive_out = convolve_naive(comm, rows_of(image, edges, comm.rank), edges, weight, bias, stride, padding)
    assert naive_out == out
    return y.detach(), out, torch.autograd.grad(y, leaves, g), naive


@pytest.mark.parametrize("p", [1, 3, 4])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_convolution_of_rows_is_the_convolution(p, kernel, stride):
    """Any padding that is smaller than the kernel; heights that ranks and stride divide and others."""
    possible = 0
    for height, padding in itertools.product((12, 13, 17), range(kernel)):
        image, weight, bias = numbers(B, C, height, W + 4), numbers(4, C, kernel, kernel, seed=1), numbers(4, seed=2)
        y, (x_grad, weight_grad, bias_grad) = one_rank(image, weight, bias, stride, padding)
        try:
            plan = plan_of(edges_of(height, p), kernel, stride, padding)
        except ValueError:
            continue
        possible += 1
        run = sim.run(p, my_rows, image, weight, bias, stride, padding, threads=True)
        for rank, (mine, out, (mine_x, *_), naive) in enumerate(run):
            assert out == plan.edges
            for found in (mine, naive):
                assert (found - rows_of(y, out, rank)).abs().max() < EXACT
            assert (mine_x - rows_of(x_grad, edges_of(height, p), rank)).abs().max() < EXACT
        assert (sum(grads[1] for _, _, grads, _ in run) - weight_grad).abs().max() < EXACT
        assert (sum(grads[2] for _, _, grads, _ in run) - bias_grad).abs().max() < EXACT
    assert possible >= 3


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_a_halo_is_half_a_kernel(kernel, p):
    """With stride 1 and the image's size kept: floor(k/2) rows from and to each neighbor, forward and backward."""
    half = kernel // 2
    image, weight, bias = numbers(B, C, 12, W), numbers(4, C, kernel, kernel), numbers(4)
    assert plan_of(edges_of(12, p), kernel, 1, half).rows == [(half, half)] * p

    def both_ways(comm):
        edges = edges_of(12, comm.size)
        x = rows_of(image, edges, comm.rank).requires_grad_()
        convolve(comm, x, edges, weight, bias, 1, half)[0].sum().backward()

    row = B * C * W * 8
    sent = {r: 2 * half * row * ((r > 0) + (r < p - 1)) for r in range(p)}
    events = sim.run(p, both_ways, threads=True).events
    assert bytes_sent(events) == {r: n for r, n in sent.items() if n}
    assert all(e.nbytes == half * row for e in events if e.op in ("send", "recv"))


def test_stride_2_needs_no_more_rows_than_its_kernels_overlap():
    """A 3 x 3 kernel that begins at every other row, of shares of even height: only the row above."""
    assert plan_of(edges_of(16, 4), 3, 2, 1) == ((0, 2, 4, 6, 8), [(1, 0)] * 4, [0] * 4)


def test_a_layer_leaves_a_part_of_its_gradient_on_each_rank():
    torch.manual_seed(1)
    whole, image = nn.Conv2d(C, 4, 3, padding=1).double(), numbers(B, C, 7, W)
    whole(image).square().sum().backward()

    def layer(comm):
        mine = SpatialConvolution(comm, whole)
        edges = edges_of(7, comm.size)
        mine(rows_of(image, edges, comm.rank), edges)[0].square().sum().backward()
        add_partial_gradients(comm, mine)
        return mine.weight.grad, mine.bias.grad

    for weight, bias in sim.run(3, layer, threads=True):
        assert (weight - whole.weight.grad).abs().max() < EXACT and (bias - whole.bias.grad).abs().max() < EXACT


def refused(comm, fn):
    with pytest.raises(ValueError) as caught:
        fn(comm)
    assert not comm.trace.events  # before the first message
    return str(caught.value)


def conv(comm, height, kernel, stride=1, padding=0, edges=None, x=None):
    edges = edges_of(height, comm.size) if edges is None else edges
    x = rows_of(numbers(B, C, height, 9), edges, comm.rank) if x is None else x
    return convolve(comm, x, edges, numbers(4, C, kernel, kernel), None, stride, padding)


REFUSED = [
    (lambda c: edges_of(2, c.size), "an image of 2 rows cannot be shared by 3 ranks"),
    (lambda c: conv(c, 6, 7, padding=3), "rank 1 needs a halo of 3 rows from rank 0, which has 2: use fewer ranks"),
    (lambda c: conv(c, 5, 5, padding=2), "rank 1 needs a halo of 2 rows from rank 2, which has 1"),
    (lambda c: conv(c, 3, 3, stride=2, padding=1), "of 3 rows .kernel 3, stride 2, padding 1.: it makes 2, and rank 1"),
    (lambda c: conv(c, 6, 7), "of 6 rows .kernel 7, stride 1, padding 0.: it makes 0, and rank 0 would have none"),
    (lambda c: conv(c, 6, 3, x=numbers(B, C, 6, 9)), r"x of shape \(2, 3, 6, 9\) is not \(b, c, 2, w\), which rank"),
    (lambda c: conv(c, 6, 3, edges=(0, 3, 6), x=numbers(B, C, 3, 9)), r"edges of an image are \(0, 3, 6\)"),
    (lambda c: halo_exchange(c, numbers(B, C, 4, W), [(1, 1)] * 2), r"a pair \(above, below\) for each of the 3 ranks"),
    (lambda c: halo_exchange(c, numbers(B, C, 4, W), [(1, -1)] * 3), r"rows must be a pair"),
    (lambda c: halo_exchange(c, numbers(B, C, 4, W), 1), r"a pair \(above, below\) for each of the 3 ranks, got 1$"),
    (lambda c: halo_exchange(c, numbers(B, C, 4, W), [1, 1, 1]), r"each of the 3 ranks, got \[1, 1, 1\]$"),
    (lambda c: conv(c, 6, 3, stride=0), "a stride of 1 at least .*, got kernel 3, stride 0, padding 0$"),
    (lambda c: conv(c, 6, 3, padding=-1), "a padding of 0 at least, got kernel 3, stride 1, padding -1$"),
    (
        lambda c: SpatialConvolution(c, nn.Conv2d(4, 4, (3, 5))),
        r"square, without groups and dilation: Conv2d\(4, 4, kernel_size=\(3, 5\)",
    ),
    (lambda c: SpatialConvolution(c, nn.Conv2d(4, 4, 3, dilation=2)), "dilation"),
    (lambda c: SpatialConvolution(c, nn.Conv2d(4, 4, 3, groups=2)), "groups"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_does_not_fit_is_refused_on_every_rank(number):
    fn, message = REFUSED[number]
    for told in sim.run(3, lambda comm: refused(comm, fn)):
        assert re.search(message, told), told


def test_a_strip_that_is_lower_than_the_halo_is_refused():
    strips = PerRank([numbers(B, C, 3, W), numbers(B, C, 1, W), numbers(B, C, 3, W)])
    with pytest.raises(ValueError, match="rank 0 needs a halo of 2 rows from rank 1, which has 1: use fewer ranks"):
        sim.run(3, lambda comm, x: halo_exchange(comm, x, [(2, 2)] * 3), strips)

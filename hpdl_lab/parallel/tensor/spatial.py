"""A convolution of which every rank has some rows of the image: neighbors exchange the rows that kernels overlap.

    rank 0    rows 0 1 2 3 | 4            a 3 x 3 kernel at row 3 needs row 4, and one at row 4 needs row 3:
    rank 1           3 | 4 5 6 7          halo of floor(3/2) = 1 row

    bytes per rank and neighbor      b c floor(k/2) w itemsize: they do not grow with the rows, so long images scale
    backward                         the gradients of halo rows go home, and are added there

Kernels are whole on every rank, so their gradients are parts of a sum over ranks: tensor.cuts.add_partial_gradients.
Ref: Dryden et al. 2019 (LBANN), "Improving Strong-Scaling of CNN Training by Exploiting Finer-Grained Parallelism",
arXiv:1903.06681, section 3.

A residual block of convolutions on several ranks: the channels between its two convolutions are shared out.

    x (b, c, h, w) -> [conv1: my channels] -> norm of mine, relu -> [conv2: from my channels] -> all-reduce -> norm

One all-reduce of the block's output forward and one of its input backward. Both kernels are cut, so parameters and the
activations between them are 1/p; everything outside the blocks, the shortcut included, every rank does alike.
spatial.py cuts the image instead.
Ref: Dryden et al. 2019, "Channel and Filter Parallelism for Large-Scale CNN Training" (SC19).
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import conv2d

from ...models.batch_norm import BatchNorm
from .cuts import equal_shares
from .linear import conjugate, copy_to, reduce_from


class Plan(NamedTuple):
    """A convolution over rows that are shared out, known to every rank alike.

    edges: rank r has rows edges[r] to edges[r + 1] of the result; rows[r] = (above, below): the rows that rank r needs
    beside its own; skip[r]: the first of its own rows that its kernels do not need.
    """

    edges: tuple
    rows: list
    skip: list


def edges_of(height, ranks):
    """Where each rank's rows of an image begin, and the end: equal shares, the first ones a row longer.

    edges_of(8, 3) -> (0, 3, 6, 8).   Raises ValueError where there are more ranks than rows.
    """
    if height < ranks:
        raise ValueError(f"an image of {height} rows cannot be shared by {ranks} ranks: each needs a row at least")
    share, more = divmod(height, ranks)
    return tuple(rank * share + min(rank, more) for rank in range(ranks + 1))


def plan_of(edges, kernel, stride, padding):
    """The Plan of a convolution of rows that lie as `edges` say: row j of the result is where row j * stride is.

    Args:    edges: (p + 1) ints, as of edges_of; kernel, stride, padding: of the rows, ints.
    Raises:  ValueError, on every rank alike: a stride of 0 and the like, no row of the result for a rank, or a halo
             larger than a neighbor's rows.
    """
    if min(kernel, stride) < 1 or padding < 0:
        raise ValueError(
            "a convolution needs a kernel and a stride of 1 at least and a padding of 0 at least, "
            f"got kernel {kernel}, stride {stride}, padding {padding}"
        )
    height, ranks = edges[-1], len(edges) - 1
    total = (height + 2 * padding - kernel) // stride + 1
    out = (*(min(-(-edge // stride), total) for edge in edges[:-1]), total)
    rows, skip = [], []
    for rank, (first, end) in enumerate(zip(out, out[1:], strict=False)):
        if end <= first:
            raise ValueError(
                f"{ranks} ranks cannot share a convolution of {height} rows (kernel {kernel}, stride {stride}, padding "
                f"{padding}): it makes {max(total, 0)}, and rank {rank} would have none of them"
            )
        needed, needed_end = first * stride - padding, (end - 1) * stride - padding + kernel
        rows.append((max(0, edges[rank] - needed), max(0, needed_end - edges[rank + 1])))
        skip.append(max(0, needed - edges[rank]))
    for rank in range(ranks):
        require_high_enough(rows, rank, edges[rank + 1] - edges[rank])
    return Plan(out, rows, skip)


def halo_exchange(comm, x, rows):
    """`x` with the neighbors' rows around it that its kernels overlap.

        rank r - 1:  . . . a b                     rank r:  a b | c d e | f            rows[r] = (2, 1)
        rank r:            c d e
        rank r + 1:              f . . .

    A function of plain tensors; in a backward pass halo_return is its transposed.

    Args:    x: (b, c, h, w), this rank's rows of an image that is cut by rows, rank 0 on top; h may differ by rank.
             rows: [(above, below)] for each rank, the same on every rank: how many rows it needs from the rank above
             and from the rank below. Above rank 0 and below the last rank there is no image: zeros.
    Returns: (b, c, above + h + below, w), a new tensor.
    Raises:  ValueError where rows has not a pair per rank, or a neighbor needs more rows than this rank has.
    Steps: 1: all messages at once.   Bytes per rank: b c w itemsize for each row that a neighbor needs.
    Ref: Dryden et al. 2019, arXiv:1903.06681, section 3.1.
    """
    require_pairs(comm, rows)
    require_high_enough(rows, comm.rank, x.shape[2])
    ### BEGIN SOLUTION
    above, below = rows[comm.rank]
    b, c, h, w = x.shape
    works, top, bottom = [], x.new_zeros(b, c, above, w), x.new_zeros(b, c, below, w)
    if comm.rank > 0:
        works += receiving(comm, top, comm.rank - 1) + sending(comm, x[:, :, : rows[comm.rank - 1][1]], comm.rank - 1)
    if comm.rank < comm.size - 1:
        theirs = rows[comm.rank + 1][0]
        works += receiving(comm, bottom, comm.rank + 1) + sending(comm, x[:, :, h - theirs :], comm.rank + 1)
    for work in works:
        work.wait()
    return torch.cat([top, x, bottom], 2)

    ### END SOLUTION


def halo_return(comm, grad, rows):
    """The gradient of this rank's own rows, from that of its rows and halo: what belongs to a neighbor goes home.

        rank r - 1:  . . . a b | c     the gradient of its halo row c is sent to rank r, and added there to that of c
        rank r:        a b | c d e | f        those of a and b are sent to rank r - 1, that of f to rank r + 1

    Args:    grad: (b, c, above + h + below, w), as halo_exchange has returned; rows: as of halo_exchange.
    Returns: (b, c, h, w), a new tensor.
    Steps: 1.   Bytes per rank: b c w itemsize for each row of its halo that a neighbor has.
    """
    above, below = rows[comm.rank]
    b, c, high, w = grad.shape
    h = high - above - below
    mine, works, added = grad[:, :, above : above + h].clone(), [], []
    if comm.rank > 0:
        n = rows[comm.rank - 1][1]
        added.append((grad.new_empty(b, c, n, w), slice(0, n)))
        works += receiving(comm, added[-1][0], comm.rank - 1) + sending(comm, grad[:, :, :above], comm.rank - 1)
    if comm.rank < comm.size - 1:
        n = rows[comm.rank + 1][0]
        added.append((grad.new_empty(b, c, n, w), slice(h - n, h)))
        works += receiving(comm, added[-1][0], comm.rank + 1) + sending(comm, grad[:, :, above + h :], comm.rank + 1)
    for work in works:
        work.wait()
    for part, place in added:
        mine[:, :, place] += part
    return mine


def sending(comm, x, to):
    """[Work] that sends `x`, [] where it is empty: nobody waits for nothing."""
    return [comm.isend(x.contiguous(), to)] if x.numel() else []


def receiving(comm, x, source):
    return [comm.irecv(x, source)] if x.numel() else []


def convolve(comm, x, edges, weight, bias=None, stride=1, padding=0):
    """This rank's rows of a convolution of an image that is cut by rows.

    Args:    x: (b, c_in, h, w), rows edges[rank] to edges[rank + 1] of the image; edges: as of edges_of, the same on
             every rank; weight: (c_out, c_in, k, k), bias: (c_out,) or None, the same on every rank.
    Returns: (b, c_out, h_out, w_out), and the edges of the result.
    Raises:  ValueError before the first message, on every rank where the plan is impossible.
    Steps: 1 forward, 1 backward.   Bytes per rank: of halo_exchange, then of halo_return.
    """
    mine = edges[comm.rank + 1] - edges[comm.rank] if len(edges) == comm.size + 1 else "?"
    if x.ndim != 4 or x.shape[2] != mine:
        raise ValueError(
            f"x of shape {tuple(x.shape)} is not (b, c, {mine}, w), which rank {comm.rank} of {comm.size} has where "
            f"the edges of an image are {edges}"
        )
    plan = plan_of(edges, weight.shape[2], stride, padding)
    around = partial(halo_exchange, comm, rows=plan.rows), partial(halo_return, comm, rows=plan.rows)
    x = conjugate(x, *around)[:, :, plan.skip[comm.rank] :]
    return conv2d(x, weight, bias, stride, (0, padding)), plan.edges


def require_pairs(comm, rows):
    """Raise ValueError unless `rows` has a pair of numbers for each rank."""
    lists = isinstance(rows, tuple | list) and all(isinstance(pair, tuple | list) for pair in rows)
    if not lists or len(rows) != comm.size or any(len(pair) != 2 or min(pair) < 0 for pair in rows):
        raise ValueError(f"rows must be a pair (above, below) for each of the {comm.size} ranks, got {rows}")


def require_high_enough(rows, rank, height):
    """Raise ValueError where a neighbor of `rank`, which has `height` rows, needs more of them."""
    neighbors = [(rank - 1, rows[rank - 1][1])] if rank > 0 else []
    neighbors += [(rank + 1, rows[rank + 1][0])] if rank < len(rows) - 1 else []
    for neighbor, needed in neighbors:
        if needed > height:
            raise ValueError(
                f"rank {neighbor} needs a halo of {needed} rows from rank {rank}, which has {height}: use fewer ranks"
            )


def shard_convolutions(comm, block):
    """Replace the layers of a models.cnn.Block by this rank's parts of them, in place; returns it.

    Raises:  ValueError where the ranks do not divide the channels, or the groups of its group norm.
    """
    block.conv1, block.conv2 = ColumnConvolution(comm, block.conv1), RowConvolution(comm, block.conv2)
    block.norm1 = (
        CutBatchNorm(comm, block.norm1) if isinstance(block.norm1, BatchNorm) else CutGroupNorm(comm, block.norm1)
    )
    return block


class CutConvolution(nn.Conv2d):
    """This rank's part of the kernel of a convolution without bias, cut along `dim`: 0 its outputs, 1 its inputs."""

    dim: int

    def __init__(self, comm, whole):
        channels = [whole.out_channels, whole.in_channels]
        self.cut = equal_shares(comm, channels[self.dim], self.dim, "the channels of a convolution")
        channels[self.dim] //= comm.size
        out, inside = channels
        super().__init__(inside, out, whole.kernel_size, whole.stride, whole.padding, bias=False)
        self.comm = comm
        self.weight = self.cut.parameter_of(whole.weight)

    def cuts(self):
        return {"weight": self.cut}


class ColumnConvolution(CutConvolution):
    """This rank's output channels: (b, c, h, w) -> (b, c_out/p, ...)."""

    dim = 0

    def forward(self, x):
        return super().forward(copy_to(self.comm, x))


class RowConvolution(CutConvolution):
    """What this rank's input channels give, added over ranks: (b, c/p, h, w) -> (b, c_out, ...)."""

    dim = 1

    def forward(self, x):
        return reduce_from(self.comm, super().forward(x))


class CutGroupNorm(nn.GroupNorm):
    """A group norm of this rank's channels, which are whole groups."""

    def __init__(self, comm, whole):
        equal_shares(comm, whole.num_groups, 0, "the groups of a group norm")
        self.cut = equal_shares(comm, whole.num_channels, 0, "the channels of a group norm")
        super().__init__(whole.num_groups // comm.size, whole.num_channels // comm.size, whole.eps)
        self.weight, self.bias = self.cut.parameter_of(whole.weight), self.cut.parameter_of(whole.bias)

    def cuts(self):
        return {"weight": self.cut, "bias": self.cut}


class CutBatchNorm(BatchNorm):
    """A batch norm of this rank's channels."""

    def __init__(self, comm, whole):
        self.cut = equal_shares(comm, len(whole.weight), 0, "the channels of a batch norm")
        super().__init__(len(whole.weight) // comm.size)
        for name in ("weight", "bias"):
            setattr(self, name, self.cut.parameter_of(getattr(whole, name)))
        self.running_mean, self.running_var = self.cut.part(whole.running_mean), self.cut.part(whole.running_var)

    def cuts(self):
        return dict.fromkeys(("weight", "bias", "running_mean", "running_var"), self.cut)

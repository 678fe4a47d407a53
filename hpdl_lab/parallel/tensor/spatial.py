"""Convolutions on several ranks: images cut by rows, whose neighbors exchange what kernels overlap; or channels shared.

    rank 0    rows 0 1 2 3 | 4            a 3 x 3 kernel at row 3 needs row 4, and one at row 4 needs row 3:
    rank 1           3 | 4 5 6 7          halo of floor(3/2) = 1 row; b c floor(k/2) w itemsize bytes per neighbor

A residual block whose channels between its two convolutions are shared out has one all-reduce each way:

    x (b, c, h, w) -> [conv1: my channels] -> norm of mine, relu -> [conv2: from my channels] -> all-reduce -> norm

Ref: Dryden et al. 2019 (LBANN), arXiv:1903.06681, section 3; "Channel and Filter Parallelism" (SC19).
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ...comm.base import Comm, Work
from ...models.batch_norm import BatchNorm
from ...models.cnn import Block
from .cuts import equal_shares
from .linear import copy_to, reduce_from


def edges_of(height: int, ranks: int) -> tuple[int, ...]:
    """Return where each rank's rows of an image begin, and the end: equal shares, the first ones a row longer.

    edges_of(8, 3) -> (0, 3, 6, 8).   Raises ValueError if there are more ranks than rows.
    """
    if height < ranks:
        raise ValueError(f"an image of {height} rows cannot be shared by {ranks} ranks: each needs a row at least")
    share, more = divmod(height, ranks)
    return tuple(rank * share + min(rank, more) for rank in range(ranks + 1))


def halo_exchange(comm: Comm, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """Surround this rank's rows `x` with the neighbors' rows that a convolution needs.

        rank r - 1:  . . . a b
        rank r:            c d e           rows[r] = (2, 1)   ->   a b | c d e | f
        rank r + 1:              f . . .

    Args:    x: (b, c, h, w), this rank's rows of an image that is cut by rows, rank 0
             on top. h may differ by rank. Autograd does not go through this function.
             rows: [(above, below)] for each rank, the same list on every rank. A rank
             needs `above` rows from the rank above it, and `below` from the rank below.
             Above rank 0 and below the last rank there is no image: take zeros.
    Returns: (b, c, above + h + below, w), a new tensor.
    Raises:  ValueError if rows does not have a pair for each rank, or if a neighbor
             needs more rows than this rank has.
    Steps: 1: all messages at once.
    Bytes per rank: b c w itemsize for each row that a neighbor needs.
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


def sending(comm: Comm, x: Tensor, dst: int) -> list[Work]:
    """Return [Work] that sends `x`, or [] if `x` is empty."""
    return [comm.isend(x.contiguous(), dst)] if x.numel() else []


def receiving(comm: Comm, x: Tensor, src: int) -> list[Work]:
    """Return [Work] that receives into `x`, or [] if `x` is empty."""
    return [comm.irecv(x, src)] if x.numel() else []


def require_pairs(comm: Comm, rows: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless `rows` has a pair of numbers for each rank."""
    lists = isinstance(rows, tuple | list) and all(isinstance(pair, tuple | list) for pair in rows)
    if not lists or len(rows) != comm.size or any(len(pair) != 2 or min(pair) < 0 for pair in rows):
        raise ValueError(f"rows must be a pair (above, below) for each of the {comm.size} ranks, got {rows}")


def require_high_enough(rows: Sequence[Sequence[int]], rank: int, height: int) -> None:
    """Raise ValueError if a neighbor of `rank`, which has `height` rows, needs more of them."""
    neighbors = [(rank - 1, rows[rank - 1][1])] if rank > 0 else []
    neighbors += [(rank + 1, rows[rank + 1][0])] if rank < len(rows) - 1 else []
    for neighbor, needed in neighbors:
        if needed > height:
            raise ValueError(
                f"rank {neighbor} needs a halo of {needed} rows from rank {rank}, which has {height}: use fewer ranks"
            )


def shard_convolutions(comm: Comm, block: Block) -> Block:
    """Replace the layers of a models.cnn.Block by this rank's parts of them, in place; returns it.

    Raises:  ValueError if the ranks do not divide the channels, or the groups of its group norm.
    """
    block.conv1, block.conv2 = _ColumnConvolution(comm, block.conv1), _RowConvolution(comm, block.conv2)
    block.norm1 = (
        _CutBatchNorm(comm, block.norm1)
        if isinstance(block.norm1, BatchNorm)
        else _CutGroupNorm(comm, cast(nn.GroupNorm, block.norm1))
    )
    return block


class _CutConvolution(nn.Conv2d):
    """This rank's part of the kernel of a convolution without bias, cut along `dim`: 0 its outputs, 1 its inputs."""

    dim: int

    def __init__(self, comm: Comm, whole: nn.Conv2d) -> None:
        channels = [whole.out_channels, whole.in_channels]
        cut = equal_shares(comm, channels[self.dim], self.dim, "the channels of a convolution")
        channels[self.dim] //= comm.size
        out, inside = channels
        sizes = whole.kernel_size, whole.stride, whole.padding
        super().__init__(inside, out, *sizes, bias=False)  # pyrefly: ignore[bad-argument-type]
        self.comm, self.cuts = comm, {"weight": cut}
        self.weight = cut.parameter_of(whole.weight)


class _ColumnConvolution(_CutConvolution):
    """This rank's output channels: (b, c, h, w) -> (b, c_out/p, ...)."""

    dim = 0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(copy_to(self.comm, input))


class _RowConvolution(_CutConvolution):
    """The outputs of this rank's input channels, added over ranks: (b, c/p, h, w) -> (b, c_out, ...)."""

    dim = 1

    def forward(self, input: Tensor) -> Tensor:
        return reduce_from(self.comm, super().forward(input))


class _CutGroupNorm(nn.GroupNorm):
    """A group norm of this rank's channels, which are whole groups."""

    def __init__(self, comm: Comm, whole: nn.GroupNorm) -> None:
        equal_shares(comm, whole.num_groups, 0, "the groups of a group norm")
        cut = equal_shares(comm, whole.num_channels, 0, "the channels of a group norm")
        super().__init__(whole.num_groups // comm.size, whole.num_channels // comm.size, whole.eps)
        self.cuts = {"weight": cut, "bias": cut}
        self.weight, self.bias = cut.parameter_of(whole.weight), cut.parameter_of(whole.bias)


class _CutBatchNorm(BatchNorm):
    """A batch norm of this rank's channels."""

    def __init__(self, comm: Comm, whole: BatchNorm) -> None:
        cut = equal_shares(comm, len(whole.weight), 0, "the channels of a batch norm")
        super().__init__(len(whole.weight) // comm.size)
        self.cuts = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), cut)
        self.weight, self.bias = cut.parameter_of(whole.weight), cut.parameter_of(whole.bias)
        self.running_mean, self.running_var = cut.part(whole.running_mean), cut.part(whole.running_var)

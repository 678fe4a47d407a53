"""A residual block of convolutions on several ranks: the channels between its two convolutions are shared out.

    x (b, c, h, w) -> [conv1: my channels] -> norm of mine, relu -> [conv2: from my channels] -> all-reduce -> norm

One all-reduce of the block's output forward and one of its input backward. Both kernels are cut, so parameters and the
activations between them are 1/p; everything outside the blocks, the shortcut included, every rank does alike.
spatial.py cuts the image instead.
Ref: Dryden et al. 2019, "Channel and Filter Parallelism for Large-Scale CNN Training" (SC19).
"""

from torch import nn

from ...models.batch_norm import BatchNorm
from .cuts import equal_shares
from .pairs import copy_to, reduce_from


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

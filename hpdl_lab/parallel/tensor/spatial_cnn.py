"""A whole CNN of which every rank has some rows of each image: halos in its convolutions, sums in its norms.

    images (b, c, h, w) -> my rows -> conv, norm, blocks, each on my rows -> mean over all rows (all-reduce) -> head

Every layer of models/cnn.py is here with its rows shared out; parameters are whole on every rank and have its names.
The image may have any height, the ranks any number that leaves each rank a row of every layer.
Ref: Dryden et al. 2019 (LBANN), arXiv:1903.06681, section 3.
"""

import copy

import torch
from torch import nn
from torch.nn.functional import pad, relu

from ...models.batch_norm import BatchNorm
from ...models.cnn import CNN
from ..consensus import require_same_model
from ..data_parallel import broadcast_parameters
from .cuts import PARTIAL
from .linear import copy_to, reduce_from
from .spatial import SpatialConvolution, edges_of


def spatial_parallel(comm, model):
    """A models.cnn.CNN, which stays as it is, that works on this rank's rows. Collective.

    Called with whole images, the same on every rank; after backward, before the step: add_partial_gradients.
    Raises:  ValueError where it is no CNN, or where the ranks' models differ.
    """
    if type(model) is not CNN:
        raise ValueError(f"spatial_parallel cuts images, and a {type(model).__name__} is no cnn")
    require_same_model(comm, model, "spatial_parallel")
    whole = copy.deepcopy(model)
    broadcast_parameters(comm, whole)
    return SpatialCNN(comm, whole)


class SpatialCNN(nn.Module):
    """Images (b, c, h, w), the same on every rank -> logits (b, classes), the same on every rank."""

    def __init__(self, comm, whole):
        super().__init__()
        self.comm = comm
        self.conv, self.norm = SpatialConvolution(comm, whole.conv), spatial_norm(comm, whole.norm)
        self.blocks = nn.ModuleList([SpatialBlock(comm, block) for block in whole.blocks])
        self.head = whole.head

    def forward(self, images):
        edges = edges_of(images.shape[2], self.comm.size)
        x = images[:, :, edges[self.comm.rank] : edges[self.comm.rank + 1]]  # (b, c, h, w) -> (b, c, h_r, w)
        x, edges = self.conv(x, edges)
        x = relu(self.norm(x))
        for block in self.blocks:
            x, edges = block(x, edges)
        mean = reduce_from(self.comm, x.sum((2, 3)) / (edges[-1] * x.shape[3]))  # (b, c)
        return self.head(mean)


class SpatialBlock(nn.Module):
    """A models.cnn.Block on this rank's rows: forward(x, edges) -> y, edges."""

    def __init__(self, comm, whole):
        super().__init__()
        self.comm, self.stride, self.more = comm, whole.stride, whole.more
        self.conv1, self.norm1 = SpatialConvolution(comm, whole.conv1), spatial_norm(comm, whole.norm1)
        self.conv2, self.norm2 = SpatialConvolution(comm, whole.conv2), spatial_norm(comm, whole.norm2)

    def forward(self, x, edges):
        y, half = self.conv1(x, edges)  # (b, w_in, h_r, w) -> (b, w_out, h_r/stride, w/stride)
        y, half = self.conv2(relu(self.norm1(y)), half)
        first = -edges[self.comm.rank] % self.stride  # of my rows that the shortcut keeps: it keeps row 0 of the image
        x = x[:, :, first :: self.stride, :: self.stride]
        return relu(pad(x, (0, 0, 0, 0, 0, self.more)) + self.norm2(y)), half


def spatial_norm(comm, whole):
    """The norm of a CNN with statistics of whole images: a batch norm over `comm`, or a SpatialGroupNorm."""
    if not isinstance(whole, BatchNorm):
        return SpatialGroupNorm(comm, whole)
    return SpatialBatchNorm(comm, whole)


class SpatialBatchNorm(BatchNorm):
    """A batch norm over this rank's rows and those of the others, whose gradients are parts of a sum over ranks."""

    def __init__(self, comm, whole):
        super().__init__(len(whole.weight))
        self.ranks = comm
        for name in ("weight", "bias"):
            setattr(self, name, PARTIAL.parameter_of(getattr(whole, name)))
        self.running_mean, self.running_var = whole.running_mean.clone(), whole.running_var.clone()

    def forward(self, x):
        self.comm = self.ranks  # whatever `synchronized` has left
        return super().forward(x)

    def cuts(self):
        return {"weight": PARTIAL, "bias": PARTIAL}


class SpatialGroupNorm(nn.Module):
    """nn.GroupNorm of images of which this rank has some rows: (b, c, h_r, w) -> the same shape.

    Steps: one all_reduce forward, one backward.   Bytes per rank: of all_reduce for 2 b groups + 1 float64 numbers.
    """

    def __init__(self, comm, whole):
        super().__init__()
        self.comm, self.groups, self.eps = comm, whole.num_groups, whole.eps
        self.weight, self.bias = PARTIAL.parameter_of(whole.weight), PARTIAL.parameter_of(whole.bias)

    def forward(self, x):
        b, c, h, w = x.shape
        wide = x.double().view(b, self.groups, -1)  # (b, groups, c/groups * h * w)
        told = torch.cat([wide.sum(2).flatten(), wide.square().sum(2).flatten(), wide.new_tensor([wide.shape[2]])])
        # The sum is used by all ranks, each for its rows: its gradient is the sum of theirs.
        *sums, n = copy_to(self.comm, reduce_from(self.comm, told)).split([b * self.groups, b * self.groups, 1])
        mean, squares = (part.view(b, self.groups, 1) / n for part in sums)
        normal = (wide - mean) * torch.rsqrt(squares - mean.square() + self.eps)
        return normal.to(x.dtype).view(b, c, h, w) * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)

    def cuts(self):
        return {"weight": PARTIAL, "bias": PARTIAL}

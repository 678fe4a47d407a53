"""Batch norm with the statistics of the global batch, so that many ranks compute what one rank would.

    rank 0: (count, sum, sum of squares) --+                +--> the same mean and variance
    rank 1: (count, sum, sum of squares) --+-- all_reduce --+--> the same mean and variance

Its cost: one all-reduce of 2c + 1 numbers in the forward pass of every such layer and one of 2c in its backward pass,
all of them exposed, because the next layer waits for them. PyTorch calls it SyncBatchNorm; most training with many
images per rank leaves it out, and accepts that the batch of the norm is the shard.
Ref: Ioffe & Szegedy 2015, arXiv:1502.03167.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

if TYPE_CHECKING:
    from ..comm.base import Comm


EPSILON, MOMENTUM = 1e-5, 0.1  # as in torch.nn.BatchNorm2d


class BatchNorm(nn.Module):
    """(x - mean) / sqrt(variance + 1e-5) * weight + bias, by channel of x (b, c, h, w); 2c parameters, 2c + 1 buffers.

    Statistics are taken over all ranks inside `with synchronized(model, comm)`, else over the images of this rank.
    In evaluation mode they are the running ones, as in torch.nn.BatchNorm2d.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.comm: Comm | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            normal, mean, var, n = _Normalize.apply(x, self.comm)  # (b, c, h, w), (c,), (c,), number
            if n:  # no numbers have no mean
                with torch.no_grad():
                    self.running_mean.lerp_(mean.to(x.dtype), MOMENTUM)
                    self.running_var.lerp_((var * n / max(n - 1, 1)).to(x.dtype), MOMENTUM)
        else:
            scale = torch.rsqrt(self.running_var + EPSILON)
            normal = (x - _per_channel(self.running_mean)) * _per_channel(scale)
        return normal * _per_channel(self.weight) + _per_channel(self.bias)


class _Context(FunctionCtx):
    """The state of Normalize between forward and backward."""

    saved_tensors: tuple[torch.Tensor, torch.Tensor]
    comm: Comm | None
    n: float


class _Normalize(torch.autograd.Function):
    """x (b, c, h, w) -> (x - mean) / sqrt(var + 1e-5), mean, var, n: statistics of n numbers over (b, h, w) and ranks.

    Steps: one all_reduce forward, one backward.   Bytes per rank: of all_reduce for 2c + 1, then 2c float64 numbers.
    """

    @staticmethod
    def forward(ctx: _Context, x: torch.Tensor, comm: Comm | None) -> tuple[float | torch.Tensor, ...]:
        wide = x.double()
        sums = torch.cat([wide.new_tensor([x.numel() // x.shape[1]]), wide.sum(DIMS), wide.square().sum(DIMS)])
        count, total, squares = _summed(sums, comm).split([1, x.shape[1], x.shape[1]])
        n = float(count)
        mean = total / max(n, 1)
        var = (squares / max(n, 1) - mean.square()).clamp_min(0)
        scale = torch.rsqrt(var + EPSILON)
        normal = ((wide - _per_channel(mean)) * _per_channel(scale)).to(x.dtype)
        ctx.save_for_backward(normal, scale)
        ctx.comm, ctx.n = comm, n
        ctx.mark_non_differentiable(mean, var)
        return normal, mean, var, n

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]
        ctx: _Context, grad: torch.Tensor, *_: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """Return dx = scale (g - mean(g) - normal mean(g normal)): means over (b, h, w) and ranks."""
        normal, scale = ctx.saved_tensors
        g, y = grad.double(), normal.double()
        means = _summed(torch.cat([g.sum(DIMS), (g * y).sum(DIMS)]), ctx.comm) / max(ctx.n, 1)
        mean_g, mean_gy = means.split(len(scale))
        return ((g - _per_channel(mean_g) - y * _per_channel(mean_gy)) * _per_channel(scale)).to(grad.dtype), None


DIMS = (0, 2, 3)


def _per_channel(values: torch.Tensor) -> torch.Tensor:
    """Return `values` (c,) as (1, c, 1, 1), to be combined with (b, c, h, w)."""
    return values.view(1, -1, 1, 1)


def _summed(x: torch.Tensor, comm: Comm | None) -> torch.Tensor:
    """Return x, added over the ranks of `comm` if there is one."""
    return x if comm is None else comm.all_reduce(x)


def talks(model: nn.Module) -> bool:
    """Return True if `model` has a BatchNorm: then ranks wait for each other inside its forward and backward pass."""
    return any(isinstance(module, BatchNorm) for module in model.modules())


@contextmanager
def synchronized(model: nn.Module, comm: Comm) -> Generator[None]:
    """Let every BatchNorm of `model` share its statistics over `comm`, on which all ranks must run it equally often."""
    norms = [module for module in model.modules() if isinstance(module, BatchNorm)]
    try:
        for module in norms:
            module.comm = comm
        yield
    finally:
        for module in norms:
            module.comm = None  # so that the model can be copied and sent again

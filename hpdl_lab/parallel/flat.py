"""Parameters in one vector that the ranks share out: each owns a chunk, with the parts of parameters that lie in it.

The common part of ZeRO (zero.py) and hybrid parallelism (hybrid/gradients.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..comm.base import Comm
from .consensus import is_finite
from .reducer import GradientBuffer


def own_reduce_scatter(comm: Comm, x: Tensor) -> Tensor:
    """Return chunk r, on rank r, of the sum over ranks of flat `x`, by the communicator's own reduce-scatter."""
    return comm.reduce_scatter(x.view(comm.size, -1))


def own_all_gather(comm: Comm, x: Tensor) -> Tensor:
    """Give every rank every chunk of flat `x`, whose chunk r rank r holds, by the communicator's own all-gather."""
    rows = x.view(comm.size, -1)
    rows.copy_(comm.all_gather(rows[comm.rank]))
    return x


class FlatParameter(GradientBuffer):
    """Parameters of one unit, of one dtype, in one vector padded to equal chunks, one for each rank.

        full    [ w1 ........ | b1 | w2 .... | b2 | pad ]   (P n,)   views[i]: the part of params[i], in its shape
        shard                 [..............]              (n,)     chunk r; a part of `full` unless `sharded`
        pieces                [ w1 | b1 | w2 ]                       (i, begin, end, offset in shard) of each parameter

    grad: (P n,) while gradients of this rank come in.
    sharded_params: what an optimizer updates, for each piece: its part of `shard`, unless it gets a master of that.
    """

    def __init__(self, comm: Comm, params: Sequence[nn.Parameter], indices: Sequence[int], sharded: bool) -> None:
        super().__init__(params, indices)
        self.comm, self.sharded = comm, sharded
        self.n = -(-sum(self.sizes) // comm.size)
        self.full = params[0].detach().new_zeros(comm.size * self.n)
        self.views = self.views_of(self.full)
        with torch.no_grad():
            for param, view in zip(params, self.views, strict=True):
                view.copy_(param)
        self.shard = self.own(self.full).clone() if sharded else self.own(self.full)
        self.pieces: list[tuple[int, int, int, int]] = []
        first, offset = comm.rank * self.n, 0
        for i, size in enumerate(self.sizes):
            begin, end = (min(max(edge - offset, 0), size) for edge in (first, first + self.n))
            if end > begin:
                self.pieces.append((i, begin, end, offset + begin - first))
            offset += size
        self.sharded_params = [nn.Parameter(part, params[0].requires_grad) for part in self.slices(self.shard)]
        value = float("nan") if self.full.is_floating_point() else 0
        self.nothing = self.full.new_full((), value)  # what a resharded parameter shows, in its own shape
        self.begin()
        if sharded:
            self.reshard()
        else:
            self.attach()

    def own(self, full: Tensor) -> Tensor:
        """Return the chunk of this rank."""
        return full[self.comm.rank * self.n : (self.comm.rank + 1) * self.n]

    def slices(self, shard: Tensor) -> list[Tensor]:
        """Cut a vector (n,) into this rank's pieces."""
        return [shard[offset : offset + end - begin] for _, begin, end, offset in self.pieces]

    def full_tensors(self, values: Sequence[Tensor | float | None], dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return tensors in the shapes of the parameters, put together from all ranks' pieces. Collective.

        Args:    values: for each piece of this rank a tensor like it, a number, or None for zeros; dtype: of what is
                 returned, by default the parameters' own.
        Steps: one all_gather.   Bytes per rank: as in an all_gather of these parameters.
        """
        mine = self.shard.new_zeros(self.n, dtype=dtype or self.shard.dtype)
        for part, value in zip(self.slices(mine), values, strict=True):
            if value is not None:
                part.copy_(torch.as_tensor(value))
        return self.views_of(self.comm.all_gather(mine).view(-1))

    def fill(self, wholes: Sequence[Tensor]) -> None:
        """Take the values of these tensors, in the shapes of the parameters."""
        if self.full.untyped_storage().nbytes():
            for view, whole in zip(self.views, wholes, strict=True):
                view.copy_(whole)
            self.shard.copy_(self.own(self.full))
            self.attach()
        else:
            for part, (i, begin, end, _) in zip(self.slices(self.shard), self.pieces, strict=True):
                part.copy_(wholes[i].reshape(-1)[begin:end])
            self.reshard()

    def attach(self) -> None:
        """Make the parts of `full` the parameters."""
        for param, view in zip(self.params, self.views, strict=True):
            param.data = view

    def reshard(self) -> None:
        """Give the memory of `full` back. What autograd has saved of it is there again after the next `allocate`."""
        for param in self.params:
            param.data = self.nothing.expand(param.shape)
        self.full.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Take memory for `full`, and put this rank's chunk into it."""
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        self.own(self.full).copy_(self.shard)

    # gradients

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        self.grad: Tensor | None = None
        self.missing = []
        self.bad: list[tuple[int, str]] = []  # (index, NaN or infinity) of gradients that are not finite

    def expect(self) -> None:
        """Make room for gradients: zeros."""
        self.grad = self.full.new_zeros(len(self.full))
        self.grads = self.views_of(self.grad)

    def put(self, i: int) -> None:
        """Move the gradient of params[i] into its place, or zeros."""
        if self.grad is None:
            self.expect()
        super().put(i)
        self.params[i].grad = None

    def packed(self) -> Tensor:
        """Return the gradients of this rank (P n,), which are forgotten here; `bad` says if one is not finite."""
        flat, self.grad = cast(Tensor, self.grad), None
        if not is_finite(flat.sum()):
            for index, grad in zip(self.indices, self.grads, strict=True):
                if not is_finite(grad):
                    self.bad.append((index, "NaN" if torch.isnan(grad).any() else "infinity"))
        self.grads = []
        return flat

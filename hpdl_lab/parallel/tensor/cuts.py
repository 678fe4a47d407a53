"""The part of each parameter that a rank holds, as data: to cut a whole model, and to put it together again.

weight (6, 4) cut along dim 0 for two ranks      places [[0, 1, 2], [3, 4, 5]]
qkv of two heads of two rows, for two ranks      places [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
a table of 5 rows for two ranks                  places [[0, 1, 2], [3, 4, -1]]: padded with a row of zeros
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...comm.base import Comm


@dataclass(frozen=True, eq=False)
class Cut:
    """The layout of a parameter on p ranks, seen from one of them.

    rank:    this one.
    dim:     along which it is cut; None: every rank holds it whole.
    size:    of the whole along dim.
    places:  (p, n) int64: which places of the whole each rank holds, -1 for padding; None if it is whole.
    partial: the gradient that backward leaves is this rank's part of a sum over ranks, as of a norm if
             each rank has seen only its positions: add it over ranks before a step.
    """

    rank: int = 0
    dim: int | None = None
    size: int = 0
    places: Tensor | None = None
    partial: bool = False

    def part(self, whole: Tensor) -> Tensor:
        """Return what this rank holds of `whole`, in memory of its own."""
        if self.dim is None or self.places is None:
            return whole.detach().clone()
        if whole.shape[self.dim] != self.size:
            raise ValueError(f"a tensor of shape {tuple(whole.shape)} is not {self.size} long along dim {self.dim}")
        mine = self.places[self.rank].to(whole.device)
        out = whole.detach().index_select(self.dim, mine.clamp_min(0))
        return out.index_fill_(self.dim, (mine < 0).nonzero().flatten(), 0)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the whole, from what every rank holds, in rank order."""
        if self.dim is None or self.places is None:
            return parts[self.rank].detach().clone()
        shape = list(parts[0].shape)
        shape[self.dim] = self.size
        whole = parts[0].new_empty(shape)
        for places, part in zip(self.places.to(whole.device), parts, strict=True):
            real = (places >= 0).nonzero().flatten()
            whole.index_copy_(self.dim, places[real], part.detach().index_select(self.dim, real))
        return whole

    def parameter_of(self, whole: Tensor) -> nn.Parameter:
        """Return this rank's part of a parameter as a parameter."""
        return nn.Parameter(self.part(whole), whole.requires_grad)


WHOLE = Cut()
PARTIAL = Cut(partial=True)


def equal_shares(comm: Comm, size: int, dim: int, what: str) -> Cut:
    """Return the Cut of `size` places into equal shares in the order of ranks. Raises ValueError for `what`."""
    if size % comm.size:
        raise ValueError(f"{what}: {size} cannot be shared equally by {comm.size} ranks")
    return Cut(comm.rank, dim, size, torch.arange(size).view(comm.size, -1))


def padded_shares(comm: Comm, size: int, dim: int) -> Cut:
    """Return the Cut of `size` places into shares of ceil(size/p), the last ones padded."""
    share = -(-size // comm.size)
    places = torch.arange(share * comm.size).view(comm.size, share)
    return Cut(comm.rank, dim, size, places.masked_fill(places >= size, -1))


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """Return {name: Cut} of every parameter and buffer of a sharded model: WHOLE unless a module has others.

    A module that is cut has cuts, {local name: Cut}. Ask the model before it is split into stages: a stage may hold
    a tied table without the module that has its cut.
    """
    cuts = {name: WHOLE for name, _ in tensors_of(model)}
    for prefix, module in model.named_modules():
        mine = vars(module).get("cuts", {}).items()
        cuts |= {f"{prefix}.{name}" if prefix else name: cut for name, cut in mine}
    return cuts


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every parameter and persistent buffer, tied ones once: the names of the whole model."""
    yield from model.named_parameters()
    kept = model.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def gather_parameters(comm: Comm, model: nn.Module) -> dict[str, Tensor]:
    """Return the whole model's parameters and buffers by name, from the parts of all ranks. Collective.

    Returns: {name: tensor}, the same on every rank, as `dict(whole.named_parameters())` and its buffers would be.
    Steps: one all_gather per tensor that is cut.   Bytes per rank: of all_gather for what it holds of them.
    """
    cuts = cuts_of(model)
    return {name: joined(comm, tensor, cuts[name]) for name, tensor in tensors_of(model)}


def joined(comm: Comm, part: Tensor, cut: Cut) -> Tensor:
    """Return the whole, from this rank's `part` of it. Collective if it is cut."""
    if cut.dim is None:
        return part.detach().clone()
    return cut.join(comm.all_gather(part.detach().contiguous()).unbind())


def add_partial_gradients(comm: Comm, model: nn.Module) -> None:
    """Add over ranks the gradients that each rank has a part of. Collective, after backward, before the step.

    Parameters are those whose Cut is partial: norms and row biases under sequence parallel. Nothing else needs it.
    Steps: one all_reduce for all of them together.   Bytes per rank: of all_reduce for their elements.
    """
    cuts = cuts_of(model)
    partial = [p for name, p in model.named_parameters() if p.requires_grad and cuts[name].partial]
    if comm.size == 1 or not partial:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in partial])
    comm.all_reduce(flat)
    for p, total in zip(partial, flat.split([p.numel() for p in partial]), strict=True):
        p.grad = total.view(p.shape)

"""The state of a model that ZeRO has in shards: whole on every rank, or each rank's shards, for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..comm.base import Comm
from .checkpoint import StateDict, shard_of
from .flat import FlatParameter
from .optimizer_state import Piece


class ShardedState:
    """A model whose parameters lie in `flats`, to be saved and loaded in the dtypes in which it came.

    params: as the optimizer of the whole model counts them; dtypes: {id of a parameter: its dtype}, before masters of
    it were taken, if there are masters.
    """

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        flats: Sequence[FlatParameter],
        dtypes: dict[int, torch.dtype],
        masters: bool,
    ) -> None:
        self.comm, self.model, self.params, self.flats = comm, model, params, flats
        self.dtypes, self.masters = dtypes, masters
        self.numbers = {id(p): number for number, p in enumerate(params)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the whole model's state_dict(), {name: tensor}, on every rank. Collective."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def shards(self) -> StateDict:
        """Return this rank's shards of `state_dict`, as checkpoint.save_shards writes them; rank 0 has the buffers."""
        mine: dict[int, list[tuple[int, Tensor]]] = {id(param): [] for flat in self.flats for param in flat.params}
        for flat in self.flats:
            for (i, begin, *_), piece in zip(flat.pieces, flat.sharded_params, strict=True):
                mine[id(flat.params[i])] = [(begin, piece)]
        found: StateDict = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in mine:
                found[name] = shard_of(tensor.shape, mine[id(tensor)])
            elif self.comm.rank == 0:
                found[name] = tensor.detach()
        return found

    def load_state_dict(self, whole: dict[str, Tensor]) -> None:
        """Take this rank's chunks of `whole`, the state_dict() of the model, saved on any number of ranks. Collective.

        Raises:  RuntimeError of torch that names the tensor which is missing or has another shape.
        """
        self.model.load_state_dict(whole)

    # -- what Strategy.register_state_dict_hooks calls -----------------------------------------------------------------

    def widen(self) -> None:
        """Give the model its whole parameters. Collective."""
        for flat in self.flats:
            if flat.sharded or self.masters:
                wholes = flat.full_tensors(
                    [piece.data for piece in flat.sharded_params], self.dtypes[id(flat.params[0])]
                )
                for param, whole in zip(flat.params, wholes, strict=True):
                    param.data = whole

    def narrow(self) -> None:
        """Undo `widen`, and take the values that the model has by now."""
        for flat in self.flats:
            wholes = [param.data for param in flat.params]
            for piece, (i, begin, end, _) in zip(flat.sharded_params, flat.pieces, strict=True):
                piece.data.copy_(wholes[i].reshape(-1)[begin:end])
            flat.fill(wholes)

    # -- what optimizer_state.py asks ----------------------------------------------------------------------------------

    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(param.shape) for param in self.params]

    def pieces(self) -> dict[int, Piece]:
        return {
            self.numbers[id(flat.params[i])]: Piece(piece, begin, end)
            for flat in self._trainable()
            for (i, begin, end, _), piece in zip(flat.pieces, flat.sharded_params, strict=True)
        }

    def part(self, number: int, whole: Tensor) -> Tensor:
        return whole

    def gather(self, values: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Put together tensors from all ranks' pieces: an all_gather per unit."""
        found: dict[int, Tensor] = {}
        for flat in self._trainable():
            numbers = [self.numbers[id(param)] for param in flat.params]
            mine = [values.get(numbers[i]) for i, *_ in flat.pieces]
            found |= zip(numbers, flat.full_tensors(mine, self.dtypes[id(flat.params[0])]), strict=True)
        return found

    def _trainable(self) -> list[FlatParameter]:
        return [flat for flat in self.flats if flat.params[0].requires_grad]

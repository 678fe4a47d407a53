"""Optimizers of ranks that have pieces of parameters, or masters of them; checkpoints hold the whole model's state.

    rank 0   [ w1 ....... ]            state of its piece     --+
    rank 1            [ w1 | b1 ]      state of its pieces    --+--> state_dict() of torch's optimizer of w1 and b1

Tensors that have the shape of their piece, such as a momentum, are gathered and cut as it is; numbers, such as Adam's
count of steps, are the same on all ranks that have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from ..comm.base import Comm
from .checkpoint import StateDict, shard_of
from .consensus import gather_items
from .precision import Precision

LIKE, OTHER = "like its parameter", "of shape"

OptimizerOf: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class OptimizerLike(Protocol):
    """An optimizer of torch, or what stands in its place."""

    @property
    def param_groups(self) -> list[StateDict]: ...

    def zero_grad(self) -> None: ...

    def step(self) -> object: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict, /) -> object: ...


class Piece(NamedTuple):
    """A part of a parameter that an optimizer updates: elements begin to end of this rank, flat or in its shape."""

    param: nn.Parameter
    begin: int
    end: int


class ShardedParameters(Protocol):
    """The parameters of a model over ranks. number: of a parameter of the whole model, as its optimizer counts them."""

    @property
    def comm(self) -> Comm: ...

    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Return the shapes of all parameters of the whole model."""
        ...

    def pieces(self) -> Mapping[int, Piece]:
        """Return {number: Piece} of this rank, in the order in which its optimizer has them."""
        ...

    def part(self, number: int, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor in the shape of the whole parameter: its Piece is cut from that."""
        ...

    def gather(self, values: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """Return {number: whole tensor} on every rank from {number: tensor like the Piece} of each. Collective."""
        ...


class OptimizerState:
    """The optimizer of a HybridParallel, or of shards, as torch's of the whole model, for checkpoints."""

    def __init__(self, params: ShardedParameters, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer of all pieces of this rank in one group. Raises ValueError for another one."""
        self.params, self.optimizer = params, optimizer
        ours = [id(piece.param) for piece in params.pieces().values()]
        theirs = [[id(p) for p in group["params"] if ours or p.numel()] for group in optimizer.param_groups]
        if theirs != [ours]:
            raise ValueError(
                f"a checkpoint needs an optimizer of all {len(ours)} parameters of this rank in one group: this one "
                f"has groups of {', '.join(str(len(group)) for group in theirs)}"
            )

    def state_dict(self) -> StateDict:
        """Return optimizer.state_dict() as it would be for the whole model, on every rank. Collective.

        Raises:  ValueError on every rank for an optimizer whose state is neither like a parameter nor one number.
        """
        kinds = self._kinds()
        state: dict[int, dict[str, Tensor]] = {number: {} for number in sorted(kinds)}
        for key in sorted({key for row in kinds.values() for key in row}):
            whole: Mapping[int, Tensor] = {}
            if any(row.get(key) == LIKE for row in kinds.values()):
                rows = {n: self.optimizer.state[piece.param] for n, piece in self.params.pieces().items()}
                mine = {n: row[key] for n, row in rows.items() if kinds.get(n, {}).get(key) == LIKE}
                whole = self.params.gather(mine)
            for number, row in state.items():
                if kind := kinds[number].get(key):  # a number is a tensor, as torch counts in it
                    row[key] = whole[number] if kind == LIKE else torch.tensor(float(kind))
        return self._state_dict(state)

    def shards(self) -> StateDict:
        """Return this rank's shards of `state_dict`, as checkpoint.save_shards writes them. No messages."""
        shapes = self.params.shapes()
        state: dict[int, StateDict] = {}
        for number, piece in self.params.pieces().items():
            for key, value in self.optimizer.state.get(piece.param, {}).items():
                like = _is_like(key, value, piece.param.shape)
                row = state.setdefault(number, {})
                row[key] = shard_of(shapes[number], [(piece.begin, value)]) if like else value
        return self._state_dict(state)

    def load_state_dict(self, whole: StateDict) -> None:
        """Take this rank's pieces of what `state_dict` has returned, on any number of ranks. No messages."""
        (group,), shapes = whole["param_groups"], self.params.shapes()
        if len(group["params"]) != len(shapes):
            raise ValueError(f"its optimizer has {len(group['params'])} parameters, this model {len(shapes)}")
        rows = {}
        for i, (number, (param, begin, end)) in enumerate(self.params.pieces().items()):
            if row := whole["state"].get(number):
                like = [key for key, value in row.items() if _is_like(key, value, shapes[number])]
                parts = {key: self.params.part(number, row[key]).reshape(-1)[begin:end] for key in like}
                rows[i] = row | {key: part.view(param.shape) for key, part in parts.items()}
        (ours,) = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": rows, "param_groups": [ours | group | {"params": ours["params"]}]})

    def _state_dict(self, state: Mapping[int, StateDict]) -> StateDict:
        """Return the state_dict() of an optimizer of the whole model that has this state."""
        (group,) = self.optimizer.state_dict()["param_groups"]
        return {"state": state, "param_groups": [group | {"params": list(range(len(self.params.shapes())))}]}

    def _kinds(self) -> dict[int, dict[str, str]]:
        """Return {number of a parameter: {key of its state: LIKE it, or the number that it is}}, of all ranks."""
        mine = [
            (f"{number} {key}", _kind_of(key, value, piece.param.shape))
            for number, piece in self.params.pieces().items()
            for key, value in self.optimizer.state.get(piece.param, {}).items()
            if value is not None
        ]
        kinds: dict[int, dict[str, str]] = {}
        for name, kind in (pair for pairs in gather_items(self.params.comm, mine) for pair in pairs if len(pair) == 2):
            number, _, key = name.partition(" ")
            known = kinds.setdefault(int(number), {}).setdefault(key, kind)
            if kind.startswith(OTHER) or known != kind:
                what = kind if kind.startswith(OTHER) else f"{known} on one rank and {kind} on another"
                raise ValueError(
                    f"no checkpoint can hold an optimizer whose {key} is {what}: SGD, Adam and the like can be saved"
                )
        return kinds


def _is_like(key: str, value: object, shape: Sequence[int]) -> bool:
    """Return whether a value of an optimizer's state belongs to the elements of a parameter of this shape."""
    # `step` has the shape of a scalar parameter but is a number
    return isinstance(value, Tensor) and tuple(value.shape) == tuple(shape) and (bool(shape) or key != "step")


def _kind_of(key: str, value: Tensor | float, shape: Sequence[int]) -> str:
    """Return LIKE a parameter of this shape, the number that it is, or OTHER with its shape."""
    if _is_like(key, value, shape):
        return LIKE
    own = tuple(value.shape) if isinstance(value, Tensor) else ()
    return f"{OTHER} {own} for a parameter of shape {(*shape,)}" if own else repr(float(value))


class _Updates(Protocol):
    """A strategy that takes the steps of its optimizer."""

    precision: Precision | None

    def update(self, optimizer: torch.optim.Optimizer) -> None: ...

    def drop_gradients(self) -> None: ...


class StrategyOptimizer:
    """A torch optimizer of masters, or of this rank's pieces, whose steps a strategy takes. Its methods are collective.

    optimizer: the torch optimizer itself, which a learning-rate schedule of torch needs.
    params: of a strategy with shards. Masters themselves are saved with the model.
    """

    def __init__(
        self, strategy: _Updates, optimizer: torch.optim.Optimizer, params: ShardedParameters | None = None
    ) -> None:
        self.strategy, self.optimizer, self.params = strategy, optimizer, params

    @property
    def param_groups(self) -> list[StateDict]:
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        self.strategy.drop_gradients()

    def step(self) -> None:
        """Update the parameters of all ranks."""
        self.strategy.update(self.optimizer)

    def state_dict(self) -> StateDict:
        """Return the state_dict() of the optimizer that DataParallel would have, on every rank."""
        return self._with_scale((self._state or self.optimizer).state_dict())

    def shards(self) -> StateDict:
        """Return this rank's shards of `state_dict`. No messages."""
        if self._state is None:
            raise TypeError("every rank has the whole state of this optimizer: checkpoint.save writes it")
        return self._with_scale(self._state.shards())

    def load_state_dict(self, state: StateDict) -> None:
        """Take this rank's part of what `state_dict` has returned, on any number of ranks."""
        precision = self.strategy.precision
        (self._state or self.optimizer).load_state_dict(state if precision is None else state["inner"])
        if precision is not None:
            precision.load_state_dict(state["precision"])

    @property
    def _state(self) -> OptimizerState | None:
        return None if self.params is None else OptimizerState(self.params, self.optimizer)

    def _with_scale(self, inner: StateDict) -> StateDict:
        precision = self.strategy.precision
        return inner if precision is None else {"inner": inner, "precision": precision.state_dict()}

"""Mixed precision: 16-bit parameters and gradients, float32 master weights, and a loss scale that all ranks agree on.

    float32   masters m ---- round ----> p (16 bits)      forward and backward run in 16 bits
                 ^                          |             the loss is computed in float32, and multiplied by the scale
                 |                       backward
              optimizer                     v
                 ^------ / scale ------- g (16 bits)      travels over ranks in 16 bits: half the bytes of float32

    bytes per parameter: 2 (p) + 2 (g) + 4 (m) + 8 (AdamW's moments of m) = 16; float32 alone has 4 + 4 + 8 = 16, too:
    what is saved is bytes on the wire, activations and time, and, with ZeRO, whatever of the 12 is sharded

A step of SGD of 1e-4 times a parameter is lost in bfloat16, whose numbers above 1 are 2^-7 apart: it adds up in m.
float16 has 5 bits of exponent: its smallest number is 6e-8, its largest 65504, and then comes infinity. So the
loss, and by the chain rule every gradient, is multiplied by a scale as large as gradients allow. bfloat16 has the range
of float32.

What is saved of a model is m: from `start` to `stop` of a strategy model.state_dict() has float32, and
model.load_state_dict() gives m its values, and p their roundings.
Ref: Micikevicius et al. 2018, "Mixed precision training", arXiv:1710.03740; Rajbhandari et al. 2020 (ZeRO), section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..comm.base import Comm
from ..comm.buffers import dtype_name
from ..units import require_int, require_number

SIXTEEN_BITS = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}
DTYPES = SIXTEEN_BITS | {"fp32": torch.float32, "float32": torch.float32}


def dtype_called(name: str, option: str = "precision", known: Mapping[str, torch.dtype] = DTYPES) -> torch.dtype:
    """Return the dtype of this name. Raises ValueError that lists the names."""
    if name not in known:
        raise ValueError(f"{option}={name!r}: one of {', '.join(known)} is needed")
    return known[name]


@dataclass
class LossScale:
    """The factor of the loss, and its changes: halved at infinity, doubled after `interval` good steps.

    good_steps: taken since it last changed. The defaults are torch.amp.GradScaler's.
    """

    scale: float = 2.0**16
    interval: int = 2000
    good_steps: int = 0

    def __post_init__(self) -> None:
        require_number("scale", self.scale, above=0)
        require_int("interval", self.interval, 1)


def unscale_together(comm: Comm, grads: Sequence[Tensor], scaler: LossScale) -> bool:
    """Unscale the gradients, decide with all ranks on the step, and set the next scale.

        rank 0: finite        --+                        +--> skip the step, scale / 2
        rank 1: has infinity  --+-- is one not finite? --+--> skip the step, scale / 2
        rank 2: finite        --+                        +--> skip the step, scale / 2

    Each rank holds different gradients, such as its shard, and can look for infinity and
    NaN only in the gradients that it holds. Unscale: divide by the loss scale.

    Args:    grads: list of float tensors, different per rank, perhaps none; overwritten.
             scaler: LossScale, the same on every rank. Set its .scale and .good_steps.
             .good_steps counts the good steps in a row so far.
             After .interval good steps in a row the scale doubles.
    Returns: whether this step is taken, the same on every rank.
    Steps: one all_reduce of one number.
    Ref: Micikevicius et al. 2018, section 3.2; torch.amp.GradScaler.
    """
    ### BEGIN SOLUTION
    for grad in grads:
        grad /= scaler.scale
    bad = torch.tensor([float(not all(torch.isfinite(grad).all() for grad in grads))], device=comm.device)
    if comm.all_reduce(bad).item():
        scaler.scale, scaler.good_steps = scaler.scale / 2, 0
        return False
    scaler.good_steps += 1
    if scaler.good_steps == scaler.interval:
        scaler.scale, scaler.good_steps = scaler.scale * 2, 0
    return True
    ### END SOLUTION


class Precision:
    """Mixed precision of one rank, which a strategy takes: DataParallel(precision="bfloat16").

    dtype:   "bfloat16" or "bf16", "float16" or "fp16", in which the model computes and gradients travel.
    scaler:  LossScale; float16 makes one, bfloat16 needs none.
    skipped: was the latest step refused, on all ranks?
    """

    def __init__(self, dtype: str = "bfloat16", scaler: LossScale | None = None) -> None:
        self.dtype, self.skipped = dtype_called(dtype, "dtype", SIXTEEN_BITS), False
        self.scaler = LossScale() if scaler is None and self.dtype == torch.float16 else scaler

    def __repr__(self) -> str:
        scaled = f", {self.scaler}" if self.scaler else ""
        return f"Precision({dtype_name(self.dtype)!r}{scaled})"

    @classmethod
    def of(cls, precision: str | Precision | None) -> Precision | None:
        """Return what a strategy makes of its argument: None for float32. Raises ValueError that lists the names."""
        if precision is None or isinstance(precision, cls):
            return precision
        return None if dtype_called(str(precision)) == torch.float32 else cls(str(precision))

    def masters(self, tensors: Iterable[Tensor]) -> list[nn.Parameter]:
        """Copy float32 parameters, or flat shards of them, before `lower` rounds them: what the optimizer updates.

        Raises:  ValueError if one has another dtype: there is no more of it to keep.
        """
        copies = [nn.Parameter(tensor.detach().clone()) for tensor in tensors]
        for copy in copies:
            if copy.dtype != torch.float32:
                raise ValueError(f"{self} keeps masters in float32, and the model has {dtype_name(copy.dtype)}")
        return copies

    def lower(self, model: nn.Module) -> list[RemovableHandle]:
        """Round the parameters of `model` to 16 bits in place, cast its inputs, and give its output in float32.

        A module with statistics of its own in float, such as a batch norm, stays in float32, with what it is given.
        Returns: handles of the hooks that cast.
        """
        handles = [
            model.register_forward_pre_hook(lambda _, inputs: _cast(inputs, self.dtype)),
            model.register_forward_hook(lambda _, inputs, output: _cast(output, torch.float32)),
        ]
        for module in model.modules():
            if any(buffer.is_floating_point() for buffer in module.buffers(recurse=False)):
                handles += [
                    module.register_forward_pre_hook(lambda _, inputs: _cast(inputs, torch.float32)),
                    module.register_forward_hook(lambda _, inputs, output: _cast(output, self.dtype)),
                ]
            else:
                for param in module.parameters(recurse=False):
                    param.grad = None
                    param.data = param.data.to(self.dtype)
        return handles

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss that backward starts from."""
        return loss * self.scaler.scale if self.scaler else loss

    def grads_to_masters(self, comm: Comm, masters: Sequence[nn.Parameter], grads: Iterable[Tensor | None]) -> bool:
        """Give the masters their gradients, in float32 and without the scale; say whether to take the step.

        Args:    grads: of the same shapes as `masters`; None: that parameter has none.
        Returns: False on every rank if one has infinity or NaN. Collective if the loss is scaled.
        Raises:  FloatingPointError on every rank if the scale has come down to 1 in vain.
        """
        for master, grad in zip(masters, grads, strict=True):
            master.grad = None if grad is None else grad.to(torch.float32, copy=True)
        if self.scaler:
            found = [master.grad for master in masters if master.grad is not None]
            self.skipped = not unscale_together(comm, found, self.scaler)
            if self.skipped and self.scaler.scale < 1:
                raise FloatingPointError(
                    "a gradient has NaN or infinity though the loss is not scaled up any more (scale 1): look at the "
                    "input and at the learning rate"
                )
        return not self.skipped

    def masters_to_params(self, masters: Sequence[nn.Parameter], tensors: Iterable[Tensor]) -> None:
        """Round the masters into the tensors that compute, and drop their gradients: 4 bytes per parameter."""
        for master, tensor in zip(masters, tensors, strict=True):
            master.grad = None
            tensor.data.copy_(master.data)

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scaler.scale, "good_steps": self.scaler.good_steps} if self.scaler else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        for name, value in state.items():
            setattr(self.scaler, name, value)


def _cast(values: object, dtype: torch.dtype) -> object:
    """Return `values`, a tensor or a tuple of them, in `dtype`; integers, such as tokens, stay what they are."""
    if isinstance(values, tuple):
        return tuple(_cast(value, dtype) for value in values)
    return values.to(dtype) if isinstance(values, Tensor) and values.is_floating_point() else values

"""A batch on its way through a model: each operation with the shapes that really went through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .experts import Experts, Router
from .llama import Rotary

NAMES = {  # of torch's functions -> in the row
    "linear": "linear",
    "conv2d": "convolution",
    "embedding": "embedding",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "relu": "ReLU",
    "gelu": "GELU",
    "silu": "SiLU",
    "scaled_dot_product_attention": "attention",
    "softmax": "attention weights",
    "add": "add",
}
PARTS: dict[type[nn.Module], str] = {  # one row for all operations inside
    Rotary: "turn by position",
    Router: "router",
    Experts: "experts",
}
WEIGHTED = ("linear", "conv2d", "embedding", "layer_norm", "rms_norm")


class OperationShapes(NamedTuple):
    """An operation: the shapes of its input and output; of its parameters the shape of the largest, and their count.

    module: the name of the module that does it, "blocks.0.mlp.0", or "" for the model itself.
    tied: the parameters belong to an earlier step as well.
    """

    name: str
    module: str
    shape_in: tuple[int, ...]
    weight: tuple[int, ...]
    shape_out: tuple[int, ...]
    parameters: int
    tied: bool


class _Recorder(TorchFunctionMode):
    """A record of every operation of NAMES while it is entered; the last of `modules` is at work.

    part: the module of PARTS that is at work, whose operations are not kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[OperationShapes] = []
        self.modules = [""]
        self.seen: set[int] = set()
        self.part: nn.Module | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if name in NAMES and self.part is None and out.is_floating_point():
            self.keep(name, out, [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)])
        return out

    def keep(self, name: str, out: Tensor, tensors: list[Tensor]) -> None:
        weights = [t for t in tensors if isinstance(t, nn.Parameter)] if name in WEIGHTED else []
        x = next((t for t in tensors if not isinstance(t, nn.Parameter)), tensors[0])
        tied = any(id(w) in self.seen for w in weights)
        self.seen.update(map(id, weights))
        largest = tuple(max(weights, key=Tensor.numel).shape) if weights else ()
        count = sum(w.numel() for w in weights)
        self.steps.append(
            OperationShapes(NAMES[name], self.modules[-1], tuple(x.shape), largest, tuple(out.shape), count, tied)
        )

    def keep_part(self, module: nn.Module, x: Tensor, out: Tensor) -> None:
        weights = [*module.parameters()]
        largest = tuple(max(weights, key=Tensor.numel).shape) if weights else ()
        count = sum(w.numel() for w in weights)
        row = OperationShapes(
            PARTS[type(module)], self.modules[-2], tuple(x.shape), largest, tuple(out.shape), count, False
        )
        self.steps.append(row)


def shapes(model: nn.Module, x: Tensor) -> list[OperationShapes]:
    """Run `model` on the batch `x` and return its operations in order, also additions of two tensors."""
    recorder = _Recorder()
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        recorder.modules.append(names[module])
        recorder.part = module if type(module) in PARTS else recorder.part

    def leave(module: nn.Module, given: tuple[Tensor, ...], out: Tensor | tuple[Tensor, ...]) -> None:
        if recorder.part is module:
            recorder.part = None
            recorder.keep_part(module, given[0], out[1] if isinstance(out, tuple) else out)
        recorder.modules.pop()

    hooks = [module.register_forward_pre_hook(enter) for module in names]
    hooks += [module.register_forward_hook(leave) for module in names]
    try:
        with torch.no_grad(), recorder:
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.steps

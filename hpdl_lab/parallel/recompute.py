"""Recomputation, or activation checkpointing: keep a block's input, and do its forward again when its backward begins.

    kept       all activations of all blocks:  L a            recomputed:  L inputs + the activations of one block
    forward    F F F F                                        F F F F                       keep x0 x1 x2 x3
    backward            B B B B                                       FB FB FB FB           of one block at a time
    FLOPs      L (f + 2 f) = 3 L f                            L (f + f + 2 f) = 4 L f       4/3

Of whole blocks, or selective: of attention alone, say, whose activations are large for the FLOPs that they cost.
A pipeline that keeps only the inputs of its stages does it itself (pipeline/stage.py).
Ref: Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022, arXiv:2205.05198, section 5.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    class AgainContext(FunctionCtx):
        """The state that forward of `_Again` leaves to its backward."""

        backward_of_block: Callable[[Tensor], Tensor | None]


Recomputed: TypeAlias = Callable[[nn.Module, Tensor], tuple[Tensor, Callable[[Tensor], Tensor | None]]]


def recomputed(block: nn.Module, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor | None]]:
    """Run a block, and keep only its input for backward.

        forward    x  --> [ block, no graph ] --> y            kept: x, random state
        backward   dy --> [ block with graph, back ] --> dx    then the graph is gone

    The second forward must drop the same numbers as the first (dropout). When backward
    returns, the random generator must be in the state that it had when backward began.

    Args:    block: nn.Module, one tensor in, one tensor out.
             x: (b, ...), which may require a gradient.
    Returns: (y, backward). y: block(x), without a graph.
             backward(dy) adds the gradients of the block's parameters to their .grad, and
             returns dx, the gradient of x, of the shape of x.
             All gradients are bit for bit as without recomputation.
             `recomputed` may be called for a second micro-batch before this backward.
    FLOPs: 4/3 of a step without recomputation.   Ref: Chen et al. 2016, arXiv:1604.06174.
    """
    ### BEGIN SOLUTION
    random = torch.get_rng_state()
    with torch.no_grad():
        y = block(x)

    def backward(dy: torch.Tensor) -> torch.Tensor | None:
        again = x.detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(random)
            out = block(again)
        out.backward(dy)
        return again.grad

    return y, backward
    ### END SOLUTION


class _Again(torch.autograd.Function):
    """`recomputed`, or another function like it, as one operation of autograd: (by, block, x, anchor) -> y.

    anchor: a tensor without numbers, through which the output needs a gradient even if x needs none. A parameter
    would do, but the hooks that say that its gradient is complete would run twice.
    """

    @staticmethod
    def forward(ctx: AgainContext, by: Recomputed, block: nn.Module, x: Tensor, anchor: Tensor) -> Tensor:
        y, ctx.backward_of_block = by(block, x)
        return y

    @staticmethod
    def backward(ctx: AgainContext, dy: Tensor) -> tuple[None, None, Tensor | None, None]:  # pyrefly: ignore[bad-override]
        return None, None, ctx.backward_of_block(dy), None


class _Inner(nn.Module):
    """The computation of a module whose `forward` is another by now, with the module's parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.run = module, module.forward

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.run(*inputs)


def recompute(model: nn.Module, *kinds: type[nn.Module], by: Recomputed | None = None) -> int:
    """Let every module of these classes keep only its inputs; returns how many modules that are.

        recompute(gpt, Block)                    whole blocks
        recompute(gpt, Attention)                selective
        recompute(gpt, Block, by=recomputed)     by your function, in place of torch.utils.checkpoint

    In place; names of parameters and state_dict stay what they are. Gradients are bit-equal, dropout included. torch
    stops the second forward at the last tensor that backward needs, so it costs less than a whole forward.
    What wraps the call of a module, such as the gather of ZeRO-3, happens once in backward: the second forward begins
    inside it.
    Raises:  ValueError if `model` has no such module, one inside another, or one with a batch norm, whose running
             statistics a second forward would change again.
    """
    modules = [module for module in model.modules() if isinstance(module, kinds)]
    names = " or ".join(kind.__name__ for kind in kinds)
    if not modules:
        raise ValueError(f"{type(model).__name__} has no {names}: nothing to recompute")
    for module in modules:
        if any(isinstance(inner, kinds) for inner in list(module.modules())[1:]):
            raise ValueError(f"{type(module).__name__} contains another {names}, which would be computed three times")
        if any(buffer.is_floating_point() for buffer in module.buffers()):
            raise ValueError(
                f"{type(module).__name__} has running statistics: a second forward would change them twice"
            )
        if by is None:
            forward = partial(checkpoint, module.forward, use_reentrant=False)
        else:
            inner, anchor = _Inner(module), torch.zeros(0, requires_grad=True)
            forward = partial(_applied, by, inner, anchor)
        module.forward = forward
    return len(modules)


def _applied(by: Recomputed, block: nn.Module, anchor: Tensor, x: Tensor) -> Tensor:
    return _Again.apply(by, block, x, anchor)


class Watch(TorchDispatchMode):
    """A watch over every operation of torch within it, in forward and in backward.

    flops:  of all of them, as torch.utils.flop_counter counts; most: bytes of what they have computed and is held.
    course: [(flops so far, bytes held)] after each.   keep: tensors that are not counted, such as parameters.
    """

    def __init__(self, *keep: Tensor) -> None:
        super().__init__()
        self.flops, self.most = 0, 0
        self.course: list[tuple[int, int]] = []
        self.known = {tensor.untyped_storage()._cdata for tensor in keep}
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.course.append((self.flops, held := self.held()))
        self.most = max(self.most, held)
        return out

    def held(self, *but: Tensor) -> int:
        """Return bytes of what was computed and still exists, without the tensors `but`."""
        self.storages = {key: (ref, n) for key, (ref, n) in self.storages.items() if not ref.expired()}
        left_out = {tensor.untyped_storage()._cdata for tensor in but}
        return sum(n for key, (_, n) in self.storages.items() if key not in left_out)


class Costs(dict[str, Watch]):
    """{what is recomputed: the Watch of a forward and a backward}; `lab.show` draws it."""


def compare(model: nn.Module, x: Tensor, choices: dict[str, Sequence[type[nn.Module] | Recomputed]]) -> Costs:
    """Watch one step of the model for each choice of what is recomputed; the loss is the sum of what it returns.

        compare(gpt, tokens, {"all kept": (), "attention again": (Attention,), "blocks again": (Block,)})

    Args:    choices: {name: classes, as of `recompute`, or none}; a function in place of a class is its `by`.
    """
    costs = Costs()
    for name, kinds in choices.items():
        mine = copy.deepcopy(model)
        functions = [kind for kind in kinds if not isinstance(kind, type)]
        if kinds:
            recompute(mine, *(kind for kind in kinds if isinstance(kind, type)), by=next(iter(functions), None))
        for param in mine.parameters():
            param.grad = torch.zeros_like(param)
        with Watch(x, *mine.parameters(), *(p.grad for p in mine.parameters() if p.grad is not None)) as watch:
            mine(x).sum().backward()
        costs[name] = watch
    return costs

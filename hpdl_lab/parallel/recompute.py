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

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(block: nn.Module, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Run a block so that of all that it computes only its input is kept for its backward.

        forward    x  --> [ block, without a graph ] --> y                   kept: x, and where random numbers were
        backward   dy --> [ block again, with its graph, and back ] --> dx   the graph is gone when this returns

    Dropout must draw the same numbers again, and what is drawn afterwards must not notice that it did.

    Args:    block: nn.Module, one tensor in, one tensor out; x: (b, ...), which may require a gradient.
    Returns: (y, backward). y: block(x), without a graph. backward(dy): adds to the .grad of the block's parameters what
             this x contributes, and returns dx, of the shape of x: bit by bit what autograd gives without
             recomputation. Other calls may come in between: two micro-batches are under way at once.
    FLOPs: 4/3 of those without recomputation.   Ref: Chen et al. 2016, arXiv:1604.06174.
    """
    ### BEGIN SOLUTION
    random = torch.get_rng_state()
    with torch.no_grad():
        y = block(x)

    def backward(dy: Tensor) -> Tensor:
        again = x.detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(random)
            out = block(again)
        out.backward(dy)
        return again.grad

    return y, backward
    ### END SOLUTION


def recompute(model: nn.Module, *kinds: type[nn.Module]) -> int:
    """Let every module of these classes keep only its inputs, by torch.utils.checkpoint; returns how many there are.

        recompute(gpt, Block)          whole blocks
        recompute(gpt, Attention)      selective

    In place; names of parameters and state_dict stay what they are. Gradients are bit-equal, dropout included. torch
    stops the second forward at the last tensor that backward needs, so it costs less than a whole forward.
    What wraps the call of a module, such as the gather of ZeRO-3, happens once in backward: the second forward begins
    inside it.
    Raises:  ValueError where `model` has no such module, or one inside another.
    """
    modules = [module for module in model.modules() if isinstance(module, kinds)]
    names = " or ".join(kind.__name__ for kind in kinds)
    if not modules:
        raise ValueError(f"{type(model).__name__} has no {names}: nothing to recompute")
    for module in modules:
        if any(isinstance(inner, kinds) for inner in list(module.modules())[1:]):
            raise ValueError(f"{type(module).__name__} contains another {names}, which would be computed three times")
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    return len(modules)

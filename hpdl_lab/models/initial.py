"""The parameters that a model starts with: a function of its structure and a seed, not of the machine or the dtype."""

from collections.abc import Callable

import torch


def drawn(make: Callable, seed: int, dtype: str, std: Callable) -> torch.nn.Module:
    """The model that `make()` builds, with every parameter drawn anew.

        matrices, kernels, tables      normal numbers with standard deviation std(name, shape), mean 0
        weights of norms               1
        biases                         0

    Drawn in float64 and then rounded, so that every dtype starts from the same network. torch's own random numbers stay
    as they were.

    Args:    make: () -> nn.Module; seed: int; dtype: "float32"; std: f(name, shape) -> float, name such as "0.weight".
    Returns: nn.Module.
    """
    with torch.random.fork_rng(devices=[]):
        model = make().to(getattr(torch, dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim > 1:
                numbers = torch.randn(param.shape, generator=generator, dtype=torch.float64)
                param.copy_(numbers * std(name, tuple(param.shape)))
            else:
                param.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def count(model: torch.nn.Module) -> int:
    """How many parameters a model has: a tensor that is used twice counts once."""
    return sum(param.numel() for param in model.parameters())

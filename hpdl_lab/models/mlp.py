"""The multi-layer perceptron: the smallest network that reads handwriting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from ..data.dataset import Dataset

__all__ = ["SIZES", "MLPConfig", "build", "count_parameters", "draw_parameters", "fields_of", "mlp"]

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True)
class MLPConfig:
    """Features in, units of each hidden layer, classes out."""

    features: int
    hidden: tuple[int, ...]
    classes: int


SIZES = {  # 300 and 100 hidden units are "LeNet-300-100" of LeCun et al. 1998, for 28 x 28 pixels: 266,610 parameters
    "tiny": MLPConfig(64, (128, 64), 10),
    "small": MLPConfig(64, (512, 256), 10),
    "paper": MLPConfig(784, (300, 100), 10),
}


def mlp(sizes: tuple[int, ...] = (64, 128, 64, 10), seed: int = 0, dtype: str = "float32") -> nn.Module:
    """Return linear layers with ReLU between them; the same seed gives the same parameters on every machine.

        x (b, 64) -> linear, relu (b, 128) -> linear, relu (b, 64) -> linear (b, 10) = logits

    Args:    sizes: features in, of each hidden layer, and out; seed, dtype: of the initial parameters.
    Returns: nn.Sequential with sum of (in + 1) * out parameters: 17,226 for (64, 128, 64, 10).
    """
    if len(sizes) < 2:
        raise ValueError(f"a network needs at least an input and an output size, got {tuple(sizes)}")
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random numbers as they were
        torch.manual_seed(seed)
        for n_in, n_out in zip(sizes, sizes[1:], strict=False):
            # Drawn in float64 and then rounded, so that every dtype starts from the same network.
            layers += [nn.Linear(n_in, n_out, dtype=torch.float64), nn.ReLU()]
    return nn.Sequential(*layers[:-1]).to(getattr(torch, dtype))


def build(config: MLPConfig, seed: int = 0, dtype: str = "float32") -> nn.Module:
    """Return the same network by the names of its sizes."""
    return mlp((config.features, *config.hidden, config.classes), seed, dtype)


def fields_of(data: Dataset) -> dict[str, int]:
    """Return the fields of a network that reads these rows, (n, features)."""
    return {"features": data.train_x.shape[1], "classes": data.classes}


def draw_parameters(
    make: Callable[[], ModelT], seed: int, dtype: str, std: Callable[[str, tuple[int, ...]], float]
) -> ModelT:
    """Return the model that `make()` builds, with every parameter drawn anew.

        matrices, kernels, tables      normal numbers with standard deviation std(name, shape), mean 0
        weights of norms               1
        biases                         0

    Drawn in float64 and then rounded, so that every dtype starts from the same network. torch's own random numbers stay
    as they were.

    Args:    std: f(name, shape), with a name such as "0.weight".
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


def count_parameters(model: torch.nn.Module) -> int:
    """Return the number of parameters of a model: a tensor that is used twice counts once."""
    return sum(param.numel() for param in model.parameters())

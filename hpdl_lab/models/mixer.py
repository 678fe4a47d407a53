"""MLP-Mixer: patches of an image, mixed by two small networks in turn, across positions and across features.

Ref: Tolstikhin et al. 2021, "MLP-Mixer: An all-MLP Architecture for Vision", arXiv:2105.01601. Without dropout, so that
one rank and many take the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from . import mlp as initial
from .transformer import EPSILON, std_of

if TYPE_CHECKING:
    from torch import Tensor

    from ..data.dataset import Dataset


@dataclass(frozen=True)
class MixerConfig:
    """The sizes of a Mixer: sides of images and patches in pixels; hidden units across positions and features."""

    image: int
    patch: int
    channels: int
    classes: int
    layers: int
    width: int
    across_positions: int
    across_features: int


SIZES = {  # "Mixer-B/16": 59,880,472 parameters for 1,000 classes
    "tiny": MixerConfig(8, 2, 1, 10, layers=2, width=32, across_positions=16, across_features=64),
    "small": MixerConfig(32, 4, 3, 10, layers=6, width=192, across_positions=96, across_features=768),
    "paper": MixerConfig(224, 16, 3, 1000, layers=12, width=768, across_positions=384, across_features=3072),
}


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class MixerBlock(nn.Module):
    """x + mix(norm(x)) across the s positions of each feature, then across the d features of each position.

    2 s hs + hs + s + 2 d hd + hd + d + 4 d parameters, for hs and hd hidden units.
    """

    def __init__(self, positions: int, config: MixerConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width, EPSILON), nn.LayerNorm(config.width, EPSILON)
        self.positions = _mlp(positions, config.across_positions)
        self.mlp = _mlp(config.width, config.across_features)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(self.norm1(x).transpose(1, 2)).transpose(1, 2)  # (b, s, d) -> (b, d, s) -> (b, s, d)
        return x + self.mlp(self.norm2(x))  # (b, s, d)


class Mixer(nn.Module):
    """Images (b, channels, image, image) -> logits (b, classes), the mean over positions; each position is a patch.

    (c patch^2 + 1) d + 2 d + (d + 1) classes parameters, for c channels, and the blocks'.
    """

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        image, patch, width = config.image, config.patch, config.width
        if image % patch:
            raise ValueError(f"an image of {image} x {image} pixels cannot be cut into patches of {patch} x {patch}")
        self.shape = (config.channels, image, image)
        self.patches = nn.Conv2d(config.channels, width, patch, stride=patch)
        self.blocks = nn.Sequential(*[MixerBlock((image // patch) ** 2, config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(width, EPSILON)
        self.head = nn.Linear(width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[1:]) != self.shape:
            raise ValueError(f"this mixer reads images of shape {self.shape}, got {tuple(images.shape[1:])}")
        x = self.patches(images).flatten(2).transpose(1, 2)  # (b, c, i, i) -> (b, d, i/p, i/p) -> (b, s, d)
        return self.head(self.norm(self.blocks(x)).mean(1))  # (b, d) @ (d, classes) = (b, classes)


def build(config: MixerConfig, seed: int = 0, dtype: str = "float32") -> nn.Module:
    """Return a Mixer; the same seed gives the same parameters on every machine.

    Raises:  ValueError if the patches do not tile the image.
    """
    return initial.draw_parameters(lambda: Mixer(config), seed, dtype, std_of(config.layers, config.width))


def fields_of(data: Dataset) -> dict[str, int]:
    """Return the fields of a Mixer that reads these images, (n, c, h, h). Raises ValueError if they are not square."""
    _, channels, height, wide = data.train_x.shape
    if height != wide:
        raise ValueError(f"mixer reads square images, got {height} x {wide} pixels: cnn reads any")
    return {"image": height, "channels": channels, "classes": data.classes}

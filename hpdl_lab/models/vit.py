"""ViT: an image is cut into patches, and a transformer reads them as if they were words.

Ref: Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words", arXiv:2010.11929. Without dropout, so that one rank and
many take the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import mlp as initial
from .transformer import EPSILON, Block, check_heads, std_of

if TYPE_CHECKING:
    from ..data.dataset import Dataset


__all__ = ["SIZES", "ViT", "ViTConfig", "build", "fields_of"]


@dataclass(frozen=True)
class ViTConfig:
    """The sizes of a ViT: sides of images and patches in pixels; fields with a default are for published models."""

    image: int
    patch: int
    channels: int
    classes: int
    layers: int
    heads: int
    width: int
    hidden: int | None = None
    epsilon: float = EPSILON
    gelu: str = "tanh"
    qkv_bias: bool = True


SIZES = {  # 12 layers of width 768 and patches of 16 x 16 are "ViT-B/16": 86,567,656 parameters for 1,000 classes
    "tiny": ViTConfig(image=8, patch=2, channels=1, classes=10, layers=2, heads=2, width=32),
    "small": ViTConfig(image=32, patch=4, channels=3, classes=10, layers=6, heads=3, width=192),
    "paper": ViTConfig(image=224, patch=16, channels=3, classes=1000, layers=12, heads=12, width=768),
}


class ViT(nn.Module):
    """Images (b, channels, image, image) -> logits (b, classes).

    (image / patch)^2 patches and one more position, which sees them all and answers, make s positions of width d:
    (c patch^2 + 1) d + (1 + s) d + layers (12 d^2 + 13 d) + 2 d + (d + 1) classes parameters, for c channels.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        image, patch, channels, heads, width = config.image, config.patch, config.channels, config.heads, config.width
        check_heads(width, heads)
        if patch < 1 or image % patch:
            raise ValueError(f"an image of {image} x {image} pixels cannot be cut into patches of {patch} x {patch}")
        self.shape = (channels, image, image)
        s = (image // patch) ** 2 + 1
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)  # one linear layer, applied to every patch
        self.answer = nn.Parameter(torch.zeros(1, 1, width))  # at first, of the position that answers
        self.positions = nn.Parameter(torch.zeros(1, s, width))
        published = config.hidden, config.epsilon, config.gelu, config.qkv_bias
        self.blocks = nn.Sequential(*[Block(width, heads, False, *published) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(width, config.epsilon)
        self.head = nn.Linear(width, config.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if tuple(images.shape[1:]) != self.shape:
            raise ValueError(f"this vit reads images of shape {self.shape}, got {tuple(images.shape[1:])}")
        x = self.patches(images).flatten(2).transpose(1, 2)  # (b, c, i, i) -> (b, d, i/p, i/p) -> (b, s - 1, d)
        x = torch.cat([self.answer.expand(len(x), -1, -1), x], dim=1)  # (b, s, d)
        x = self.norm(self.blocks(x + self.positions))  # (b, s, d)
        return self.head(x[:, 0])  # (b, d) @ (d, classes) = (b, classes)


def build(config: ViTConfig, seed: int = 0, dtype: str = "float32") -> nn.Module:
    """Return a ViT; the same seed gives the same parameters on every machine.

    Raises:  ValueError if the patches do not tile the image, or the heads do not divide the width.
    """
    return initial.draw_parameters(lambda: ViT(config), seed, dtype, std_of(config.layers, config.width))


def fields_of(data: Dataset) -> dict[str, int]:
    """Return the fields of a ViT that reads these images, (n, c, h, h). Raises ValueError if they are not square."""
    _, channels, height, wide = data.train_x.shape
    if height != wide:
        raise ValueError(f"vit reads square images, got {height} x {wide} pixels: cnn reads any")
    return {"image": height, "channels": channels, "classes": data.classes}

"""A small residual network for images: stages of blocks, and each block adds a correction to its input.

Ref: He et al. 2015, "Deep Residual Learning for Image Recognition", arXiv:1512.03385, section 4.2 (CIFAR-10).

The paper uses batch norm, with statistics over the batch, and a rank has only its shard of the batch. Left alone, four
ranks with 32 images each compute another function than one rank with 128, and data parallelism is no longer one big
batch. So the norm here is by default over groups of channels of one image (Wu & He 2018, arXiv:1803.08494), which is
the same on any number of ranks. norm="batch" is the paper's, with statistics of the global batch: see batch_norm.py,
and its cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.functional import pad, relu

from . import mlp as initial
from .batch_norm import BatchNorm

if TYPE_CHECKING:
    from torch import Tensor

    from ..data.dataset import Dataset


__all__ = ["CNN", "NORMS", "SIZES", "Block", "CNNConfig", "build", "fields_of"]


@dataclass(frozen=True)
class CNNConfig:
    """The sizes of a CNN. widths: channels of each stage; blocks: in each of them; norm: one of NORMS."""

    channels: int
    classes: int
    widths: tuple[int, ...]
    blocks: int
    norm: str


SIZES = {  # 3 blocks in each of 3 stages are "ResNet-20": 269,722 parameters, "0.27M" in the paper's table 6
    "tiny": CNNConfig(1, 10, (8, 16), 1, "group"),
    "small": CNNConfig(3, 10, (16, 32, 64), 1, "group"),
    "paper": CNNConfig(3, 10, (16, 32, 64), 3, "group"),
}
GROUPS = 4
NORMS: dict[str, Callable[[int], nn.Module]] = {"group": lambda width: nn.GroupNorm(GROUPS, width), "batch": BatchNorm}


class Block(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))): two 3 x 3 convolutions; `stride` 2 halves the image.

    9 w_in w + 9 w^2 + 4 w parameters. The shortcut has none: it drops pixels and adds channels of zeros ("option A").
    """

    def __init__(self, width_in: int, width: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stride, self.more = stride, width - width_in
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)

    def forward(self, x: Tensor) -> Tensor:
        y = relu(self.norm1(self.conv1(x)))  # (b, w_in, h, h) -> (b, w, h/stride, h/stride)
        y = self.norm2(self.conv2(y))  # (b, w, h/stride, h/stride)
        x = x[:, :, :: self.stride, :: self.stride]  # (b, w_in, h/stride, h/stride)
        return relu(pad(x, (0, 0, 0, 0, 0, self.more)) + y)  # zeros behind the last channel: (b, w, ...)


class CNN(nn.Module):
    """Images (b, channels, h, w) of any size -> logits (b, classes).

    A convolution, then stages of `blocks` blocks; every stage but the first halves the image and has the next width.
    """

    def __init__(self, config: CNNConfig) -> None:
        super().__init__()
        widths, norm = tuple(config.widths), config.norm
        if norm not in NORMS:
            raise ValueError(f"norm={norm!r}: one of {', '.join(NORMS)} is needed")
        if not widths:
            raise ValueError("a cnn needs the width of at least one stage, such as widths=(8,)")
        if norm == "group" and any(width % GROUPS for width in widths):
            raise ValueError(f"widths of {widths} cannot be cut into {GROUPS} groups of channels: give multiples of it")
        make = NORMS[norm]
        self.conv = nn.Conv2d(config.channels, widths[0], 3, padding=1, bias=False)
        self.norm = make(widths[0])
        stages, width_in = [], widths[0]
        for i, width in enumerate(widths):
            for j in range(config.blocks):
                stages.append(Block(width_in, width, 2 if i and not j else 1, make))
                width_in = width
        self.blocks = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = relu(self.norm(self.conv(images)))  # (b, c, h, w) -> (b, widths[0], h, w)
        x = self.blocks(x)  # (b, widths[-1], h / 2^(stages - 1), ...)
        return self.head(x.mean((2, 3)))  # (b, widths[-1]) @ (widths[-1], classes) = (b, classes)


def build(config: CNNConfig, seed: int = 0, dtype: str = "float32") -> nn.Module:
    """Return a CNN; the same seed gives the same parameters on every machine.

    Raises:  ValueError for a norm that is none, or widths that GroupNorm cannot cut.
    """

    def std(name: str, shape: tuple[int, ...]) -> float:
        n_in = shape[1] * (shape[2] * shape[3] if len(shape) == 4 else 1)  # numbers that add up to an output
        return (2 / n_in) ** 0.5 if len(shape) == 4 else (1 / n_in) ** 0.5  # He et al. 2015, arXiv:1502.01852

    return initial.draw_parameters(lambda: CNN(config), seed, dtype, std)


def fields_of(data: Dataset) -> dict[str, int]:
    """Return the fields of a CNN that reads these images, (n, c, h, w)."""
    return {"channels": data.train_x.shape[1], "classes": data.classes}

"""The block that GPT and ViT are stacked from: attention between positions, then two linear layers at each position.

b sequences of s positions, d numbers wide; h heads of d / h numbers each.   Ref: Vaswani et al. 2017, arXiv:1706.03762.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from torch import nn

from .attention import Attend, AttentionModule, Causal, Full

if TYPE_CHECKING:
    from torch import Tensor

EPSILON = 1e-5  # of GPT-2's norms


class Attention(AttentionModule):
    """The weighted mean of the values of all positions, for each; `causal`: of positions up to its own.

    softmax(q k^T / sqrt(d / h)) v     for each head; 4 d^2 + 4 d parameters, 3 d less without `qkv_bias`
    """

    def __init__(self, width: int, heads: int, causal: bool, qkv_bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.attend: Attend = Causal() if causal else Full()
        self.qkv = nn.Linear(width, 3 * width, qkv_bias)  # query, key and value of each position, in one product
        self.out = nn.Linear(width, width)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        head = self.out.in_features // self.heads
        return self.heads, head, head

    def forward(self, x: Tensor) -> Tensor:
        return self.out(attend_qkv(self.attend, self.qkv(x), self.heads))  # (b, s, d) -> (b, s, 3d) -> (b, s, d)


def attend_qkv(attend: Attend, qkv: Tensor, heads: int) -> Tensor:
    """Return the attention of all heads, (b, s, d), of qkv (b, s, 3d): q of all heads, then k, then v."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # each (b, h, s, d/h)
    # (b, h, s, d/h) @ (b, h, d/h, s) = (b, h, s, s) weights; @ (b, h, s, d/h) = (b, h, s, d/h)
    return attend(q, k, v).transpose(1, 2).flatten(-2)  # (b, s, d)


class _SeparateAttention(AttentionModule):
    """The same attention with q, k and v as three layers, so that each of them can be sharded by its outputs.

    The number of heads follows from the width of q: with half of q's outputs a rank has half of the heads.
    """

    def __init__(self, whole: Attention) -> None:
        super().__init__()
        self.head, self.attend = whole.out.in_features // whole.heads, whole.attend
        width, bias = whole.out.in_features, whole.qkv.bias is not None
        self.q, self.k, self.v = layers = [nn.Linear(width, width, bias) for _ in range(3)]
        for name, packed in whole.qkv.named_parameters():
            for layer, part in zip(layers, packed.chunk(3), strict=True):
                setattr(layer, name, nn.Parameter(part.detach().clone()))
        self.out = whole.out

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return self.q.weight.shape[0] // self.head, self.head, self.head

    def forward(self, x: Tensor) -> Tensor:
        # (b, s, d) -> (b, s, d) -> (b, s, h, d/h) -> (b, h, s, d/h)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))  # (b, s, d)


def separate_qkv(model: nn.Module) -> nn.Module:
    """Make three layers of every q, k, v of a GPT or ViT, in place; returns the model, which computes the same."""
    for module in [*model.modules()]:
        if isinstance(module, Block):
            module.attention = _SeparateAttention(cast("Attention", module.attention))
    return model


class PreNorm(nn.Module):
    """A block x + attention(norm(x)), then x + mlp(norm(x)): norms first, so that the sum runs from end to end.

    Ref: Radford et al. 2019 (GPT-2), section 2.3.
    """

    def __init__(self, norm1: nn.Module, attention: nn.Module, norm2: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = norm1, attention, norm2, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))  # (b, s, d)
        return x + self.mlp(self.norm2(x))  # (b, s, d)


class Block(PreNorm):
    """The block of GPT and ViT: 12 d^2 + 13 d parameters.

    hidden: by default 4 d; gelu: "tanh" for GPT-2's approximation, "none" for the exact one.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        causal: bool,
        hidden: int | None = None,
        epsilon: float = EPSILON,
        gelu: str = "tanh",
        qkv_bias: bool = True,
    ) -> None:
        hidden = hidden or 4 * width
        mlp = nn.Sequential(
            nn.Linear(width, hidden),  # (b, s, d) -> (b, s, 4d)
            nn.GELU(gelu),
            nn.Linear(hidden, width),  # (b, s, 4d) -> (b, s, d)
        )
        norm1, norm2 = nn.LayerNorm(width, epsilon), nn.LayerNorm(width, epsilon)
        super().__init__(norm1, Attention(width, heads, causal, qkv_bias), norm2, mlp)


def check_heads(width: int, heads: int) -> None:
    """Raise ValueError unless the heads share the width equally."""
    if heads < 1 or width % heads:
        raise ValueError(f"{heads} heads cannot share a width of {width}: it must be a multiple of the heads")


def std_of(layers: int, width: int) -> Callable[[str, tuple[int, ...]], float]:
    """Return the standard deviation of the initial parameters of a transformer, for mlp.draw_parameters.

    0.02 for the 768 of the papers and more for a smaller width, by its square root, so that a layer's output stays as
    large; divided by sqrt(2 layers) in the two layers of a block that add to x, so that x does not grow with depth.
    """

    def std(name: str, shape: tuple[int, ...]) -> float:
        adds = name.endswith(("attention.out.weight", "mlp.2.weight", "down", "down.weight"))
        return 0.02 * (768 / width / (2 * layers if adds else 1)) ** 0.5

    return std

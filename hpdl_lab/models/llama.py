"""LLaMA: GPT's decoder with RMSNorm, rotary positions, grouped queries and SwiGLU; Llama 3 8B in the size "paper".

Ref: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024 (Llama 3), arXiv:2407.21783. RMSNorm: Zhang &
Sennrich 2019, arXiv:1910.07467; rotary positions: Su et al. 2021, arXiv:2104.09864; grouped queries: Ainslie et al.
2023, arXiv:2305.13245; SwiGLU: Shazeer 2020, arXiv:2002.05202.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import mlp as initial
from .attention import Attend, AttentionModule, Causal, require_groups
from .experts import SwiGLU
from .gpt import fields_of, require_window
from .transformer import PreNorm, check_heads, std_of

__all__ = ["SIZES", "Decoder", "Llama", "Rotary", "Stretch", "build", "fields_of"]

SIZES = {  # 32 layers of width 4,096 are Llama 3 8B: 8,030,261,248 parameters
    "tiny": {
        "vocabulary": 80, "block": 64, "layers": 2, "heads": 4, "kv_heads": 2, "width": 64, "hidden": 128,
        "theta": 500_000,
    },
    "small": {
        "vocabulary": 80, "block": 128, "layers": 6, "heads": 6, "kv_heads": 2, "width": 192, "hidden": 512,
        "theta": 500_000,
    },
    "paper": {
        "vocabulary": 128_256, "block": 8192, "layers": 32, "heads": 32, "kv_heads": 8, "width": 4096, "hidden": 14_336,
        "theta": 500_000,
    },
}  # fmt: skip
EPSILON = 1e-5


class Stretch(NamedTuple):
    """The rule by which Llama 3.1 reads more positions than the `original` ones of its training.

    Pairs that turn slowly turn yet slower:

        turns within the original positions    fewer than low ..................... more than high
        speed times                            1 / factor      linear in between    1

    Ref: Grattafiori et al. 2024, arXiv:2407.21783, section 3.4.2; the rule is from Meta's llama-models.
    """

    factor: float
    low: float
    high: float
    original: int

    def slowed(self, speed: Tensor) -> Tensor:
        """Return the slowed speed of each pair per position. speed: (n/2,)."""
        turns = self.original * speed / (2 * math.pi)
        share = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return speed * (share + (1 - share) / self.factor)


class Rotary(nn.Module):
    """Rotary positions: each pair of numbers of a query or key is turned by an angle that grows with its position.

    Pair i of n/2 turns by theta^(-2i/n) per position: then q k depends on the distance of the two, not on their places.

    block: positions 0 to block - 1; neighbors: number 2i is paired with 2i + 1 (DeepSeek), else i with i + n/2 (LLaMA).
    """

    def __init__(
        self, block: int, n: int, theta: float, neighbors: bool = False, stretch: Stretch | None = None
    ) -> None:
        super().__init__()
        if n % 2:
            raise ValueError(f"rotary positions turn pairs of numbers, and a head of {n} has an odd number of them")
        self.neighbors = neighbors
        speed = theta ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)  # (n/2,)
        speed = stretch.slowed(speed) if stretch else speed
        angles = torch.arange(block, dtype=torch.float64).unsqueeze(1) * speed  # (block, n/2)
        self.register_buffer("table", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """Return x, (b, h, s, n), turned by its places: (s,) or (b, s) int64."""
        cos, sin = self.table[:, places].unsqueeze(-3)  # each (1, s, n/2) or (b, 1, s, n/2)
        one, two = (x[..., ::2], x[..., 1::2]) if self.neighbors else x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Attention(AttentionModule):
    """GPT's attention with h_kv keys and values for h queries, and both are turned by their positions.

    (2 h + 2 h_kv) n d parameters, for heads of n = `head` numbers; and (h + 2 h_kv) n + d with biases.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, rotary: Rotary, head: int | None = None, bias: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, head or width // heads
        self.attend: Attend = Causal()
        self.rotary = rotary
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head, bias)
        self.out = nn.Linear(heads * self.head, width, bias)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return self.kv_heads, self.head, self.head

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head)).transpose(1, 2)  # (b, s, d) -> (b, h + 2 h_kv, s, n)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
        turned = self.rotary(qk, self.attend.positions(x.shape[1], x.device))
        q, k = turned.split([self.heads, self.kv_heads], 1)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))  # (b, h, s, n) -> (b, s, h n) -> (b, s, d)


class Decoder(nn.Module):
    """Tokens (b, s) int64, s <= block -> logits (b, s, vocabulary) of the token that follows each of them.

    tied: the last layer's weight is the token embedding's: one parameter, which has a gradient from both ends.
    """

    def __init__(
        self,
        vocabulary: int,
        block: int,
        width: int,
        blocks: Sequence[nn.Module],
        epsilon: float,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.block = block
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.RMSNorm(width, epsilon)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.tied = tied
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.blocks(self.embed(tokens)))

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first block, (b, s, d), of tokens (b, s)."""
        parts = next((m.attend.parts for m in self.modules() if isinstance(m, AttentionModule)), 1)
        require_window(type(self).__name__.lower(), tokens, self.block, parts)
        return self.tokens(tokens)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits, (b, s, V), of the last block's output (b, s, d)."""
        return self.head(self.norm(x))  # (b, s, d) @ (d, V) = (b, s, V)


class Llama(Decoder):
    """2 V d + layers ((2 + 2 h_kv/h) d^2 + 3 d hidden + 2 d) + d parameters, for a vocabulary of V and width d.

    Fields that follow `theta` are for published models. head: numbers of a head, by default d / h; bias: of attention;
    mlp_bias: of the other layers of a block; tied: V d parameters less, see Decoder.
    """

    def __init__(
        self,
        vocabulary: int,
        block: int,
        layers: int,
        heads: int,
        kv_heads: int,
        width: int,
        hidden: int,
        theta: float,
        head: int | None = None,
        stretch: Stretch | None = None,
        epsilon: float = EPSILON,
        bias: bool = False,
        mlp_bias: bool = False,
        tied: bool = False,
    ) -> None:
        if head is None:
            check_heads(width, heads)
            head = width // heads
        require_groups(heads, kv_heads)
        rotary = Rotary(block, head, theta, stretch=stretch)  # one table for all layers
        blocks = [
            PreNorm(
                nn.RMSNorm(width, epsilon),
                Attention(width, heads, kv_heads, rotary, head, bias),
                nn.RMSNorm(width, epsilon),
                SwiGLU(width, hidden, mlp_bias),
            )
            for _ in range(layers)
        ]
        super().__init__(vocabulary, block, width, blocks, epsilon, tied)


def build(*, seed: int = 0, dtype: str = "float32", **fields: Any) -> nn.Module:
    """Return a LLaMA; the same seed gives the same parameters on every machine.

    Raises:  ValueError if the heads do not divide the width into even parts, or the key heads the heads.
    """
    return initial.drawn(lambda: Llama(**fields), seed, dtype, std_of(fields["layers"], fields["width"]))

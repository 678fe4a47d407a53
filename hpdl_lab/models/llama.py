"""LLaMA: GPT's decoder with RMSNorm, rotary positions, grouped queries and SwiGLU; Llama 3 8B in the size "paper".

Ref: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024 (Llama 3), arXiv:2407.21783. RMSNorm: Zhang &
Sennrich 2019, arXiv:1910.07467; rotary positions: Su et al. 2021, arXiv:2104.09864; grouped queries: Ainslie et al.
2023, arXiv:2305.13245; SwiGLU: Shazeer 2020, arXiv:2002.05202.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import mlp as initial
from .attention import Attend, AttentionModule, Causal, require_groups
from .experts import SwiGLU
from .gpt import fields_of, require_window
from .transformer import PreNorm, check_heads, std_of

__all__ = ["SIZES", "Decoder", "Llama", "Rotary", "build", "fields_of"]

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


class Rotary(nn.Module):
    """Turn each pair of numbers of a query or key by an angle that grows with its position, pair i of n/2 by
    theta^(-2i/n) per position: then q k depends on how far apart the two are, and not on where they are.

    block: positions 0 to block - 1; neighbors: number 2i is paired with 2i + 1 (DeepSeek), else i with i + n/2 (LLaMA).
    """

    def __init__(self, block: int, n: int, theta: float, neighbors: bool = False) -> None:
        super().__init__()
        if n % 2:
            raise ValueError(f"rotary positions turn pairs of numbers, and a head of {n} has an odd number of them")
        self.neighbors = neighbors
        speed = theta ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)  # (n/2,)
        angles = torch.arange(block, dtype=torch.float64).unsqueeze(1) * speed  # (block, n/2)
        self.register_buffer("table", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """x: (b, h, s, n), places: (s,) or (b, s) int64 -> (b, h, s, n)."""
        cos, sin = self.table[:, places].unsqueeze(-3)  # each (1, s, n/2) or (b, 1, s, n/2)
        one, two = (x[..., ::2], x[..., 1::2]) if self.neighbors else x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Attention(AttentionModule):
    """GPT's attention, in which h_kv keys and values serve h queries, and both are turned by their positions.

    (2 h + 2 h_kv) n d parameters, for heads of n = d / h numbers.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.attend: Attend = Causal()
        self.rotary = rotary
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)

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
    """Tokens (b, s) int64, s <= block -> logits (b, s, vocabulary) of the token that follows each of them."""

    def __init__(self, vocabulary: int, block: int, width: int, blocks: Sequence[nn.Module], epsilon: float) -> None:
        super().__init__()
        self.block = block
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.RMSNorm(width, epsilon)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.blocks(self.embed(tokens)))

    def embed(self, tokens: Tensor) -> Tensor:
        """What the first block is given: (b, s) -> (b, s, d)."""
        parts = next((m.attend.parts for m in self.modules() if isinstance(m, AttentionModule)), 1)
        require_window(type(self).__name__.lower(), tokens, self.block, parts)
        return self.tokens(tokens)

    def logits(self, x: Tensor) -> Tensor:
        """What the last block's output says: (b, s, d) -> (b, s, V)."""
        return self.head(self.norm(x))  # (b, s, d) @ (d, V) = (b, s, V)


class Llama(Decoder):
    """2 V d + layers ((2 + 2 h_kv/h) d^2 + 3 d hidden + 2 d) + d parameters, for a vocabulary of V and width d."""

    def __init__(
        self, vocabulary: int, block: int, layers: int, heads: int, kv_heads: int, width: int, hidden: int, theta: int
    ) -> None:
        check_heads(width, heads)
        require_groups(heads, kv_heads)
        rotary = Rotary(block, width // heads, theta)  # one table for all layers
        blocks = [
            PreNorm(
                nn.RMSNorm(width, EPSILON),
                Attention(width, heads, kv_heads, rotary),
                nn.RMSNorm(width, EPSILON),
                SwiGLU(width, hidden),
            )
            for _ in range(layers)
        ]
        super().__init__(vocabulary, block, width, blocks, EPSILON)


def build(*, seed: int = 0, dtype: str = "float32", **fields: Any) -> nn.Module:
    """A LLaMA; the same parameters wherever it is built with the same seed.

    Raises:  ValueError if the heads do not divide the width into even parts, or the key heads the heads.
    """
    return initial.drawn(lambda: Llama(**fields), seed, dtype, std_of(fields["layers"], fields["width"]))

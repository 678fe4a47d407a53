"""LLaMA: GPT's decoder with RMSNorm, rotary positions, grouped queries and SwiGLU; Llama 3 8B in the size "paper".

Ref: Touvron et al. 2023, arXiv:2302.13971; Grattafiori et al. 2024 (Llama 3), arXiv:2407.21783. RMSNorm: Zhang &
Sennrich 2019, arXiv:1910.07467; rotary positions: Su et al. 2021, arXiv:2104.09864; grouped queries: Ainslie et al.
2023, arXiv:2305.13245; SwiGLU: Shazeer 2020, arXiv:2002.05202.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from . import mlp as initial
from .attention import Attend, AttentionModule, Causal, require_groups
from .experts import SwiGLU
from .gpt import fields_of, require_window
from .transformer import PreNorm, check_heads, std_of

__all__ = ["SIZES", "Decoder", "Llama", "LlamaConfig", "RopeScaling", "Rotary", "build", "fields_of"]

EPSILON = 1e-5


class RopeScaling(NamedTuple):
    """The rule by which Llama 3.1 reads more positions than the original ones of its training ("llama3").

    Pairs that rotate slowly rotate yet slower:

        rotations within the original positions    fewer than low .................... more than high
        frequency times                            1 / factor      linear in between    1

    Ref: Grattafiori et al. 2024, arXiv:2407.21783, section 3.4.2; the rule is from Meta's llama-models.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scaled(self, frequency: Tensor) -> Tensor:
        """Return the scaled frequency of each pair, radians per position. frequency: (n/2,)."""
        rotations = self.original_max_position_embeddings * frequency / (2 * math.pi)
        share = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = share.clamp(0, 1)
        return frequency * (share + (1 - share) / self.factor)


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of a LLaMA: GPT's words, others as transformers calls them; defaults are for published models.

    kv_heads: of keys and values; hidden: units of a SwiGLU; head_dim: numbers of a head, by default width / heads.
    """

    vocabulary: int
    block: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden: int
    rope_theta: float
    head_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = EPSILON
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False


SIZES = {  # 32 layers of width 4,096 are Llama 3 8B: 8,030,261,248 parameters
    "tiny": LlamaConfig(80, 64, layers=2, heads=4, kv_heads=2, width=64, hidden=128, rope_theta=500_000),
    "small": LlamaConfig(80, 128, layers=6, heads=6, kv_heads=2, width=192, hidden=512, rope_theta=500_000),
    "paper": LlamaConfig(128_256, 8192, layers=32, heads=32, kv_heads=8, width=4096, hidden=14_336, rope_theta=500_000),
}


class Rotary(nn.Module):
    """Rotary positions: each pair of numbers of a query or key is rotated by an angle that grows with its position.

    Pair i of n/2 rotates by theta^(-2i/n) per position: then q k depends on the distance of the two positions only.

    block: positions 0 to block - 1; interleave: pairs are 2i and 2i + 1 (DeepSeek), else i and i + n/2 (LLaMA).
    """

    def __init__(
        self, block: int, n: int, theta: float, interleave: bool = False, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        if n % 2:
            raise ValueError(f"rotary positions turn pairs of numbers, and a head of {n} has an odd number of them")
        self.interleave = interleave
        frequency = theta ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)  # (n/2,)
        frequency = scaling.scaled(frequency) if scaling else frequency
        angles = torch.arange(block, dtype=torch.float64).unsqueeze(1) * frequency  # (block, n/2)
        self.register_buffer("table", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x, (b, h, s, n), rotated by its positions: (s,) or (b, s) int64."""
        cos, sin = self.table[:, positions].unsqueeze(-3)  # each (1, s, n/2) or (b, 1, s, n/2)
        one, two = (x[..., ::2], x[..., 1::2]) if self.interleave else x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class Attention(AttentionModule):
    """GPT's attention with h_kv keys and values for h queries, and queries and keys are rotated by their positions.

    (2 h + 2 h_kv) n d parameters, for heads of n = `head_dim` numbers; and (h + 2 h_kv) n + d with biases.
    """

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.head_dim or config.width // config.heads
        self.attend: Attend = Causal()
        self.rotary = rotary
        self.qkv = nn.Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_dim, config.attention_bias)
        self.out = nn.Linear(self.heads * self.head_dim, config.width, config.attention_bias)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return self.kv_heads, self.head_dim, self.head_dim

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (b, s, d) -> (b, h + 2 h_kv, s, n)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], 1)
        rotated = self.rotary(qk, self.attend.positions(x.shape[1], x.device))
        q, k = rotated.split([self.heads, self.kv_heads], 1)
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

    With tie_word_embeddings V d parameters less, see Decoder.
    """

    def __init__(self, config: LlamaConfig) -> None:
        width, epsilon = config.width, config.rms_norm_eps
        if config.head_dim is None:
            check_heads(width, config.heads)
        require_groups(config.heads, config.kv_heads)
        head_dim = config.head_dim or width // config.heads
        rotary = Rotary(config.block, head_dim, config.rope_theta, scaling=config.rope_scaling)  # for all layers
        blocks = [
            PreNorm(
                nn.RMSNorm(width, epsilon),
                Attention(config, rotary),
                nn.RMSNorm(width, epsilon),
                SwiGLU(width, config.hidden, config.mlp_bias),
            )
            for _ in range(config.layers)
        ]
        super().__init__(config.vocabulary, config.block, width, blocks, epsilon, config.tie_word_embeddings)


def build(config: LlamaConfig, seed: int = 0, dtype: str = "float32") -> nn.Module:
    """Return a LLaMA; the same seed gives the same parameters on every machine.

    Raises:  ValueError if the heads do not divide the width into even parts, or the key heads the heads.
    """
    return initial.draw_parameters(lambda: Llama(config), seed, dtype, std_of(config.layers, config.width))

"""A GPT in plain torch, and windows of a text for it: what notebooks give to take home beside their scripts.

It is models/gpt.py without what a laboratory needs, and takes its weights.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention


class Attention(nn.Module):
    """Causal attention of several heads; q, k and v are one matrix."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (b, h, s, d/h)
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention between positions, then two linear layers at each position, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Windows (b, s + 1) of tokens -> the loss of predicting the last s of them."""

    def __init__(self, vocabulary: int, block: int = 64, layers: int = 2, heads: int = 4, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)  # the last layer as well

    def logits(self, tokens: Tensor) -> Tensor:
        """Return (b, s, vocabulary) for tokens (b, s)."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return linear(self.norm(self.blocks(x)), self.tokens.weight)

    def forward(self, windows: Tensor) -> Tensor:
        return cross_entropy(self.logits(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def windows_of(path: str, block: int = 64) -> tuple[Tensor, int]:
    """Return all windows of a file as numbers (n, block + 1) of its characters, and how many characters occur."""
    text = Path(path).read_text()
    letters = sorted(set(text))
    return torch.tensor([letters.index(c) for c in text]).unfold(0, block + 1, 1), len(letters)

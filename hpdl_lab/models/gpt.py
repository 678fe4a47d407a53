"""GPT-2: a decoder that computes, at every position of a text, the probability of each next token.

Ref: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Without dropout, so that one rank and
many take the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import nn
from torch.nn.functional import linear, softmax

from ..units import require_int, require_number
from . import mlp as initial
from .attention import AttentionModule, Causal
from .transformer import EPSILON, Block, check_heads, std_of


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT. block: positions that it reads at once; fields with a default are for published models."""

    vocabulary: int
    block: int
    layers: int
    heads: int
    width: int
    hidden: int | None = None
    epsilon: float = EPSILON
    gelu: str = "tanh"


SIZES = {  # 12 layers of width 768 are "GPT-2 small": 124,439,808 parameters
    "tiny": GPTConfig(vocabulary=80, block=64, layers=2, heads=2, width=64),
    "small": GPTConfig(vocabulary=80, block=128, layers=6, heads=6, width=192),
    "paper": GPTConfig(vocabulary=50257, block=1024, layers=12, heads=12, width=768),
}


if TYPE_CHECKING:
    from ..data.dataset import Dataset

    class LanguageModel(nn.Module):
        """A model that reads tokens and computes logits of the next ones, or a rank's part of one."""

        block: int
        tokens: nn.Embedding

        def embed(self, tokens: torch.Tensor) -> torch.Tensor: ...
        def blocks(self, x: torch.Tensor) -> torch.Tensor: ...
        def logits(self, x: torch.Tensor) -> torch.Tensor: ...


class GPT(nn.Module):
    """Tokens (b, s) int64, s <= block -> logits (b, s, vocabulary) of the token that follows each of them.

    V d + block d + layers (12 d^2 + 13 d) + 2 d parameters, for a vocabulary of V and width d. The token embedding
    is also the last layer (tied weights), so it has a gradient from both ends of the model.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, heads = config.width, config.heads
        check_heads(width, heads)
        self.block = config.block
        self.tokens = nn.Embedding(config.vocabulary, width)
        self.positions = nn.Embedding(config.block, width)
        published = config.hidden, config.epsilon, config.gelu
        self.blocks = nn.Sequential(*[Block(width, heads, True, *published) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(width, config.epsilon)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.logits(self.blocks(self.embed(tokens)))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the input of the first block, (b, s, d), of tokens (b, s)."""
        first = next((m.attend for m in self.modules() if isinstance(m, AttentionModule)), Causal())  # or no block
        require_window("gpt", tokens, self.block, first.parts)
        positions = first.positions(tokens.shape[1], tokens.device)  # (s,)
        return self.tokens(tokens) + self.positions(positions)  # (b, s, d) + (s, d) = (b, s, d)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, (b, s, V), of the last block's output (b, s, d)."""
        return linear(self.norm(x), self.tokens.weight)  # (b, s, d) @ (d, V) = (b, s, V)


def require_window(name: str, tokens: torch.Tensor, block: int, parts: int = 1) -> None:
    """Raise ValueError unless `tokens` are (b, s), one of `parts` of a sequence that is at most `block` long."""
    if len(tokens.shape) != 2:
        raise ValueError(f"a {name} reads tokens of shape (b, s), got {tuple(tokens.shape)}")
    s = tokens.shape[1] * parts
    if s > block:
        raise ValueError(f"this {name} reads {block} tokens at once, got {s}: build it with block={s}")


def build(config: GPTConfig, seed: int = 0, dtype: str = "float32") -> nn.Module:
    """Return a GPT; the same seed gives the same parameters on every machine.

    Raises:  ValueError if the heads do not divide the width.
    """
    return initial.draw_parameters(lambda: GPT(config), seed, dtype, std_of(config.layers, config.width))


def fields_of(data: Dataset) -> dict[str, int]:
    """Return the fields of a GPT that reads these windows of tokens, (n, block) int64."""
    return {"vocabulary": data.classes, "block": data.train_x.shape[1]}


@torch.no_grad()
def generate(model: nn.Module, tokens: torch.Tensor, n: int, temperature: float = 0.8, seed: int = 0) -> torch.Tensor:
    """Continue `tokens` by n more, each drawn with the model's probabilities of the next token.

    Args:    model: a GPT, which looks back at most model.block tokens; tokens: (s,) int64, s >= 1; n: at least 0.
             temperature: 1 draws with the model's own probabilities, less than 1 prefers the likely tokens, 0 always
             takes the likeliest (greedy). seed: of the draws; the same seed gives the same tokens.
    Returns: (s + n,) int64, which begins with `tokens`.
    Raises:  ValueError for no tokens at all, a negative n or a negative temperature.
    """
    require_int("n, a number of tokens,", n, 0)
    require_number("temperature", temperature, 0)
    if tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"generate continues tokens of shape (s,), s >= 1; got {tuple(tokens.shape)}")
    generator, block = torch.Generator().manual_seed(seed), cast("LanguageModel", model).block
    for _ in range(n):
        logits = model(tokens[None, -block:])[0, -1]  # (V,), of the token after the last one
        if temperature:
            following = torch.multinomial(softmax(logits / temperature, 0), 1, generator=generator)
        else:
            following = logits.argmax(0, keepdim=True)
        tokens = torch.cat([tokens, following])
    return tokens

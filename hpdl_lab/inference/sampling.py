"""The choice of the next token: the likeliest, or one that is drawn, with a generator for each request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..units import require_int, require_number


@dataclass(frozen=True)
class Sampling:
    """The rule by which a request chooses tokens.

    temperature: 0 takes the likeliest token (greedy), 1 draws with the model's own probabilities, less than 1 prefers
    likely tokens. top_k: draw among the k likeliest, 0: among all. top_p: draw among the likeliest that together have
    this probability (nucleus; Holtzman et al. 2019, arXiv:1904.09751). seed: of the draws, which depend neither on
    other requests nor on how tokens are batched.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, 0)
        require_int("top_k", self.top_k, 0)
        require_number("top_p", self.top_p, above=0, most=1)
        require_int("seed", self.seed)

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each token to be drawn, (..., V) float64, from logits (..., V)."""
        logits = logits.double()
        if not self.temperature:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # 0 is the largest, however small T is
        if self.top_k and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        p = logits.softmax(-1)
        if self.top_p < 1:
            likeliest, order = p.sort(-1, descending=True)
            before = likeliest.cumsum(-1) - likeliest  # of all likelier tokens; 0 for the likeliest, which stays
            p = p.masked_fill((before >= self.top_p).scatter(-1, order, before >= self.top_p), 0)
        return p / p.sum(-1, keepdim=True)


GREEDY = Sampling()


def draw(p: Tensor, generator: torch.Generator) -> int:
    """Return one token, with the probabilities p (V,)."""
    return int(torch.multinomial(p.cpu(), 1, generator=generator))

"""Speculative decoding: a small draft proposes tokens, and the model reads them all at once and keeps the first ones.

    draft    t1 t2 t3 t4          gamma = 4 small steps, one after the other
    model    p1 p2 p3 p4 p5       one step: its probabilities at each of these positions
    kept     t1 t2 x              t3 was rejected, and x is drawn in its place; if all are kept, one more is drawn of p5

A step of decoding reads all weights for each token; here it reads them once for several. The tokens are distributed
exactly as without a draft, and in greedy decoding they are the same.
Ref: Leviathan et al. 2022, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ..units import counted, require_int
from .cache import Chunk, PagedCache
from .engine import tokens_of
from .sampling import GREEDY, Sampling, draw

if TYPE_CHECKING:
    from ..models.gpt import LanguageModel


def expected_tokens(acceptance: float, gamma: int) -> float:
    """Predict how many tokens an iteration of speculative decoding yields on average.

    The model keeps the guesses before the first rejected guess, and adds one token.
    This token replaces the rejected guess, and all later guesses are dropped. If the
    model accepts all guesses, the added token comes after them.

        gamma = 3   ok  ok  ok        3 guesses are kept: 4 tokens
                    ok  no            1 guess is kept: 2 tokens
                    no                no guess is kept: 1 token

    Args:    acceptance: the probability, 0 to 1, that the model accepts a guess. This
             probability is the same for each guess, and independent of other guesses.
             gamma: tokens that the draft guesses in an iteration, at least 0.
    Returns: tokens per iteration, a number from 1 to gamma + 1. In an iteration the
             model runs once.
    Ref: Leviathan et al. 2022, arXiv:2211.17192, section 3.1.
    """
    ### BEGIN SOLUTION
    return sum(acceptance**kept for kept in range(gamma + 1))
    ### END SOLUTION


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Return the probability that a token drawn of q is kept if p is wanted: Σ min(p, q), (...), of (..., V) each."""
    return torch.minimum(p, q).sum(-1)


class CachedModel:
    """A request in a cache of its own; it reads new tokens, and may go back."""

    def __init__(self, model: nn.Module, page_size: int = 16) -> None:
        self.cache = PagedCache(model, -(-cast("LanguageModel", model).block // page_size), page_size)
        self.pages: list[int] = []
        self.num_computed_tokens = 0

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """Return logits (n, V) after each of the n last of `tokens`, which have not been read."""
        self.cache.pages.allocate(self.pages, self.num_computed_tokens, len(tokens))
        chunk = Chunk(tokens[self.num_computed_tokens :], self.num_computed_tokens, self.pages)
        self.num_computed_tokens = len(tokens)
        return self.cache.forward([chunk], every=True)

    def truncate(self, n: int) -> None:
        """Forget all but the first `n` tokens: the next ones are written over them."""
        self.num_computed_tokens = min(self.num_computed_tokens, n)


class Speculative:
    """The tokens that `model` would generate alone, in fewer of its steps; each request has caches of its own.

    draft: a smaller model of the same vocabulary; gamma: tokens that it proposes in an iteration.
    iterations, proposed, kept: so far; iterations include the one that reads the prompt.
    Raises:  ValueError if the vocabularies differ.
    """

    def __init__(self, model: nn.Module, draft: nn.Module, gamma: int = 4, page_size: int = 16) -> None:
        self.gamma = require_int("gamma, tokens that the draft proposes,", gamma, 1)
        ours, drafts = (cast("LanguageModel", m).tokens.num_embeddings for m in (model, draft))
        if ours != drafts:
            raise ValueError(f"the draft has a vocabulary of {counted(drafts, 'token')}, the model one of {ours:,}")
        self.model, self.draft, self.page_size = model, draft, page_size
        self.iterations = self.proposed = self.kept = 0

    def generate(
        self, prompt: Sequence[int], max_tokens: int = 16, sampling: Sampling = GREEDY, stop: Sequence[int] = ()
    ) -> Iterator[int]:
        """Yield the new tokens while they come.

        Raises:  as Engine.submit, for the context of either model.
        """
        models = self.model, self.draft
        tokens, _ = (tokens_of(model, prompt, max_tokens) for model in models)
        model, draft = (CachedModel(model, self.page_size) for model in models)
        end, generator = len(tokens) + max_tokens, sampling.generator()
        while len(tokens) < end:
            gamma = min(self.gamma, end - len(tokens) - 1)
            for token in self.iteration(tokens, gamma, sampling, generator, model, draft):
                tokens.append(token)
                yield token
                if token in stop:
                    return

    def iteration(
        self,
        tokens: list[int],
        gamma: int,
        sampling: Sampling,
        generator: torch.Generator,
        model: CachedModel,
        draft: CachedModel,
    ) -> list[int]:
        """Return between 1 and gamma + 1 tokens that follow `tokens`."""
        proposed, draft_probs = [*tokens], []
        for _ in range(gamma):
            draft_probs.append(sampling.probabilities(draft(proposed)[-1]))  # (V,), of the draft
            proposed.append(draw(draft_probs[-1], generator))
        target_probs = sampling.probabilities(model(proposed)[-gamma - 1 :])  # (gamma + 1, V), of the model
        new = proposed[len(tokens) :]
        kept = 0
        while kept < gamma and _accepts(target_probs[kept], draft_probs[kept], new[kept], generator):
            kept += 1
        rest = target_probs[kept] if kept == gamma else (target_probs[kept] - draft_probs[kept]).clamp(min=0)
        self.iterations, self.proposed, self.kept = self.iterations + 1, self.proposed + gamma, self.kept + kept
        for reader in (model, draft):
            reader.truncate(len(tokens) + kept)
        return [*new[:kept], draw(rest, generator)]


def _accepts(p: Tensor, q: Tensor, token: int, generator: torch.Generator) -> bool:
    """Return True if a token drawn of q is kept. It, or the one drawn in its place, is then distributed as p."""
    return float(torch.rand((), generator=generator, dtype=torch.float64)) * float(q[token]) < float(p[token])

"""The vocabulary on several ranks: the token embedding, the layer that names the next token, and its loss.

    V = 5 tokens, two ranks        rank 0: rows 0 1 2        rank 1: rows 3 4 and one of zeros (padding)

Both ends of a GPT use one table (V, d), for 50,257 tokens the largest tensor of GPT-2 small. Each rank has ceil(V/p)
of its rows: it looks up the tokens that it has and zeros for the others, and computes the logits of its tokens.
Ref: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from ...comm.base import Comm
from .cuts import padded_shares
from .linear import (
    all_gather_sequence,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_sequence,
    require_positions,
    summed,
)

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    class LossContext(FunctionCtx):
        """The state that forward of `_VocabularyLoss` leaves to its backward."""

        saved_tensors: tuple[Tensor, ...]


class VocabularyEmbedding(nn.Module):
    """This rank's rows of an nn.Embedding: tokens (b, s) int64, the same on every rank -> (b, s, d), the same.

    sequence: the result is this rank's positions, (b, s/p, d). longest: s at most, or None.
    Raises:  ValueError before the first message: a token that is none, too many positions, or p does not divide them.
    Steps: one all_reduce (sequence: reduce_scatter) of b s d elements forward; none (all_gather) backward.
    """

    def __init__(self, comm: Comm, whole: nn.Embedding, sequence: bool = False, longest: int | None = None) -> None:
        super().__init__()
        self.comm, self.sequence, self.longest = comm, sequence, longest
        self.num_embeddings = whole.num_embeddings
        self.cuts = {"weight": padded_shares(comm, whole.num_embeddings, 0)}
        self.weight = self.cuts["weight"].parameter_of(whole.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.longest is not None and tokens.shape[1] > self.longest:
            raise ValueError(f"this gpt reads {self.longest} tokens at once, got {tokens.shape[1]}")
        _require_tokens(tokens, self.num_embeddings)
        if self.sequence:
            require_positions(self.comm, tokens.shape[1])
        x = _found(tokens, self.weight, self.comm.rank)  # (b, s, d), zeros if another rank has the token
        return (reduce_scatter_sequence if self.sequence else reduce_from)(self.comm, x)


class VocabularyLinear(nn.Module):
    """x (b, s, d), the same on every rank, and the table's rows of this rank, (ceil(V/p), d) -> logits (b, s, V).

    sequence: x is this rank's positions, (b, s/p, d).
    whole: gather the logits of all ranks, b s V elements, for any loss of torch. Without it the result is this rank's
    (b, s, ceil(V/p)), for vocabulary_cross_entropy, which sends three numbers per position.
    """

    def __init__(self, comm: Comm, vocabulary: int, sequence: bool = False, whole: bool = True) -> None:
        super().__init__()
        self.comm, self.vocabulary, self.sequence, self.whole = comm, vocabulary, sequence, whole

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = (all_gather_sequence if self.sequence else copy_to)(self.comm, x)  # (b, s, d)
        logits = linear(x, table)  # (b, s, d) @ (d, V/p) = (b, s, V/p)
        return gather_from(self.comm, logits)[..., : self.vocabulary] if self.whole else logits


def _found(tokens: Tensor, weight: Tensor, rank: int) -> Tensor:
    """Return rows of this rank's part of a table, (n, d), for `tokens`; zeros for tokens that other ranks have."""
    mine = tokens - rank * len(weight)
    other = (mine < 0) | (mine >= len(weight))
    return embedding(mine.masked_fill(other, 0), weight).masked_fill(other.unsqueeze(-1), 0)


def vocabulary_cross_entropy(comm: Comm, logits: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    """Return the mean over positions of log(sum exp(logits)) - logits[target], if each rank has some of the logits.

        per position     max over ranks, then the sums of exp(logit - max) and of the target's logit: 3 numbers, not V

    Args:    logits: (..., ceil(V/p)), this rank's tokens; after the last of V there may be padding, which is ignored.
             targets: (...) int64, the same on every rank; vocabulary: V.
    Returns: scalar, the same on every rank: torch's cross_entropy of all logits. logits.grad needs no message.
    Raises:  ValueError if shapes do not fit or a target is no token, before the first message.
    Steps: one all_gather of n numbers and one all_reduce of 2n, for n positions; 0 backward.
    Ref: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    share = -(-vocabulary // comm.size)
    if logits.shape[:-1] != targets.shape or logits.shape[-1] != share:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} and targets of shape {tuple(targets.shape)} do not fit: for "
            f"{vocabulary} tokens on {comm.size} ranks logits are {(*targets.shape, share)}"
        )
    _require_tokens(targets, vocabulary)
    return _VocabularyLoss.apply(logits.reshape(-1, share), targets.reshape(-1), comm, vocabulary)


class _VocabularyLoss(torch.autograd.Function):
    """logits (n, V/p), targets (n,) -> their mean cross-entropy."""

    @staticmethod
    def forward(ctx: LossContext, logits: Tensor, targets: Tensor, comm: Comm, vocabulary: int) -> Tensor:
        n, share = logits.shape
        first = comm.rank * share
        padding = torch.arange(first, first + share, device=logits.device) >= vocabulary
        logits = logits.masked_fill(padding, -torch.inf)
        highest = comm.all_gather(logits.amax(1)).amax(0)  # (n,)
        shifted = logits - highest.unsqueeze(1)
        weights = shifted.exp()
        mine = targets - first
        other = (mine < 0) | (mine >= share)
        place = mine.masked_fill(other, 0).unsqueeze(1)  # (n, 1)
        found = shifted.gather(1, place).squeeze(1).masked_fill(other, 0)
        total, said = summed(comm, torch.stack([weights.sum(1), found]))
        share_of_target = torch.zeros_like(weights).scatter_(1, place, (~other).to(weights.dtype).unsqueeze(1))
        ctx.save_for_backward((weights / total.unsqueeze(1) - share_of_target) / n)
        return (total.log() - said).mean()

    @staticmethod
    def backward(ctx: LossContext, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyrefly: ignore[bad-override]
        (slope,) = ctx.saved_tensors
        return slope * grad, None, None, None


def _require_tokens(tokens: Tensor, vocabulary: int) -> None:
    """Raise ValueError unless all `tokens` are numbers of one of `vocabulary` tokens."""
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        low, high = int(tokens.min()), int(tokens.max())
        raise ValueError(f"tokens go from {low} to {high}, and a vocabulary of {vocabulary} from 0 to {vocabulary - 1}")

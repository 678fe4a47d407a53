"""The step of attention that models leave open, as `attend`, so that others can take its place.

    x -> q, k, v of this layer -> attend(q, k, v) -> out        q (b, h, s, d), k (b, h_kv, s, d), v (b, h_kv, s, d_v)

| attend                       | what a query sees                                                |
|------------------------------|------------------------------------------------------------------|
| Causal()                     | positions up to its own: GPT, LLaMA, DeepSeek                    |
| Full()                       | all positions: ViT                                               |
| parallel.context             | keys and values that other ranks hold                            |
| inference                    | keys and values that a cache has kept from earlier calls         |

    for attention in attentions_of(model):
        attention.attend = other

Ref: Ainslie et al. 2023 (grouped queries), arXiv:2305.13245.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Attend(Protocol):
    """A function of q, k and v that an attention module calls; a class of its own may inherit `positions`.

    parts: of a sequence; a model is given one of them, and others are on other ranks.
    """

    parts: int = 1

    def positions(self, s: int, device: torch.device) -> Tensor:
        """Return the places in their sequence of the s tokens of forward: (s,) or, per sequence, (b, s) int64."""
        return torch.arange(s, device=device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Return softmax(q k^T scale) v for each head, scale 1/sqrt(d) if it is None.

        Args:    q: (b, h, s, d), k: (b, h_kv, s, d), v: (b, h_kv, s, d_v): of the same s positions; h_kv divides h, and
                 each key head serves h/h_kv query heads that follow each other.
        Returns: (b, h, s, d_v).
        """
        ...


class AttentionModule(nn.Module):
    """A module with an `attend`, set by its constructor and free to be replaced.

    cache_shape: (key heads, d_k, d_v): a cache keeps d_k + d_v numbers per token and key head of this module on this
    rank; d_v = 0: v is the beginning of k, and nothing else is kept.
    """

    attend: Attend

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        raise NotImplementedError


def attentions_of(model: nn.Module) -> list[AttentionModule]:
    """Return the attention modules of a model, or of a stage of one, in the order of layers."""
    return [module for module in model.modules() if isinstance(module, AttentionModule)]


class Full(Attend):
    """The attention in which every position sees all."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


class Causal(Attend):
    """The attention in which a position sees no later one.

    kernel: f(q, k, v, scale), which computes it, such as grouped_query_attention; by default torch's, if it has one.
    """

    def __init__(self, kernel: Callable[..., Tensor] | None = None) -> None:
        self.kernel = kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        if self.kernel is not None:
            return self.kernel(q, k, v, scale)
        if grouped and k.shape[-1] != v.shape[-1]:  # torch has no fused kernel for this, and would repeat the keys
            return grouped_query_attention(q, k, v, scale)
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)


def grouped_query_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Compute causal attention in which several query heads share one key head.

        8 query heads, 2 key heads      q0 q1 q2 q3 | q4 q5 q6 q7
                                             k0     |     k1

    Keys are not copied: the queries of a group are all multiplied by its one key head.

    Args:    q: (b, h, s, d), s queries of each head.
             k: (b, h_kv, t, d), v: (b, h_kv, t, d_v), of the positions 0 to t - 1.
             The queries are at the last s positions, from t - s to t - 1.
             scale: factor of the products q k, 1/sqrt(d) if it is None.
    Returns: (b, h, s, d_v): for each query the weighted mean of the values at positions
             up to its own.
    Raises:  ValueError if the key heads do not divide the query heads.
    Bytes: the largest new tensor has max(b h s t, b h_kv t d) numbers.
    Ref: Ainslie et al. 2023, arXiv:2305.13245.
    """
    require_groups(q.shape[1], k.shape[1])
    ### BEGIN SOLUTION
    b, h, s, d = q.shape
    groups, t = k.shape[1], k.shape[2]
    rows = q.reshape(b, groups, h // groups * s, d)  # heads that share keys one below the other
    # (b, h_kv, h/h_kv s, d) @ (b, h_kv, d, t) = (b, h_kv, h/h_kv s, t)
    scores = (rows @ k.mT * (d**-0.5 if scale is None else scale)).view(b, h, s, t)
    later = torch.ones(s, t, dtype=torch.bool, device=q.device).triu(t - s + 1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1).view(b, groups, h // groups * s, t)
    return (weights @ v).view(b, h, s, v.shape[-1])
    ### END SOLUTION


def require_groups(heads: int, kv_heads: int) -> None:
    """Raise ValueError unless the key heads share the query heads equally."""
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(f"{kv_heads} key heads cannot serve {heads} query heads: they must divide them")

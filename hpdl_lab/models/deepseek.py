"""DeepSeek-V3: latent attention, which caches 576 numbers per token and layer instead of 40,960, and routed experts.

    x (b, s, d) -> latent (b, s, c), which all heads share -> keys and values of h heads           naive
                   attended as it is: one key head of c + r numbers, its first c are the values    absorbed

A head's key is n numbers made from the latent and r that are turned by the position, the same for all heads. Because
q (U latent) = (q U) latent, the matrix U that makes keys can be applied to the query instead: same numbers, less cache.
Training takes the naive form (fewer products per pair of positions), decoding the absorbed one (fewer bytes to read).

Ref: DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 2.1; latent attention: DeepSeek-V2, arXiv:2405.04434,
section 2.1. Without the multi-token prediction of V3's training, and without YaRN, which stretches a trained context.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import mlp as initial
from .attention import Attend, AttentionModule, Causal, attentions_of
from .experts import MixtureOfExperts, SwiGLU
from .gpt import fields_of
from .llama import Decoder, Rotary
from .transformer import PreNorm, std_of

__all__ = ["SIZES", "DeepSeek", "LatentAttention", "absorb", "build", "fields_of", "latent_attention"]

SIZES = {  # 61 layers of width 7,168 are DeepSeek-V3: 671,026,404,352 parameters; a token uses 37,552,282,624 of them
    "tiny": {
        "vocabulary": 80, "block": 64, "layers": 2, "dense": 1, "heads": 4, "width": 64, "hidden": 128,
        "experts": 8, "top_k": 2, "groups": 4, "top_groups": 2, "shared": 1, "expert_hidden": 32,
        "q_rank": 32, "kv_rank": 16, "nope": 16, "rope": 8, "value": 16, "theta": 10_000,
    },
    "small": {
        "vocabulary": 80, "block": 128, "layers": 6, "dense": 1, "heads": 6, "width": 192, "hidden": 512,
        "experts": 16, "top_k": 4, "groups": 4, "top_groups": 2, "shared": 1, "expert_hidden": 96,
        "q_rank": 96, "kv_rank": 48, "nope": 32, "rope": 16, "value": 32, "theta": 10_000,
    },
    "paper": {
        "vocabulary": 129_280, "block": 4096, "layers": 61, "dense": 3, "heads": 128, "width": 7168, "hidden": 18_432,
        "experts": 256, "top_k": 8, "groups": 8, "top_groups": 4, "shared": 1, "expert_hidden": 2048,
        "q_rank": 1536, "kv_rank": 512, "nope": 128, "rope": 64, "value": 128, "theta": 10_000,
    },
}  # fmt: skip
EPSILON = 1e-6
SCALE = 2.5  # of the routed experts' weights


def latent_attention(
    q: Tensor,
    q_turned: Tensor,
    cache: Tensor,
    key_up: Tensor,
    value_up: Tensor,
    scale: float,
    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor],
) -> Tensor:
    """Attend to a cache of latents, without keys and values of each head for all its tokens.

        cache, per token    | latent, c numbers | turned, r |        576 numbers in DeepSeek-V3, for 128 heads
        one key head        | k                             |
                            | v                 |

    Args:    q: (b, h, s, n), q_turned: (b, h, s, r): of the last s of t positions, the latter turned by them.
             cache: (b, t, c + r), of each token its latent and the part of its key that all heads share, turned.
             key_up: (h, n, c), value_up: (h, m, c): they make a head's key, n numbers, and value, m, of a latent.
             scale: of the products of queries and keys. attend: f(q, k, v, scale), such as grouped_query_attention.
    Returns: (b, h, s, m): of each head, as attention with keys and values of its own would return it.
    Bytes: no new tensor has a number per head, token and number of the latent: none is larger than the larger of cache,
    scores (b h s t) and weights.
    Ref: DeepSeek-AI 2024 (DeepSeek-V2), arXiv:2405.04434, section 2.1.2.
    """
    ### BEGIN SOLUTION
    absorbed = torch.einsum("bhsn,hnc->bhsc", q, key_up)  # the query asks in terms of the latent
    k = cache.unsqueeze(1)  # (b, 1, t, c + r): one key head
    heard = attend(torch.cat([absorbed, q_turned], -1), k, k[..., : key_up.shape[-1]], scale)  # (b, h, s, c)
    return torch.einsum("bhsc,hmc->bhsm", heard, value_up)
    ### END SOLUTION


class LatentAttention(AttentionModule):
    """x (b, s, d) -> (b, s, d) by heads whose keys and values are made of one latent of c = kv_rank numbers per token.

    Heads of n = nope numbers that no position turns, r = rope that are turned, and values of m = value numbers:
    d q_rank + q_rank + q_rank h (n + r) + d (c + r) + c + c h (n + m) + h m d parameters.

    q_rank None: queries are made of x, without a latent, by d h (n + r) parameters. bias: of the layers that make
    latents, and of the last one.
    absorbed: attend to latents instead of keys and values of each head, the same result; set by absorb.
    to_heads: a function of the latents on their way to the heads, in which tensor parallel adds their gradients.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        q_rank: int | None,
        kv_rank: int,
        nope: int,
        rope: int,
        value: int,
        rotary: Rotary,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv_rank, self.nope, self.rope, self.value = heads, kv_rank, nope, rope, value
        self.absorbed = False
        self.attend: Attend = Causal()
        self.to_heads: Callable[[Sequence[Tensor]], Sequence[Tensor]] = tuple
        self.rotary = rotary
        self.q_down: nn.Module = nn.Linear(width, q_rank, bias) if q_rank else nn.Identity()
        self.q_norm: nn.Module = nn.RMSNorm(q_rank, EPSILON) if q_rank else nn.Identity()
        self.q_up = nn.Linear(q_rank or width, heads * (nope + rope), bias=False)
        self.kv_down = nn.Linear(width, kv_rank + rope, bias)
        self.kv_norm = nn.RMSNorm(kv_rank, EPSILON)
        self.kv_up = nn.Linear(kv_rank, heads * (nope + value), bias=False)
        self.out = nn.Linear(heads * value, width, bias)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return (1, self.kv_rank + self.rope, 0) if self.absorbed else (self.heads, self.nope + self.rope, self.value)

    def forward(self, x: Tensor) -> Tensor:
        places = self.attend.positions(x.shape[1], x.device)
        latent, turned = self.kv_down(x).split([self.kv_rank, self.rope], -1)  # (b, s, d) -> (b, s, c), (b, s, r)
        asked, latent, turned = self.to_heads([self.q_norm(self.q_down(x)), self.kv_norm(latent), turned])
        q = self.q_up(asked).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (b, s, q_rank) -> (b, h, s, n + r)
        q, q_turned = q.split([self.nope, self.rope], -1)
        q_turned = self.rotary(q_turned, places)
        turned = self.rotary(turned.unsqueeze(1), places)  # (b, 1, s, r): one for all heads
        heard = (self.from_latents if self.absorbed else self.from_heads)(q, q_turned, latent, turned)  # (b, h, s, m)
        return self.out(heard.transpose(1, 2).flatten(-2))  # (b, s, h m) -> (b, s, d)

    def from_heads(self, q: Tensor, q_turned: Tensor, latent: Tensor, turned: Tensor) -> Tensor:
        """Attend naively: by keys and values of each head, h (n + r + m) numbers per token, 40,960 in DeepSeek-V3."""
        kv = self.kv_up(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (b, s, c) -> (b, h, s, n + m)
        k, v = kv.split([self.nope, self.value], -1)
        k = torch.cat([k, turned.expand(-1, self.heads, -1, -1)], -1)  # (b, h, s, n + r)
        return self.attend(torch.cat([q, q_turned], -1), k, v)

    def from_latents(self, q: Tensor, q_turned: Tensor, latent: Tensor, turned: Tensor) -> Tensor:
        """Attend to latents: c + r numbers per token for all heads, 576 in DeepSeek-V3."""
        key_up, value_up = self.kv_up.weight.unflatten(0, (self.heads, -1)).split([self.nope, self.value], 1)
        cache = torch.cat([latent, turned.squeeze(1)], -1)  # (b, s, c + r)
        scale = (self.nope + self.rope) ** -0.5
        return latent_attention(q, q_turned, cache, key_up, value_up, scale, self.attend)


def absorb(model: nn.Module, absorbed: bool = True) -> nn.Module:
    """Let the latent attention of `model` attend to latents, or (False) to keys and values; returns the model."""
    for attention in attentions_of(model):
        if isinstance(attention, LatentAttention):
            attention.absorbed = absorbed
    return model


class DeepSeek(Decoder):
    """2 V d + layers (A + 2 d) + dense 3 d hidden + (layers - dense) M + d parameters.

    V: vocabulary, d: width, A: of LatentAttention, M: of MixtureOfExperts. The first `dense` layers have no experts.
    Fields that follow `theta` are for published models. epsilon: of norms of width d, norms of latents keep EPSILON;
    neighbors: see Rotary; scale, normal: see Router; bias: see LatentAttention; tied: V d parameters less, see Decoder.
    """

    def __init__(
        self,
        vocabulary: int,
        block: int,
        layers: int,
        dense: int,
        heads: int,
        width: int,
        hidden: int,
        experts: int,
        top_k: int,
        groups: int,
        top_groups: int,
        shared: int,
        expert_hidden: int,
        q_rank: int | None,
        kv_rank: int,
        nope: int,
        rope: int,
        value: int,
        theta: float,
        neighbors: bool = True,
        epsilon: float = EPSILON,
        scale: float = SCALE,
        normal: bool = True,
        bias: bool = False,
        tied: bool = False,
    ) -> None:
        rotary = Rotary(block, rope, theta, neighbors)  # one table for all layers
        blocks = [
            PreNorm(
                nn.RMSNorm(width, epsilon),
                LatentAttention(width, heads, q_rank, kv_rank, nope, rope, value, rotary, bias),
                nn.RMSNorm(width, epsilon),
                SwiGLU(width, hidden)
                if layer < dense
                else MixtureOfExperts(width, expert_hidden, experts, top_k, shared, groups, top_groups, scale, normal),
            )
            for layer in range(layers)
        ]
        super().__init__(vocabulary, block, width, blocks, epsilon, tied)


def build(*, seed: int = 0, dtype: str = "float32", **fields: Any) -> nn.Module:
    """Return a DeepSeek-V3; the same seed gives the same parameters on every machine.

    Raises:  ValueError if `rope` is odd, or the groups of experts do not fit (see MixtureOfExperts).
    """
    return initial.drawn(lambda: DeepSeek(**fields), seed, dtype, std_of(fields["layers"], fields["width"]))

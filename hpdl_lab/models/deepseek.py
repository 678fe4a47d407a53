"""DeepSeek-V3: latent attention, which caches 576 numbers per token and layer instead of 40,960, and routed experts.

    x (b, s, d) -> latent (b, s, c), which all heads share -> keys and values of h heads           naive
                   attended as it is: one key head of c + r numbers, its first c are the values    absorbed

A head's key is n numbers made from the latent and r that are rotated by the position, the same for all heads. Because
q (U latent) = (q U) latent, the matrix U that makes keys can be applied to the query instead: same numbers, less cache.
Training takes the naive form (fewer products per pair of positions), decoding the absorbed one (fewer bytes to read).

Ref: DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 2.1; latent attention: DeepSeek-V2, arXiv:2405.04434,
section 2.1. Without the multi-token prediction of V3's training, and without YaRN, which stretches a trained context.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import mlp as initial
from .attention import Attend, AttentionModule, Causal, attentions_of
from .experts import MixtureOfExperts, SwiGLU
from .gpt import fields_of
from .llama import Decoder, Rotary
from .transformer import PreNorm, std_of

__all__ = [
    "SIZES", "DeepSeek", "DeepseekConfig", "LatentAttention", "absorb", "build", "fields_of", "latent_attention",
]  # fmt: skip

EPSILON = 1e-6


@dataclass(frozen=True)
class DeepseekConfig:
    """The fields of a DeepSeek-V3: GPT's words, others as transformers calls them; defaults are for published models.

    The first first_k_dense_replace layers have a SwiGLU of `hidden` units. In others a token goes to all
    n_shared_experts, and to num_experts_per_tok of n_routed_experts, in topk_group of n_group groups of them; each has
    moe_intermediate_size units. rms_norm_eps: of norms of `width`, norms of latents have EPSILON. q_lora_rank None:
    queries are made without a latent.
    """

    vocabulary: int
    block: int
    layers: int
    first_k_dense_replace: int
    heads: int
    width: int
    hidden: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    n_shared_experts: int
    moe_intermediate_size: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    rope_interleave: bool = True
    rms_norm_eps: float = EPSILON
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    attention_bias: bool = False
    tie_word_embeddings: bool = False


SIZES = {  # 61 layers of width 7,168 are DeepSeek-V3: 671,026,404,352 parameters; a token uses 37,552,282,624 of them
    "tiny": DeepseekConfig(
        vocabulary=80, block=64, layers=2, first_k_dense_replace=1, heads=4, width=64, hidden=128,
        n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, n_shared_experts=1,
        moe_intermediate_size=32, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16, rope_theta=10_000,
    ),
    "small": DeepseekConfig(
        vocabulary=80, block=128, layers=6, first_k_dense_replace=1, heads=6, width=192, hidden=512,
        n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, n_shared_experts=1,
        moe_intermediate_size=96, q_lora_rank=96, kv_lora_rank=48, qk_nope_head_dim=32, qk_rope_head_dim=16,
        v_head_dim=32, rope_theta=10_000,
    ),
    "paper": DeepseekConfig(
        vocabulary=129_280, block=4096, layers=61, first_k_dense_replace=3, heads=128, width=7168, hidden=18_432,
        n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4, n_shared_experts=1,
        moe_intermediate_size=2048, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, rope_theta=10_000,
    ),
}  # fmt: skip


def latent_attention(
    q: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    key_up: Tensor,
    value_up: Tensor,
    scale: float,
    attend: Callable[[Tensor, Tensor, Tensor, float], Tensor],
) -> Tensor:
    """Attend to a cache of latents, without making keys and values of each head.

        cache, per token    | latent, c numbers | rotated, r |    V3: c = 512, r = 64
        as a key            | k                              |    V3: 128 query heads
        as a value          | v                 |

    Args:    q: (b, h, s, n), s queries of each head.
             q_rope: (b, h, s, r), the rotated part of these queries.
             cache: (b, t, c + r), of the positions 0 to t - 1: each token's latent, and
             behind the latent the rotated part of the key, which all heads share.
             The queries are at the last s positions, from t - s to t - 1.
             key_up: (h, n, c), value_up: (h, m, c): each head's matrices, which make
             a key (n numbers) and a value (m numbers) from a latent.
             scale: factor of the products of queries and keys.
             attend: f(q, k, v, scale), a function like grouped_query_attention.
    Returns: (b, h, s, m): the result of attention with keys and values of each head.
    Bytes: no new tensor is larger than the largest of cache, scores (b h s t), key_up.
    Ref: DeepSeek-AI 2024 (DeepSeek-V2), arXiv:2405.04434, section 2.1.2.
    """
    ### BEGIN SOLUTION
    absorbed = torch.einsum("bhsn,hnc->bhsc", q, key_up)  # the query in terms of the latent
    k = cache.unsqueeze(1)  # (b, 1, t, c + r): one key head
    attn_output = attend(torch.cat([absorbed, q_rope], -1), k, k[..., : key_up.shape[-1]], scale)  # (b, h, s, c)
    return torch.einsum("bhsc,hmc->bhsm", attn_output, value_up)
    ### END SOLUTION


class LatentAttention(AttentionModule):
    """x (b, s, d) -> (b, s, d) by heads whose keys and values are made of one latent of c = kv_lora_rank numbers.

    Heads of n = qk_nope_head_dim numbers that no position rotates, r = qk_rope_head_dim that are rotated, and values of
    m = v_head_dim numbers, for q = q_lora_rank: d q + q + q h (n + r) + d (c + r) + c + c h (n + m) + h m d parameters.

    q_lora_rank None: queries are made of x, without a latent, by d h (n + r) parameters. attention_bias: of the layers
    that make latents, and of the last one.
    absorbed: attend to latents instead of keys and values of each head, the same result; set by absorb.
    to_heads: a function of the latents on their way to the heads, in which tensor parallel adds their gradients.
    """

    def __init__(self, config: DeepseekConfig, rotary: Rotary) -> None:
        super().__init__()
        width, bias, q_rank, self.heads = config.width, config.attention_bias, config.q_lora_rank, config.heads
        self.kv_rank, self.nope, self.rope = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value = config.v_head_dim
        self.absorbed = False
        self.attend: Attend = Causal()
        self.to_heads: Callable[[Sequence[Tensor]], Sequence[Tensor]] = tuple
        self.rotary = rotary
        self.q_down: nn.Module = nn.Linear(width, q_rank, bias) if q_rank else nn.Identity()
        self.q_norm: nn.Module = nn.RMSNorm(q_rank, EPSILON) if q_rank else nn.Identity()
        self.q_up = nn.Linear(q_rank or width, self.heads * (self.nope + self.rope), bias=False)
        self.kv_down = nn.Linear(width, self.kv_rank + self.rope, bias)
        self.kv_norm = nn.RMSNorm(self.kv_rank, EPSILON)
        self.kv_up = nn.Linear(self.kv_rank, self.heads * (self.nope + self.value), bias=False)
        self.out = nn.Linear(self.heads * self.value, width, bias)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return (1, self.kv_rank + self.rope, 0) if self.absorbed else (self.heads, self.nope + self.rope, self.value)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.attend.positions(x.shape[1], x.device)
        kv_latent, k_rope = self.kv_down(x).split([self.kv_rank, self.rope], -1)  # (b, s, d) -> (b, s, c), (b, s, r)
        latents = self.q_norm(self.q_down(x)), self.kv_norm(kv_latent), k_rope
        q_latent, kv_latent, k_rope = self.to_heads(latents)
        q = self.q_up(q_latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (b, s, q) -> (b, h, s, n + r)
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        q_rope = self.rotary(q_rope, positions)
        k_rope = self.rotary(k_rope.unsqueeze(1), positions)  # (b, 1, s, r): one for all heads
        attend = self.from_latents if self.absorbed else self.from_heads
        attn_output = attend(q_nope, q_rope, kv_latent, k_rope)  # (b, h, s, m)
        return self.out(attn_output.transpose(1, 2).flatten(-2))  # (b, s, h m) -> (b, s, d)

    def from_heads(self, q_nope: Tensor, q_rope: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        """Attend naively: by keys and values of each head, h (n + r + m) numbers per token, 40,960 in DeepSeek-V3."""
        kv = self.kv_up(kv_latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (b, s, c) -> (b, h, s, n + m)
        k, v = kv.split([self.nope, self.value], -1)
        k = torch.cat([k, k_rope.expand(-1, self.heads, -1, -1)], -1)  # (b, h, s, n + r)
        return self.attend(torch.cat([q_nope, q_rope], -1), k, v)

    def from_latents(self, q_nope: Tensor, q_rope: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        """Attend to latents: c + r numbers per token for all heads, 576 in DeepSeek-V3."""
        key_up, value_up = self.kv_up.weight.unflatten(0, (self.heads, -1)).split([self.nope, self.value], 1)
        cache = torch.cat([kv_latent, k_rope.squeeze(1)], -1)  # (b, s, c + r)
        scale = (self.nope + self.rope) ** -0.5
        return latent_attention(q_nope, q_rope, cache, key_up, value_up, scale, self.attend)


def absorb(model: nn.Module, absorbed: bool = True) -> nn.Module:
    """Let the latent attention of `model` attend to latents, or (False) to keys and values; returns the model."""
    for attention in attentions_of(model):
        if isinstance(attention, LatentAttention):
            attention.absorbed = absorbed
    return model


class DeepSeek(Decoder):
    """2 V d + layers (A + 2 d) + k 3 d hidden + (layers - k) M + d parameters, the first k layers without experts.

    V: vocabulary, d: width, A: of LatentAttention, M: of MixtureOfExperts; V d less with tie_word_embeddings.
    """

    def __init__(self, config: DeepseekConfig) -> None:
        width, epsilon = config.width, config.rms_norm_eps
        rotary = Rotary(config.block, config.qk_rope_head_dim, config.rope_theta, config.rope_interleave)  # one table

        def mixture() -> MixtureOfExperts:
            return MixtureOfExperts(
                width,
                config.moe_intermediate_size,
                config.n_routed_experts,
                config.num_experts_per_tok,
                config.n_shared_experts,
                config.n_group,
                config.topk_group,
                config.routed_scaling_factor,
                config.norm_topk_prob,
            )

        blocks = [
            PreNorm(
                nn.RMSNorm(width, epsilon),
                LatentAttention(config, rotary),
                nn.RMSNorm(width, epsilon),
                SwiGLU(width, config.hidden) if layer < config.first_k_dense_replace else mixture(),
            )
            for layer in range(config.layers)
        ]
        super().__init__(config.vocabulary, config.block, width, blocks, epsilon, config.tie_word_embeddings)


def build(config: DeepseekConfig, seed: int = 0, dtype: str = "float32") -> nn.Module:
    """Return a DeepSeek-V3; the same seed gives the same parameters on every machine.

    Raises:  ValueError if qk_rope_head_dim is odd, or the groups of experts do not fit (see MixtureOfExperts).
    """
    return initial.draw_parameters(lambda: DeepSeek(config), seed, dtype, std_of(config.layers, config.width))

"""LLaMA and DeepSeek on several ranks: each has some of the heads and some of the hidden units.

    llama       rows of qkv, heads 0 1 2 3 and key heads 0 1, two ranks     q0 q1 q2 q3 | k0 k1 | v0 v1
                rank 0                                                      q0 q1         k0      v0
                rank 1                                                            q2 q3      k1      v1

    deepseek    x -> latents of queries, and of keys and values: whole on every rank, as they are what all heads share
                  -> [my heads] -> all-reduce

A query head and its key head are on one rank, so the ranks must divide the key heads. Routed experts are whole on every
rank: it is expert parallelism that shares them out (DeepSeek-V3 was trained without tensor parallelism, section 3.2).
The tables at both ends, one parameter in a tied model, are cut by the vocabulary.
Ref: Shoeybi et al. 2019, arXiv:1909.08053; DeepSeek-AI 2024, arXiv:2412.19437.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from ...comm.base import Comm
from ...models.deepseek import LatentAttention
from ...models.experts import MixtureOfExperts, SwiGLU
from ...models.llama import Attention, Decoder
from ...models.transformer import PreNorm
from .cuts import Cut, equal_shares, padded_shares
from .linear import ColumnLinear, RowLinear, copy_to
from .vocabulary import VocabularyEmbedding, VocabularyLinear


def shard_decoder(comm: Comm, whole: Decoder, whole_logits: bool) -> Decoder:
    """Replace the layers of a Llama or DeepSeek by this rank's parts of them, in place; returns it.

    Steps: per block two all_reduces of b s d elements forward; backward two, for latent attention one of b s d and one
    of b s (q_rank + c + r), for routed experts one of b s d less.
    """
    tied = whole.head.weight is whole.tokens.weight
    for block in cast("Iterable[PreNorm]", whole.blocks):
        if isinstance(block.attention, Attention):
            _shard_grouped(comm, block.attention)
        else:
            _shard_latent(comm, cast(LatentAttention, block.attention))
        if not isinstance(block.mlp, MixtureOfExperts):
            block.mlp = _TensorSwiGLU(comm, cast(SwiGLU, block.mlp))
        elif block.mlp.shared:
            block.mlp.add_module("shared", _TensorSwiGLU(comm, block.mlp.shared))
    whole.add_module("tokens", VocabularyEmbedding(comm, whole.tokens))
    whole.add_module("head", _VocabularyHead(comm, whole.head, whole_logits))
    if tied:
        whole.head.weight = whole.tokens.weight
    return whole


def _shard_grouped(comm: Comm, attention: Attention) -> None:
    """Leave to `attention` this rank's query heads and the key heads that serve them."""
    _require_key_heads(comm, attention.kv_heads)
    rows = torch.arange(attention.qkv.out_features)
    heads, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    parts = [part.view(comm.size, -1) for part in rows.split([heads, keys, keys])]
    attention.heads, attention.kv_heads = attention.heads // comm.size, attention.kv_heads // comm.size
    cut = Cut(comm.rank, 0, len(rows), torch.cat(parts, 1))
    attention.add_module("qkv", ColumnLinear(comm, attention.qkv, cut))
    attention.add_module("out", RowLinear(comm, attention.out))


def _shard_latent(comm: Comm, attention: LatentAttention) -> None:
    """Leave to `attention` this rank's heads; what makes the latents stays whole, its gradient is added over ranks."""
    if attention.heads % comm.size:
        raise ValueError(f"{attention.heads} heads cannot be shared equally by {comm.size} ranks")
    attention.heads //= comm.size
    cuts: dict[str, Cut] = {}
    attention.cuts = cuts  # pyrefly: ignore[bad-argument-type]
    for name in ("q_up", "kv_up"):
        layer = getattr(attention, name)
        cut = cuts[f"{name}.weight"] = equal_shares(comm, layer.out_features, 0, name)
        layer.weight, layer.out_features = cut.parameter_of(layer.weight), layer.out_features // comm.size
    attention.to_heads = partial(_copies_to, comm)
    attention.add_module("out", RowLinear(comm, attention.out))


def _copies_to(comm: Comm, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Do what copy_to does for several tensors (..., n), whose gradients are added over ranks in one message."""
    return copy_to(comm, torch.cat([*tensors], -1)).split([x.shape[-1] for x in tensors], -1)


def _require_key_heads(comm: Comm, kv_heads: int) -> None:
    """Raise ValueError unless the ranks share the key heads equally."""
    if kv_heads % comm.size:
        raise ValueError(
            f"{kv_heads} key heads cannot be shared equally by {comm.size} ranks: a key head stays with its queries"
        )


class _TensorSwiGLU(nn.Module):
    """This rank's hidden units of a SwiGLU: (..., d) -> (..., d), the same on every rank."""

    def __init__(self, comm: Comm, whole: SwiGLU) -> None:
        super().__init__()
        self.comm = comm
        self.gate, self.up = ColumnLinear(comm, whole.gate), ColumnLinear(comm, whole.up)
        self.down = RowLinear(comm, whole.down)

    def forward(self, x: Tensor) -> Tensor:
        x = copy_to(self.comm, x)  # once for both
        return self.down(silu(self.gate.part(x)) * self.up.part(x))  # (..., d) -> (..., hidden/p) -> (..., d)


class _VocabularyHead(nn.Module):
    """This rank's rows of the last layer, an nn.Linear without bias: x (b, s, d) -> logits, see VocabularyLinear."""

    def __init__(self, comm: Comm, whole: nn.Linear, whole_logits: bool) -> None:
        super().__init__()
        self.logits = VocabularyLinear(comm, whole.out_features, whole=whole_logits)
        self.cuts = {"weight": padded_shares(comm, whole.out_features, 0)}
        self.weight = self.cuts["weight"].parameter_of(whole.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x, self.weight)

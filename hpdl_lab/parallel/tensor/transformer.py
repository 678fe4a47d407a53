"""The block of GPT and ViT, and a whole GPT, on several ranks: each has some of the heads.

    x -> norm -> [attention of my heads] -> all-reduce -> add -> norm -> [columns, GELU, rows] -> all-reduce -> add

The weight of all heads' questions, keys and values is one packed matrix; a rank holds three pieces of it:

    rows of qkv, heads 0 1 2 3, two ranks        q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3
    rank 0                                       q0 q1         k0 k1         v0 v1
    rank 1                                             q2 q3         k2 k3         v2 v3

With `sequence` x is this rank's positions, (b, s/p, d): an all-gather before a layer, a reduce-scatter after it.
Ref: Shoeybi et al. 2019, arXiv:1909.08053, figures 3b and 4; Korthikanti et al. 2022, arXiv:2205.05198, figure 5.
"""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, scaled_dot_product_attention

from ...comm.base import Comm
from ...models.attention import AttentionModule
from ...models.gpt import GPT
from ...models.transformer import Attention, Block, attend_qkv
from .cuts import PARTIAL, WHOLE, Cut
from .linear import (
    DIM,
    ColumnLinear,
    RowLinear,
    column_linear,
    gather_from,
    require_positions,
    row_linear,
    sequence_parallel,
    split_to,
)
from .vocabulary import VocabularyEmbedding, VocabularyLinear


def rows_of_heads(rank: int, ranks: int, heads: int, width: int) -> Tensor:
    """List the rows of the packed weight of attention (all of q, then k, then v) that belong to the heads of `rank`.

    Args:    heads: the number of heads of the whole layer. Rank 0 has the first heads/ranks of them, rank 1 the next.
             width: of all heads together, so a head has width/heads rows in each of q, k and v.
    Returns: (3 * width / ranks,) int64 tensor of row numbers below 3 * width: q's, then k's, then v's.
    Raises:  ValueError if the ranks do not divide the heads, or the heads the width.
    """
    if heads < 1 or heads % ranks or width % heads:
        raise ValueError(
            f"{heads} heads of a width of {width} cannot be shared equally by {ranks} ranks: the ranks must divide the "
            f"heads, and the heads the width"
        )
    mine = torch.arange(rank * width // ranks, (rank + 1) * width // ranks)  # rows of q
    return torch.cat([mine, width + mine, 2 * width + mine])


def attention_heads(
    comm: Comm,
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor | None,
    heads: int,
    causal: bool,
) -> Tensor:
    """Compute attention with the heads of this rank, and add the outputs of all ranks.

    The whole weight stacks three matrices: q, k and v. So the rows of one head are not
    contiguous, and `rows_of_heads` lists them.

    Args:    x: (b, s, d), the same on every rank.
             qkv_weight: (3d/p, d), the rows of the whole weight that `rows_of_heads` lists
             for this rank: first all rows for q, then all for k, then all for v.
             qkv_bias: (3d/p,), the same rows of the whole bias.
             out_weight: (d, d/p), the columns that multiply the outputs of this rank's
             heads.
             out_bias: (d,) or None, the same on every rank.
             heads: the number of heads on this rank.
             causal: True if a position attends only to itself and to earlier positions.
    Returns: (b, s, d), the same on every rank. After backward x.grad is complete.
    Raises:  ValueError if the shapes do not fit, before the first message.
    Steps: one all_reduce forward, one backward.
    Bytes per rank: one all_reduce of b s d elements in each direction.
    Ref: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    require_heads(qkv_weight, out_weight, heads)
    ### BEGIN SOLUTION
    b, s, _ = x.shape
    qkv = column_linear(comm, x, qkv_weight, qkv_bias)  # (b, s, d) -> (b, s, 3d/p)
    q, k, v = qkv.view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)  # each (b, heads, s, n), n numbers per head
    mixed = scaled_dot_product_attention(q, k, v, is_causal=causal)  # (b, heads, s, n)
    return row_linear(comm, mixed.transpose(1, 2).reshape(b, s, -1), out_weight, out_bias)  # (b, s, d/p) -> (b, s, d)

    ### END SOLUTION


class _TensorAttention(AttentionModule):
    """This rank's heads of a models.transformer.Attention; (b, s, d) -> (b, s, d), the same on every rank.

    Computes what attention_heads does for causal or full attention, for any `attend`.
    sequence: x and the result are this rank's positions, (b, s/p, d) -> (b, s/p, d).
    """

    def __init__(self, comm: Comm, whole: Attention, sequence: bool = False) -> None:
        super().__init__()
        width = whole.qkv.in_features
        places = torch.stack([rows_of_heads(rank, comm.size, whole.heads, width) for rank in range(comm.size)])
        self.comm, self.sequence, self.attend = comm, sequence, whole.attend
        self.heads, self.head = whole.heads // comm.size, width // whole.heads
        self.qkv = ColumnLinear(comm, whole.qkv, Cut(comm.rank, 0, 3 * width, places))
        self.out = RowLinear(comm, whole.out, sequence)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return self.heads, self.head, self.head

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence:
            return self.out.plus_bias(sequence_parallel(self.comm, x, self.part))
        return self.out(attend_qkv(self.attend, self.qkv(x), self.heads))

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum, without communication and bias: (b, s, d) -> (b, s, d)."""
        return self.out.part(attend_qkv(self.attend, self.qkv.part(x), self.heads))


def require_heads(qkv_weight: Tensor, out_weight: Tensor, heads: int) -> None:
    """Raise ValueError unless the packed weight has rows for q, k and v of `heads` heads, and `out` as many columns."""
    rows, columns = qkv_weight.shape[0], out_weight.shape[1]
    if heads < 1 or rows % (3 * heads) or rows != 3 * columns:
        raise ValueError(
            f"{heads} heads on this rank do not fit its qkv weight of {rows} rows and an out of {columns} columns: "
            f"the rows are q, k and v of the heads, and the columns one of these"
        )


def shard_block(comm: Comm, block: Block, sequence: bool = False) -> Block:
    """Replace the layers of a models.transformer.Block by this rank's parts of them, in place; returns it."""
    block.attention = _TensorAttention(comm, cast(Attention, block.attention), sequence)
    wide, gelu, narrow = cast("tuple[nn.Linear, nn.Module, nn.Linear]", block.mlp)  # an nn.Sequential
    columns, rows = ColumnLinear(comm, wide), RowLinear(comm, narrow, sequence)
    block.mlp = _SequenceMLP(comm, columns, gelu, rows) if sequence else nn.Sequential(columns, gelu, rows)
    if sequence:
        block.norm1 = _SequenceNorm(cast(nn.LayerNorm, block.norm1))
        block.norm2 = _SequenceNorm(cast(nn.LayerNorm, block.norm2))
    return block


class _SequenceMLP(nn.Sequential):
    """Column linear, GELU, row linear for x (b, s/p, d), this rank's positions -> (b, s/p, d)."""

    def __init__(self, comm: Comm, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.comm = comm

    def forward(self, input: Tensor) -> Tensor:
        wide, gelu, narrow = cast("tuple[ColumnLinear, nn.Module, RowLinear]", self)
        y = sequence_parallel(self.comm, input, lambda x: narrow.part(gelu(wide.part(x))))
        return narrow.plus_bias(y)


class _SequenceNorm(nn.LayerNorm):
    """A layer norm that sees this rank's positions only, so that its gradients are parts of a sum over ranks."""

    def __init__(self, whole: nn.LayerNorm) -> None:
        super().__init__(list(whole.normalized_shape), whole.eps)
        self.cuts = {"weight": PARTIAL, "bias": PARTIAL}
        self.weight, self.bias = PARTIAL.parameter_of(whole.weight), PARTIAL.parameter_of(whole.bias)


class GatheredNorm(_SequenceNorm):
    """The same, and then all positions on every rank: (b, s/p, d) -> (b, s, d), for a layer that no rank shares."""

    def __init__(self, comm: Comm, whole: nn.LayerNorm) -> None:
        super().__init__(whole)
        self.comm = comm

    def forward(self, input: Tensor) -> Tensor:
        return gather_from(self.comm, super().forward(input), DIM)


class SplitBlock(Block):
    """A block that is given all positions, the same on every rank, (b, s, d), and goes on with its own, (b, s/p, d)."""

    def __init__(self, comm: Comm, block: Block) -> None:
        nn.Module.__init__(self)
        self.comm = comm
        for name, child in block.named_children():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        require_positions(self.comm, x.shape[DIM])
        return super().forward(split_to(self.comm, x, DIM))


class TensorGPT(GPT):
    """This rank's shard of a models.gpt.GPT: tokens (b, s) -> logits (b, s, vocabulary), the same on every rank.

    ceil(V/p) d + block d + layers (12 d^2/p + 7 d/p + 6 d) + 2 d parameters, for a vocabulary of V and width d.
    whole_logits=False: logits (b, s, ceil(vocabulary/p)) of this rank's tokens, for vocabulary_cross_entropy.
    """

    def __init__(self, comm: Comm, whole: GPT, sequence: bool = False, whole_logits: bool = True) -> None:
        nn.Module.__init__(self)
        self.block = whole.block
        self.add_module("tokens", VocabularyEmbedding(comm, whole.tokens, sequence, whole.block))
        self.add_module("positions", _Positions(comm, whole.positions, sequence))
        blocks = cast("Iterable[Block]", whole.blocks)
        self.blocks = nn.Sequential(*[shard_block(comm, block, sequence) for block in blocks])
        self.norm = _SequenceNorm(whole.norm) if sequence else whole.norm
        self.head = VocabularyLinear(comm, whole.tokens.num_embeddings, sequence, whole_logits)

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x), self.tokens.weight)


class _Positions(nn.Module):
    """Rows of the table of positions, whole on every rank; with `sequence` of this rank's share of the places."""

    def __init__(self, comm: Comm, whole: nn.Embedding, sequence: bool) -> None:
        super().__init__()
        self.comm, self.cuts = comm, {"weight": PARTIAL if sequence else WHOLE}
        self.weight = self.cuts["weight"].parameter_of(whole.weight)

    def forward(self, places: Tensor) -> Tensor:
        mine = places.tensor_split(self.comm.size)[self.comm.rank] if self.cuts["weight"].partial else places
        return embedding(mine, self.weight)

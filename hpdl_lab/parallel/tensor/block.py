"""The block of GPT and ViT on several ranks: two all-reduces forward and two backward, whatever p.

    x -> norm -> [attention of my heads] -> all-reduce -> add -> norm -> [columns, GELU, rows] -> all-reduce -> add

It is the models' own Block with attention and mlp replaced. With `sequence` x is this rank's positions, (b, s/p, d),
and each all-reduce an all-gather before the layer and a reduce-scatter behind it.
Ref: Shoeybi et al. 2019, arXiv:1909.08053, figure 4; Korthikanti et al. 2022, arXiv:2205.05198, figure 5.
"""

from torch import nn

from ...models.transformer import Block
from .attention import TensorAttention
from .cuts import PARTIAL
from .linear import ColumnLinear, RowLinear
from .pairs import gather_from, split_to
from .sequence import DIM, require_positions, sequence_parallel


def shard_block(comm, block, sequence=False):
    """Replace the layers of a models.transformer.Block by this rank's parts of them, in place; returns it."""
    block.attention = TensorAttention(comm, block.attention, sequence)
    wide, gelu, narrow = block.mlp
    pair = ColumnLinear(comm, wide), gelu, RowLinear(comm, narrow, sequence)
    block.mlp = SequenceMLP(comm, *pair) if sequence else nn.Sequential(*pair)
    if sequence:
        block.norm1, block.norm2 = SequenceNorm(block.norm1), SequenceNorm(block.norm2)
    return block


class SequenceMLP(nn.Sequential):
    """Column linear, GELU, row linear for x (b, s/p, d), this rank's positions -> (b, s/p, d)."""

    def __init__(self, comm, *layers):
        super().__init__(*layers)
        self.comm = comm

    def forward(self, x):
        wide, gelu, narrow = self
        return sequence_parallel(self.comm, x, lambda x: narrow.part(gelu(wide.part(x)))) + narrow.bias


class SequenceNorm(nn.LayerNorm):
    """A layer norm that sees this rank's positions only, so that its gradients are parts of a sum over ranks."""

    def __init__(self, whole):
        super().__init__(whole.normalized_shape, whole.eps)
        self.weight, self.bias = PARTIAL.parameter_of(whole.weight), PARTIAL.parameter_of(whole.bias)

    def cuts(self):
        return {"weight": PARTIAL, "bias": PARTIAL}


class GatheredNorm(SequenceNorm):
    """The same, and then all positions on every rank: (b, s/p, d) -> (b, s, d), for a layer that no rank shares."""

    def __init__(self, comm, whole):
        super().__init__(whole)
        self.comm = comm

    def forward(self, x):
        return gather_from(self.comm, super().forward(x), DIM)


class SplitBlock(Block):
    """A block that is given all positions, the same on every rank, (b, s, d), and goes on with its own, (b, s/p, d)."""

    def __init__(self, comm, block):
        nn.Module.__init__(self)
        self.comm = comm
        for name, child in block.named_children():
            self.add_module(name, child)

    def forward(self, x):
        require_positions(self.comm, x.shape[DIM])
        return super().forward(split_to(self.comm, x, DIM))

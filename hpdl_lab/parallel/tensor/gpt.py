"""A GPT whose table of tokens is cut as well: what of models/gpt.py is not a block."""

from torch import nn
from torch.nn.functional import embedding

from ...models.gpt import GPT
from .block import SequenceNorm, shard_block
from .cuts import PARTIAL, WHOLE
from .vocabulary import VocabularyEmbedding, VocabularyLinear


class TensorGPT(GPT):
    """This rank's shard of a models.gpt.GPT: tokens (b, s) -> logits (b, s, vocabulary), the same on every rank.

    ceil(V/p) d + block d + layers (12 d^2/p + 7 d/p + 6 d) + 2 d parameters, for a vocabulary of V and width d.
    whole_logits=False: logits (b, s, ceil(vocabulary/p)) of this rank's tokens, for vocabulary_cross_entropy.
    """

    def __init__(self, comm, whole, sequence=False, whole_logits=True):
        nn.Module.__init__(self)
        self.block = whole.block
        self.tokens = VocabularyEmbedding(comm, whole.tokens, sequence, whole.block)
        self.positions = Positions(comm, whole.positions, sequence)
        self.blocks = nn.Sequential(*[shard_block(comm, block, sequence) for block in whole.blocks])
        self.norm = SequenceNorm(whole.norm) if sequence else whole.norm
        self.head = VocabularyLinear(comm, whole.tokens.num_embeddings, sequence, whole_logits)

    def logits(self, x):
        return self.head(x, self.tokens.weight)


class Positions(nn.Module):
    """Rows of the table of positions, whole on every rank; with `sequence` those of this rank's share of the places."""

    def __init__(self, comm, whole, sequence):
        super().__init__()
        self.comm, self.cut = comm, PARTIAL if sequence else WHOLE
        self.weight = self.cut.parameter_of(whole.weight)

    def forward(self, places):
        mine = places.tensor_split(self.comm.size)[self.comm.rank] if self.cut.partial else places
        return embedding(mine, self.weight)

    def cuts(self):
        return {"weight": self.cut}

"""A small GPT whose training step is slow for six reasons; each can be removed by its name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ..comm.base import Comm

REPAIRS = ("input", "dispatch", "memory", "communication", "optimizer", "imbalance")
VOCABULARY, WIDTH, LAYERS, LENGTH = 512, 192, 2, 64
EXAMPLES = 8  # of a rank in a step
OPEN_S = 0.002  # to open a file on a shared file system


class _Files(Dataset[Tensor]):
    """Sequences on a slow file system, which takes OPEN_S for each file, with `shard` sequences in a file."""

    def __init__(self, tokens: Tensor, shard: int) -> None:
        self.files = tokens.split(shard)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(OPEN_S)
        return self.files[index]


class _GPT(nn.Module):
    """A transformer that predicts the next token. fused: its GELU is one operation, not eight."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH,
            WIDTH // 64,
            4 * WIDTH,
            0.0,
            _tanh_gelu if fused else _gelu_in_parts,
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.layers(self.embedding(tokens), mask=self.mask, is_causal=True)
        return h @ self.embedding.weight.T


def _tanh_gelu(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def _gelu_in_parts(x: Tensor) -> Tensor:
    """Compute tanh_gelu by operations that each read and write the whole tensor."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gpt_step(comm: Comm, *repaired: str) -> Callable[[], float]:
    """Build the GPT on this rank, within a process group of `comm`. The losses do not depend on the repairs.

    Args:    repaired: names of REPAIRS.
                 input: one file has the sequences of a step, not one sequence.
                 dispatch: the step computes with all its sequences at once, not with one after the other.
                 memory: GELU is one operation.
                 communication: DDP sends buckets during backward, not one gradient after the other at its end.
                 optimizer: AdamW is one operation (fused), not a loop over parameters.
                 imbalance: all ranks get EXAMPLES sequences; else rank 0 gets half more, and the last rank half less.
    Returns: a function that makes one step and returns this rank's loss; their mean is the loss of the whole batch.
    Raises:  ValueError if a repair is not known.
    """
    unknown = set(repaired) - set(REPAIRS)
    if unknown:
        raise ValueError(f"no repair is called {sorted(unknown)[0]!r}: there are {', '.join(REPAIRS)}")
    torch.manual_seed(0)
    model = _GPT("memory" in repaired)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True) if "communication" in repaired else None
    forward: nn.Module = model if ddp is None else ddp
    fused, foreach = (True, None) if "optimizer" in repaired else (None, False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=foreach)
    reader = read(comm, "input" in repaired, "imbalance" in repaired)

    def step() -> float:
        tokens = next(reader)
        loss = torch.zeros(())
        optimizer.zero_grad()
        parts = [tokens] if "dispatch" in repaired else tokens.split(1)
        for part in parts:
            with nullcontext() if ddp is None or part is parts[-1] else ddp.no_sync():
                logits = forward(part[:, :-1])
                total = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
                mean = total / (EXAMPLES * LENGTH)  # of the whole batch, after the mean over ranks
                mean.backward()
            loss += mean.detach()
        if ddp is None:
            for parameter in model.parameters():
                if (gradient := parameter.grad) is not None:
                    dist.all_reduce(gradient)
                    gradient /= comm.size
        optimizer.step()
        return loss.item()

    return step


def read(comm: Comm, shards: bool, balanced: bool) -> Iterator[Tensor]:
    """Yield this rank's sequences of each step. All ranks together read the same ones at any share."""
    shares = [EXAMPLES] * comm.size
    if not balanced and comm.size > 1:
        shares[0] += EXAMPLES // 2
        shares[-1] -= EXAMPLES // 2
    first, mine = sum(shares[: comm.rank]), shares[comm.rank]
    tokens = torch.randint(VOCABULARY, (4, sum(shares), LENGTH + 1), generator=torch.Generator().manual_seed(1))
    files = _Files(tokens[:, first : first + mine].flatten(0, 1), mine if shards else 1)
    loader = DataLoader(files, batch_size=None if shards else mine)
    while True:
        for batch in loader:
            yield batch.reshape(mine, LENGTH + 1)

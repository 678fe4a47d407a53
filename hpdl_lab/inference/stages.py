"""A decoder over ranks: each has some heads of each layer (tp), some of the blocks (pp), and the cache of its own.

    one engine       stage 0   A0 .  A1 .  A2        a token is needed for the next one: stages wait
                     stage 1   .  A0 .  A1 .
    two engines      stage 0   A0 B0 A1 B1 A2        stage 0 works for B while A's token is still on its way
                     stage 1   .  A0 B0 A1 B1

Every rank runs the same engines: all have the same logits, and choose the same tokens and the same requests.
Ref: Narayanan et al. 2021, arXiv:2104.04473; Pope et al. 2022, arXiv:2211.05102.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from ..comm.base import Comm, Work
from ..mesh import DeviceMesh
from ..parallel.tensor.model import shard
from ..units import counted
from .engine import Engine

if TYPE_CHECKING:
    from ..models.gpt import LanguageModel


def part_for_rank(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    """Return the part of a model with which a rank of a mesh of tp and pp runs an Engine. All ranks have equal models.

    Args:    model: GPT, LLaMA or DeepSeek, left as it is.
    Returns: nn.Module with this rank's heads of the blocks of its stage.
    Raises:  ValueError for heads or blocks that the ranks cannot share.
    Messages: none here; in a step two all_reduce of T d numbers over tp per layer, for T tokens; over pp: see Stage.
    """
    part = copy.deepcopy(model)
    if mesh["tp"].size > 1:
        part = shard(mesh["tp"], part)
    return _Stage(mesh["pp"], part) if mesh["pp"].size > 1 else part


class _Stage(nn.Module):
    """This rank's blocks of a decoder, with `embed`, `blocks` and `logits` as the whole one has.

    comm: of the stages; whole: the model, or a rank's shard of it over other ranks; it is used up.
    asynchronous: `logits` returns before the logits have come: `wait_oldest` waits for the oldest step's.
    Bytes: T d numbers from stage to stage, for T tokens, and from the last one V logits per request to each other.
    """

    whole: LanguageModel

    def __init__(self, comm: Comm, whole: nn.Module) -> None:
        super().__init__()
        blocks, model = cast("nn.Sequential", whole.blocks), cast("LanguageModel", whole)
        layers, p = len(blocks), comm.size
        if p > layers:
            raise ValueError(f"{counted(layers, 'block')} cannot be shared by {p} stages")
        whole.blocks = blocks[layers * comm.rank // p : layers * (comm.rank + 1) // p]
        self.comm, self.whole, self.block, self.tokens = comm, model, model.block, model.tokens
        self.asynchronous = False
        self.steps: deque[list[Work]] = deque()  # messages of each step

    def embed(self, tokens: Tensor) -> Tensor:
        """Return (T, 1, d) of tokens (T, 1): on the first stage the embedding, else the output of the stage before."""
        self.steps.append([])
        if self.comm.rank == 0:
            return self.whole.embed(tokens)
        table = self.tokens.weight
        return self.comm.recv(table.new_empty(*tokens.shape, table.shape[1]), self.comm.rank - 1)

    def blocks(self, x: Tensor) -> Tensor:
        x = self.whole.blocks(x)
        if self.comm.rank < self.comm.size - 1:
            self.steps[-1].append(self.comm.isend(x, self.comm.rank + 1))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Return (n, 1, V) of x (n, 1, d), the last stage's on every rank."""
        last = self.comm.size - 1
        if self.comm.rank == last:
            logits = self.whole.logits(x)
            self.steps[-1] += [self.comm.isend(logits, rank) for rank in range(last)]
        else:
            logits = x.new_empty(*x.shape[:-1], self.tokens.num_embeddings)
            self.steps[-1].append(self.comm.irecv(logits, last))
        if not self.asynchronous:
            self.wait_oldest()
        return logits

    def wait_oldest(self) -> None:
        """Wait for all messages of the oldest step."""
        for work in self.steps.popleft():
            work.wait()


def run_interleaved(stage: _Stage, engines: Sequence[Engine]) -> None:
    """Step engines on the same stage in turn until their requests have ended; as many as stages keep all ranks busy."""
    stage.asynchronous = True
    in_flight = deque(engine for engine in engines if engine.start_step())
    while in_flight:
        engine = in_flight.popleft()
        stage.wait_oldest()
        engine.finish_step()
        if engine.start_step():
            in_flight.append(engine)
    stage.asynchronous = False

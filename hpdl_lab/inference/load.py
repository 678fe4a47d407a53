"""Load for an engine: requests that arrive at random, how long they take, and what a step takes on paper.

    arrivals     |    | ||      |         gaps are drawn from an exponential distribution: a Poisson process
    steps        [==][===][====][===]     whoever has arrived joins the next step

    time to the first token     from arrival: waiting for a slot, and reading the prompt
    time between two tokens     the steps of everybody who runs

Time is that of the communicator: virtual on simulated ranks, where a step takes what StepModel says.
Ref: Kwon et al. 2023, arXiv:2309.06180, section 6; Williams et al. 2009 (roofline), CACM 52(4).
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..collectives.cost import fit_link
from ..comm.base import Comm
from ..data import text
from ..features import cores
from ..measure import measure
from ..models.attention import attentions_of
from ..units import require_int, require_number

SIMULATED_BANDWIDTH = 20e9  # bytes/s from the memory of a simulated rank, about that of two cores
REPEATS = 15  # of each measurement of a machine


class Arrival(NamedTuple):
    """A request: s at which it arrives, tokens of its prompt, and how many more it asks for."""

    seconds: float
    prompt: list[int]
    new: int


@dataclass(frozen=True)
class Load:
    """Requests of mixed lengths. prompts, new: tokens of a prompt and tokens to generate, (least, most).

    corpus: (n,) int64, from which prompts are cut; the same requests for every rate, which only moves them in time.
    """

    corpus: Tensor
    requests: int = 24
    prompts: tuple[int, int] = (8, 64)
    new: tuple[int, int] = (16, 48)
    seed: int = 0

    def __post_init__(self) -> None:
        require_int("requests", self.requests, 1)
        for name in ("prompts", "new"):
            least, most = getattr(self, name)
            require_int(f"the least of {name}", least, 1)
            require_int(f"the most of {name}", most, least)
        require_int("the most of prompts", self.prompts[1], 1, len(self.corpus) - 1)

    def arrivals(self, rate: float) -> list[Arrival]:
        """Requests in order of arrival, `rate` of them per s on average."""
        chance, seconds, found = random.Random(self.seed), 0.0, []
        for _ in range(self.requests):
            seconds += chance.expovariate(1.0) / rate
            n = chance.randint(*self.prompts)
            start = chance.randrange(len(self.corpus) - n)
            found.append(Arrival(seconds, self.corpus[start : start + n].tolist(), chance.randint(*self.new)))
        return found

    @property
    def means(self) -> tuple[float, float]:
        """(tokens of a prompt, tokens to generate), on average."""
        return sum(self.prompts) / 2, sum(self.new) / 2


# -- a step on paper --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepModel:
    """What a step takes on one of `ranks` ranks that share each layer.

        rest  +  max(bytes / bandwidth, FLOPs / flops)  +  messages (alpha + n beta)

    Bytes are this rank's weights, and the keys and values of what is read; a message has n = tokens · width · itemsize
    bytes, two for each layer, and two at the ends of the model. rest: s of the interpreter and of all that is called,
    the one number that is not counted but taken from a step of one request.
    """

    weights: int  # bytes, of this rank
    cached: int  # bytes per token that is kept, of this rank
    parameters: int  # of this rank
    messages: int
    message: int  # bytes per token
    bandwidth: float  # bytes/s
    flops: float  # per s
    alpha: float  # s
    beta: float  # s/byte
    rest: float = 0.0  # s

    def seconds(self, tokens: float, kept: float) -> float:
        """s of a step that reads `tokens` tokens, over the keys and values of `kept` earlier ones."""
        nbytes = self.weights + self.cached * kept
        work = max(nbytes / self.bandwidth, 2 * self.parameters * tokens / self.flops)
        return self.rest + work + self.messages * (self.alpha + tokens * self.message * self.beta)

    def line(self, load: Load, slots: int) -> list[tuple[float, float]]:
        """[(tokens/s, s between two tokens)] for 1, 2, ... `slots` requests that run all the time.

        While a request generates its n tokens, each of the b that run has its prompt read once.
        """
        prompt, new = load.means
        found = []
        for b in range(1, slots + 1):
            decode, prefill = self.seconds(b, b * (prompt + new / 2)), self.seconds(prompt, 0)
            between = decode + b / new * prefill
            found.append((b / between, between))
        return found


def step_model(comm: Comm, model: nn.Module) -> StepModel:
    """Measure what StepModel needs to know of this rank, all but `rest`. Collective.

    Args:    model: this rank's part of a model. On simulated ranks arithmetic takes no time: bandwidth is
             SIMULATED_BANDWIDTH, and flops, alpha and beta are those of the network.
    """
    attentions = attentions_of(model)
    weights = [p for p in model.parameters()]
    itemsize, parameters = weights[0].itemsize, sum(p.numel() for p in weights)
    width = next(p.shape[-1] for p in weights if p.ndim == 2)
    cached = sum(kv_heads * (k + v) for kv_heads, k, v in (a.cache_shape for a in attentions)) * itemsize
    alpha, beta, messages = 0.0, 0.0, 0
    if comm.size > 1:
        messages = 2 * len(attentions) + 2
        sizes = [width * itemsize * n for n in (1, 4, 16, 64)]
        alpha, beta = fit_link(sizes, [seconds_of(comm, lambda n=n: all_reduce_of(comm, n)) for n in sizes])
    bandwidth, flops = speeds(comm, parameters, width, weights[0].dtype)
    nbytes = parameters * itemsize
    return StepModel(nbytes, cached, parameters, messages, width * itemsize, bandwidth, flops, alpha, beta)


def all_reduce_of(comm: Comm, nbytes: int) -> None:
    """As a layer does it: of a tensor that has just been written."""
    comm.all_reduce(torch.ones(nbytes // 4))


def seconds_of(comm: Comm, fn: Any, calls: int = 10) -> float:
    """s per call on the slowest rank, the median of many. Collective."""
    found = measure(fn, repeats=REPEATS, calls=calls, barrier=comm.barrier, clock=comm.trace.clock).median
    return float(comm.all_gather(torch.tensor([found], dtype=torch.float64)).max())


def speeds(comm: Comm, parameters: int, width: int, dtype: torch.dtype) -> tuple[float, float]:
    """(bytes/s, FLOP/s) of all ranks at once: of a vector times, and of many rows times, as many numbers as a model."""
    rows, work = 64, 1e9
    if comm.simulated:
        return SIMULATED_BANDWIDTH, work / seconds_of(comm, lambda: comm.compute(flops=work), calls=1)
    matrix = torch.ones(max(1, parameters // width), width, dtype=dtype)
    x = torch.ones(rows, width, dtype=dtype)
    vector, many = (seconds_of(comm, lambda x=x: matrix @ x.T, calls=3) for x in (x[0], x))
    return matrix.nbytes / vector, 2 * rows * matrix.numel() / many


# -- serving ----------------------------------------------------------------------------------------------------------


def corpus_of(model: nn.Module) -> Tensor:
    """Tokens that prompts for `model` are cut from: the tenth of Moby-Dick that was not trained on, (n,) int64."""
    tokens = text.in_bytes().long()
    return tokens[-(len(tokens) // text.TEST_SHARE) :] % model.tokens.num_embeddings

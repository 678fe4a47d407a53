"""Load for an engine: requests that arrive at random, their times, and the time of a step on paper.

    arrivals     |    | ||      |         gaps are drawn from an exponential distribution: a Poisson process
    steps        [==][===][====][===]     requests that have arrived join the next step

    time to the first token     from arrival: waiting for a slot, and reading the prompt
    time between two tokens     the steps of all requests that run

Time is the communicator's: virtual on simulated ranks, on which a step takes as long as StepModel computes.
Ref: Kwon et al. 2023, arXiv:2309.06180, section 6; Williams et al. 2009 (roofline), CACM 52(4).
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..collectives.cost import fit_link
from ..comm.base import Comm, Row
from ..data import text
from ..features import cores
from ..measure import measure
from ..mesh import DeviceMesh
from ..models.attention import attentions_of
from ..units import require_int
from .engine import Engine, Request, TokenStream
from .scheduler import schedule
from .stages import part_for_rank

if TYPE_CHECKING:
    from ..models.gpt import LanguageModel

SIMULATED_BANDWIDTH = 20e9  # bytes/s from the memory of a simulated rank, about as of two cores
REPEATS = 15  # of each measurement of a machine
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0, 1.3)  # of the requests per s that are possible on paper
BUDGET = 64  # tokens of a step, so that requests that decode wait little for a prompt


class Arrival(NamedTuple):
    """A request: s at which it arrives, tokens of its prompt, and the number of tokens to generate."""

    seconds: float
    prompt: list[int]
    new: int


@dataclass(frozen=True)
class Load:
    """Requests of mixed lengths. prompts, new: tokens of a prompt and tokens to generate, (least, most).

    corpus: (n,) int64, from which prompts are cut. Requests are the same for every rate, which only moves them in time.
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
        """Return requests in order of arrival, `rate` of them per s on average."""
        rng, seconds, found = random.Random(self.seed), 0.0, []
        for _ in range(self.requests):
            seconds += rng.expovariate(1.0) / rate
            n = rng.randint(*self.prompts)
            start = rng.randrange(len(self.corpus) - n)
            found.append(Arrival(seconds, self.corpus[start : start + n].tolist(), rng.randint(*self.new)))
        return found

    @property
    def means(self) -> tuple[float, float]:
        """Means (tokens of a prompt, tokens to generate)."""
        return sum(self.prompts) / 2, sum(self.new) / 2


# -- a step on paper --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepModel:
    """The time of a step on one of several ranks that share each layer.

        overhead + per_request (b - 1)  +  max(bytes / bandwidth, FLOPs / flops)  +  messages (alpha + n beta)

    Bytes are this rank's weights, and the keys and values that are read; a message has n = tokens · width · itemsize
    bytes, two for each layer, and two at the ends of the model. overhead: s of the interpreter and of all calls;
    per_request: of each further one of b requests; both are taken from steps of one and of all slots.
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
    overhead: float = 0.0  # s
    per_request: float = 0.0  # s

    def seconds(self, tokens: float, kept: float, requests: int = 1) -> float:
        """Return s of a step that reads `tokens` tokens of `requests` requests; `kept`: tokens with keys and values."""
        messages = self.messages * (self.alpha + tokens * self.message * self.beta)
        return self.overhead + self.per_request * (requests - 1) + self.work(tokens, kept) + messages

    def work(self, tokens: float, kept: float) -> float:
        """Return s for which a rank computes: the roofline."""
        nbytes = self.weights + self.cached * kept
        return max(nbytes / self.bandwidth, 2 * self.parameters * tokens / self.flops)

    def line(self, load: Load, slots: int) -> list[tuple[float, float]]:
        """Return [(tokens/s, s between two tokens)] for 1, 2, ... `slots` requests that run all the time.

        While a request generates its tokens, each of the b that run has its prompt read once, in a step of the others.
        """
        prompt, new = load.means
        found = []
        for b in range(1, slots + 1):
            kept = b * (prompt + new / 2)
            decode = self.seconds(b, kept, b)
            between = decode + b / new * (self.seconds(b + prompt, kept, b + 1) - decode)
            found.append((b / between, between))
        return found


def step_model(comm: Comm, model: nn.Module) -> StepModel:
    """Measure the StepModel of this rank, all but `overhead` and `per_request`. Collective.

    Args:    model: this rank's part of a model. On simulated ranks arithmetic takes no time: bandwidth is
             SIMULATED_BANDWIDTH, and flops, alpha and beta are the network's.
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
        alpha, beta = fit_link(sizes, [_seconds_of(comm, lambda n=n: _all_reduce_of(comm, n)) for n in sizes])
    bandwidth, flops = _speeds(comm, parameters, width, weights[0].dtype)
    nbytes = parameters * itemsize
    return StepModel(nbytes, cached, parameters, messages, width * itemsize, bandwidth, flops, alpha, beta)


def _all_reduce_of(comm: Comm, nbytes: int) -> None:
    """Add a tensor that has just been written over ranks, as a layer does."""
    comm.all_reduce(torch.ones(nbytes // 4))


def _seconds_of(comm: Comm, fn: Callable[[], object], calls: int = 10) -> float:
    """Return s per call on the slowest rank, the median of many. Collective."""
    found = measure(fn, repeats=REPEATS, calls=calls, barrier=comm.barrier, clock=comm.trace.clock).median
    return float(comm.all_gather(torch.tensor([found], dtype=torch.float64)).max())


def _speeds(comm: Comm, parameters: int, width: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return (bytes/s, FLOP/s) while all ranks compute: a matrix as large as a model times a vector, and times many."""
    rows, work = 64, 1e9
    if comm.simulated:
        return SIMULATED_BANDWIDTH, work / _seconds_of(comm, lambda: comm.compute(flops=work), calls=1)
    matrix = torch.ones(max(1, parameters // width), width, dtype=dtype)
    x = torch.ones(width, rows, dtype=dtype)
    vector, many = (_seconds_of(comm, lambda x=x: matrix @ x, calls=3) for x in (x[:, 0].clone(), x))
    return matrix.nbytes / vector, 2 * rows * matrix.numel() / many


# -- serving ----------------------------------------------------------------------------------------------------------


def corpus_of(model: nn.Module) -> Tensor:
    """Return tokens for prompts for `model`: the tenth of Moby-Dick that was not trained on, (n,) int64."""
    tokens = text.in_bytes().long()
    return tokens[-(len(tokens) // text.TEST_SHARE) :] % cast("LanguageModel", model).tokens.num_embeddings


def serve_rates(
    comm: Comm,
    model: nn.Module,
    load: Load,
    rates: Sequence[float] | None = None,
    slots: int = 8,
    schedule: Callable[..., list[int]] = schedule,
) -> StepModel:
    """Serve `load` at one rate after the other, each rank with its heads of `model`; rank 0 reports rows.

    Args:    rates: requests/s; None: SHARES of the most that is possible by StepModel. slots, schedule: of the Engine.
    Returns: StepModel of this rank. Rows: {"line": StepModel.line} first, then the rows of `_serve`.
    """
    part = part_for_rank(DeviceMesh(comm, tp=comm.size), model)
    step = step_model(comm, part)
    step = replace(step, overhead=_excess_seconds(comm, part, load, 1, step))
    if slots > 1:
        step = replace(step, per_request=_excess_seconds(comm, part, load, slots, step) / (slots - 1))
    line = step.line(load, slots)
    if comm.rank == 0:
        comm.report(line=line)
    most = line[-1][0] / load.means[1]  # requests/s
    for rate in rates or [float(f"{share * most:.2g}") for share in SHARES]:
        _serve(comm, part, load, rate, slots, schedule, step, comm.report if comm.rank == 0 else None)
    return step


def _excess_seconds(comm: Comm, part: nn.Module, load: Load, requests: int, step: StepModel) -> float:
    """Return s by which a decode of so many requests takes longer than by `step`, the same on every rank. Collective.

    The shorter of two runs counts: the first one warms up, and another program may delay either.
    """
    together = replace(load, requests=requests, prompts=(load.prompts[0],) * 2, new=(load.new[1],) * 2)
    between = min(_serve(comm, part, together, 1e9, requests, schedule, step)["between_s"] for _ in range(2))
    kept = requests * (load.prompts[0] + load.new[1] / 2)
    return _of_rank_0(comm, max(0.0, between - step.seconds(requests, kept, requests)))


def _serve(
    comm: Comm,
    part: nn.Module,
    load: Load,
    rate: float,
    slots: int,
    schedule: Callable[..., list[int]],
    step: StepModel,
    report: Callable[..., None] | None = None,
) -> Row:
    """Serve `load` at `rate` requests/s. Collective.

    Args:    part: this rank's part of a model; step: the time of a step on simulated ranks.
             report: called with the row so far whenever a request has ended.
    Returns: row: rate, requests, done, tokens (generated), seconds, throughput (tokens/s); first_s, between_s (medians
             over requests), first_p95_s, between_p95_s; running, idle_slots (means over steps); ranks, cores.
    """
    begin, steps = comm.trace.clock(), list[Row]()

    def clock() -> float:
        return (comm.trace.clock() - begin) / 1e9

    def timed(running: Sequence[int], waiting: Sequence[int], slots: int, budget: int) -> list[int]:
        counts = schedule(running, waiting, slots, budget)
        if comm.simulated:
            comm.compute(seconds=step.work(sum(counts), sum(r.num_computed_tokens for r in engine.running)))
        return counts

    budget = max(slots, BUDGET)
    engine = Engine(part, slots, queue=load.requests, budget=budget, schedule=timed, clock=clock, on_row=steps.append)
    pending, streams, done = deque(load.arrivals(rate)), list[TokenStream](), 0
    while pending or engine.running or engine.waiting:
        now = _of_rank_0(comm, clock())
        while pending and pending[0].seconds <= now:
            arrival = pending.popleft()
            streams.append(engine.submit(arrival.prompt, arrival.new))
            streams[-1].request.times[0] = arrival.seconds
        if not engine.step():
            _pause(comm, pending[0].seconds - now if pending else 0.0)
        finished = sum(stream.request.finished for stream in streams)
        if report is not None and finished > done:
            done = finished
            report(**_row_of(load, rate, [stream.request for stream in streams], steps, slots, comm.size))
    return _row_of(load, rate, [stream.request for stream in streams], steps, slots, comm.size)


def _of_rank_0(comm: Comm, seconds: float) -> float:
    """Return rank 0's time on every rank, so that all see the same arrivals before the same step."""
    return float(comm.broadcast(torch.tensor([seconds], dtype=torch.float64))) if comm.size > 1 else seconds


def _pause(comm: Comm, seconds: float) -> None:
    """Let time pass until the next arrival."""
    comm.compute(seconds=max(0.0, seconds))
    if not comm.simulated:
        time.sleep(max(0.0, seconds))


def _row_of(load: Load, rate: float, requests: Sequence[Request], steps: Sequence[Row], slots: int, ranks: int) -> Row:
    """Return the row of `_serve`, from the requests that have ended."""
    finished = [request.times for request in requests if request.finished]
    first = [times[1] - times[0] for times in finished]
    between = [(times[-1] - times[1]) / (len(times) - 2) for times in finished if len(times) > 2] or [0.0]
    tokens = sum(len(request.times) - 1 for request in requests)
    seconds = max(times[-1] for times in finished) - requests[0].times[0]
    running = statistics.fmean(row["running"] for row in steps)
    return {
        "rate": rate,
        "requests": load.requests,
        "done": len(finished),
        "tokens": tokens,
        "seconds": seconds,
        "throughput": tokens / seconds,
        "first_s": float(np.median(first)),
        "first_p95_s": float(np.percentile(first, 95)),
        "between_s": float(np.median(between)),
        "between_p95_s": float(np.percentile(between, 95)),
        "running": running,
        "idle_slots": slots - running,
        "ranks": ranks,
        "cores": cores(),
    }

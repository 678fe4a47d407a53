"""A part of a transformer, x + mlp(norm(x)), on several ranks in four ways: what each sends, keeps and takes.

    way          weights    forward                         backward
    whole        all        -                               -
    by layer     1/p        2 all-gathers: 4n and n         2 all-reduces: n and 4n
    pair         1/p        1 all-reduce: n                 1 all-reduce: n
    sequence     1/p        1 all-gather, 1 reduce-scatter  1 all-gather, 1 reduce-scatter

n = b s d numbers, the size of x; the layer in between is four times as wide. Columns, then rows, need no message there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from ...collectives import cost, ring, sweep
from ...comm.base import Comm, Row
from ...comm.errors import WrongAnswer
from ...measure import measure
from ..grid.memory import SavedBytes
from ..reducer import result_of
from .linear import Map, column_linear, linear_naive, row_linear, sequence_parallel

Linear: TypeAlias = Callable[[Comm, Tensor, Tensor, Tensor | None], Tensor]
OnRanks: TypeAlias = Callable[[Comm, Tensor], Tensor]
WAYS = ("whole", "by layer", "pair", "sequence")
TOLERANCE = 1e-3  # of float32 results, relative to the largest


class Parts(NamedTuple):
    """Functions of a layer, the library's or an attendee's."""

    column: Linear = column_linear
    row: Linear = row_linear
    sequence: Callable[[Comm, Tensor, Map], Tensor] = sequence_parallel


class Shape(NamedTuple):
    """x is (batch, tokens, width)."""

    batch: int
    tokens: int
    width: int

    @property
    def nbytes(self) -> int:
        return 4 * self.batch * self.tokens * self.width


def _weights_of(shape: Shape) -> list[Tensor]:
    """Return (up, up_bias, down, down_bias) of the whole layer, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    d = shape.width
    sizes = ((4 * d, d), (4 * d,), (d, 4 * d), (d,))
    return [torch.randn(size, generator=generator) / d**0.5 for size in sizes]


def _weights_here(comm: Comm, way: str, weights: list[Tensor]) -> list[Tensor]:
    """Return what this rank holds of them: all, its rows of both (by layer), or its rows and then its columns."""
    if way == "whole":
        return weights
    up, up_bias, down, down_bias = (w.tensor_split(comm.size, 0)[comm.rank] for w in weights)
    if way != "by layer":
        down, down_bias = weights[2].tensor_split(comm.size, 1)[comm.rank], weights[3]
    return [w.contiguous() for w in (up, up_bias, down, down_bias)]


def _block(comm: Comm, way: str, parts: Parts, x: Tensor, weights: list[Tensor]) -> Tensor:
    """Compute x + mlp(norm(x)); x (b, s, d) whole, or with "sequence" (b, s/p, d), this rank's positions."""
    up, up_bias, down, down_bias = weights
    normed = layer_norm(x, x.shape[-1:])
    if way == "whole":
        return x + linear(gelu(linear(normed, up, up_bias)), down, down_bias)
    if way == "by layer":
        return x + linear_naive(comm, gelu(linear_naive(comm, normed, up, up_bias)), down, down_bias)
    if way == "pair":
        hidden = _made(parts.column, comm, normed, up, up_bias)
        return x + _made(parts.row, comm, gelu(hidden), down, down_bias)
    return x + _made(parts.sequence, comm, normed, partial(_mlp_part, up, up_bias, down)) + down_bias


def _made(fn: Callable[..., object], comm: Comm, *args: object) -> Tensor:
    """Return fn(comm, *args). Raises WrongAnswer if that is no tensor."""
    y = fn(comm, *args)
    if not isinstance(y, torch.Tensor):
        what = "nothing" if y is None else f"something of type {type(y).__name__}"
        raise WrongAnswer(f"{getattr(fn, '__name__', 'your function')} returned {what}; lab.check says why")
    return y


def _mlp_part(up: Tensor, up_bias: Tensor, down: Tensor, x: Tensor) -> Tensor:
    """Return a rank's part of the sum, without communication."""
    return linear(gelu(linear(x, up, up_bias)), down)


def race(comm: Comm, parts: Parts, shape: Shape, repeats: int) -> None:
    """Time, on one rank, a ping-pong, then every way; rank 0 reports the largest of what the ranks send and keep."""
    for way in ("pair", "sequence"):  # with the functions that were given: a mistake shows before anything is measured
        try_way(comm, way, parts, Shape(1, comm.size, comm.size), 0)
    alpha, beta, gamma = sweep.ping_pong(comm, 1 if repeats == 1 else sweep.SAMPLES, 1 if repeats == 1 else 20)
    if comm.rank == 0:
        comm.report(alpha=alpha, beta=beta, gamma=gamma)
    known = Known.of(comm, shape)
    for way in WAYS:
        found = try_way(comm, way, parts, shape, repeats, known)
        seconds = found.pop("seconds")
        most = {name: int(np.max(comm.all_gather(np.array([n])))) for name, n in found.items() if name != "way"}
        if comm.rank == 0:
            comm.report(way=way, **most, seconds=statistics.median(seconds), times=seconds)


class Known(NamedTuple):
    """The start and the end that all ways of one shape share: x, weights of the whole layer; y, x.grad on one rank."""

    x: torch.Tensor
    weights: list[Tensor]
    y: Tensor
    grad: Tensor

    @classmethod
    def of(cls, comm: Comm, shape: Shape) -> Known:
        x, weights = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(1)), _weights_of(shape)
        counted = _count_step(comm, "whole", Parts(), x, weights)
        return cls(x, weights, counted.y, cast(Tensor, counted.grad))


def try_way(comm: Comm, way: str, parts: Parts, shape: Shape, repeats: int, known: Known | None = None) -> Row:
    """Go forward and back in one way on this rank: right first, then counted, then timed.

    Args:    parts: Parts; shape: Shape, whose tokens the ranks share equally; repeats: times that are measured.
             known: Known of this shape, for several ways; default made here.
    Returns: dict: way, forward, backward: bytes sent on a ring; kept: bytes of activations kept for backward;
             weights: bytes; seconds: list of times of a forward and a backward.
    Raises:  collectives.sweep.WrongAnswer on every rank if the result is not one rank's.
    """
    x, whole, y, grad = known or Known.of(comm, shape)
    weights = [w.clone().requires_grad_(True) for w in _weights_here(comm, way, whole)]
    if way == "sequence":
        x, y, grad = (_positions_here(comm, t) for t in (x, y, grad))
    rings = on_a_ring(comm)
    counted = _count_step(rings, way, parts, x, weights)
    for name, got, right in (("y", counted.y, y), ("x.grad", counted.grad, grad)):
        _require_right(comm, way, name, got, right)

    def step() -> None:
        _block(rings, way, parts, x.clone().requires_grad_(True), weights).sum().backward()

    timed = measure(step, warmup=0, repeats=repeats, barrier=comm.barrier, clock=comm.trace.clock)
    held = {"kept": counted.kept, "weights": sum(w.nbytes for w in weights)}
    sent = {"forward": counted.forward, "backward": counted.backward}
    return {"way": way, **sent, **held, "seconds": list(timed.times)}


def _positions_here(comm: Comm, x: Tensor) -> Tensor:
    """Return this rank's positions of x (b, s, d)."""
    return x.tensor_split(comm.size, 1)[comm.rank].contiguous()


class _StepCounts(NamedTuple):
    """The figures of a step: y, the gradient of x, bytes sent forward and backward, bytes kept in between."""

    y: Tensor
    grad: Tensor | None
    forward: int
    backward: int
    kept: int


def _count_step(comm: Comm, way: str, parts: Parts, x: Tensor, weights: list[Tensor]) -> _StepCounts:
    """Take one step, and count what it sends and keeps."""
    x, begun = x.clone().requires_grad_(True), len(comm.trace.log)
    with SavedBytes(weights) as saved:
        y = _block(comm, way, parts, x, weights)
    middle = len(comm.trace.log)
    (y * y).sum().backward()
    sent = [e.nbytes if e.op == "send" else 0 for e in comm.trace.events[begun:]]
    forward, backward = sum(sent[: middle - begun]), sum(sent[middle - begun :])
    return _StepCounts(y.detach(), x.grad, forward, backward, saved.most)


def _require_right(comm: Comm, way: str, name: str, got: Tensor | None, right: Tensor) -> None:
    """Raise WrongAnswer, on every rank, unless all ranks have what one rank has."""
    off = float("inf")
    if got is not None and got.shape == right.shape:
        off = float((got - right).abs().max() / right.abs().max())
    for rank, worst in enumerate(np.asarray(comm.all_gather(np.array([off]))).reshape(-1)):
        if not worst < TOLERANCE:
            raise WrongAnswer(
                f"{way!r} is not timed: its {name} on rank {rank} is off by {worst:.2g} of the largest number; "
                "lab.check says why"
            )


def bytes_sent(way: str, p: int, n: int) -> tuple[float, ...]:
    """Return (forward, backward) bytes that a rank sends on a ring of p ranks, for an x of n bytes."""
    gather, reduce = n * (p - 1) / p, 2 * n * (p - 1) / p
    return {
        "whole": (0, 0),
        "by layer": (5 * gather, 5 * reduce),
        "pair": (reduce, reduce),
        "sequence": (2 * gather, 2 * gather),
    }[way]


def seconds_of(way: str, p: int, n: int, whole: float, alpha: float, beta: float, gamma: float = 0.0) -> float:
    """Predict the seconds of a forward and a backward. whole: s of the way "whole", whose arithmetic p ranks share."""
    if way == "whole":
        return whole
    seconds = partial(cost.Cost.seconds, alpha=alpha, beta=beta, gamma=gamma)
    one = 2 * seconds(cost.all_reduce(p, n))
    if way == "by layer":
        gathers = seconds(cost.all_gather(p, 4 * n)) + seconds(cost.all_gather(p, n))
        one = gathers + seconds(cost.all_reduce(p, 4 * n)) + seconds(cost.all_reduce(p, n))
    return whole / p + one


class Plugged:
    """`comm` in everything but the collectives that are given: Plugged(comm, all_reduce=my_ring).

    all_reduce:     f(comm, x): replaces the flat tensor x by its sum over ranks.
    all_gather:     f(comm, x): the (p, *x.shape) stack of every rank's x.
    reduce_scatter: f(comm, x): row r, on rank r, of the sum of x, whose first dimension is p.
    What is not given is the communicator's own.
    """

    def __init__(
        self,
        comm: Comm,
        all_reduce: OnRanks | None = None,
        all_gather: OnRanks | None = None,
        reduce_scatter: OnRanks | None = None,
    ) -> None:
        self._comm = comm
        if all_reduce:
            self.all_reduce = lambda x: result_of(all_reduce, comm, x.view(-1)).view(x.shape)
        if all_gather:
            self.all_gather = lambda x: all_gather(comm, x)
        if reduce_scatter:
            self.reduce_scatter = lambda x: reduce_scatter(comm, x)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not yet set, while this is being copied
            raise AttributeError(name)
        return getattr(self._comm, name)


def on_a_ring(comm: Comm) -> Comm:
    """Return `comm` with the collectives of collectives/ring.py, for which invariants of bandwidth are written."""
    return cast(Comm, Plugged(comm, ring.all_reduce, _ring_all_gather, _ring_reduce_scatter))


def _ring_all_gather(comm: Comm, x: Tensor) -> Tensor:
    """Return the (p, *x.shape) stack of every rank's `x`.   Steps: p - 1.   Bytes per rank: (p - 1) * N * itemsize."""
    out = x.new_empty((comm.size, x.numel()))
    out[comm.rank] = x.reshape(-1)
    return ring.all_gather(comm, out.view(-1)).view(comm.size, *x.shape)


def _ring_reduce_scatter(comm: Comm, x: Tensor) -> Tensor:
    """Return row r, on rank r, of the sum of `x` (p, ...).  Steps: p - 1.   Bytes: (p - 1)/p * N * itemsize."""
    return ring.reduce_scatter(comm, x.clone().view(-1)).view(x.shape[1:])

"""Notebook 13: one new token through a layer with a cache, and through layers that ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from ...comm import Results
from ...comm.base import Comm
from ...inference.decode import Shard, decode_step, norm, tensor_parallel_decode
from ...units import counted
from ..checkers import because, engine_facts, in_all_cases, with_ranks
from ..layer import CallLog, Sent, cut, difference, drawn, equal, ring_bytes, why_wrong, width_for
from ..ranks import SENTINEL, alone, capital, number, type_text, unlike
from ..record import Answer, Broken, Exercise, Passed, Rows, Runner
from ..traffic import check_waits

ROOM = 3  # positions that stay free in the cache
SHAPES = ((2, 4, 24, 12), (1, 1, 6, 5), (3, 2, 8, 7))  # sequences, heads, width, tokens


class _Layer(NamedTuple):
    """A layer of attention and what comes into it. x: (b, tokens, d); qkv: (3d, d); out: (d, d)."""

    x: Tensor
    qkv: Tensor
    out: Tensor
    heads: int

    def room(self) -> tuple[int, int, int, int]:
        """Return the shape of its cache."""
        b, tokens, d = self.x.shape
        return b, self.heads, tokens + ROOM, d // self.heads

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v of all positions, each (b, heads, tokens, n)."""
        q, k, v = (self.x @ self.qkv.T).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v


class _Step(NamedTuple):
    """The returned value for one more token, the operations it took, and the cache that the answer left."""

    y: Any
    flops: int
    keys: Tensor
    values: Tensor
    x: Tensor


def _layer_of(b: int, heads: int, width: int, tokens: int) -> _Layer:
    return _Layer(drawn(1, b, tokens, width), drawn(2, 3 * width, width) / 2, drawn(3, width, width) / 2, heads)


def _decode(fn: Answer, layer: _Layer) -> list[_Step]:
    """Call the answer for one token after the other."""
    keys, values = (torch.full(layer.room(), SENTINEL, dtype=layer.x.dtype) for _ in range(2))
    steps = []
    for s in range(1, layer.x.shape[1] + 1):
        x = layer.x[:, :s].clone()
        with FlopCounterMode(display=False) as counter:
            y = fn(x, layer.qkv, layer.out, keys, values)
        y = y.detach().clone() if isinstance(y, Tensor) else y
        steps.append(_Step(y, counter.get_total_flops(), keys.clone(), values.clone(), x))
    return steps


def _check_decode_step(fn: Answer) -> Passed:
    for shape in SHAPES:
        layer = _layer_of(*shape)
        where = f"with {counted(shape[0], 'sequence')}, {counted(shape[1], 'head')} and a width of {shape[2]}"
        steps = alone(_decode, fn, layer, where=where)
        _check_values(steps, layer, capital(where))
        _check_work(steps, layer, capital(where))
        _check_cache(steps, layer, capital(where))
    layer = _layer_of(*SHAPES[0])
    steps, (b, s, d) = _decode(fn, layer), layer.x.shape
    whole = _flops_of(layer, s) + 4 * b * (s - 1) * d * d  # keys and values of all positions, one query
    return Passed(
        f"output of attention over all positions, to 1e-10, token by token, in {len(SHAPES)} shapes",
        f"""work: token {len(steps)} takes {steps[-1].flops / 2:,.0f} multiply-adds, token 1 {steps[0].flops / 2:,.0f};
        without a cache token {len(steps)} takes {whole / 2:,.0f}""",
        "cache: each call writes one row of keys and one of values, and leaves the others as they are",
    )


def _check_values(steps: list[_Step], layer: _Layer, where: str) -> None:
    """Raise Broken if the result for a token is wrong."""
    attended = scaled_dot_product_attention(*layer.parts(), is_causal=True)
    right = attended.transpose(1, 2).flatten(2) @ layer.out.T
    for s, step in enumerate(steps, 1):
        wanted = right[:, s - 1]
        if wrong := unlike(step.y, wanted):
            raise Broken(f"""returns: {where} your function returned {wrong} for token {s}: return the attention
                at the newest position, {tuple(wanted.shape)}, of the dtype of x.""")
        if not torch.equal(step.x, layer.x[:, :s]):
            raise Broken(f"input: {where} your function has written into x, which belongs to its caller.")
        got = step.y.numpy()
        if not equal(got, wanted.numpy()):
            text = f"{where}, at token {s}, {difference('y', got, wanted.numpy())}."
            raise because(why_wrong(got, wanted.numpy(), list(_mistakes(layer, s)), "value"), text)


def _mistakes(layer: _Layer, s: int) -> Iterator[tuple[np.ndarray, str]]:
    """Yield (what may be returned for token s, what is wrong with it)."""
    parts = layer.parts()
    d, n = layer.x.shape[-1], parts[0].shape[-1]
    q, new = parts[0][:, :, s - 1], s - 1

    def said(keys: Tensor, values: Tensor, q: Tensor = q, scale: float = n**-0.5, dim: int = -1) -> np.ndarray:
        scores = (keys @ q[..., None]).squeeze(-1) * scale
        return ((scores.softmax(dim)[:, :, None] @ values).flatten(1) @ layer.out.T).numpy()

    k, v = (part[:, :, :s] for part in parts[1:])
    empty = torch.full((*k.shape[:2], ROOM + layer.x.shape[1] - s, n), SENTINEL, dtype=k.dtype)
    blank = torch.full_like(k[:, :, :1], SENTINEL)
    rest = "room: The cache has room for more positions, and no call has written there: attend to the first s only."
    yield said(torch.cat([k, empty], 2), torch.cat([v, empty], 2)), rest
    early = f"own: A position also attends to itself. At token {s} the cache has to hold {counted(s, 'position')}."
    yield said(k[:, :, :new], v[:, :, :new]), early
    place = f"""place: A row was read that no call has written: the newest of {counted(s, "position")} is
        position {new}, as Python counts."""
    yield said(torch.cat([k[:, :, :new], blank], 2), torch.cat([v[:, :, :new], blank], 2)), place
    yield said(torch.cat([blank, k[:, :, :new]], 2), torch.cat([blank, v[:, :, :new]], 2)), place
    yield said(blank.expand_as(k), blank.expand_as(v)), place
    yield (
        said(k, v, parts[0][:, :, 0]),
        "newest: That is position 0: take the query of the newest position.",
    )
    yield said(k, v, scale=1.0), "scale: Scores are divided by the root of n, the numbers of a head."
    yield said(k, v, scale=d**-0.5), f"scale: Scores are divided by the root of {n}, a head's width, not of {d}."
    yield said(k, v, scale=1 / n), f"scale: Scores are divided by the root of {n}, not by {n}."
    yield said(k, v, dim=1), "softmax: Weights add up to 1 over positions, for each head by itself: softmax(-1)."
    yield said(v, k), "order: Keys and values have changed places: qkv has the rows of q, then of k, then of v."
    yield (
        said(parts[0][:, :, :s], v, k[:, :, new]),
        "order: A key was used as the query: qkv has the rows of q first, then of k, then of v.",
    )
    raw = (((k @ q[..., None]).squeeze(-1) * n**-0.5)[:, :, None] @ v).flatten(1) @ layer.out.T
    yield raw.numpy(), "softmax: Scores become weights that add up to 1 by softmax."
    attended = (((k @ q[..., None]).squeeze(-1) * n**-0.5).softmax(-1)[:, :, None] @ v).flatten(1)
    yield attended.numpy(), "out: These are the results of the heads: multiply them by out.T."
    yield (attended @ layer.out).numpy(), "out: A weight is (outputs, inputs), as torch keeps it: multiply by out.T."
    mixed = (layer.x @ layer.qkv.T).unflatten(-1, (layer.heads, 3, -1)).permute(3, 0, 2, 1, 4)
    swapped = "heads: The rows of qkv are q of all heads, then k, then v: view(b, 3, heads, n)."
    yield said(mixed[1][:, :, :s], mixed[2][:, :, :s], mixed[0][:, :, new]), swapped


def _flops_of(layer: _Layer, positions: int) -> int:
    """Return the operations of one token that is multiplied once and attends to so many positions."""
    b, _, d = layer.x.shape
    return 8 * b * d * d + 4 * b * positions * d


def _check_work(steps: list[_Step], layer: _Layer, where: str) -> None:
    """Raise Broken if a token costs more than one row of each product, and attention to all of the room."""
    most = _flops_of(layer, layer.room()[2])
    for step in steps:
        if step.flops <= most:
            continue
        grows = steps[-1].flops > 1.5 * most and steps[0].flops <= most
        why = f"""token {len(steps)} takes {steps[-1].flops / 2:,.0f} multiply-adds, and
            {_flops_of(layer, len(steps)) / 2:,.0f} are enough: """
        why += (
            """the keys and values of all positions are computed again for each token, although they are in the cache.
            Multiply x[:, -1] only."""
            if grows
            else f"that is {number(round(step.flops / most, 1))} times as much: is something computed twice?"
        )
        raise Broken(f"work: {where} all numbers are right, but {why}")


def _check_cache(steps: list[_Step], layer: _Layer, where: str) -> None:
    """Raise Broken if the cache is not what the next token needs."""
    _, k, v = layer.parts()
    for s, step in enumerate(steps, 1):
        for name, got, right in (("keys", step.keys, k), ("values", step.values, v)):
            if not torch.allclose(got[:, :, :s], right[:, :, :s], rtol=1e-10, atol=1e-10):
                raise Broken(f"""cache: {where} what you return is right, but after token {s} {name}[:, :, :{s}] does
                    not hold the {name} of {counted(s, "position")}.""")
            if (got[:, :, s:] != SENTINEL).any():
                raise Broken(f"""cache: {where} what you return is right, but after token {s} {name} holds more than
                    {counted(s, "position")}: this room belongs to later tokens.""")


# -- on several ranks --------------------------------------------------------------------------------------------------

RANKS = (2, 1, 3, 4)
BATCH, TOKENS, LAYERS = 2, 3, 2
HEAD = 6  # numbers of a head


class _Whole(NamedTuple):
    """A layer on a single rank: qkv (3d, d), out (d, d), up (4d, d), down (d, 4d)."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor


class _Heads:
    """The cache of some heads, and attention to it; counts its calls."""

    def __init__(self, heads: int) -> None:
        self.heads, self.calls = heads, 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shape = BATCH, self.heads * HEAD
        if any(part.shape != shape for part in (q, k, v)):
            shapes = ", ".join(str(tuple(part.shape)) for part in (q, k, v))
            raise ValueError(f"attend: q, k and v of this rank's heads have shape {shape} each, not {shapes}")
        self.calls += 1
        q, k, v = (part.detach().unflatten(-1, (self.heads, -1))[:, :, None] for part in (q, k, v))
        self.keys.append(k)
        self.values.append(v)
        return scaled_dot_product_attention(q, torch.cat(self.keys, 2), torch.cat(self.values, 2)).flatten(1)


class _Decoded(NamedTuple):
    """A rank's results for each token, their kinds, how often each cache was asked, and what was sent."""

    ys: list[np.ndarray | None]
    kinds: list[str]
    calls: list[int]
    sent: Sent
    changed: bool


def _heads_for(p: int) -> int:
    """Return the number of heads of a layer that p ranks share."""
    return width_for(p, 4)


def _wholes(heads: int) -> list[_Whole]:
    d = heads * HEAD
    shapes = ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d))
    return [_Whole(*(drawn(10 * i + j, *shape) / d**0.5 for j, shape in enumerate(shapes))) for i in range(LAYERS)]


def _shards_of(heads: int, p: int, r: int) -> list[Shard]:
    """Return a rank's part of each layer, with empty caches."""
    found = []
    for whole in _wholes(heads):
        qkv = torch.cat([cut(part, p, 0)[r] for part in cut(whole.qkv, 3, 0)])
        out, up, down = cut(whole.out, p, 1)[r], cut(whole.up, p, 0)[r], cut(whole.down, p, 1)[r]
        found.append(Shard(qkv, out, up, down, _Heads(heads // p)))
    return found


def _tokens(heads: int) -> list[Tensor]:
    return [drawn(90 + i, BATCH, heads * HEAD) for i in range(TOKENS)]


def _decode_on(comm: Comm, fn: Answer) -> _Decoded:
    """Decode some tokens, one after the other, on one rank."""
    heads = _heads_for(comm.size)
    shards, log = _shards_of(heads, comm.size, comm.rank), CallLog(comm)
    ys, kinds, changed = [], [], False
    for x in _tokens(heads):
        given = x.clone()
        y = fn(comm, given, shards)
        kinds.append(type(y).__name__)
        ys.append(y.detach().numpy().copy() if isinstance(y, Tensor) else None)
        changed |= not torch.equal(given, x)
    return _Decoded(ys, kinds, [shard.attend.calls for shard in shards], log.phase(), changed)  # pyrefly: ignore[missing-attribute]


def _variant(heads: int, p: int = 1, **how: bool) -> list[np.ndarray]:
    """Return the results of p ranks for each token on rank 0, with one mistake, if any."""
    shards = [_shards_of(heads, p, r) for r in range(p)]
    ys = []
    for x in _tokens(heads):
        for parts in zip(*shards, strict=True):
            inner = x if how.get("bare") else norm(x)
            said = [part.attend(*(inner @ part.qkv.T).chunk(3, -1)) @ part.out.T for part in parts]
            attended = said[0] if how.get("own") else sum(said, torch.zeros(())) / (p if how.get("mean") else 1)
            if how.get("one"):
                attended, inner = attended + (p - 1) * x, inner
            old, x = x, attended if how.get("plain") else x + attended
            inner = norm(old) if how.get("parallel") else x if how.get("bare") else norm(x)
            wide = [inner @ part.up.T for part in parts]
            said = [(w if how.get("linear") else gelu(w)) @ part.down.T for w, part in zip(wide, parts, strict=True)]
            attended = said[0] if how.get("own") else sum(said, torch.zeros(())) / (p if how.get("mean") else 1)
            if how.get("one"):
                attended = attended + (p - 1) * x
            x = attended if how.get("plain") else x + attended
            if how.get("first"):
                break
        ys.append(x.numpy())
    return ys


MISTAKES: Rows = (
    ("own", "sum: That is the part of rank 0 alone: add the parts of all ranks."),
    ("mean", "mean: That is the mean over ranks, but the parts of a product add up."),
    (
        "one",
        "residual: x was added on every rank, so the sum has it once for each rank: add x after the sum.",
    ),
    ("plain", "residual: x itself is missing: each half of a layer adds its result to x."),
    ("bare", "norm: Apply norm before attention, and again before the MLP."),
    ("parallel", "order: The MLP has read x as it was before attention: its input is the sum of x and attention."),
    ("linear", "gelu: Apply gelu between up and down."),
    ("first", "layers: Only the first layer was computed: there are more."),
)


def _judge_decoded(run: Results, where: str) -> None:
    """Raise Broken unless each rank returns what one rank alone does."""
    p, heads = len(run), _heads_for(len(run))
    right = _variant(heads)
    for r, decoded in enumerate(run):
        for i, wanted in enumerate(right):
            got = decoded.ys[i]
            if got is None or got.shape != wanted.shape:
                what = type_text(decoded.kinds[i]) if got is None else f"shape {got.shape}"
                raise Broken(f"returns: {where} rank {r} returned {what}: return (b, d), the same on every rank.")
            if not equal(got, wanted):
                rows = [(_variant(heads, p, **{how: True})[i], why) for how, why in MISTAKES] if r == 0 else []
                text = f"{where}, at token {i + 1}, {difference('y', got, wanted)} on rank {r}."
                raise because(why_wrong(got, wanted, rows, "value"), text)
        if decoded.changed:
            raise Broken(f"input: {where} all numbers are right, but rank {r} has written into its caller's x.")
        if any(calls != TOKENS for calls in decoded.calls):
            raise Broken(f"""cache: {where} attend of a layer was called {max(decoded.calls)} times for {TOKENS} tokens:
                each call adds to the cache.""")


def _check_sent(run: Results, where: str) -> None:
    """Raise Broken if ranks together send more than two all-reduces of b d numbers for each layer."""
    p, n = len(run), BATCH * _heads_for(len(run)) * HEAD
    total, most = sum(decoded.sent.nbytes for decoded in run), ring_bytes(p, 8 * n, 2 * LAYERS * TOKENS)
    sent = run[0].sent
    if sent.barriers:
        raise Broken(
            f"messages: {where} the numbers are right, but rank 0 waits in {counted(sent.barriers, 'barrier')}."
        )
    if total > most:
        raise Broken(f"""messages: {where} all numbers are right, but the ranks send {total // TOKENS:,} bytes for a
            token, and {most // TOKENS:,.0f} are enough: two all-reduces of b d = {n} numbers for each of
            {LAYERS} layers. Rank 0 {Sent(sent.calls[: len(sent.calls) // TOKENS], 0, 0).described()}.""")


def _check_tensor_parallel_decode(fn: Answer, runner: Runner = None) -> Passed:
    def judge(run: Results, where: str) -> None:
        _judge_decoded(run, where)
        check_waits(run.events, len(run))
        if len(run) > 1:
            _check_sent(run, where)

    run = in_all_cases(fn, _decode_on, [(p,) for p in RANKS], with_ranks, judge)
    sent, n = sum(decoded.sent.nbytes for decoded in run), BATCH * _heads_for(len(run)) * HEAD
    return Passed(
        f"{TOKENS} tokens through {LAYERS} layers: as on a single rank, to 1e-10, on 1, 2, 3 and 4 simulated ranks",
        f"""messages: {len(run)} ranks send {sent // TOKENS:,} bytes for a token, as in two all-reduces of b d = {n}
        numbers for each of {LAYERS} layers; caches and weights stay where they are""",
        *engine_facts(runner, _judge_decoded, _decode_on, fn),
        run=run,
    )


EXERCISES = (
    Exercise("13.1", "one token with a cache", decode_step, 2, _check_decode_step),
    Exercise("13.2", "decode on several ranks", tensor_parallel_decode, 2, _check_tensor_parallel_decode),
)

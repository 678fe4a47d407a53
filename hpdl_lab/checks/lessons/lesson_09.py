"""Notebook 09: linear layers cut by outputs and by inputs, heads, sequence parallel, and the halos of a convolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias, TypedDict, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from ...comm import Results
from ...comm.base import Comm
from ...comm.network import Network, Ring
from ...parallel.tensor import spatial as reference
from ...parallel.tensor import transformer
from ...parallel.tensor.linear import column_linear, row_linear, sequence_parallel
from ...units import counted
from ..checkers import because, engine_facts, first_wrong, in_all_cases, with_ranks
from ..layer import (
    LayerCase,
    Part,
    arrays,
    check_layer,
    cut,
    drawn,
    nearly_whole,
    ring_bytes,
    small_integers,
    width_for,
)
from ..ranks import capital, full_stop, simulate, type_text
from ..record import Answer, Broken, Drawing, Exercise, Passed, Reason, Rows, Runner
from ..traffic import check_waits, in_barriers

NARROW = 5  # wide is one side of the layer; the other is what the ranks share
LEADS = {3: (4,), 4: (2, 1, 2)}  # x is (2, 3, ...), and on some numbers of ranks (4, ...) or (2, 1, 2, ...)


def _column_case(p: int, biased: bool = True) -> LayerCase:
    """Return a layer 5 -> 12 whose outputs p ranks share."""
    out, lead = width_for(p), LEADS.get(p, (2, 3))
    x, g = nearly_whole(1, *lead, NARROW), nearly_whole(4, *lead, out)
    weight, bias = nearly_whole(2, out, NARROW), nearly_whole(3, out) * biased
    y, dx = x @ weight.T + bias, g @ weight
    weights, biases, gs, bare = cut(weight, p, 0), cut(bias, p, 0), cut(g, p, -1), cut(x @ weight.T, p, -1)
    parts = cut(y, p, -1)
    weight_grads = [gr.flatten(0, -2).T @ x.flatten(0, -2) for gr in gs]

    added = f"sum: x has been added over {p} ranks, and was the same on all of them: forward copies, backward adds."

    def explain(r: int) -> Rows:
        return (
            (y, "gathered: Those are the columns of all ranks. The next layer takes only the columns of its own rank."),
            (bare[r], f"bias: The bias is missing: {out // p} numbers on every rank, one for each of its rows."),
            (sum(parts), "sum: That is the sum over ranks, but every rank has other columns: nothing to add here."),
            (p * x @ weights[r].T + biases[r], added),
        )

    def explain_grad(name: str, r: int) -> Rows:
        if name == "x":
            mine = gs[r] @ weights[r]
            return (
                (mine, _blame(r)),
                (p * dx, f"twice: That is {p} times as much: it has been added over ranks twice."),
                (p * mine, _blame(r)),
                (dx / p, f"mean: That is the mean over {p} ranks: their contributions to the gradient of x add up."),
            )
        total = sum(weight_grads) if name == "weight" else sum(gr.flatten(0, -2).sum(0) for gr in gs)
        return (
            (total, f"shard: It was added over ranks, but every rank has other rows: {name} of rank {r} is its own."),
        )

    case = LayerCase(
        inputs=[{"x": x, "weight": w, "bias": b} for w, b in zip(weights, biases, strict=True)],
        weights=gs,
        y=arrays(parts),
        grads={
            "x": arrays([dx] * p),
            "weight": arrays(weight_grads),
            "bias": arrays([gr.flatten(0, -2).sum(0) for gr in gs]),
        },
        whole=weight.numel(),
        most={"forward": 0, "backward": ring_bytes(p, x.nbytes)},
        explain=explain,
        explain_grad=explain_grad,
    )
    return case if biased else _without_bias(case)


def _without_bias(case: LayerCase) -> LayerCase:
    """Return the same case of a layer whose bias is None."""
    inputs = [{name: x for name, x in given.items() if name != "bias"} for given in case.inputs]
    return case._replace(inputs=inputs, grads={name: g for name, g in case.grads.items() if name != "bias"})


def _blame(r: int) -> Reason:
    return f"""transposed: That is only the gradient of x from the columns of rank {r}. All ranks used x, so backward
        adds the gradients of all: copy in forward, all-reduce in backward."""


def _row_case(p: int, biased: bool = True) -> LayerCase:
    """Return a layer 12 -> 5 whose inputs p ranks share."""
    into, lead = width_for(p), LEADS.get(p, (2, 3))
    x, g = nearly_whole(5, *lead, into), nearly_whole(8, *lead, NARROW)
    weight, bias = nearly_whole(6, NARROW, into), nearly_whole(7, NARROW) * biased
    y, xs, weights = x @ weight.T + bias, cut(x, p, -1), cut(weight, p, 1)
    parts = [a @ w.T for a, w in zip(xs, weights, strict=True)]
    flat = g.flatten(0, -2)
    bias_grad, weight_grads = flat.sum(0), [flat.T @ a.flatten(0, -2) for a in xs]

    def explain(r: int) -> Rows:
        alone = f"That is rank {r}'s own part: each has multiplied its columns, and y is the sum over ranks."
        return (
            (y + (p - 1) * bias, f"bias: The bias was added {p} times, once on every rank before the sum."),
            (y - bias, "bias: The sum is right, the bias is missing."),
            (parts[r] + bias, f"sum: {alone}"),
            (parts[r], f"sum: {alone}"),
            ((y - bias) / p + bias, f"mean: That is the mean over {p} ranks: parts of a product add up."),
            (y / p, f"mean: That is the mean over {p} ranks: parts of a product add up."),
            (torch.cat([part + bias for part in parts], -1), "sum: Parts of one product are added, not put in a row."),
            (torch.cat(parts, -1), "sum: Parts of one product are added, not put in a row."),
        )

    def explain_grad(name: str, r: int) -> Rows:
        right = {"x": g @ weights[r], "weight": weight_grads[r], "bias": bias_grad}[name]
        often = f"That is {p} times as much: all-reduce in forward, and in backward nothing, not once more."
        if name != "bias":
            others = sum(g @ weight for weight in weights)
            mixed = "It was added over ranks, but every rank has other columns of x, and their gradients are its own."
            return (p * right, f"transposed: {often}"), (others, f"transposed: {mixed}")
        few = f"That is 1/{p} of it: bias / {p} on every rank gives the right sum, but learns {p} times too slowly."
        none = "Only some ranks add it. Here it stays as it is, while the others change theirs: replicas drift apart."
        return (p * right, f"transposed: {often}"), (right / p, f"bias: {few}"), (0 * right, f"bias: {none}")

    case = LayerCase(
        inputs=[{"x": a, "weight": w, "bias": bias} for a, w in zip(xs, weights, strict=True)],
        weights=[g] * p,
        y=arrays([y] * p),
        grads={"x": arrays([g @ w for w in weights]), "weight": arrays(weight_grads), "bias": arrays([bias_grad] * p)},
        whole=weight.numel(),
        most={"forward": ring_bytes(p, y.nbytes), "backward": 0},
        explain=explain,
        explain_grad=explain_grad,
    )
    return case if biased else _without_bias(case)


COLUMN = Part(
    _column_case,
    "this rank's columns, (..., out/p)",
    {
        "forward": "Every rank has all of x and its own rows of the weight: that is all it needs for its own columns.",
        "backward": "One all-reduce, of the gradient of x. Weights and bias are this rank's own.",
    },
)
ROW = Part(
    _row_case,
    "the whole sum, (..., out), the same on every rank",
    {
        "forward": "One all-reduce, of y. The columns of x and the weight stay where they are.",
        "backward": "Every rank has the whole gradient of y already, and its own columns need nothing else.",
    },
)


def _check_linear(part: Part, case: Callable[..., LayerCase]) -> Callable[..., Passed]:
    """Return the check of a layer with a bias, and with None."""
    bare = replace(
        part, case=lambda p: case(p, biased=False), adapt=lambda fn: lambda comm, x, weight: fn(comm, x, weight, None)
    )
    return partial(check_layer, part=part, fact=_share_of_weight, variant=bare, more="and bias None")


def _share_of_weight(p: int) -> str:
    n = 12 * NARROW
    return f"memory: with {p} ranks each holds {n // p} of the {n} weights, and no tensor as large as all of them"


BATCH, TOKENS, HEAD = 2, 5, 3  # a head's width is no root of the width of all heads


class _Mistake(TypedDict, total=False):
    """A mistake of attention, see `_variant`."""

    turned: bool
    one: bool
    scale: float
    swapped: bool
    unmerged: bool


def _attention_case(p: int, causal: bool) -> LayerCase:
    """Return attention with max(p, 4) heads or so, shared by p ranks."""
    heads = width_for(p, 4)
    d, per = heads * HEAD, heads // p
    x, g = drawn(11, BATCH, TOKENS, d), drawn(12, BATCH, TOKENS, d)
    qkv, out = (drawn(13, 3 * d, d) / 4, drawn(14, 3 * d)), (drawn(15, d, d) / 4, drawn(16, d))
    names = ("x", "qkv_weight", "qkv_bias", "out_weight", "out_bias")
    leaves = {name: t.requires_grad_(True) for name, t in zip(names, (x, *qkv, *out), strict=True)}
    y = _variant(leaves, heads, causal) + leaves["out_bias"]
    y.backward(g)

    def mine(tensor: Tensor, r: int) -> Tensor:
        return tensor.view(3, p, d // p, -1)[:, r].flatten(0, 1).reshape(-1, *tensor.shape[1:])

    def shard(r: int, layer: dict[str, Tensor]) -> dict[str, Tensor]:
        cuts = {name: mine(layer[name], r) for name in ("qkv_weight", "qkv_bias")}
        return {**layer, **cuts, "out_weight": cut(layer["out_weight"], p, 1)[r]}

    shards = [shard(r, {name: t.detach() for name, t in leaves.items()}) for r in range(p)]
    right = [shard(r, {name: t.grad for name, t in leaves.items() if t.grad is not None}) for r in range(p)]
    y, out_bias = y.detach(), shards[0]["out_bias"]
    parts = [_variant(s, per, causal) for s in shards]

    def explain(r: int) -> Rows:
        def made(**changes: Unpack[_Mistake]) -> Tensor:
            return sum((_variant(shards[s], per, causal, **changes) for s in range(p)), torch.zeros(())) + out_bias

        other = "attend to later ones" if causal else "attend only to earlier ones, although causal is False"
        return (
            (y + (p - 1) * out_bias, f"bias: out_bias was added {p} times, once on every rank before the sum."),
            (parts[r] + out_bias, f"sum: Only the heads of rank {r} are in it: row_linear adds over ranks."),
            (made(turned=True), f"causal: Positions {other}: is_causal=causal."),
            (made(one=True), f"heads: Your rank attends with one head of {per * HEAD} numbers, not with {per}."),
            (made(scale=d**-0.5), f"scale: Scores are divided by the root of {HEAD}, a head's width, not of {d}."),
            (made(scale=1 / HEAD), f"scale: Scores are divided by the root of {HEAD}, a head's width, not by {HEAD}."),
            (made(swapped=True), f"boundary: {SWAPPED}"),
            (made(unmerged=True), "merge: After attention the heads come first: .transpose(1, 2), then reshape."),
        )

    def explain_grad(name: str, r: int) -> Rows:
        x = shards[r]["x"].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(_variant(shards[r] | {"x": x}, per, causal), x, g)
        return ((slope, TRANSPOSED.format(r=r)),) if name == "x" else ()

    return LayerCase(
        inputs=shards,
        weights=[g] * p,
        y=arrays([y] * p),
        grads={name: arrays([right[r][name] for r in range(p)]) for name in right[0]},
        whole=qkv[0].numel(),
        most={"forward": ring_bytes(p, y.nbytes), "backward": ring_bytes(p, x.nbytes)},
        explain=explain,
        explain_grad=explain_grad,
        given=(per, causal),
    )


SWAPPED = """You take q, k and v of one head to lie side by side. Of this rank's columns the first third are queries of
    all its heads, then keys, then values: view(b, s, 3, heads, -1)."""
TRANSPOSED = """transposed: That is only the gradient of x from the heads of rank {r}. All ranks used x: column_linear
    adds their gradients."""


def _variant(
    shard: dict[str, Tensor],
    heads: int,
    causal: bool,
    turned: bool = False,
    one: bool = False,
    scale: float | None = None,
    swapped: bool = False,
    unmerged: bool = False,
) -> Tensor:
    """Return attention with these heads as in models/transformer.py, without out_bias; with one mistake, if any."""
    b, s, _ = shard["x"].shape
    heads = 1 if one else heads
    qkv = linear(shard["x"], shard["qkv_weight"], shard["qkv_bias"])
    if swapped:
        q, k, v = qkv.view(b, s, heads, 3, -1).permute(3, 0, 2, 1, 4)
    else:
        q, k, v = qkv.view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
    attended = scaled_dot_product_attention(q, k, v, is_causal=causal != turned, scale=scale)
    attended = attended.reshape(b, s, -1) if unmerged else attended.transpose(1, 2).reshape(b, s, -1)
    return linear(attended, shard["out_weight"])


PROMISE = "the sum over all heads, (b, s, d), the same on every rank"
WHY = {
    "forward": "One all-reduce, of y: heads need nothing from each other, and row_linear adds their outputs.",
    "backward": "One all-reduce, of the gradient of x: q, k and v come out of one product.",
}
CAUSAL = Part(lambda p: _attention_case(p, True), PROMISE, WHY)
FREE = Part(lambda p: _attention_case(p, False), PROMISE, WHY)


check_attention_heads = partial(
    check_layer, part=CAUSAL, variant=FREE, fact=lambda p: "with causal=True as in a GPT, with causal=False as in a ViT"
)


BATCH_SEQUENCE, WIDTH, HIDDEN = 2, 5, 3  # HIDDEN: of each rank
LEAST = 4  # positions
FIRST, SECOND = "the layer's first weight", "the layer's second weight"


def _mlp_part(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return one rank's part of an MLP: column linear, GELU, row linear without the sum."""
    return linear(gelu(linear(x, up)), down)


def _with_mlp(fn: Answer) -> Callable[[Comm, Tensor, Tensor, Tensor], Tensor]:
    """Return the answer as a function of x and the weights of its rank's layer."""

    def called(comm: Comm, up: Tensor, down: Tensor, x: Tensor) -> Tensor:
        seen = []

        def layer(whole: Tensor) -> Tensor:
            seen.append(whole.shape)
            return _mlp_part(whole, up, down)

        y = fn(comm, x, layer)
        if len(seen) > 1:
            raise ValueError(f"layer was called {len(seen)} times: it is most of the arithmetic, and once is enough")
        return y

    return called


def _sequence_case(p: int) -> LayerCase:
    s = width_for(p, LEAST)
    x, g = drawn(21, BATCH_SEQUENCE, s, WIDTH), drawn(22, BATCH_SEQUENCE, s, WIDTH)
    ups, downs = cut(drawn(23, p * HIDDEN, WIDTH), p, 0), cut(drawn(24, WIDTH, p * HIDDEN), p, 1)
    xs, gs = cut(x, p, 1), cut(g, p, 1)
    leaves = [t.clone().requires_grad_(True) for t in (x, *ups, *downs)]
    pairs = zip(leaves[1 : p + 1], leaves[p + 1 :], strict=True)
    sum((_mlp_part(leaves[0], up, down) for up, down in pairs), torch.zeros(())).backward(g)
    dx, *others = [t.grad for t in leaves if t.grad is not None]
    parts = [_mlp_part(x, up, down) for up, down in zip(ups, downs, strict=True)]
    y = sum(parts, torch.zeros(()))
    dealt = torch.stack(xs, 2).flatten(1, 2)

    def explain(r: int) -> Rows:
        mixed = sum((_mlp_part(dealt, up, down) for up, down in zip(ups, downs, strict=True)), torch.zeros(()))
        lonely = sum((_mlp_part(xs[s], ups[s], downs[s]) for s in range(p)), torch.zeros(()))
        return (
            (y, "whole: Those are all positions: every rank would keep a copy of what one of them has to keep."),
            (lonely, "gather: The layer saw only the positions of each rank, so the sum adds different positions."),
            (
                cut(parts[r], p, 1)[r],
                f"sum: That is only the part of the layer on rank {r}: parts add up over ranks.",
            ),
            (cut(y, p, 1)[r] / p, f"mean: That is the mean over {p} ranks: parts of a product add up."),
            (cut(mixed, p, 1)[r], "order: The positions are in the wrong order: all positions of rank 0 come first."),
            (xs[r] * p, "layer: The layer had no part in it."),
        )

    def explain_grad(name: str, r: int) -> Rows:
        if name == "x":
            alone = x.clone().requires_grad_(True)
            (slope,) = torch.autograd.grad(_mlp_part(alone, ups[r], downs[r]), alone, g)
            return ((cut(slope, p, 1)[r], NOT_ADDED.format(r=r)),)
        pair = [t[r].clone().requires_grad_(True) for t in (ups, downs)]
        cut(_mlp_part(x, *pair), p, 1)[r].backward(gs[r])
        return ((pair[name == SECOND].grad, NOT_GATHERED.format(r=r)),)

    return LayerCase(
        inputs=[{FIRST: up, SECOND: down, "x": part} for up, down, part in zip(ups, downs, xs, strict=True)],
        weights=gs,
        y=arrays(cut(y, p, 1)),
        grads={FIRST: arrays(others[:p]), SECOND: arrays(others[p:]), "x": arrays(cut(dx, p, 1))},
        whole=10**9,
        most={phase: (2 * (p - 1) * (x.nbytes + x.nbytes // p)) for phase in ("forward", "backward")},
        explain=explain,
        explain_grad=explain_grad,
    )


NOT_ADDED = """transposed: That is only the gradient from the layer of rank {r}. The layers of all ranks used these
    positions: what forward gathers, backward adds and scatters."""
NOT_GATHERED = """transposed: That is the gradient from the positions of rank {r} alone, as if the other positions had
    none. What forward scatters, backward gathers: the layer needs the gradient of all positions."""


SEQUENCE = Part(
    _sequence_case,
    "this rank's positions of the sum, (b, s/p, d)",
    {
        "forward": "An all-gather of x, a reduce-scatter of the result. An all-reduce is both: more than is needed.",
        "backward": "The same two in the other order: gather where forward scatters, scatter where it gathers.",
    },
    _with_mlp,
)


check_sequence_parallel = partial(
    check_layer,
    part=SEQUENCE,
    fact=lambda p: (
        f"memory: between layers each of {p} ranks keeps 1/{p} of the positions; tensor parallel alone keeps all"
    ),
)


T = TypeVar("T")
Noted: TypeAlias = list[tuple[int, int, int]]  # (source, dest, height)
Needs = Sequence[tuple[int, int]]  # rows (above, below) of each rank

IMAGES, CHANNELS, COLUMNS = 2, 4, 3  # no two alike, so that none is taken for another
CASES = (  # (height of the image, (above, below) of each rank)
    (9, ((1, 1),) * 3),
    (4, ((1, 1),) * 2),
    (14, ((2, 2),) * 4),
    (11, ((0, 1),) * 3),  # a kernel of 2: no rank needs what is above
    (13, ((1, 0), (2, 1), (0, 2), (1, 2))),  # every rank needs something else
    (6, ((0, 0),) * 2),
    (5, ((2, 1),)),
)
MANY = (24, ((1, 1),) * 8)  # for counting time
MOST_STEPS = 2  # messages in a row: up and down, or both at once, however many ranks there are


class _Padded(NamedTuple):
    """A rank's result as an array, or None; its type; whether it changed x."""

    y: np.ndarray | None
    kind: str
    changed: bool


def _image_of(height: int) -> Tensor:
    return small_integers(31, IMAGES, CHANNELS, height, COLUMNS)


def _call(comm: Comm, fn: Answer, height: int, rows: Needs | None, noted: Noted | None = None) -> _Padded:
    """Call fn(comm, x, rows) on this rank's strip of the image; returns Padded.

    noted: a list of (source, dest, height) of a whole strip that is sent to a rank that needs none of it: noted when it
    is sent, as most such messages never arrive.
    """
    rows = _rows_for(comm.size) if rows is None else list(rows)
    x = _image_of(height).tensor_split(comm.size, 2)[comm.rank].contiguous()
    given = x.clone()
    if noted is not None:
        for name in ("send", "isend"):
            setattr(comm, name, _noting(comm, getattr(comm, name), x.shape[2], rows, noted))
    y = fn(comm, x, rows)
    value = y.detach().numpy().copy() if isinstance(y, torch.Tensor) else None
    return _Padded(value, type(y).__name__, not torch.equal(x, given))


def _noting(comm: Comm, send: Callable[..., T], high: int, rows: Needs, noted: Noted) -> Callable[..., T]:
    """Return `send`, which also notes a strip that goes down to a rank that needs no rows from above."""

    def sends(x: Tensor, dest: int) -> T:
        if dest == comm.rank + 1 < comm.size and rows[dest][0] == 0 and x.ndim == 4 and x.shape[2] == high:
            noted.append((comm.rank, dest, high))
        return send(x, dest)

    return sends


def _rows_for(p: int) -> list[tuple[int, int]]:
    """Return alternating needs for the engines, however many there are."""
    return [((1, 2), (2, 1))[r % 2] for r in range(p)]


def _check_halo_exchange(fn: Answer, runner: Runner = None) -> Passed:
    for height, rows in CASES:
        noted: Noted = []
        trial = partial(_call, noted=noted)  # of arguments every rank would get a copy
        blame = partial(_with_needs, noted=noted)
        in_all_cases(fn, trial, [(len(rows), height, rows)], _case_of, _check_strips, blame)
    _check_bytes(_run_of(fn, *CASES[4]), *CASES[4])
    run = _run_of(fn, *CASES[2])
    facts = [
        f"the strips of {len(CASES)} images, of equal and unequal heights, on 1, 2, 3 and 4 simulated ranks",
        _check_bytes(run, *CASES[2]),
        _check_steps(_run_of(fn, *MANY, Ring(alpha=1.0, beta=0.0))),
    ]
    return Passed(*facts, *engine_facts(runner, _check_strips, _call, fn, 17, None), run=run)


def _run_of(fn: Answer, height: int, rows: Needs, network: Network | None = None) -> Results:
    return simulate(len(rows), _call, fn, height, rows, network=network, where=_case_of(len(rows), height, rows))


def _case_of(p: int, height: int, rows: Needs) -> str:
    needs = f"{rows[0]} for every rank" if len(set(rows)) == 1 else list(rows)
    return f"{with_ranks(p)}, an image of {height} rows and rows = {needs},"


def _with_needs(broken: Broken, where: str, height: int, rows: Needs, noted: Noted) -> Reason | None:
    """Return why messages do not fit, if ranks need different numbers of rows."""
    if len({pair[0] for pair in rows} | {pair[1] for pair in rows}) == 1 or broken.failed not in ("raises", "deadlock"):
        return None
    found = capital(broken.message.removeprefix(where).strip())
    if noted:
        source, dest, high = noted[0]
        return f"""everything: You send all {high} rows, but 0 are needed: x[:, :, -0:] is everything. Rank
            {source} sends them to rank {dest} {where[0].lower()}{where[1:-1]}: rows[{dest}][0] is 0. Count
            from the front, as in x[:, :, h - n:]. {full_stop(found)}"""
    return f"""asks: {where} messages do not fit, though they do if all ranks need as many rows above as below. Send up
        as many rows as the rank above needs, rows[rank - 1][1]; receive rows[rank][0] rows from there.
        {full_stop(found)}"""


def _check_strips(run: Results, where: str, height: int, rows: Needs | None) -> None:
    """Raise Broken unless every rank holds its strip, with the rows around it, or zeros outside the image."""
    p, rows = len(run), _rows_for(len(run)) if rows is None else rows
    strips = [s.numpy() for s in _image_of(height).tensor_split(p, 2)]
    for r, left in enumerate(run):
        above, below = rows[r]
        image = np.pad(_image_of(height).numpy(), ((0, 0), (0, 0), (above, below), (0, 0)))
        first, n = sum(s.shape[2] for s in strips[:r]), strips[r].shape[2]
        right = image[:, :, first : first + above + n + below]
        if left.y is None or left.y.shape != right.shape:
            got = type_text(left.kind) if left.y is None else f"shape {left.y.shape}"
            raise Broken(f"""shape: {where} rank {r} returned {got}, and {right.shape} is right: {above} + {n} +
                {below} rows, from above, its own and from below.""")
        if not np.array_equal(left.y, right):
            text = first_wrong(f"y{{}} on rank {r}", left.y, right, left.y == right)
            raise because(_explain(left.y, r, rows, strips), f"{where} {text}.")
        if left.changed:
            raise Broken(f"input: {where} rank {r} has changed x: its caller still needs it.")
    if hasattr(run, "events"):
        check_waits(run.events, p)


def _explain(got: np.ndarray, r: int, rows: Needs, strips: list[np.ndarray]) -> Reason:
    """Return the Reason for a wrong result of rank r."""
    p, above, n = len(rows), rows[r][0], strips[r].shape[2]
    if not np.array_equal(got[:, :, above : above + n], strips[r]):
        return f"inside: Rows {above} to {above + n - 1} of y are the strip of rank {r} itself, unchanged."
    for side, halo, s in ((0, got[:, :, :above], r - 1), (1, got[:, :, above + n :], r + 1)):
        described, k = ("above", "below")[side], halo.shape[2]
        opposite = r + 1 if side == 0 else r - 1
        if not 0 <= s < p:
            if not halo.any():
                continue
            if p > 1 and _same(halo, _edge(strips[s % p], k, 1 - side)):
                return f"edge: There is nothing {described} rank {r}, and no ring: zeros, not the rows of rank {s % p}."
            return f"edge: There is nothing {described} rank {r}: outside the image are zeros."
        if _same(halo, _edge(strips[s], k, 1 - side)):
            continue
        which = ("last", "first")[side]
        if not halo.any():
            return f"""zeros: The rows {described} the strip of rank {r} are zeros, in the middle of the image: they are
                the {which} rows of rank {s}. Only the image has an edge, a strip has none."""
        if _same(halo, _edge(strips[s], k, side)):
            return f"""side: Those are the {("first", "last")[side]} rows of rank {s}, which are farthest away:
                {described} the strip of rank {r} are the {which} rows of rank {s}."""
        if 0 <= opposite < p and (_same(halo, _edge(strips[opposite], k, side))):
            return f"neighbor: Those are rows of rank {opposite}: {described} the strip of rank {r} is rank {s}."
        if _same(halo, _edge(strips[s], k, 1 - side)[:, :, ::-1]):
            return f"upside down: Those are the right rows of rank {s} upside down."
        return f"value: Those are not the {which} {counted(k, 'row')} of rank {s}."
    return "value: "


def _edge(strip: np.ndarray, k: int, last: int) -> np.ndarray:
    """Return the first k rows of a strip, or its last ones."""
    return strip[:, :, strip.shape[2] - k :] if last else strip[:, :, :k]


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b)


def _check_bytes(run: Results, height: int, rows: Needs) -> str:
    """Raise Broken if more than the halos was sent. Returns a fact."""
    p, row = len(run), IMAGES * CHANNELS * COLUMNS * 8
    sends = [e.nbytes for e in run.events if e.op == "send"]
    sent, halos = sum(sends), [(r > 0) * above for r, (above, _) in enumerate(rows)]
    halos += [(r < p - 1) * below for r, (_, below) in enumerate(rows)]
    needed = row * sum((r > 0) * above + (r < p - 1) * below for r, (above, below) in enumerate(rows))
    if sent > needed:
        why = "a rank needs only the rows next to its own, from its neighbors"
        many, enough = sum(n > 0 for n in sends), sum(n > 0 for n in halos)
        if many > enough:
            why = f"{counted(many, 'message')} with something in them, and {enough} would do, one for each halo: {why}"
        raise Broken(f"""bytes: The strips are right, but with {p} ranks {sent:,} bytes were sent, and {needed:,} are
            enough: {why}.""")
    return f"bytes: {sent:,} with {p} ranks, the halos and nothing else; the image has {height * row:,}"


def _check_steps(run: Results) -> str:
    """Raise Broken if ranks wait for each other in a row: in `run` a message takes 1 s. Returns a fact."""
    p, took = len(run), round(run.seconds)
    if took > MOST_STEPS:
        in_a_row = """a rank can send before its neighbor's rows have come. Begin all messages with sending and
            receiving, then wait for them."""
        raise Broken(f"""steps: The strips are right, but with {p} ranks it takes the time of {took} messages one after
            another, and {MOST_STEPS} are enough: {in_barriers(run.events) or in_a_row}""")
    found = counted(took, "message")
    return f"time: {found} in a row with {p} ranks, and no more with 1,000: only neighbors wait for each other"


EXERCISES = (
    Exercise("9.1", "a linear layer cut by its outputs", column_linear, 2, _check_linear(COLUMN, _column_case)),
    Exercise("9.2", "a linear layer cut by its inputs", row_linear, 2, _check_linear(ROW, _row_case)),
    Exercise("9.3", "attention with this rank's heads", transformer.attention_heads, 3, check_attention_heads),
    Exercise(
        "9.4",
        "sequence parallel: gather, compute, scatter, and the way back",
        sequence_parallel,
        3,
        check_sequence_parallel,
    ),
    Exercise(
        "9.6",
        "halos of a convolution",
        reference.halo_exchange,
        3,
        _check_halo_exchange,
        picture=Drawing("traffic", "Your halos: rows for the neighbors, and for no other rank"),
    ),
)

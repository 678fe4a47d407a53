"""Notebook 09, attention: which rows of the packed weights belong to a rank's heads, and attention with only those."""

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from ..parallel.tensor import transformer as reference
from .layer_part import Case, Part, arrays, check_part, cut, drawn, ring_bytes, width_for
from .ranks import alone, capital, count, describe_error, tried
from .record import Broken, Exercise, Passed

# (ranks, heads, width)
SHARED = ((2, 4, 8), (2, 2, 6), (3, 6, 12), (4, 4, 16), (4, 8, 32), (1, 3, 12))
UNEVEN = ((2, 3, 12), (4, 6, 24), (3, 2, 12))  # the width could be shared, the heads cannot
PARTS = ("q", "k", "v")


def check_rows_of_heads(fn, runner=None):
    for ranks, heads, width in SHARED:
        for rank in range(ranks):
            where = f"for rank {rank} of {ranks}, {count(heads, 'head')} and a width of {width},"
            rows = rows_of(fn, rank, ranks, heads, width, where)
            check_rows(rows, rank, ranks, heads, width, capital(where))
    for ranks, heads, width in UNEVEN:
        check_refused(fn, ranks, heads, width)
    return Passed(
        (
            f"right for {len(SHARED)} shapes on 1 to 4 ranks; {count(heads, 'head')} on {ranks} ranks are refused",
            "a GPT-2 small on 4 ranks: rank 1 holds the heads 3, 4 and 5, rows 192 to 383 of q, and of k, and of v",
        )
    )


def rows_of(fn, rank, ranks, heads, width, where):
    """The answer's rows as a list of ints, or Broken."""
    rows = alone(fn, rank, ranks, heads, width, where=where)
    if isinstance(rows, torch.Tensor) and rows.ndim == 1 and not rows.is_floating_point():
        return rows.tolist()
    rows = list(rows) if isinstance(rows, list | tuple | range) else None
    if rows is None or not all(isinstance(row, int) and not isinstance(row, bool) for row in rows):
        message = f"{capital(where)} your function returned no row numbers: return one flat tensor of them, int64."
        raise Broken("returns", message)
    return rows


def check_rows(rows, rank, ranks, heads, width, where):
    each, per = width // heads, heads // ranks
    n, first = per * each, rank * per * each
    right = [part * width + first + i for part in range(3) for i in range(n)]
    if rows == right:
        return
    outside = [row for row in rows if not 0 <= row < 3 * width]
    if outside:
        raise Broken("rows", f"{where} there is no row {outside[0]}: the packed weight has 3 x {width} of them.")
    holds = [sorted({row % width // each for row in rows if row // width == part}) for part in range(3)]
    told = ", ".join(f"{name} of {named(has)}" for name, has in zip(PARTS, holds, strict=True))
    if sorted(rows) == sorted(right):
        message = (
            f"{where} these are the right rows in another order: {rows[: 3 * each]} ... All queries come first, then "
            "all keys, then all values, as in the whole weight: view(b, s, 3, heads, -1) counts on it."
        )
        raise Broken("order", message)
    if any(not has for has in holds):
        message = (
            f"{where} your rows hold {told}. A head needs all three: q, k and v of its own. Cut each of the three "
            "blocks of rows, not the whole."
        )
        raise Broken("boundary", message)
    if holds[0] != holds[1] or holds[1] != holds[2]:
        raise Broken("boundary", f"{where} your rows hold {told}: a head's q, k and v have to be on one rank.")
    mine = list(range(rank * per, (rank + 1) * per))
    if holds[0] == mine:
        lost = sorted(set(right) - set(rows))
        what = f"row {lost[0]} is missing" if lost else "some are there twice"
        message = f"{where} you give {count(len(rows), 'row')}, and {len(right)} are needed: {what}."
        raise Broken("rows", message)
    message = (
        f"{where} your rows hold {named(holds[0])}, and should hold {named(mine)}: neighbors stay together, in the "
        "order of the ranks, so that the shards put side by side are the whole weight again."
    )
    raise Broken("heads", message)


def named(heads):
    if not heads:
        return "no head"
    return f"head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}"


def check_refused(fn, ranks, heads, width):
    where = f"for {count(heads, 'head')} of width {width // heads} on {ranks} ranks"
    _, error = tried(fn, 0, ranks, heads, width, where=where)
    if isinstance(error, ValueError):
        return
    if error is not None:
        raise Broken("raises", f"{describe_error(error, where + ',')}: raise ValueError with the numbers.")
    message = (
        f"{capital(where)} your function returned something. A width of {width} can be shared by {ranks} ranks, but "
        "then a head would be cut in two, and half a head attends to something else: raise ValueError."
    )
    raise Broken("refuse", message)


BATCH, TOKENS, HEAD = 2, 5, 3  # a head's width is no root of that of all heads


def attention_case(p, causal):
    """Attention with max(p, 4) heads or so, shared by p ranks."""
    heads = width_for(p, 4)
    d, per = heads * HEAD, heads // p
    x, g = drawn(11, BATCH, TOKENS, d), drawn(12, BATCH, TOKENS, d)
    tensors = [drawn(13, 3 * d, d) / 4, drawn(14, 3 * d), drawn(15, d, d) / 4, drawn(16, d)]
    leaves = [t.requires_grad_(True) for t in (x, *tensors)]
    y = whole(*leaves, heads, causal)
    y.backward(g)
    grads = [t.grad for t in leaves]
    x, qkv_weight, qkv_bias, out_weight, out_bias = (t.detach() for t in leaves)

    def mine(tensor, r):
        return tensor.view(3, p, d // p, -1)[:, r].flatten(0, 1).reshape(-1, *tensor.shape[1:])

    def shard(r, x, qkv_weight, qkv_bias, out_weight, out_bias):
        return {
            "x": x,
            "qkv_weight": mine(qkv_weight, r),
            "qkv_bias": mine(qkv_bias, r),
            "out_weight": cut(out_weight, p, 1)[r],
            "out_bias": out_bias,
        }

    shards = [shard(r, x, qkv_weight, qkv_bias, out_weight, out_bias) for r in range(p)]
    right = [shard(r, *grads) for r in range(p)]
    y, nothing = y.detach(), torch.zeros(d, dtype=x.dtype)
    parts = [whole(s["x"], s["qkv_weight"], s["qkv_bias"], s["out_weight"], nothing, per, causal) for s in shards]

    def explain(got, r):
        def made(**changes):
            return sum(variant(shards[s], per, causal, **changes) for s in range(p)) + out_bias

        other = "hear what comes later" if causal else "hear only what came before, though causal is False"
        return (
            (y + (p - 1) * out_bias, "bias", f"out_bias was added {p} times, once on every rank before the sum."),
            (parts[r] + out_bias, "sum", f"Only the heads of rank {r} are in it: row_linear adds over ranks."),
            (made(turned=True), "causal", f"Positions {other}: is_causal=causal."),
            (made(one=True), "heads", f"Your rank attends with one head of {per * HEAD} numbers, not with {per}."),
            (made(scale=d**-0.5), "scale", f"Scores are divided by the root of {HEAD}, a head's width, not of {d}."),
            (
                made(scale=1 / HEAD),
                "scale",
                f"Scores are divided by the root of {HEAD}, a head's width, not by {HEAD}.",
            ),
            (made(swapped=True), "boundary", SWAPPED),
            (made(unmerged=True), "merge", "After attention the heads come first: .transpose(1, 2), then reshape."),
        )

    def explain_grad(name, got, r):
        if name == "x":
            return ((own_say(shards[r], per, causal, g), "transposed", TRANSPOSED.format(r=r)),)
        return ((p * right[r][name], "transposed", f"That is {p} times as much: added over ranks in backward, too."),)

    return Case(
        inputs=shards,
        weights=[g] * p,
        y=arrays([y] * p),
        grads={name: arrays([right[r][name] for r in range(p)]) for name in right[0]},
        whole=qkv_weight.numel(),
        most={"forward": ring_bytes(p, y.nbytes), "backward": ring_bytes(p, x.nbytes)},
        explain=explain,
        explain_grad=explain_grad,
        given=(per, causal),
    )


SWAPPED = (
    "You take q, k and v of one head to lie side by side. Of this rank's columns the first third are queries of all "
    "its heads, then keys, then values: view(b, s, 3, heads, -1)."
)
TRANSPOSED = "That is only what the heads of rank {r} say about x. All ranks used x: column_linear adds what they say."


def whole(x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal):
    """Attention on one rank, as in models/transformer.py."""
    b, s, _ = x.shape
    q, k, v = linear(x, qkv_weight, qkv_bias).view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
    heard = scaled_dot_product_attention(q, k, v, is_causal=causal)
    return linear(heard.transpose(1, 2).reshape(b, s, -1), out_weight, out_bias)


def variant(shard, heads, causal, turned=False, one=False, scale=None, swapped=False, unmerged=False):
    """What a rank's heads add to y, without out_bias, with one mistake."""
    b, s, _ = shard["x"].shape
    heads = 1 if one else heads
    qkv = linear(shard["x"], shard["qkv_weight"], shard["qkv_bias"])
    if swapped:
        q, k, v = qkv.view(b, s, heads, 3, -1).permute(3, 0, 2, 1, 4)
    else:
        q, k, v = qkv.view(b, s, 3, heads, -1).permute(2, 0, 3, 1, 4)
    heard = scaled_dot_product_attention(q, k, v, is_causal=causal != turned, scale=scale)
    heard = heard.reshape(b, s, -1) if unmerged else heard.transpose(1, 2).reshape(b, s, -1)
    return linear(heard, shard["out_weight"])


def own_say(shard, heads, causal, g):
    """The gradient of x by one rank's heads alone."""
    x = shard["x"].clone().requires_grad_(True)
    variant(shard | {"x": x}, heads, causal).backward(g)
    return x.grad


PROMISE = "the sum over all heads, (b, s, d), the same on every rank"
WHY = {
    "forward": "One all-reduce, of y: heads need nothing from each other, and row_linear adds what they have heard.",
    "backward": "One all-reduce, of the gradient of x: q, k and v come out of one product.",
}
CAUSAL = Part(lambda p: attention_case(p, True), PROMISE, WHY)
FREE = Part(lambda p: attention_case(p, False), PROMISE, WHY)


def check_attention_heads(fn, runner=None):
    facts, run = check_part(CAUSAL, fn, runner)
    check_part(FREE, fn, None)
    return Passed((*facts, "with causal=True as in a GPT, with causal=False as in a ViT"), run.events, len(run))


EXERCISES = (
    Exercise(
        id="9.3",
        title="which rows belong to a rank's heads",
        reference=reference.rows_of_heads,
        stars=2,
        check=check_rows_of_heads,
        explanation=(
            "The packed weight is three matrices on top of each other. A contiguous share of it would give the first "
            "rank all queries and the last one all values. Loading a checkpoint into ranks, and putting it together "
            "again, is this list of rows and nothing else."
        ),
        parallel=False,
    ),
    Exercise(
        id="9.4",
        title="attention with this rank's heads",
        reference=reference.attention_heads,
        stars=3,
        check=check_attention_heads,
        explanation=(
            "Heads never talk to each other, so they are where attention wants to be cut. One all-reduce in forward "
            "and one in backward; the MLP behind it takes as many: 4 all-reduces of b s d numbers for each layer of a "
            "transformer, which is why tensor parallelism stays inside a host."
        ),
    ),
)

"""Notebook 09, linear layers cut in two ways: by their outputs (columns of the result), and by their inputs."""

from dataclasses import replace

import torch

from ..parallel.tensor import linear as reference
from .layer_part import Case, Part, arrays, check_part, cut, nearly_whole, ring_bytes, width_for
from .record import Exercise, Passed

NARROW = 5  # wide is one side of the layer; the other is what the ranks share
LEADS = {3: (4,), 4: (2, 1, 2)}  # x is (2, 3, ...), and on some numbers of ranks (4, ...) or (2, 1, 2, ...)


def column_case(p, biased=True):
    """A layer 5 -> 12 whose outputs p ranks share."""
    out, lead = width_for(p), LEADS.get(p, (2, 3))
    x, g = nearly_whole(1, *lead, NARROW), nearly_whole(4, *lead, out)
    weight, bias = nearly_whole(2, out, NARROW), nearly_whole(3, out) * biased
    y, dx = x @ weight.T + bias, g @ weight
    weights, biases, gs, bare = cut(weight, p, 0), cut(bias, p, 0), cut(g, p, -1), cut(x @ weight.T, p, -1)
    parts = cut(y, p, -1)
    weight_grads = [gr.flatten(0, -2).T @ x.flatten(0, -2) for gr in gs]

    def explain(got, r):
        return (
            (y, "gathered", "Those are the columns of all ranks. The next layer takes only those of its own rank."),
            (bare[r], "bias", f"The bias is missing: {out // p} numbers on every rank, those of its own rows."),
            (sum(parts), "sum", "That is the sum over ranks, but every rank has other columns: nothing to add here."),
            (
                p * x @ weights[r].T + biases[r],
                "sum",
                f"x has been added over {p} ranks, and was the same on all of them: forward copies, backward adds.",
            ),
            (parts[0], "rank", f"Those are the columns of rank 0: rank {r} computes its own."),
        )

    def explain_grad(name, got, r):
        if name == "x":
            mine = gs[r] @ weights[r]
            return (
                (mine, "transposed", blame(r)),
                (p * dx, "twice", f"That is {p} times as much: it has been added over ranks twice."),
                (p * mine, "transposed", blame(r)),
                (dx / p, "mean", f"That is the mean over {p} ranks: what they say about x adds up."),
            )
        total = sum(weight_grads) if name == "weight" else sum(gr.flatten(0, -2).sum(0) for gr in gs)
        return (
            (total, "shard", f"It was added over ranks, but every rank has other rows: {name} of rank {r} is its own."),
        )

    case = Case(
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
    return case if biased else without_bias(case)


def without_bias(case):
    """The same case of a layer whose bias is None."""
    inputs = [{name: x for name, x in given.items() if name != "bias"} for given in case.inputs]
    return case._replace(inputs=inputs, grads={name: g for name, g in case.grads.items() if name != "bias"})


def with_none(fn):
    return lambda comm, x, weight: fn(comm, x, weight, None)


def blame(r):
    return (
        f"That is only what the columns of rank {r} say about x. All ranks used x, so all have a say, and backward has "
        "to add them: copy in forward, all-reduce in backward."
    )


def row_case(p, biased=True):
    """A layer 12 -> 5 whose inputs p ranks share."""
    into, lead = width_for(p), LEADS.get(p, (2, 3))
    x, g = nearly_whole(5, *lead, into), nearly_whole(8, *lead, NARROW)
    weight, bias = nearly_whole(6, NARROW, into), nearly_whole(7, NARROW) * biased
    y, xs, weights = x @ weight.T + bias, cut(x, p, -1), cut(weight, p, 1)
    parts = [a @ w.T for a, w in zip(xs, weights, strict=True)]
    flat = g.flatten(0, -2)
    bias_grad, weight_grads = flat.sum(0), [flat.T @ a.flatten(0, -2) for a in xs]

    def explain(got, r):
        alone = f"That is rank {r}'s own part: each has multiplied its columns, and y is the sum over ranks."
        return (
            (y + (p - 1) * bias, "bias", f"The bias was added {p} times, once on every rank before the sum."),
            (y - bias, "bias", "The sum is right, the bias is missing."),
            (parts[r] + bias, "sum", alone),
            (parts[r], "sum", alone),
            ((y - bias) / p + bias, "mean", f"That is the mean over {p} ranks: parts of a product add up."),
            (y / p, "mean", f"That is the mean over {p} ranks: parts of a product add up."),
            (
                torch.cat([part + bias for part in parts], -1),
                "sum",
                "Parts of one product are added, not put in a row.",
            ),
            (torch.cat(parts, -1), "sum", "Parts of one product are added, not put in a row."),
        )

    def explain_grad(name, got, r):
        right = {"x": g @ weights[r], "weight": weight_grads[r], "bias": bias_grad}[name]
        often = f"That is {p} times as much: all-reduce in forward, and in backward nothing, not once more."
        few = f"That is 1/{p} of it: what has been added in forward is not divided in backward."
        if name == "x":
            others = sum(g @ weight for weight in weights)
            mixed = "It was added over ranks, but every rank has other columns of x, and their gradients are its own."
            return (p * right, "transposed", often), (right / p, "mean", few), (others, "transposed", mixed)
        if name == "weight":
            return (p * right, "transposed", often), (right / p, "mean", few)
        few = f"That is 1/{p} of it: bias / {p} on every rank gives the right sum, but learns {p} times too slowly."
        none = "Only some ranks add it. Here it stays as it is, while the others change theirs: replicas drift apart."
        return (p * right, "transposed", often), (right / p, "bias", few), (0 * right, "bias", none)

    case = Case(
        inputs=[{"x": a, "weight": w, "bias": bias} for a, w in zip(xs, weights, strict=True)],
        weights=[g] * p,
        y=arrays([y] * p),
        grads={
            "x": arrays([g @ w for w in weights]),
            "weight": arrays(weight_grads),
            "bias": arrays([bias_grad] * p),
        },
        whole=weight.numel(),
        most={"forward": ring_bytes(p, y.nbytes), "backward": 0},
        explain=explain,
        explain_grad=explain_grad,
    )
    return case if biased else without_bias(case)


COLUMN = Part(
    column_case,
    "this rank's columns, (..., out/p)",
    {
        "forward": "Every rank has all of x and its own rows of the weight: that is all it needs for its own columns.",
        "backward": "One all-reduce, of the gradient of x. Weights and bias are this rank's own.",
    },
)
ROW = Part(
    row_case,
    "the whole sum, (..., out), the same on every rank",
    {
        "forward": "One all-reduce, of y. The columns of x and the weight stay where they are.",
        "backward": "Every rank has the whole gradient of y already, and its own columns need nothing else.",
    },
)


def no_bias(part, case):
    """`part` where bias is None."""
    return replace(part, case=lambda p: case(p, biased=False), adapt=with_none)


def check_column_linear(fn, runner=None):
    facts, run = check_part(COLUMN, fn, runner)
    check_part(no_bias(COLUMN, column_case), fn, None, "and bias None")
    return Passed((*facts, share_of_weight(12 * NARROW)), run.events, len(run))


def check_row_linear(fn, runner=None):
    facts, run = check_part(ROW, fn, runner)
    check_part(no_bias(ROW, row_case), fn, None, "and bias None")
    return Passed((*facts, share_of_weight(12 * NARROW)), run.events, len(run))


def share_of_weight(n):
    return f"memory: with 4 ranks each holds {n // 4} of the {n} weights, and no tensor as large as all of them"


EXERCISES = (
    Exercise(
        id="9.1",
        title="a linear layer cut by its outputs",
        reference=reference.column_linear,
        stars=2,
        check=check_column_linear,
        explanation=(
            "Forward costs nothing, backward one all-reduce of x: Megatron calls the pair f. It is the mirror image of "
            "row_linear's g, which adds in forward and copies in backward. What every rank used, every rank has a say "
            "about: wherever you copy in forward, you add in backward."
        ),
    ),
    Exercise(
        id="9.2",
        title="a linear layer cut by its inputs",
        reference=reference.row_linear,
        stars=2,
        check=check_row_linear,
        explanation=(
            "One all-reduce of y in forward, nothing in backward. Column then row is the pair that a transformer's MLP "
            "is cut into: between the two, GELU works on each rank's own columns, and nobody has to talk."
        ),
    ),
)

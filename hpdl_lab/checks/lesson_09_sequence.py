"""Notebook 09, sequence parallel: every rank keeps its own positions, and a cut layer sees all of them."""

import torch
from torch.nn.functional import gelu, linear

from ..parallel.tensor import sequence as reference
from .layer_part import Case, Part, arrays, check_part, cut, drawn, width_for
from .record import Exercise, Passed

BATCH, WIDTH, HIDDEN = 2, 5, 3  # HIDDEN: of each rank
LEAST = 4  # positions
FIRST, SECOND = "the layer's first weight", "the layer's second weight"


def mlp_part(x, up, down):
    """One rank's part of an MLP: column linear, GELU, row linear without the sum."""
    return linear(gelu(linear(x, up)), down)


def with_mlp(fn):
    """The answer as a function of x and the weights of its rank's layer."""

    def called(comm, up, down, x):
        seen = []

        def layer(whole):
            seen.append(whole.shape)
            return mlp_part(whole, up, down)

        y = fn(comm, x, layer)
        if len(seen) > 1:
            raise ValueError(f"layer was called {len(seen)} times: it is most of the arithmetic, and once is enough")
        return y

    return called


def sequence_case(p):
    s = width_for(p, LEAST)
    x, g = drawn(21, BATCH, s, WIDTH), drawn(22, BATCH, s, WIDTH)
    ups, downs = cut(drawn(23, p * HIDDEN, WIDTH), p, 0), cut(drawn(24, WIDTH, p * HIDDEN), p, 1)
    xs, gs = cut(x, p, 1), cut(g, p, 1)
    leaves = [t.clone().requires_grad_(True) for t in (x, *ups, *downs)]
    sum(mlp_part(leaves[0], up, down) for up, down in zip(leaves[1 : p + 1], leaves[p + 1 :], strict=True)).backward(g)
    dx, *others = [t.grad for t in leaves]
    parts = [mlp_part(x, up, down) for up, down in zip(ups, downs, strict=True)]
    y = sum(parts)
    dealt = torch.stack(xs, 2).flatten(1, 2)

    def explain(got, r):
        mixed = sum(mlp_part(dealt, up, down) for up, down in zip(ups, downs, strict=True))
        lonely = sum(mlp_part(xs[s], ups[s], downs[s]) for s in range(p))
        return (
            (y, "whole", "Those are all positions: every rank would keep a copy of what one of them has to keep."),
            (lonely, "gather", "The layer saw only the positions of each rank, and what was added belongs to others."),
            (
                cut(parts[r], p, 1)[r],
                "sum",
                f"That is only what the layer of rank {r} says: parts are added over ranks.",
            ),
            (cut(y, p, 1)[r] / p, "mean", f"That is the mean over {p} ranks: parts of a product add up."),
            (cut(mixed, p, 1)[r], "order", "Positions were put together in another order: rank 0's come first, all."),
            (xs[r] * p, "layer", "The layer had no part in it."),
        )

    def explain_grad(name, got, r):
        if name == "x":
            alone = x.clone().requires_grad_(True)
            mlp_part(alone, ups[r], downs[r]).backward(g)
            return ((cut(alone.grad, p, 1)[r], "transposed", NOT_ADDED.format(r=r)),)
        pair = [t[r].clone().requires_grad_(True) for t in (ups, downs)]
        cut(mlp_part(x, *pair), p, 1)[r].backward(gs[r])
        return ((pair[name == SECOND].grad, "transposed", NOT_GATHERED.format(r=r)),)

    return Case(
        inputs=[{FIRST: up, SECOND: down, "x": part} for up, down, part in zip(ups, downs, xs, strict=True)],
        weights=gs,
        y=arrays(cut(y, p, 1)),
        grads={FIRST: arrays(others[:p]), SECOND: arrays(others[p:]), "x": arrays(cut(dx, p, 1))},
        whole=10**9,
        most={phase: both_ways(p, x.nbytes) for phase in ("forward", "backward")},
        explain=explain,
        explain_grad=explain_grad,
    )


NOT_ADDED = (
    "That is only what the layer of rank {r} says about its own positions. All ranks' layers saw them: what was "
    "gathered in forward is added and scattered in backward."
)
NOT_GATHERED = (
    "That is what the positions of rank {r} say, as if the others had no gradient. What was scattered in forward is "
    "gathered in backward, so that the layer sees the gradient of all positions."
)


def both_ways(p, nbytes):
    """What p ranks send for an all-gather and a reduce-scatter of a tensor of `nbytes`, through rank 0; a ring less."""
    return 2 * (p - 1) * (nbytes + nbytes // p)


SEQUENCE = Part(
    sequence_case,
    "this rank's positions of the sum, (b, s/p, d)",
    {
        "forward": "An all-gather of x, a reduce-scatter of the result. An all-reduce is both: more than is needed.",
        "backward": "The same two in the other order: gather where forward scatters, scatter where it gathers.",
    },
    with_mlp,
)


def check_sequence_parallel(fn, runner=None):
    facts, run = check_part(SEQUENCE, fn, runner)
    p = len(run)
    memory = f"memory: between layers each of {p} ranks keeps 1/{p} of the positions; tensor parallel alone keeps all"
    return Passed((*facts, memory), run.events, p)


EXERCISES = (
    Exercise(
        id="9.5",
        title="sequence parallel: gather, compute, scatter, and the way back",
        reference=reference.sequence_parallel,
        stars=3,
        check=check_sequence_parallel,
        explanation=(
            "An all-reduce is a reduce-scatter and an all-gather. Megatron's sequence parallelism moves the second "
            "half in front of the next layer: the same bytes, and what lies between, norms, dropout, residuals, is "
            "kept once in all instead of once on every rank."
        ),
    ),
)

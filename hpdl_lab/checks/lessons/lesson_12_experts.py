"""Notebook 12: tokens travel to their experts and back, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

from ...comm.base import Comm
from ...parallel.experts import expert_layer
from ..layer import LayerCase, Part, arrays, check_layer, drawn
from ..record import Answer, Exercise, Rows

Choose: TypeAlias = Callable[[int], list[Tensor]]  # choose(ranks) -> [(n, k) chosen ranks of each rank's tokens]

D, HIDDEN, ITEMSIZE = 24, 3, 8
TOKENS = (5, 3, 6, 4)  # of ranks 0, 1, ...: no two neighbors have as many
CHOICES = 2  # experts of a token if there are more than two ranks
FIRST, SECOND = "the expert's first weight", "the expert's second weight"


def _tokens_of(p: int) -> list[int]:
    return [TOKENS[r % len(TOKENS)] for r in range(p)]


def _spread(p: int) -> list[Tensor]:
    """Return [(n, k) of each rank]: k different ranks for each token; of four ranks or more, none chooses rank 2."""
    k, ranks = (CHOICES if p > 2 else 1), torch.tensor([r for r in range(p) if p < 4 or r != 2])
    chosen = ranks[drawn(51, sum(_tokens_of(p)), len(ranks)).argsort(1)[:, :k]]
    return list(chosen.split(_tokens_of(p)))


def _expert(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(gelu(linear(x, up)), down)


def _case_of(p: int, choose: Choose) -> LayerCase:
    chosen = choose(p)
    n, k = _tokens_of(p), chosen[0].shape[1]
    x, g, w = drawn(52, sum(n), D), drawn(53, sum(n), D), drawn(54, sum(n), k).sigmoid() + 0.5
    ups, downs = list(drawn(55, p, HIDDEN, D)), list(drawn(56, p, D, HIDDEN))
    everyone = torch.cat(chosen)
    owner = torch.arange(p).repeat_interleave(torch.tensor(n))
    leaves = {"x": x, "weights": w, FIRST: torch.stack(ups), SECOND: torch.stack(downs)}

    def total(t: dict[str, Tensor], places: range | tuple[int, ...] = range(k), own: bool = False) -> Tensor:
        """Return the sum over these of the k experts of each token; own: only if the expert is on the token's rank."""
        y = torch.zeros_like(x)
        for j in places:
            for r in range(p):
                mine = (everyone[:, j] == r) & (owner == r if own else True)
                made = _expert(t["x"], t[FIRST][r], t[SECOND][r])
                y = y + mine[:, None] * t["weights"][:, j : j + 1] * made
        return y

    def gradients(own: bool) -> dict[str, Tensor]:
        t = {name: tensor.clone().requires_grad_(True) for name, tensor in leaves.items()}
        total(t, own=own).backward(g)
        return {name: tensor.grad for name, tensor in t.items() if tensor.grad is not None}

    def dealt(name: str, tensor: Tensor) -> list[Tensor]:
        return list(tensor) if name in (FIRST, SECOND) else list(tensor.split(n))

    y, ones = total(leaves).split(n), {**leaves, "weights": torch.ones_like(w)}
    right, lonely = gradients(own=False), gradients(own=True)

    def explain(r: int) -> Rows:
        order = chosen[r].flatten().argsort(stable=True)
        copies = x.split(n)[r][order // k]
        by_expert = chosen[r].flatten()[order].tolist()
        made = torch.stack([_expert(copy, ups[e], downs[e]) for copy, e in zip(copies, by_expert, strict=True)])
        flat, zeros = w.split(n)[r].flatten(), torch.zeros_like(x.split(n)[r])
        weighed = made * flat[order, None]
        small = copies * flat[order, None]
        before = torch.stack([_expert(copy, ups[e], downs[e]) for copy, e in zip(small, by_expert, strict=True)])
        stays = w.split(n)[r].sum(1, keepdim=True) * _expert(x.split(n)[r], ups[r], downs[r])
        return (
            (
                total(ones).split(n)[r],
                "weights: Results are added without weights: multiply each by weights[token, i].",
            ),
            (
                zeros.index_add(0, order // k, made * flat[:, None]),
                "weights: Results come back in the order of experts, but the weights are in the order of tokens.",
            ),
            (
                zeros.index_add(0, order // k, before),
                "weights: Tokens were multiplied by their weights before the expert: multiply its results.",
            ),
            ((made.view(-1, k, D) * w.split(n)[r][..., None]).sum(1), ORDER),
            (weighed.view(-1, k, D).sum(1), ORDER),
            (zeros.index_put((order // k,), weighed), SET),
            *((total(leaves, (j,)).split(n)[r], f"sum: That is choice {j} alone, of {k} choices.") for j in range(k)),
            (stays, f"dispatch: All tokens of rank {r} went through its own expert, whichever they had chosen."),
            (
                total(leaves, own=True).split(n)[r],
                f"dispatch: Only tokens that chose rank {r}'s own expert have a result.",
            ),
        )

    def explain_grad(name: str, r: int) -> Rows:
        if name in ("x", "weights"):
            why = f"Only the expert of rank {r} has a part in it: gradients come back the way that copies went."
        else:
            why = f"It has only the part from the tokens of rank {r}: tokens of other ranks came here, too."
        return ((dealt(name, lonely[name])[r], f"transposed: {why}"),)

    travels = sum(int((to != r).sum()) for r, to in enumerate(chosen))
    there_and_back = 2 * travels * D * ITEMSIZE
    sizes = (p - 1) * p * (p + 1) * 8  # an all_gather of p numbers, through rank 0
    return LayerCase(
        inputs=[{name: dealt(name, tensor)[r] for name, tensor in leaves.items()} for r in range(p)],
        weights=list(g.split(n)),
        y=arrays(list(y)),
        grads={name: arrays(dealt(name, grad)) for name, grad in right.items()},
        whole=10**9,
        most={"forward": there_and_back + sizes, "backward": there_and_back},
        explain=explain,
        explain_grad=explain_grad,
    )


ORDER = """order: Results come back in the order in which copies were sent, by expert: each copy belongs to the token
    from which it was made."""
SET = "sum: A token has several copies: they are added to its place, not written over each other."


def _with_expert(fn: Answer, choose: Choose) -> Callable[[Comm, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return the answer as a function of x, the weights and this rank's expert."""

    def called(comm: Comm, x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        calls = []

        def mine(there: Tensor) -> Tensor:
            calls.append(len(there))
            return _expert(there, up, down)

        y = fn(comm, x, choose(comm.size)[comm.rank], weights, mine)
        if len(calls) > 1:
            raise ValueError(f"mine was called {len(calls)} times: one product for all copies that came is much faster")
        return y

    return called


WHY = {
    "forward": """A token goes only to the ranks that it has chosen, without padding, and one result per copy comes
        back: 2 d numbers for each copy. Exchange the sizes first.""",
    "backward": "The gradient of each copy goes there and back once, as the copy did.",
}


def _part_of(choose: Choose) -> Part:
    return Part(
        partial(_case_of, choose=choose),
        "the weighted sum for each token of this rank, (n, d)",
        WHY,
        partial(_with_expert, choose=choose),
    )


def _copies_that_travel(p: int) -> str:
    chosen = _spread(p)
    copies, travels = sum(to.numel() for to in chosen), sum(int((to != r).sum()) for r, to in enumerate(chosen))
    return f"copies: with {p} ranks {travels} of {copies} travel; a token of DeepSeek-V3 has 8 copies, 172,032 bytes"


check_expert_layer = partial(
    check_layer,
    part=_part_of(_spread),
    variant=_part_of(lambda p: [torch.full((n, 1), p - 1) for n in _tokens_of(p)]),
    more="and all tokens for the last of them",
    fact=_copies_that_travel,
)

EXERCISES = (Exercise("12.2", "expert all-to-all: there, and back", expert_layer, 3, check_expert_layer),)

"""Notebook 08: a block whose forward is done again, so that only its input is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...parallel.recompute import Watch, recomputed
from ...units import amount_text
from ..ranks import alone, capital, number, type_text, unlike
from ..record import Answer, Broken, Exercise, Passed

BATCH, WIDTH, HIDDEN, SEED = 64, 32, 128, 7
CALLS = 2  # micro-batches under way at once
RANDOM = 5056  # bytes of the state of torch's random numbers


class _Seen(NamedTuple):
    """outputs, dx: of every call; grads: of the parameters, which were 1 before; first: the same after one backward;
    later: random numbers drawn after the forwards, and after the backwards; held: bytes between; flops: of all; graph:
    does an output have one?"""

    outputs: list[Tensor]
    dx: list[Tensor]
    grads: list[Tensor]
    first: list[Tensor]
    later: list[Tensor]
    held: int
    flops: int
    graph: bool


def _plain(block: nn.Module, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor | None]]:
    """Return what `recomputed` returns, by autograd, which keeps everything."""
    leaf = x.detach().requires_grad_()
    y = block(leaf)

    def backward(dy: Tensor) -> Tensor | None:
        y.backward(dy)
        return leaf.grad

    return y.detach(), backward


def _observe(fn: Answer, dropout: float) -> _Seen:
    """Run two forwards of one x, then their backwards, the second first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        block = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(dropout), nn.Linear(HIDDEN, WIDTH))
        x, *dys = torch.randn(1 + CALLS, BATCH, WIDTH)
        x.requires_grad_()
        for param in block.parameters():
            param.grad = torch.ones_like(param)
        with Watch(x, *block.parameters()) as watch:
            calls = [_pair_of(fn(block, x)) for _ in range(CALLS)]
            outputs = [y for y, _ in calls]
            nbytes, later = watch.held(*outputs), [torch.rand(3)]
            dx = [x] * CALLS  # to be replaced
            first: list[Tensor] = []
            for i in reversed(range(CALLS)):
                dx[i] = calls[i][1](dys[i])
                if wrong := unlike(dx[i], dys[i]):
                    raise Broken(f"returns: backward returned {wrong}: dx has the shape and the dtype of x.")
                dx[i] = dx[i].detach().clone()
                first = first or [p.grad.clone() for p in block.parameters() if p.grad is not None]
            later.append(torch.rand(3))
        grads = [param.grad for param in block.parameters() if param.grad is not None]
        if len(grads) < len(list(block.parameters())):
            raise Broken("gradients: a parameter has lost its .grad: what this x contributes is added to it.")
        graph = any(y.requires_grad for y in outputs)
        return _Seen([y.detach() for y in outputs], dx, grads, first, later, nbytes, watch.flops, graph)


def _pair_of(returned: object) -> tuple[Tensor, Answer]:
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Tensor)):
        what = type_text(type(returned).__name__)
        raise Broken(f"returns: your function returned {what}: return (y, backward), a tensor and a function.")
    return returned


def _check_recomputed(fn: Answer) -> Passed:
    for dropout in (0.0, 0.5):
        where = f"with a block {'with' if dropout else 'without'} dropout"
        right = _observe(_plain, dropout)
        seen = alone(_observe, fn, dropout, where=where)
        _judge(seen, right, capital(where), dropout)
    less = f"{amount_text(seen.held)} in place of {amount_text(right.held)}"
    return Passed(
        "gradients: bit for bit as without recomputation, with dropout, and with two micro-batches under way",
        f"bytes that are kept between forward and backward, besides x: {less}",
        f"FLOPs: {seen.flops:,} in place of {right.flops:,}, {number(seen.flops / right.flops)} times as many",
    )


def _judge(seen: _Seen, right: _Seen, where: str, dropout: float) -> None:
    """Raise Broken for what is wrong with an answer."""
    if not all(map(torch.equal, seen.outputs, right.outputs)):
        raise Broken(f"output: {where}, y is not block(x): it {_differs(seen.outputs, right.outputs)}.")
    if seen.graph:
        raise Broken(f"""graph: {where}, y carries a graph, which holds {amount_text(seen.held)} of activations until
            backward: run the block without one.""")
    allowed = CALLS * (4 * BATCH * WIDTH + RANDOM)
    if seen.held > allowed:
        raise Broken(f"""kept: {where}, {amount_text(seen.held)} of what the block computed are held until backward, and
            autograd alone holds {amount_text(right.held)}: keep x, and nothing that comes after it.""")
    _check_gradients(seen, right, where, dropout)
    if not torch.equal(seen.later[1], right.later[1]):
        raise Broken(f"""stream: {where}, the random numbers that are drawn after your backward differ from a run
            without recomputation: put the generator back to where it was, as torch.random.fork_rng does.""")
    if seen.flops != right.flops * 4 // 3:
        raise Broken(f"""flops: {where}, the gradients are right, and cost {number(seen.flops / right.flops)} times the
            FLOPs without recomputation. A step is 3 forwards' worth, and one more makes 4: 4/3.""")


def _check_gradients(seen: _Seen, right: _Seen, where: str, dropout: float) -> None:
    """Raise Broken unless dx and the parameters' gradients are bit-equal."""
    ones = [torch.ones_like(grad) for grad in right.grads]
    if all(map(torch.equal, seen.grads, ones)):
        raise Broken(f"""gradients: {where}, backward adds nothing to the parameters' .grad: let the second forward's
            graph reach them.""")
    alike = [(g - 1).allclose(r - 1, rtol=1e-3, atol=1e-4) for g, r in zip(seen.grads, right.grads, strict=True)]
    dx_alike = [got.allclose(want, rtol=1e-3, atol=1e-4) for got, want in zip(seen.dx, right.dx, strict=True)]
    if dropout and not (all(alike) and all(dx_alike)):
        raise Broken(f"""random: {where}, the gradients do not belong to the forward that returned y. Without dropout
            they are right. Where was the generator when the first forward of this micro-batch began?""")
    for i in reversed(range(CALLS)):
        if not dx_alike[i]:
            summed = seen.dx[i].allclose(sum(right.dx[i:], torch.zeros(())), rtol=1e-3, atol=1e-4)
            why = "it also holds what the backward before has left in x.grad:" if summed and i < CALLS - 1 else ""
            raise Broken(f"""dx: {where}, dx of call {i + 1} of {CALLS}, all with the same x, is wrong: {why}
                give the second forward a tensor of its own, x.detach().requires_grad_().""")
    if not all(alike):
        lost = all(g.allclose(r - 1, rtol=1e-3, atol=1e-4) for g, r in zip(seen.first, right.first, strict=True))
        why = ", because what was there before, from another micro-batch, is lost" if lost else ""
        raise Broken(f"""gradients: {where}, a parameter's .grad {_differs(seen.grads, right.grads)}{why}: a backward
            adds what this x contributes, once.""")
    if not all(map(torch.equal, [*seen.dx, *seen.grads], [*right.dx, *right.grads])):
        raise Broken(f"bits: {where}, the gradients are right but for their last digits: compute the block as it is.")


def _differs(got: list[Tensor], right: list[Tensor]) -> str:
    """Return the first place at which two lists of tensors differ."""
    g, r = next((g, r) for g, r in zip(got, right, strict=True) if not torch.equal(g, r))
    if g.shape != r.shape:
        return f"has shape {tuple(g.shape)} and should have {tuple(r.shape)}"
    i = int((g != r).flatten().nonzero()[0])
    return f"has {number(float(g.flatten()[i]))} where {number(float(r.flatten()[i]))} is right"


EXERCISES = (Exercise("8.2", "recompute a block", recomputed, 2, _check_recomputed),)

"""Layers on several ranks: what they send in forward decides what they must send in backward.

| pair          | forward                         | backward                        | in Megatron |
|---------------|---------------------------------|---------------------------------|-------------|
| `copy_to`     | nothing                         | sum over ranks                  | f           |
| `reduce_from` | sum over ranks                  | nothing                         | g           |
| `split_to`    | this rank's part                | all parts, gathered             |             |
| `gather_from` | all parts, gathered             | this rank's part                |             |

If p ranks go on from the same x, each with a part of the layer, the gradient of x is the sum of p gradients.

y = x A with A (in, out); torch keeps the weight as A transposed, (out, in), so a column of A is a row of `weight`.

    columns: A = [A0 | A1]       x A = [x A0 | x A1]           every rank needs all of x, and has a part of y
    rows:    A = [A0 / A1]       x A = x0 A0 + x1 A1           every rank needs its part of x, and has a part of the sum

After columns each rank holds just the part of y that rows need as their x: two layers and one all-reduce. With sequence
parallel a rank has s/p positions of what is between such pairs, in 1/p of the memory, for the same bytes:

    tensor parallel      norm -> [copy to | layer | all-reduce ] -> add          2 n (p-1)/p bytes for n = b s d numbers
    sequence parallel    norm -> [all-gather | layer | reduce-scatter] -> add    n (p-1)/p + n (p-1)/p

Ref: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ...comm.base import Comm
from .cuts import PARTIAL, WHOLE, Cut, equal_shares

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    class ConjugateContext(FunctionCtx):
        """The state that forward of `_Conjugate` leaves to its backward."""

        back: Map


Map: TypeAlias = Callable[[Tensor], Tensor]


class _Conjugate(torch.autograd.Function):
    """Two functions of plain tensors as one that autograd can go back through."""

    @staticmethod
    def forward(ctx: ConjugateContext, x: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.back = backward
        return forward(x)

    @staticmethod
    @once_differentiable  # messages in backward are no part of a graph
    def backward(ctx: ConjugateContext, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]
        return ctx.back(grad), None, None


def conjugate(x: Tensor, forward: Map, backward: Map) -> Tensor:
    """Return y = forward(x); in the backward pass x.grad = backward(y.grad).

    Args:    x: tensor; forward, backward: functions of one plain tensor, which they leave as it is.
    """
    return _Conjugate.apply(x, forward, backward)


def copy_to(comm: Comm, x: Tensor) -> Tensor:
    """Hand `x`, the same on every rank, to a layer that is shared by all ranks: Megatron's f.

    Copy in forward, all-reduce in backward.   Steps: 0 forward, one all_reduce of N elements backward.
    """
    return conjugate(x, _same, lambda grad: summed(comm, grad))


def reduce_from(comm: Comm, x: Tensor) -> Tensor:
    """Add the ranks' parts of a result: Megatron's g.

    All-reduce in forward, copy in backward.   Steps: one all_reduce of N elements forward, 0 backward.
    """
    return conjugate(x, lambda x: summed(comm, x), _same)


def split_to(comm: Comm, x: Tensor, dim: int = -1) -> Tensor:
    """Return this rank's part of `x`, the same on every rank, along `dim`: (..., n) -> (..., n/p).

    Cut in forward, all-gather in backward.   Bytes per rank: of all_gather for N/p elements backward.
    Raises:  ValueError if the ranks do not divide n.
    """
    require_divisible(comm, x.shape[dim], f"dimension {dim} of a tensor of shape {tuple(x.shape)}")
    return conjugate(x, lambda x: part(comm, x, dim), lambda grad: _gathered(comm, grad, dim))


def gather_from(comm: Comm, x: Tensor, dim: int = -1) -> Tensor:
    """Return the parts of all ranks side by side along `dim`: (..., n/p) -> (..., n), the same on every rank.

    All-gather in forward, cut in backward.   Bytes per rank: of all_gather for the N/p elements of x forward.
    """
    return conjugate(x, lambda x: _gathered(comm, x, dim), lambda grad: part(comm, grad, dim))


# -- the same for plain tensors ----------------------------------------------------------------------------------------


def _same(x: Tensor) -> Tensor:
    return x


def summed(comm: Comm, x: Tensor) -> Tensor:
    """Return a new tensor: the sum of `x` over ranks, bitwise the same on every rank."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    return total if comm.size == 1 else comm.all_reduce(total)


def _gathered(comm: Comm, x: Tensor, dim: int) -> Tensor:
    """Return a new tensor: the parts of all ranks side by side along `dim`."""
    if comm.size == 1:
        return x.detach().clone()
    return torch.cat(comm.all_gather(x.detach().contiguous()).unbind(), dim)


def part(comm: Comm, x: Tensor, dim: int) -> Tensor:
    """Return this rank's part of `x` along `dim`, a copy of its own."""
    return x.tensor_split(comm.size, dim)[comm.rank].contiguous()


def require_divisible(comm: Comm, n: int, what: str) -> None:
    """Raise ValueError, on every rank alike, unless the ranks divide `n`."""
    if n % comm.size:
        raise ValueError(f"{what}: {comm.size} ranks do not divide {n}")


def linear_naive(comm: Comm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute y = x A + bias, each layer by itself: column_linear, then the parts of y are gathered.

    Every layer pays for what only the last one needs: with two of them twice the bytes of a column and a row.

    Args:    as of column_linear.
    Returns: (..., out), the same on every rank.
    Steps: one all_gather forward, one all_reduce of x backward.
    """
    return gather_from(comm, column_linear(comm, x, weight, bias))


def column_linear(comm: Comm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute this rank's columns of y = x A + bias.

        x (..., in) on every rank
        rank 0: weight (out/p, in) -> y (..., out/p), the first columns
        rank 1: weight (out/p, in) -> y (..., out/p), the next columns

    Args:    x: (..., in), the same on every rank.
             weight: (out/p, in), bias: (out/p,) or None, different per rank.
    Returns: (..., out/p). After backward x.grad is complete, the same on every rank.
    Raises:  ValueError if the shapes do not fit, before the first message.
    Steps: 0 forward; one all_reduce backward.
    Bytes per rank: one all_reduce of all elements of x.
    Ref: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    require_fit(x, weight, bias, "column_linear")
    ### BEGIN SOLUTION
    return linear(copy_to(comm, x), weight, bias)  # (..., in) @ (in, out/p) = (..., out/p)

    ### END SOLUTION


def row_linear(comm: Comm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute all of y = x A + bias, from this rank's rows of A and columns of x.

    Row i of A multiplies column i of x, so both are on the same rank.

        rank 0: x0 (..., in/p), weight (out, in/p) -> x0 A0 --+
                                                              +--> x0 A0 + x1 A1 + bias
        rank 1: x1 (..., in/p), weight (out, in/p) -> x1 A1 --+    on every rank

    Args:    x: (..., in/p), weight: (out, in/p), different per rank.
             bias: (out,) or None, the same on every rank.
    Returns: (..., out), the same on every rank.
    Raises:  ValueError if the shapes do not fit, before the first message.
    Steps: one all_reduce forward; 0 backward.
    Bytes per rank: one all_reduce of all elements of y.
    Ref: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    require_fit(x, weight, bias, "row_linear")
    ### BEGIN SOLUTION
    y = reduce_from(comm, linear(x, weight))  # (..., in/p) @ (in/p, out) = (..., out), added over ranks
    return y if bias is None else y + bias  # once, not once per rank

    ### END SOLUTION


class ColumnLinear(nn.Module):
    """This rank's columns of an nn.Linear: weight (out/p, in), bias (out/p,).

    cut: which rows of the whole weight; by default an equal share in the order of ranks.
    """

    def __init__(self, comm: Comm, whole: nn.Linear, cut: Cut | None = None) -> None:
        super().__init__()
        self.comm = comm
        cut = cut or equal_shares(comm, whole.out_features, 0, "the outputs of a linear layer")
        self.cuts = {"weight": cut, "bias": cut}
        self.weight = cut.parameter_of(whole.weight)
        self.bias = None if whole.bias is None else cut.parameter_of(whole.bias)

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(self.comm, x, self.weight, self.bias)

    def part(self, x: Tensor) -> Tensor:
        """Do the same without communication: backward leaves in x.grad this rank's part of the sum."""
        return linear(x, self.weight, self.bias)


class RowLinear(nn.Module):
    """This rank's rows of an nn.Linear: weight (out, in/p), bias (out,) whole on every rank.

    sequence: whether a rank adds the bias at its own positions only.
    """

    def __init__(self, comm: Comm, whole: nn.Linear, sequence: bool = False) -> None:
        super().__init__()
        self.comm = comm
        cut = equal_shares(comm, whole.in_features, 1, "the inputs of a linear layer")
        self.cuts = {"weight": cut, "bias": PARTIAL if sequence else WHOLE}
        self.weight = cut.parameter_of(whole.weight)
        self.bias = None if whole.bias is None else self.cuts["bias"].parameter_of(whole.bias)

    def forward(self, x: Tensor) -> Tensor:
        return row_linear(self.comm, x, self.weight, self.bias)

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum, without communication and bias."""
        return linear(x, self.weight)

    def plus_bias(self, y: Tensor) -> Tensor:
        """Return y plus the bias, if there is one."""
        return y if self.bias is None else y + self.bias


def require_fit(x: Tensor, weight: Tensor, bias: Tensor | None, what: str) -> None:
    """Raise ValueError unless x (..., in), weight (out, in) and bias (out,) or None fit."""
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{what}: x of shape {tuple(x.shape)} and this rank's weight of shape {tuple(weight.shape)} do not fit: "
            f"the weight is (out, in), and the last dimension of x is in"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"{what}: the bias has shape {tuple(bias.shape)}, and the weight has {weight.shape[0]} outputs"
        )


DIM = 1  # of positions, in (b, s, d)


def gather_sequence(comm: Comm, x: Tensor) -> Tensor:
    """Return all positions, from every rank's: (b, s/p, d) -> (b, s, d), the same on every rank.

    A function of plain tensors; in a backward pass scatter_sequence is its transposed.
    Bytes per rank: of all_gather for the N/p elements of x.
    """
    if comm.size == 1:
        return x
    stack = comm.all_gather(x.detach().contiguous())  # (p, b, s/p, d)
    return stack.movedim(0, DIM).flatten(DIM, DIM + 1)  # (b, p, s/p, d) -> (b, s, d)


def scatter_sequence(comm: Comm, x: Tensor) -> Tensor:
    """Return this rank's positions of the sum of `x` over ranks: (b, s, d), different per rank -> (b, s/p, d).

    A function of plain tensors; in a backward pass gather_sequence is its transposed.
    Raises:  ValueError if the ranks do not divide s.
    Bytes per rank: of reduce_scatter for the N elements of x.
    """
    require_positions(comm, x.shape[DIM])
    if comm.size == 1:
        return x
    b, s, *d = x.shape
    rows = x.detach().reshape(b, comm.size, s // comm.size, *d).movedim(DIM, 0)  # (p, b, s/p, d)
    return comm.reduce_scatter(rows.contiguous())


def sequence_parallel(comm: Comm, x: Tensor, layer: Map) -> Tensor:
    """Send `x` through a layer that is cut over ranks; each rank has its positions of x.

        forward    x (b, s/p, d) -> all-gather -> (b, s, d) -> layer -> (b, s, d),
                   a part of the sum -> reduce-scatter -> y (b, s/p, d)
        backward   gradient of y (b, s/p, d) -> all-gather -> layer -> reduce-scatter
                   -> gradient of x (b, s/p, d)

    Args:    x: (b, s/p, d), this rank's positions.
             layer: a function (b, s, d) -> (b, s, d). Its input is the same on every
             rank, and the sum of its outputs over ranks is the result. It is a column
             linear without copy_to, then a row linear without reduce_from.
    Returns: (b, s/p, d), this rank's positions of the result. After backward x.grad is
             complete.
    Raises:  ValueError on every rank if the number of positions is no multiple of p.
    Steps: one all_gather and one reduce_scatter forward; the same backward.
    Bytes per rank: 2(p - 1)/p * b s d * itemsize in each direction, as one all_reduce.
    Ref: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
    """
    gather, scatter = partial(gather_sequence, comm), partial(scatter_sequence, comm)
    ### BEGIN SOLUTION
    whole = conjugate(x, forward=gather, backward=scatter)  # (b, s, d)
    part = layer(whole)  # (b, s, d)
    return conjugate(part, forward=scatter, backward=gather)  # (b, s/p, d)
    ### END SOLUTION


def all_gather_sequence(comm: Comm, x: Tensor) -> Tensor:
    """Bring (b, s/p, d) to (b, s, d) for a layer that ranks share: all-gather, reduce-scatter in backward."""
    return conjugate(x, partial(gather_sequence, comm), partial(scatter_sequence, comm))


def reduce_scatter_sequence(comm: Comm, x: Tensor) -> Tensor:
    """Bring (b, s, d), a part of the sum, to (b, s/p, d): reduce-scatter in forward, all-gather in backward."""
    return conjugate(x, partial(scatter_sequence, comm), partial(gather_sequence, comm))


def require_positions(comm: Comm, positions: int) -> None:
    """Raise ValueError, on every rank alike, unless the ranks divide the positions of a sequence."""
    require_divisible(comm, positions, f"a sequence of {positions} positions cannot be shared equally")

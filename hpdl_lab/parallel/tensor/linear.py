"""A linear layer on several ranks: cut by columns, then by rows, and one sum behind both.

y = x A with A (in, out); torch keeps the weight as A transposed, (out, in), so a column of A is a row of `weight`.

    columns: A = [A0 | A1]       x A = [x A0 | x A1]           every rank needs all of x, and has a part of y
    rows:    A = [A0 / A1]       x A = x0 A0 + x1 A1           every rank needs its part of x, and has a part of the sum

After columns each rank holds just the part of y that rows need as their x, and ReLU or GELU between them work on each
number alone: two layers and one all-reduce.
Ref: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053, section 3 and figure 3.
"""

from torch import nn
from torch.nn.functional import linear

from .cuts import PARTIAL, WHOLE, equal_shares
from .pairs import copy_to, gather_from, reduce_from


def linear_naive(comm, x, weight, bias):
    """y = x A + bias, each layer by itself: column_linear, then the parts of y are gathered.

    Every layer pays for what only the last one needs: with two of them twice the bytes of a column and a row.

    Args:    as of column_linear.
    Returns: (..., out), the same on every rank.
    Steps: one all_gather forward, one all_reduce of x backward.
    """
    return gather_from(comm, column_linear(comm, x, weight, bias))


def column_linear(comm, x, weight, bias):
    """This rank's columns of y = x A + bias.

        x (..., in) on every rank;  rank 0: weight (out/p, in) -> y (..., out/p), the first columns; rank 1: the next

    Args:    x: (..., in), the same on every rank; weight: (out/p, in), bias: (out/p,) or None, different per rank.
    Returns: (..., out/p). After backward x.grad is complete, the same on every rank.
    Raises:  ValueError where the shapes do not fit, before the first message.
    Steps: 0 forward; one all_reduce backward.   Bytes per rank: of all_reduce for the N elements of x.
    Ref: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    require_fit(x, weight, bias, "column_linear")
    ### BEGIN SOLUTION
    return linear(copy_to(comm, x), weight, bias)  # (..., in) @ (in, out/p) = (..., out/p)
    ### END SOLUTION


def row_linear(comm, x, weight, bias):
    """y = x A + bias, of which this rank has some rows of A and the same columns of x.

        rank 0: x0 (..., in/p), weight (out, in/p) -> x0 A0 --+
        rank 1: x1 (..., in/p), weight (out, in/p) -> x1 A1 --+--> x0 A0 + x1 A1 + bias on every rank

    Args:    x: (..., in/p), different per rank; weight: (out, in/p), different per rank; bias: (out,) or None, the same
             on every rank.
    Returns: (..., out), the same on every rank.
    Raises:  ValueError where the shapes do not fit, before the first message.
    Steps: one all_reduce forward; 0 backward.   Bytes per rank: of all_reduce for the N elements of y.
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

    def __init__(self, comm, whole, cut=None):
        super().__init__()
        self.comm = comm
        self.cut = cut or equal_shares(comm, whole.out_features, 0, "the outputs of a linear layer")
        self.weight = self.cut.parameter_of(whole.weight)
        self.bias = None if whole.bias is None else self.cut.parameter_of(whole.bias)

    def forward(self, x):
        return column_linear(self.comm, x, self.weight, self.bias)

    def part(self, x):
        """Without communication: backward leaves in x.grad this rank's part of the sum."""
        return linear(x, self.weight, self.bias)

    def cuts(self):
        return {name: self.cut for name, _ in self.named_parameters()}


class RowLinear(nn.Module):
    """This rank's rows of an nn.Linear: weight (out, in/p), bias (out,) whole on every rank.

    sequence: whether a rank adds the bias at its own positions only.
    """

    def __init__(self, comm, whole, sequence=False):
        super().__init__()
        self.comm = comm
        self.cut = equal_shares(comm, whole.in_features, 1, "the inputs of a linear layer")
        self.bias_cut = PARTIAL if sequence else WHOLE
        self.weight = self.cut.parameter_of(whole.weight)
        self.bias = None if whole.bias is None else self.bias_cut.parameter_of(whole.bias)

    def forward(self, x):
        return row_linear(self.comm, x, self.weight, self.bias)

    def part(self, x):
        """Without communication and bias: this rank's part of the sum."""
        return linear(x, self.weight)

    def cuts(self):
        return {"weight": self.cut} | ({} if self.bias is None else {"bias": self.bias_cut})


def require_fit(x, weight, bias, what):
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

"""Communication with two directions: what a layer sends in forward decides what it must send in backward.

| pair          | forward                         | backward                        | in Megatron |
|---------------|---------------------------------|---------------------------------|-------------|
| `copy_to`     | nothing                         | sum over ranks                  | f           |
| `reduce_from` | sum over ranks                  | nothing                         | g           |
| `split_to`    | this rank's part                | all parts, gathered             |             |
| `gather_from` | all parts, gathered             | this rank's part                |             |

Why the sum: where p ranks go on from the same x, each with a part of the layer, the loss depends on x in p ways, and
its gradient is the sum of p gradients. The backward of a linear map is its transposed: that of "copy" is "add".
Ref: Shoeybi et al. 2019 (Megatron-LM), arXiv:1909.08053, section 3.
"""

import torch


class Alone:
    """Enough of a communicator for one rank that sends nothing: what a layer does to its part by itself."""

    rank, size = 0, 1


ALONE = Alone()


class Conjugate(torch.autograd.Function):
    """Two functions of plain tensors as one that autograd can go back through."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.back = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.back(grad), None, None


def conjugate(x, forward, backward):
    """y = forward(x), and in the backward pass x.grad = backward(y.grad).

    Args:    x: tensor; forward, backward: functions of one plain tensor, which they leave as it is.
    """
    return Conjugate.apply(x, forward, backward)


def copy_to(comm, x):
    """Hand `x`, the same on every rank, to a layer of which every rank has a part: Megatron's f.

    Copy in forward, all-reduce in backward.   Steps: 0 forward, one all_reduce of N elements backward.
    """
    return conjugate(x, same, lambda grad: summed(comm, grad))


def reduce_from(comm, x):
    """Add the ranks' parts of a result: Megatron's g.

    All-reduce in forward, copy in backward.   Steps: one all_reduce of N elements forward, 0 backward.
    """
    return conjugate(x, lambda x: summed(comm, x), same)


def split_to(comm, x, dim=-1):
    """This rank's part of `x`, the same on every rank, along `dim`: (..., n) -> (..., n/p).

    Cut in forward, all-gather in backward.   Bytes per rank: of all_gather for N/p elements backward.
    Raises:  ValueError where the ranks do not divide n.
    """
    require_divisible(comm, x.shape[dim], f"dimension {dim} of a tensor of shape {tuple(x.shape)}")
    return conjugate(x, lambda x: part(comm, x, dim), lambda grad: gathered(comm, grad, dim))


def gather_from(comm, x, dim=-1):
    """The parts of all ranks side by side along `dim`: (..., n/p) -> (..., n), the same on every rank.

    All-gather in forward, cut in backward.   Bytes per rank: of all_gather for the N/p elements of x forward.
    """
    return conjugate(x, lambda x: gathered(comm, x, dim), lambda grad: part(comm, grad, dim))


# -- the same for plain tensors ----------------------------------------------------------------------------------------


def same(x):
    return x


def summed(comm, x):
    """A new tensor: the sum of `x` over ranks, bitwise the same on every rank."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    return total if comm.size == 1 else comm.all_reduce(total)


def gathered(comm, x, dim):
    """A new tensor: the parts of all ranks side by side along `dim`."""
    if comm.size == 1:
        return x.detach().clone()
    return torch.cat(comm.all_gather(x.detach().contiguous()).unbind(), dim)


def part(comm, x, dim):
    """This rank's part of `x` along `dim`, a copy of its own."""
    return x.tensor_split(comm.size, dim)[comm.rank].contiguous()


def require_divisible(comm, n, what):
    """Raise ValueError, on every rank alike, unless the ranks divide `n`."""
    if n % comm.size:
        raise ValueError(f"{what}: {comm.size} ranks do not divide {n}")

"""The collectives of torch as f(comm, ...) on tensors of any shape and, if nothing is added, of any dtype."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from ..comm.base import Comm
from ..comm.buffers import ITEMSIZE, dtype_name
from ..comm.calls import only_calls

Out = TypeVar("Out")
In = TypeVar("In")


@only_calls("all_reduce")
def all_reduce(comm: Comm, x: Tensor) -> Tensor:
    """Replace contiguous x by its sum over ranks."""
    return comm.all_reduce(x)


def all_reduce_each(comm: Comm, tensors: Iterable[Tensor]) -> None:
    """Do the same for each of several tensors, contiguous or not."""
    for x in tensors:
        _in_one_piece(x, comm.all_reduce)


FOLDS = {"MIN": torch.amin, "MAX": torch.amax, "PRODUCT": torch.prod}  # of rows (p, n) over ranks, in their order


def fold_each(comm: Comm, tensors: list[Tensor], name: str) -> None:
    """Replace each of the tensors by the smallest, the largest or the product over ranks of each element. Of any dtype.

    What is compiled adds only. So every rank gets all ranks' tensors: made for the few numbers that DDP's join or a
    clipped norm compare.   Bytes per rank: as all_gather, (p - 1) * n * itemsize in.
    """
    for x in tensors:
        rows = comm.all_gather(flat_memory(x.contiguous())).view(x.dtype).reshape(comm.size, -1)
        x.detach().copy_(FOLDS[name](rows, 0).view_as(x))


def reduce(comm: Comm, x: Tensor, root: int) -> None:
    """Replace x of rank `root` by the sum over ranks."""
    total = comm.reduce(x.detach().contiguous(), root)
    if total is not None:
        x.detach().copy_(total)


def reduce_scatter(comm: Comm, output: Tensor, rows: list[Tensor]) -> None:
    """Replace output by this rank's row of the sum over ranks. rows: one for each rank, or one tensor."""
    x = torch.cat([row.detach().reshape(-1) for row in rows]).view(comm.size, -1)
    output.detach().copy_(comm.reduce_scatter(x).view_as(output))


def broadcast_each(comm: Comm, tensors: list[Tensor], root: int) -> None:
    """Replace each of the tensors by the one of rank `root`."""
    for x in tensors:
        _in_one_piece(x, comm.broadcast, root)


def all_gather(comm: Comm, outputs: list[Tensor], x: Tensor) -> None:
    """Fill outputs with the x of all ranks. outputs: one for each rank, or one tensor for all of them."""
    _put(outputs, comm.all_gather(flat_memory(x.contiguous())).view(x.dtype))


def gather(comm: Comm, outputs: list[Tensor], x: Tensor, root: int) -> None:
    """Do the same, on rank `root` alone."""
    rows = comm.gather(flat_memory(x.contiguous()), root)
    if rows is not None:
        _put(outputs, rows.view(x.dtype))


def scatter(comm: Comm, output: Tensor, rows: list[Tensor], root: int) -> None:
    """Replace output by this rank's row of rank `root`."""
    x = torch.stack([flat_memory(row.contiguous()) for row in rows]) if comm.rank == root else None
    _in_one_piece(output, lambda out: comm.scatter(x, out, root))


def all_to_all_single(comm: Comm, output: Tensor, x: Tensor) -> None:
    """Replace row s of output by row `rank` of rank s's x; the first dimension is a multiple of the ranks."""
    rows = flat_memory(x.contiguous()).view(comm.size, -1)
    _put([output], comm.all_to_all(rows).view(x.dtype))


def all_to_all(comm: Comm, outputs: list[Tensor], inputs: list[Tensor]) -> None:
    """Fill outputs[s] with what rank s has for this rank, by messages: only these two agree on its size."""
    outputs[comm.rank].detach().copy_(inputs[comm.rank])
    others = [r for r in range(comm.size) if r != comm.rank]
    arriving = {r: flat_memory(outputs[r].contiguous()) for r in others}
    works = [comm.irecv(arriving[r], r) for r in others]
    works += [comm.isend(flat_memory(inputs[r].contiguous()), r) for r in others]
    for work in works:
        work.wait()
    for r in others:
        if not outputs[r].is_contiguous():
            outputs[r].detach().copy_(arriving[r].view(outputs[r].dtype).view_as(outputs[r]))


def barrier(comm: Comm) -> None:
    comm.barrier()


def each(
    function: Callable[[Comm, Out, In], None],
) -> Callable[[Comm, Iterable[Out], Iterable[In]], None]:
    """Return `function(comm, output, x)` for several of both."""

    def several(comm: Comm, outputs: Iterable[Out], inputs: Iterable[In]) -> None:
        for output, x in zip(outputs, inputs, strict=True):
            function(comm, output, x)

    several.__name__ = function.__name__
    return several


def flat_memory(x: Tensor) -> Tensor:
    """Return the memory of contiguous x, flat, in a dtype that communicators move: in bytes if x has another."""
    x = x.detach().reshape(-1)
    return x if dtype_name(x.dtype) in ITEMSIZE else x.view(torch.uint8)


def _in_one_piece(x: Tensor, act: Callable[..., object], *args: object) -> None:
    """Call act(the flat memory of x, ...), by way of a copy if x is not contiguous."""
    if x.is_contiguous():
        act(flat_memory(x), *args)
    else:
        copy = x.detach().contiguous()
        act(flat_memory(copy), *args)
        x.detach().copy_(copy)


def _put(outputs: list[Tensor], rows: Tensor) -> None:
    """Copy rows (p, n) to p outputs of n elements, or to one of p * n."""
    rows = rows.reshape(len(outputs), -1)
    for output, row in zip(outputs, rows, strict=True):
        output.detach().copy_(row.view_as(output))

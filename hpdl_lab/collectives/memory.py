"""All-reduces of ranks that share memory: what each reads and writes, and two of them in Python.

What they cost is not messages but loads and stores: bytes between the cores and their memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..comm.base import Comm
from .chunks import chunk

if TYPE_CHECKING:
    from torch import Tensor

ONE_PASS, STAGED, RING_ONCE, RING_TWICE = "one pass", "staged", "ring, one copy", "ring, two copies"
ALGORITHMS = (ONE_PASS, STAGED, RING_ONCE, RING_TWICE)


def bytes_moved(algorithm: str, p: int, n: float) -> tuple[float, float]:
    """Count what one of p ranks reads from memory, and what it writes there, in an all-reduce of n bytes.

        one pass            tensors lie in shared memory: each rank adds its slice of all of them, 1/p of the length,
                            in registers, and stores the sum to all of them
        staged              each rank copies its tensor to shared memory, adds its slice of all the copies, stores the
                            sum once, to shared memory, and copies the whole result from there into its tensor
        ring, one copy      reduce-scatter and all-gather; a message is copied from the tensor of its sender into the
                            buffer of its receiver, and if a sum is due that buffer is added to the tensor
        ring, two copies    the same ring; a message is copied into memory of the library, and from there on

    Which rank makes a copy does not matter: all do the same, and a copy reads each byte once and writes it once.

    Args:    algorithm: one of these four names; p: ranks, at least 2; n: bytes of each rank's tensor.
    Returns: (bytes read, bytes written).
    """
    if algorithm == "one pass":
        return n, n  # p slices of n / p bytes
    if algorithm == "staged":
        return n + n + n, n + n / p + n
    copies = 2 if algorithm == "ring, two copies" else 1
    passed = 2 * (p - 1) * n / p  # in 2(p - 1) messages of n / p bytes
    added = (p - 1) * n / p
    return copies * passed + 2 * added, copies * passed + added


def one_pass(comm: Comm, x: Tensor) -> Tensor:
    """Replace `x`, a tensor in shared memory, by the sum of all ranks' tensors; each element moves as little as it can.

        p = 2             x of rank 0         x of rank 1
                         [ left | right ]    [ left | right ]
        rank 0 reads       here                here                adds them in the order of ranks,
               writes      here                here                and stores the sum to both
        rank 1                    here                here         does the same with its half, at the same time

    The rank that adds a slice is its owner. Nobody else reads or writes it from one barrier to the next.

    Args:    x: (N,) tensor of comm.allocate, or a part of one, different per rank.
    Returns: x, bitwise the same on every rank.
    Bytes per rank: N * itemsize read and as many written; memory of its own at most for one slice.
    """
    views = comm.views(x)
    comm.barrier()
    total = sum(chunk(view, comm.size, comm.rank) for view in views)
    for view in views:
        chunk(view, comm.size, comm.rank)[:] = total
    comm.barrier()
    return x


def staged(comm: Comm, x: Tensor, shared: Tensor, result: Tensor) -> Tensor:
    """Replace `x`, a tensor anywhere, by the sum over ranks, through memory that the ranks share.

    Args:    x, shared, result: (N,) tensors; `shared` and `result` of comm.allocate, and only rank 0's result is used.
    Returns: x, bitwise the same on every rank.
    """
    shared.copy_(x)
    comm.barrier()
    p, r = comm.size, comm.rank
    views, sums = comm.views(shared), comm.views(result)[0]
    chunk(sums, p, r)[:] = sum(chunk(view, p, r) for view in views)
    comm.barrier()
    return x.copy_(sums)

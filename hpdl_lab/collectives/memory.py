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
    """Count the bytes that one of p ranks reads and writes in an all-reduce of n bytes.

        one pass            Each rank reads its slice, 1/p, of all p tensors, adds in
                            registers, and stores the sum to all p tensors.
        staged              Each rank copies its tensor to shared memory, and reads its
                            slice of all p copies. It stores the sum once, to shared
                            memory. Then it copies the whole result into its tensor.
        ring, one copy      In the reduce-scatter, each message is copied to a buffer
                            of the receiver, which adds this buffer to its tensor. In
                            the all-gather, each message is copied from the sender's
                            tensor to the receiver's tensor.
        ring, two copies    The same ring, but each message is first copied to a
                            buffer of the library, and then to its destination.

    A copy reads each byte once and writes it once. In a ring, every rank sends and
    receives. Count the copies of the messages that the rank sends, and the additions of
    the messages that the rank receives.

    Args:    algorithm: one of these four names; p: ranks, at least 2;
             n: bytes of each rank's tensor.
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
    """Replace `x`, in shared memory, by the sum over ranks, in one pass.

        p = 2             x of rank 0         x of rank 1
                         [ left | right ]    [ left | right ]
        rank 0 reads       left                left              and adds both slices
        rank 0 writes      sum                 sum               the same sum twice
        rank 1 does the same with the right slices

    All ranks work at the same time. Between the two barriers, only the owner of a
    slice, the rank that adds it, reads or writes this slice.

    Args:    x: (N,) tensor of comm.allocate, or a part of one, different per rank.
    Returns: x, bitwise the same on every rank: add in the order of ranks.
    Bytes per rank: N * itemsize read, and as many written. A rank may allocate memory
             for one slice.
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

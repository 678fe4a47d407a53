"""The first functions that run on every rank: who am I, and what do I share? And a ball between two ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..comm.base import Comm

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def hello(comm: Comm) -> str:
    """Say which rank this is, and of how many.

    Args:    comm: the communicator; comm.rank counts from 0, comm.size is the number of ranks.
    Returns: a sentence such as "hello from rank 2 of 4".
    """
    return f"hello from rank {comm.rank} of {comm.size}"


def fill_with_rank(comm: Comm, x: np.ndarray) -> tuple[int, np.ndarray]:
    """Fill `x` with this rank's number, wait until all ranks have done so, and say what is in it then.

    Args:    comm: the communicator; comm.barrier() returns on every rank when all ranks have called it.
             x: (n,) array of zeros, overwritten: on every rank the same `x` of the notebook, or is it?
    Returns: (process id, x): an int (os.getpid) and the array.
    """
    x[:] = comm.rank
    comm.barrier()
    return os.getpid(), x


def ping_pong(comm: Comm, x: Tensor) -> Tensor:
    """Play one round: rank 0 sends `x` to rank 1, and rank 1 sends back what it got.

        rank 0 --x--> rank 1      half a round is the time of one message: alpha + beta * bytes
        rank 0 <--x-- rank 1      ranks 2, 3, ... only look on

    Args:    x: (n,) tensor or array of any dtype, different per rank; rank 1's is overwritten with rank 0's.
    Returns: x, on every rank.
    Raises:  ValueError on a communicator of one rank, which has no rank 1; CommTimeout if the other does not answer.
    Steps: 2.   Bytes per rank: n * itemsize on ranks 0 and 1, none on the others.
    """
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(x, 1)
    elif comm.rank == 1:
        comm.recv(x, 0)
        comm.send(x, 0)
    return x

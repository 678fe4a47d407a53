"""The first functions that run on every rank: who am I, and what do I share? And a ball between two ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..comm.base import Comm

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


def hello(comm: Comm) -> str:
    """Return a sentence with the number of this rank and the number of ranks.

    Args:    comm: the communicator; comm.rank is this rank's number, from 0,
             and comm.size is the number of ranks.
    Returns: a sentence such as "hello from rank 2 of 4".
    """
    return f"hello from rank {comm.rank} of {comm.size}"


def fill_with_rank(comm: Comm, x: np.ndarray) -> tuple[int, np.ndarray]:
    """Fill `x` with this rank's number, wait for all ranks, return process id and `x`.

    Args:    comm: the communicator; comm.barrier() returns when all ranks have
             called it.
             x: (n,) array of zeros; overwritten.
    Returns: (process id, x): an int, from os.getpid(), and the array.
    """
    x[:] = comm.rank
    comm.barrier()
    return os.getpid(), x


def ping_pong(comm: Comm, x: Tensor) -> Tensor:
    """Play one round: rank 0 sends `x` to rank 1, and rank 1 sends it back.

        rank 0 --x--> rank 1      half a round is the time of one message
        rank 0 <--x-- rank 1      ranks 2, 3, ... do nothing

    Args:    x: (n,) tensor or array of any dtype, different per rank; rank 1 receives
             rank 0's x into its own x.
    Returns: x, on every rank.
    Raises:  ValueError if there is only one rank; CommTimeout if the other rank does
             not answer.
    Steps: 2.   Bytes per rank: n * itemsize on ranks 0 and 1, none on the others.
    """
    if comm.rank == 0:
        comm.send(x, 1)
        comm.recv(x, 1)
    elif comm.rank == 1:
        comm.recv(x, 0)
        comm.send(x, 0)
    return x

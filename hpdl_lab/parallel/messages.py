"""The first functions that run on every rank: who am I, and where? And a ball between two ranks."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from ..comm.base import Comm

if TYPE_CHECKING:
    from torch import Tensor


def hello(comm: Comm) -> str:
    """Say which rank this is, and of how many.

    Args:    comm: the communicator; comm.rank counts from 0, comm.size is the number of ranks.
    Returns: a sentence such as "hello from rank 2 of 4".
    """
    return f"hello from rank {comm.rank} of {comm.size}"


def who_runs_where(comm: Comm) -> tuple[int, str, int]:
    """Say where this rank runs.

    Args:    comm: the communicator.
    Returns: (rank, host name, process id): an int, a str (socket.gethostname) and an int (os.getpid).
    """
    return comm.rank, socket.gethostname(), os.getpid()


def ping_pong(comm: Comm, x: Tensor) -> Tensor:
    """Play one round: rank 0 sends `x` to rank 1, and rank 1 sends back what it got.

        rank 0 --x--> rank 1      half a round is the time of one message: alpha + beta * bytes
        rank 0 <--x-- rank 1      ranks 2, 3, ... only look on

    Args:    x: (n,) tensor or array of any dtype, different per rank; rank 1's is overwritten with that of rank 0.
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

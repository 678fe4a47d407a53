"""The first functions that run on every rank: who am I, and where?"""

import os
import socket


def hello(comm):
    """Say which rank this is, and of how many.

    Args:    comm: the communicator; comm.rank counts from 0, comm.size is the number of ranks.
    Returns: a sentence such as "hello from rank 2 of 4".
    Steps: 0.   Bytes per rank: 0.
    """
    return f"hello from rank {comm.rank} of {comm.size}"


def who_runs_where(comm):
    """Say where this rank runs.

    Args:    comm: the communicator.
    Returns: (rank, host name, process id): an int, a str (socket.gethostname) and an int (os.getpid).
    Steps: 0.   Bytes per rank: 0.
    """
    return comm.rank, socket.gethostname(), os.getpid()

"""Messages that nobody has received, in a communicator that its ranks have left."""

import time
from typing import Any

WORTH_DROPPING = 1 << 20  # bytes
PATIENCE = 0.1  # s


def drop_stale(MPI: Any, comm: Any, cancelled: list, whatever: bool = False) -> bool:
    """Receive and forget what has arrived in `comm`; True when nothing is left there.

    False where a message cannot be received: a large one needs the help of its sender, which has left.
    Args:    cancelled: list that keeps alive what MPI may still write to. whatever: try also the large ones.
    """
    status = MPI.Status()
    while comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
        nbytes = status.Get_count(MPI.BYTE)
        if nbytes > WORTH_DROPPING and not whatever:
            return False
        request = comm.Irecv([bytearray(nbytes), MPI.BYTE], status.Get_source(), status.Get_tag())
        end = time.monotonic() + PATIENCE
        while not request.Test():
            if time.monotonic() > end:
                cancelled.append(request)
                return False
    return True

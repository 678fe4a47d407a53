"""Messages that nobody has received, in a communicator that its ranks have left."""

import time

WORTH_DROPPING = 1 << 20  # bytes
PATIENCE = 0.1  # s


def drop_stale(MPI, comm):
    """Receive and forget what has arrived in `comm`; True when nothing is left there.

    False where a message cannot be received: a large one needs the help of its sender, which has left.
    """
    status = MPI.Status()
    while (message := comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
        nbytes = status.Get_count(MPI.BYTE)
        if nbytes > WORTH_DROPPING:
            return False
        request = message.Irecv([bytearray(nbytes), MPI.BYTE])
        end = time.monotonic() + PATIENCE
        while not request.Test():
            if time.monotonic() > end:
                return False
    return True

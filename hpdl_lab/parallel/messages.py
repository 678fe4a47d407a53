"""The smallest program with messages: a ball between two ranks."""


def ping_pong(comm, x):
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

"""Answers to exercise 2.4 that the check must reject or accept; CI proves both."""

import numpy as np

from hpdl_lab.parallel.gossip import one_peer_hop


def by_requests(comm, x, step):
    p, r, hop = comm.size, comm.rank, one_peer_hop(comm.size, step)
    if p == 1:
        return x
    theirs = np.empty_like(x)
    for work in (comm.irecv(theirs, (r + hop) % p), comm.isend(x.copy(), (r - hop) % p)):
        work.wait()
    x[:] = (x + theirs) / 2
    return x


def even_ranks_first(comm, x, step):
    """A chain of blocking messages: who is first in its circle sends first, all others receive first."""
    p, r, hop = comm.size, comm.rank, one_peer_hop(comm.size, step)
    if p == 1:
        return x
    theirs = np.empty_like(x)
    first = r == min((r + k * hop) % p for k in range(p))
    if first:
        comm.send(x, (r - hop) % p)
    comm.recv(theirs, (r + hop) % p)
    if not first:
        comm.send(x, (r - hop) % p)
    x += theirs
    x /= 2
    return x


WRONG = {
    "2.4": """
peer: places back: it gets your x
    (r - hop) % p, new_like(x, x.shape), (r + hop) % p => (r + hop) % p, new_like(x, x.shape), (r - hop) % p
mean: the sum of two ranks
    -         x /= 2
mean: Only one of the two numbers is halved
    -         x += comm.sendrecv(copy_of(x), (r - hop) % p, new_like(x, x.shape), (r + hop) % p)
    -         x /= 2
    +         x /= 2
    +         x += comm.sendrecv(2 * x, (r - hop) % p, new_like(x, x.shape), (r + hop) % p)
mean: the other rank's x alone
    -         x += comm.sendrecv(copy_of(x), (r - hop) % p, new_like(x, x.shape), (r + hop) % p)
    -         x /= 2
    +         x[:] = comm.sendrecv(copy_of(x), (r - hop) % p, new_like(x, x.shape), (r + hop) % p)
hop: The rank 1 places further on is in it
    one_peer_hop(comm.size, step) => 1
hop: The rank 3 places further on is in it, and not 4
    one_peer_hop(comm.size, step) => step + 1
raises: itself
    one_peer_hop(comm.size, step) => 1 << step
peer: the mean of all ranks
    comm.all_reduce(x)
    x /= comm.size
    return x
sum: nothing that arrived is in it
    p, r, hop = comm.size, comm.rank, one_peer_hop(comm.size, step)
    if p > 1:
        comm.sendrecv(x.copy(), (r - hop) % p, np.empty_like(x), (r + hop) % p)
    return x
deadlock: receive first
    p, r, hop = comm.size, comm.rank, one_peer_hop(comm.size, step)
    if p > 1:
        theirs = np.empty_like(x)
        comm.send(x, (r - hop) % p)
        comm.recv(theirs, (r + hop) % p)
        x += theirs
        x /= 2
    return x
raises: itself
    p > 1 => p > 0
steps: every rank sent 2 messages
    -         x /= 2
    +         comm.sendrecv(copy_of(x), (r - hop) % p, new_like(x, x.shape), (r + hop) % p)
    +         x /= 2
steps: barrier
    -     return x
    +     comm.barrier()
    +     return x
in place: x was not overwritten
    -         x += comm.sendrecv(copy_of(x), (r - hop) % p, new_like(x, x.shape), (r + hop) % p)
    +         x = x + comm.sendrecv(copy_of(x), (r - hop) % p, new_like(x, x.shape), (r + hop) % p)
returns: returned nothing
    return x => pass
returns: something of type list
    return x => return list(x)
""",
}
RIGHT = {"2.4": (by_requests, even_ranks_first)}
COMPLETED = {"2.4": ["(r + hop) % p"]}

"""Answers to the exercise of notebook 02 that a check must reject or accept; CI proves both."""

import numpy as np


def mean_of_all(comm, g):
    """Right: what most of the answers below do something more to."""
    comm.all_reduce(g)
    g /= comm.size
    return g


def passed_around(comm, g, steps):
    """Every gradient goes around a ring, and every rank adds what comes by."""
    mine, arriving = g.copy(), np.empty_like(g)
    for _ in range(steps):
        comm.sendrecv(mine, (comm.rank + 1) % comm.size, arriving, (comm.rank - 1) % comm.size)
        mine[...] = arriving
        g += arriving
    g /= comm.size
    return g


def collected(comm, g, sources):
    if comm.rank > 0:
        comm.send(g, 0)
        return comm.recv(g, 0)
    for source in sources:
        g += comm.recv(np.empty_like(g), source)
    g /= comm.size
    for to in range(1, comm.size):
        comm.send(g, to)
    return g


def divides_first(comm, g):
    g /= comm.size
    return comm.all_reduce(g)


def by_gathering(comm, g):
    g[...] = comm.all_gather(g).mean(axis=0)
    return g


def by_messages(comm, g):
    """Rank 0 collects, averages, and sends the mean back: a parameter server in eight lines."""
    if comm.rank == 0:
        for source in range(1, comm.size):
            g += comm.recv(np.empty_like(g), source)
        g /= comm.size
        for to in range(1, comm.size):
            comm.send(g, to)
    else:
        comm.send(g, 0)
        comm.recv(g, 0)
    return g


def reduces_and_broadcasts(comm, g):
    total = comm.reduce(g)
    if comm.rank == 0:
        g[...] = total / comm.size
    return comm.broadcast(g)


WRONG = {
    "2.1": """
mean: the step would be 4 times too long
    return comm.all_reduce(g)
size: there are 2 ranks: comm.size
    comm.size => 4
sum @divides_first: add the gradients of all ranks first
    comm.all_reduce(g) => g
mean: It was divided by 4 twice
    -     comm.all_reduce(g)
    +     g /= comm.size
    +     comm.all_reduce(g)
sum: the gradient of rank 0 alone
    return comm.broadcast(g)
sum: nothing came from the others
    return g
deadlock: never called all_reduce
    if comm.rank == 0:
        comm.all_reduce(g)
        g /= comm.size
    return g
in place @divides_first: g was not overwritten
    g /= comm.size => total = comm.all_reduce(g.copy())
    comm.all_reduce(g) => total / comm.size
returns @divides_first: returned nothing
    g /= comm.size => comm.all_reduce(g)
    return comm.all_reduce(g) => g /= comm.size
returns: the gradient is a NumPy array of shape (2,)
    return comm.all_reduce(g).mean()
returns: something of type list
    return list(mean_of_all(comm, g))
returns @divides_first: something of type Tensor
    g /= comm.size => import torch
    comm.all_reduce(g) => torch.from_numpy(mean_of_all(comm, g))
returns: something of dtype float32
    return mean_of_all(comm, g).astype(np.float32)
precision @by_gathering: The first digits are right
    comm.all_gather(g).mean(axis=0) => mean_of_all(comm, g.astype(np.float32))
precision: // rounds down
    / => //
mean @divides_first: the median of the 4 gradients
    g /= comm.size => g[...] = np.median(comm.all_gather(g), axis=0)
    comm.all_reduce(g) => g
mean @by_gathering: the largest of the 4 gradients
    mean => max
mean: You divided by 3, but there are 4 ranks
    size => size - 1
returns: something of shape (4,)
    return comm.all_gather(g).mean(axis=1)
mean @reduces_and_broadcasts: on rank 1 should be
    total = comm.reduce => comm.all_reduce
    g[...] = total / comm => g /= comm
    comm.broadcast(g) => g
steps: calls 2 collectives that add
    return mean_of_all(comm, mean_of_all(comm, g))
bitwise: hold different bits
    return passed_around(comm, g, comm.size - 1)
loop: The gradient of rank 0 is in it twice
    return passed_around(comm, g, comm.size)
loop: The gradient of rank 1 is missing: is a loop
    return passed_around(comm, g, comm.size - 2)
deadlock: leave out rank 3?
    return collected(comm, g, range(1, comm.size - 1))
raises: ranks here are 0 to 3
    return collected(comm, g, range(1, comm.size + 1))
""",
}
RIGHT = {
    "2.1": (divides_first, by_gathering, by_messages, reduces_and_broadcasts),
}

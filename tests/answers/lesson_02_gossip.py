"""Answers to exercise 2.3 that the check must reject or accept; CI proves both."""

import numpy as np


def received(comm, x, graph):
    """{neighbor: its x}, from all neighbors at the same time."""
    mine, parts = x.copy(), {j: np.empty_like(x) for j in graph.neighbors[comm.rank]}
    works = [comm.irecv(part, j) for j, part in parts.items()] + [comm.isend(mine, j) for j in parts]
    for work in works:
        work.wait()
    return parts


def subtracts_what_it_has_become(comm, x, graph):
    degree = [len(who) for who in graph.neighbors]
    before, arriving = x.copy(), np.empty_like(x)
    for j in graph.neighbors[comm.rank]:
        comm.sendrecv(before, j, arriving, j)
        x += (arriving - x) / (1 + max(degree[comm.rank], degree[j]))
    return x


def meets(comm, x, graph, neighbors):
    """One exchange after another, with these neighbors."""
    degree = [len(who) for who in graph.neighbors]
    before, arriving = x.copy(), np.empty_like(x)
    for j in neighbors:
        comm.sendrecv(before, j, arriving, j)
        x += (arriving - before) / (1 + max(degree[comm.rank], degree[j]))
    return x


def weighs(comm, x, graph, weight):
    """weight(degree, i, j) for a neighbor j of rank i."""
    degree = [len(who) for who in graph.neighbors]
    change = sum(weight(degree, comm.rank, j) * (xj - x) for j, xj in received(comm, x, graph).items())
    x += change
    return x


def metropolis(comm, x, graph):
    """All messages under way at the same time."""
    degree = [len(who) for who in graph.neighbors]
    change = sum((xj - x) / (1 + max(degree[comm.rank], degree[j])) for j, xj in received(comm, x, graph).items())
    x += change
    return x


def own_weight_last(comm, x, graph):
    degree = [len(who) for who in graph.neighbors]
    weights = {j: 1 / (1 + max(degree[comm.rank], degree[j])) for j in graph.neighbors[comm.rank]}
    parts = received(comm, x, graph)
    x *= 1 - sum(weights.values())
    for j, weight in weights.items():
        x += weight * parts[j]
    return x


def in_falling_order(comm, x, graph):
    return meets(comm, x, graph, graph.neighbors[comm.rank][::-1])


WRONG = {
    "2.3": """
weights: the plain mean of a rank and its neighbors
    parts = received(comm, x, graph)
    x[...] = np.mean([x, *parts.values()], axis=0)
    return x
weights: Those are the neighbors alone
    parts = received(comm, x, graph)
    if parts:
        x[...] = np.mean(list(parts.values()), axis=0)
    return x
weights @metropolis: the smaller degree of the two
    max => min
weights: 1 / (1 + the larger degree)
    degree = [len(who) for who in graph.neighbors]
    change = sum((xj - x) / max(degree[comm.rank], degree[j]) for j, xj in received(comm, x, graph).items())
    x += change
    return x
sum @subtracts_what_it_has_become: still the x from before the step?
    -     before, arriving = (x.copy(), np.empty_like(x))
    +     arriving = np.empty_like(x)
    -         comm.sendrecv(before, j, arriving, j)
    +         comm.sendrecv(x.copy(), j, arriving, j)
mean @subtracts_what_it_has_become: Add weight * (theirs - mine)
mean @metropolis: The mean over all ranks was
    (xj - x) => xj
peers: which is not its neighbor
    comm.all_reduce(x)
    x /= comm.size
    return x
peers: On a star of 5 ranks
    p, r = comm.size, comm.rank
    before, arriving, change = x.copy(), np.empty_like(x), np.zeros_like(x)
    for shift in (1, -1) if p > 2 else (1,) * (p - 1):
        comm.sendrecv(before, (r + shift) % p, arriving, (r - shift) % p)
        change += (arriving - before) / 3
    x += change
    return x
deadlock: received from 1 of its 2 neighbors
    arriving = np.empty_like(x)
    for j in graph.neighbors[comm.rank][:1]:
        comm.sendrecv(x.copy(), j, arriving, j)
        x += (arriving - x) / 3
    return x
deadlock @in_falling_order: the loop is too short
    :- => -
deadlock @in_falling_order: the loop is too short
    ::-1 => 1:
deadlock: the loop is too long
    near = graph.neighbors[comm.rank]
    return meets(comm, x, graph, near + near[-1:])
raises: does a loop go one step too far?
    near = graph.neighbors[comm.rank]
    return meets(comm, x, graph, (near[k] for k in range(len(near) + 1)))
raises: receives from itself
    return meets(comm, x, graph, sorted((*graph.neighbors[comm.rank], comm.rank)))
weights: the weight 1 / (the number of ranks)
    return weighs(comm, x, graph, lambda degree, i, j: 1 / comm.size)
weights: the weight 1/3 for every neighbor
    return weighs(comm, x, graph, lambda degree, i, j: 1 / 3)
weights: the largest degree of the whole graph
    return weighs(comm, x, graph, lambda degree, i, j: 1 / (1 + max(degree)))
weights: the neighbor's degree
    return weighs(comm, x, graph, lambda degree, i, j: 1 / (1 + degree[j]))
sign: a step away from the neighbors
    return weighs(comm, x, graph, lambda degree, i, j: -1 / (1 + max(degree[i], degree[j])))
sum @subtracts_what_it_has_become: still the x from before the step?
    -     before, arriving = (x.copy(), np.empty_like(x))
    +     before, arriving = (x, np.empty_like(x))
    -         x += (arriving - x) / (1 + max(degree[comm.rank], degree[j]))
    +         x += (arriving - before) / (1 + max(degree[comm.rank], degree[j]))
mean: The mean over all ranks was
    degree, near = [len(who) for who in graph.neighbors], graph.neighbors[comm.rank]
    before, arriving = x.copy(), np.empty_like(x)
    for work in [comm.irecv(arriving, j) for j in near] + [comm.isend(before, j) for j in near]:
        work.wait()
    for j in near:
        x += (arriving - before) / (1 + max(degree[comm.rank], degree[j]))
    return x
precision: The first digits are right
    x[...] = metropolis(comm, x.astype(np.float32), graph)
    return x
returns: something of type list
    return list(metropolis(comm, x, graph))
returns: something of type Tensor
    import torch
    return torch.from_numpy(metropolis(comm, x, graph))
peers: gossip waits for neighbors only
    metropolis(comm, x, graph)
    comm.barrier()
    return x
deadlock @subtracts_what_it_has_become: receive first
    -         comm.sendrecv(before, j, arriving, j)
    -         x += (arriving - x) / (1 + max(degree[comm.rank], degree[j]))
    +         comm.recv(arriving, j)
    +         comm.send(before, j)
    +         x += (arriving - before) / (1 + max(degree[comm.rank], degree[j]))
steps: Those are two steps
    return metropolis(comm, metropolis(comm, x, graph), graph)
bytes: one is enough
    received(comm, x, graph)
    return metropolis(comm, x, graph)
in place @in_falling_order: x was not overwritten
    meets(comm, x, graph, graph.neighbors[comm.rank][::-1]) => metropolis(comm, x.copy(), graph)
returns: returned nothing: return x
    metropolis(comm, x, graph)
sum: nothing from the neighbors is in it
    received(comm, x, graph)
    return x
""",
}
RIGHT = {
    "2.3": (metropolis, own_weight_last, in_falling_order),
}
COMPLETED = {
    "2.3": ["1 / (1 + max(len(graph.neighbors[comm.rank]), len(graph.neighbors[j])))"],
}

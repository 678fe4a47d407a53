"""Answers to exercise 2.3 that the check must reject or accept; CI proves both."""

import numpy as np

from . import WrongAnswer

# -- gossip_step: wrong ------------------------------------------------------------------------------------------------


def heard(comm, x, graph):
    """{neighbor: its x}, from all neighbors at the same time."""
    mine, parts = x.copy(), {j: np.empty_like(x) for j in graph.neighbors[comm.rank]}
    works = [comm.irecv(part, j) for j, part in parts.items()] + [comm.isend(mine, j) for j in parts]
    for work in works:
        work.wait()
    return parts


def plain_mean_of_neighbors(comm, x, graph):
    parts = heard(comm, x, graph)
    x[...] = np.mean([x, *parts.values()], axis=0)
    return x


def forgets_itself(comm, x, graph):
    parts = heard(comm, x, graph)
    if parts:
        x[...] = np.mean(list(parts.values()), axis=0)
    return x


def smaller_degree(comm, x, graph):
    degree = [len(who) for who in graph.neighbors]
    change = sum((xj - x) / (1 + min(degree[comm.rank], degree[j])) for j, xj in heard(comm, x, graph).items())
    x += change
    return x


def without_the_one(comm, x, graph):
    degree = [len(who) for who in graph.neighbors]
    change = sum((xj - x) / max(degree[comm.rank], degree[j]) for j, xj in heard(comm, x, graph).items())
    x += change
    return x


def passes_on_what_it_just_heard(comm, x, graph):
    degree = [len(who) for who in graph.neighbors]
    arriving = np.empty_like(x)
    for j in graph.neighbors[comm.rank]:
        comm.sendrecv(x.copy(), j, arriving, j)
        x += (arriving - x) / (1 + max(degree[comm.rank], degree[j]))
    return x


def subtracts_what_it_has_become(comm, x, graph):
    degree = [len(who) for who in graph.neighbors]
    before, arriving = x.copy(), np.empty_like(x)
    for j in graph.neighbors[comm.rank]:
        comm.sendrecv(before, j, arriving, j)
        x += (arriving - x) / (1 + max(degree[comm.rank], degree[j]))
    return x


def adds_without_taking_off(comm, x, graph):
    degree = [len(who) for who in graph.neighbors]
    change = sum(xj / (1 + max(degree[comm.rank], degree[j])) for j, xj in heard(comm, x, graph).items())
    x += change
    return x


def mean_of_all(comm, x, graph):
    comm.all_reduce(x)
    x /= comm.size
    return x


def always_on_a_ring(comm, x, graph):
    p, r = comm.size, comm.rank
    before, arriving, change = x.copy(), np.empty_like(x), np.zeros_like(x)
    for shift in (1, -1) if p > 2 else (1,) * (p - 1):
        comm.sendrecv(before, (r + shift) % p, arriving, (r - shift) % p)
        change += (arriving - before) / 3
    x += change
    return x


def only_the_first_neighbor(comm, x, graph):
    arriving = np.empty_like(x)
    for j in graph.neighbors[comm.rank][:1]:
        comm.sendrecv(x.copy(), j, arriving, j)
        x += (arriving - x) / 3
    return x


def meets(comm, x, graph, neighbors):
    """One exchange after another, with these neighbors."""
    degree = [len(who) for who in graph.neighbors]
    before, arriving = x.copy(), np.empty_like(x)
    for j in neighbors:
        comm.sendrecv(before, j, arriving, j)
        x += (arriving - before) / (1 + max(degree[comm.rank], degree[j]))
    return x


def all_but_the_last_neighbor(comm, x, graph):
    return meets(comm, x, graph, graph.neighbors[comm.rank][:-1])


def all_but_the_first_neighbor(comm, x, graph):
    return meets(comm, x, graph, graph.neighbors[comm.rank][1:])


def one_neighbor_too_many(comm, x, graph):
    near = graph.neighbors[comm.rank]
    return meets(comm, x, graph, near + near[-1:])


def one_index_too_many(comm, x, graph):
    near = graph.neighbors[comm.rank]
    return meets(comm, x, graph, (near[k] for k in range(len(near) + 1)))


def meets_itself(comm, x, graph):
    return meets(comm, x, graph, sorted((*graph.neighbors[comm.rank], comm.rank)))


def weighs(comm, x, graph, weight):
    """weight(degree, i, j) for a neighbor j of rank i."""
    degree = [len(who) for who in graph.neighbors]
    change = sum(weight(degree, comm.rank, j) * (xj - x) for j, xj in heard(comm, x, graph).items())
    x += change
    return x


def one_over_the_ranks(comm, x, graph):
    return weighs(comm, x, graph, lambda degree, i, j: 1 / comm.size)


def third_for_everybody(comm, x, graph):
    """Right on a ring."""
    return weighs(comm, x, graph, lambda degree, i, j: 1 / 3)


def largest_degree_of_all(comm, x, graph):
    """Right on a ring and on a star."""
    return weighs(comm, x, graph, lambda degree, i, j: 1 / (1 + max(degree)))


def degree_of_the_neighbor(comm, x, graph):
    return weighs(comm, x, graph, lambda degree, i, j: 1 / (1 + degree[j]))


def moves_away(comm, x, graph):
    return weighs(comm, x, graph, lambda degree, i, j: -1 / (1 + max(degree[i], degree[j])))


def sends_what_changes(comm, x, graph):
    """`before` is another name of x."""
    degree = [len(who) for who in graph.neighbors]
    before, arriving = x, np.empty_like(x)
    for j in graph.neighbors[comm.rank]:
        comm.sendrecv(before, j, arriving, j)
        x += (arriving - before) / (1 + max(degree[comm.rank], degree[j]))
    return x


def one_place_for_all(comm, x, graph):
    degree, near = [len(who) for who in graph.neighbors], graph.neighbors[comm.rank]
    before, arriving = x.copy(), np.empty_like(x)
    for work in [comm.irecv(arriving, j) for j in near] + [comm.isend(before, j) for j in near]:
        work.wait()
    for j in near:
        x += (arriving - before) / (1 + max(degree[comm.rank], degree[j]))
    return x


def gossips_in_float32(comm, x, graph):
    x[...] = metropolis(comm, x.astype(np.float32), graph)
    return x


def gossips_into_a_list(comm, x, graph):
    return list(metropolis(comm, x, graph))


def gossips_into_a_tensor(comm, x, graph):
    import torch

    return torch.from_numpy(metropolis(comm, x, graph))


def meets_everybody_in_a_barrier(comm, x, graph):
    metropolis(comm, x, graph)
    comm.barrier()
    return x


def receives_first(comm, x, graph):
    degree = [len(who) for who in graph.neighbors]
    before, arriving = x.copy(), np.empty_like(x)
    for j in graph.neighbors[comm.rank]:
        comm.recv(arriving, j)
        comm.send(before, j)
        x += (arriving - before) / (1 + max(degree[comm.rank], degree[j]))
    return x


def two_steps(comm, x, graph):
    return metropolis(comm, metropolis(comm, x, graph), graph)


def listens_twice(comm, x, graph):
    heard(comm, x, graph)
    return metropolis(comm, x, graph)


def gossips_into_a_new_array(comm, x, graph):
    return metropolis(comm, x.copy(), graph)


def gossips_and_returns_nothing(comm, x, graph):
    metropolis(comm, x, graph)


def changes_nothing(comm, x, graph):
    heard(comm, x, graph)
    return x


# -- gossip_step: right ------------------------------------------------------------------------------------------------


def metropolis(comm, x, graph):
    """All messages under way at the same time."""
    degree = [len(who) for who in graph.neighbors]
    change = sum((xj - x) / (1 + max(degree[comm.rank], degree[j])) for j, xj in heard(comm, x, graph).items())
    x += change
    return x


def own_weight_last(comm, x, graph):
    degree = [len(who) for who in graph.neighbors]
    weights = {j: 1 / (1 + max(degree[comm.rank], degree[j])) for j in graph.neighbors[comm.rank]}
    parts = heard(comm, x, graph)
    x *= 1 - sum(weights.values())
    for j, weight in weights.items():
        x += weight * parts[j]
    return x


def in_falling_order(comm, x, graph):
    return meets(comm, x, graph, graph.neighbors[comm.rank][::-1])


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "2.3": (
        WrongAnswer(plain_mean_of_neighbors, "weights", "the plain mean of a rank and its neighbors"),
        WrongAnswer(forgets_itself, "weights", "Those are the neighbors alone"),
        WrongAnswer(smaller_degree, "weights", "the smaller degree of the two"),
        WrongAnswer(without_the_one, "weights", "1 / (1 + the larger degree)"),
        WrongAnswer(passes_on_what_it_just_heard, "sum", "still the x from before the step?"),
        WrongAnswer(subtracts_what_it_has_become, "mean", "Add weight * (theirs - mine)"),
        WrongAnswer(adds_without_taking_off, "mean", "The mean over all ranks was"),
        WrongAnswer(mean_of_all, "peers", "which is not its neighbor"),
        WrongAnswer(always_on_a_ring, "peers", "On a star of 5 ranks"),
        WrongAnswer(only_the_first_neighbor, "deadlock", "received from 1 of its 2 neighbors"),
        WrongAnswer(all_but_the_last_neighbor, "deadlock", "the loop is too short"),
        WrongAnswer(all_but_the_first_neighbor, "deadlock", "the loop is too short"),
        WrongAnswer(one_neighbor_too_many, "deadlock", "the loop is too long"),
        WrongAnswer(one_index_too_many, "raises", "does a loop go one step too far?"),
        WrongAnswer(meets_itself, "raises", "receives from itself"),
        WrongAnswer(one_over_the_ranks, "weights", "the weight 1 / (the number of ranks)"),
        WrongAnswer(third_for_everybody, "weights", "the weight 1/3 for every neighbor"),
        WrongAnswer(largest_degree_of_all, "weights", "the largest degree of the whole graph"),
        WrongAnswer(degree_of_the_neighbor, "weights", "the neighbor's degree"),
        WrongAnswer(moves_away, "sign", "a step away from the neighbors"),
        WrongAnswer(sends_what_changes, "sum", "still the x from before the step?"),
        WrongAnswer(one_place_for_all, "mean", "The mean over all ranks was"),
        WrongAnswer(gossips_in_float32, "precision", "The first digits are right"),
        WrongAnswer(gossips_into_a_list, "returns", "something of type list"),
        WrongAnswer(gossips_into_a_tensor, "returns", "something of type Tensor"),
        WrongAnswer(meets_everybody_in_a_barrier, "peers", "gossip waits for neighbors only"),
        WrongAnswer(receives_first, "deadlock", "receive first"),
        WrongAnswer(two_steps, "steps", "Those are two steps"),
        WrongAnswer(listens_twice, "bytes", "one is enough"),
        WrongAnswer(gossips_into_a_new_array, "in place", "x was not overwritten"),
        WrongAnswer(gossips_and_returns_nothing, "returns", "returned nothing: return x"),
        WrongAnswer(changes_nothing, "sum", "nothing of the neighbors is in it"),
    ),
}
RIGHT = {
    "2.3": (metropolis, own_weight_last, in_falling_order),
}

"""Answers to the exercise of notebook 02 that a check must reject or accept; CI proves both."""

import numpy as np

from . import WrongAnswer

# -- average_gradients: wrong ------------------------------------------------------------------------------------------


def forgets_to_divide(comm, g):
    return comm.all_reduce(g)


def divides_by_four(comm, g):
    comm.all_reduce(g)
    g /= 4
    return g


def divides_its_own(comm, g):
    g /= comm.size
    return g


def divides_twice(comm, g):
    g /= comm.size
    comm.all_reduce(g)
    g /= comm.size
    return g


def takes_rank_0(comm, g):
    return comm.broadcast(g)


def does_nothing(comm, g):
    return g


def only_rank_0_calls(comm, g):
    if comm.rank == 0:
        comm.all_reduce(g)
        g /= comm.size
    return g


def divides_into_a_new_array(comm, g):
    total = comm.all_reduce(g.copy())
    return total / comm.size


def averages_and_forgets(comm, g):
    comm.all_reduce(g)
    g /= comm.size


def averages_to_a_number(comm, g):
    return comm.all_reduce(g).mean()


def mean_of_all(comm, g):
    """Right: what most of the answers below do something more to."""
    comm.all_reduce(g)
    g /= comm.size
    return g


def averages_the_mean_again(comm, g):
    """Nothing changes, and every byte is sent twice."""
    return mean_of_all(comm, mean_of_all(comm, g))


def averages_to_a_list(comm, g):
    return list(mean_of_all(comm, g))


def averages_to_a_tensor(comm, g):
    import torch

    return torch.from_numpy(mean_of_all(comm, g))


def returns_float32(comm, g):
    return mean_of_all(comm, g).astype(np.float32)


def adds_in_float32(comm, g):
    g[...] = mean_of_all(comm, g.astype(np.float32))
    return g


def divides_and_rounds_down(comm, g):
    comm.all_reduce(g)
    g //= comm.size
    return g


def takes_the_median(comm, g):
    g[...] = np.median(comm.all_gather(g), axis=0)
    return g


def takes_the_largest(comm, g):
    g[...] = comm.all_gather(g).max(axis=0)
    return g


def divides_by_one_less(comm, g):
    comm.all_reduce(g)
    g /= comm.size - 1
    return g


def mean_of_the_wrong_axis(comm, g):
    return comm.all_gather(g).mean(axis=1)


def only_rank_0_divides(comm, g):
    comm.all_reduce(g)
    if comm.rank == 0:
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


def each_in_its_own_order(comm, g):
    return passed_around(comm, g, comm.size - 1)


def passes_once_too_often(comm, g):
    return passed_around(comm, g, comm.size)


def passes_once_too_few(comm, g):
    return passed_around(comm, g, comm.size - 2)


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


def collects_one_too_few(comm, g):
    return collected(comm, g, range(1, comm.size - 1))


def collects_one_too_many(comm, g):
    return collected(comm, g, range(1, comm.size + 1))


# -- average_gradients: right ------------------------------------------------------------------------------------------


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


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "2.1": (
        WrongAnswer(forgets_to_divide, "mean", "the step would be 4 times too long"),
        WrongAnswer(divides_by_four, "size", "there are 2 ranks: comm.size"),
        WrongAnswer(divides_its_own, "sum", "add those of all ranks first"),
        WrongAnswer(divides_twice, "mean", "It was divided by 4 twice"),
        WrongAnswer(takes_rank_0, "sum", "the gradient of rank 0 alone"),
        WrongAnswer(does_nothing, "sum", "nothing came from the others"),
        WrongAnswer(only_rank_0_calls, "deadlock", "never called all_reduce"),
        WrongAnswer(divides_into_a_new_array, "in place", "g was not overwritten"),
        WrongAnswer(averages_and_forgets, "returns", "returned nothing"),
        WrongAnswer(averages_to_a_number, "returns", "the gradient is a NumPy array of shape (2,)"),
        WrongAnswer(averages_to_a_list, "returns", "something of type list"),
        WrongAnswer(averages_to_a_tensor, "returns", "something of type Tensor"),
        WrongAnswer(returns_float32, "returns", "something of dtype float32"),
        WrongAnswer(adds_in_float32, "precision", "The first digits are right"),
        WrongAnswer(divides_and_rounds_down, "precision", "// rounds down"),
        WrongAnswer(takes_the_median, "mean", "the median of the 4 gradients"),
        WrongAnswer(takes_the_largest, "mean", "the largest of the 4 gradients"),
        WrongAnswer(divides_by_one_less, "mean", "You divided by 3, but there are 4 ranks"),
        WrongAnswer(mean_of_the_wrong_axis, "returns", "something of shape (4,)"),
        WrongAnswer(only_rank_0_divides, "mean", "on rank 1 should be"),
        WrongAnswer(averages_the_mean_again, "steps", "calls 2 collectives that add"),
        WrongAnswer(each_in_its_own_order, "bitwise", "hold different bits"),
        WrongAnswer(passes_once_too_often, "loop", "The gradient of rank 0 is in it twice"),
        WrongAnswer(passes_once_too_few, "loop", "The gradient of rank 1 is missing in it"),
        WrongAnswer(collects_one_too_few, "deadlock", "leave out rank 3?"),
        WrongAnswer(collects_one_too_many, "raises", "ranks here are 0 to 3"),
    ),
}
RIGHT = {
    "2.1": (
        divides_first,
        by_gathering,
        by_messages,
        reduces_and_broadcasts,
    ),
}

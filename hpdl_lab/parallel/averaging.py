"""Gradient descent by several ranks, each with its share of the examples: average the gradients, take one common step.

rank 0: its examples -> g0 --+                            +--> the same step
rank 1: its examples -> g1 --+--> (g0 + g1 + g2 + g3) / 4 +--> the same step
rank 2: its examples -> g2 --+                            +--> the same step
rank 3: its examples -> g3 --+                            +--> the same step
"""

from ..optim.gradient_descent import gradient


def own_gradient(comm, w, x, y):
    """The gradient of the loss on this rank's share of the examples: the rank-th of comm.size equal parts.

    Args:    w: (d,), x: (n, d), y: (n,): the same on every rank.
    Returns: (d,) array, different per rank.
    Raises:  ValueError where comm.size does not divide n, because then the mean over ranks is not the mean over
    examples.
    """
    n, rest = divmod(len(y), comm.size)
    if rest:
        raise ValueError(f"{len(y)} examples cannot be shared equally by {comm.size} ranks: {rest} would be left over")
    mine = slice(comm.rank * n, (comm.rank + 1) * n)
    return gradient(w, x[mine], y[mine])


def average_gradients(comm, g):
    """Replace the gradient of every rank by the mean over ranks.

    Args:    g: (d,) float array, different per rank, overwritten with the mean. (hpdl_lab's own takes tensors too.)
    Returns: g, bitwise the same on every rank.
    Raises:  ValueError if the ranks' sizes differ; CommTimeout if a rank does not answer.
    Steps: one all_reduce.   Bytes per rank: those of the communicator's all_reduce for d elements.
    """
    comm.all_reduce(g)  # now the sum
    g /= comm.size
    return g


def step_together(comm, w, x, y, rate, average=average_gradients):
    """The weights after one step along the mean of the ranks' gradients.

    Args:    w: (d,), x: (n, d), y: (n,): the same on every rank; average: average_gradients(comm, g).
    Returns: (d,) new array, the same on every rank.
    """
    return w - rate * average(comm, own_gradient(comm, w, x, y))

"""Gradient descent by several ranks, each with its share of the examples: average the gradients, take one common step.

    rank 0: its examples -> g0 --+                            +--> the same step
    rank 1: its examples -> g1 --+--> (g0 + g1 + g2 + g3) / 4 +--> the same step
    rank 2: its examples -> g2 --+                            +--> the same step
    rank 3: its examples -> g3 --+                            +--> the same step
"""

import numpy as np

from ..optim.gradient_descent import gradient


def average_gradients(comm, g):
    """Replace the gradient of every rank by the mean over ranks.

    Args:    g: (d,) float array or tensor, different per rank, overwritten with the mean.
    Returns: g, bitwise the same on every rank.
    Raises:  ValueError if the ranks' sizes differ; CommTimeout if a rank does not answer.
    Steps: one all_reduce.   Bytes per rank: those of the communicator's all_reduce for d elements.
    """
    comm.all_reduce(g)  # now the sum
    g /= comm.size
    return g


def descend_together(comm, x, y, rate, steps, average=average_gradients):
    """Descend with every rank's gradient taken on its own share of the examples.

    The mean of the ranks' gradients is the gradient over all the examples, because every share has the same size.

    Args:    x: (n, d), y: (n,): all examples, the same on every rank; n is cut down to a multiple of comm.size.
             average: average_gradients(comm, g), yours or the library's.
    Returns: (steps + 1, d) the weights before the first step and after each one, the same on every rank.
    """
    n = len(y) // comm.size
    mine = slice(comm.rank * n, (comm.rank + 1) * n)
    path = [np.zeros(x.shape[1])]
    for _ in range(steps):
        w = path[-1]
        path.append(w - rate * average(comm, gradient(w, x[mine], y[mine])))
    return np.stack(path)

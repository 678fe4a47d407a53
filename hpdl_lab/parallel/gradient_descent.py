"""Gradient descent by several ranks in NumPy: average the gradients and take one common step, or let one rank serve.

rank 0: its examples -> g0 --+                            +--> the same step
rank 1: its examples -> g1 --+--> (g0 + g1 + g2 + g3) / 4 +--> the same step
rank 2: its examples -> g2 --+                            +--> the same step
rank 3: its examples -> g3 --+                            +--> the same step

rank 1: its examples -> g1 --+                                  +--> w
rank 2: its examples -> g2 --+--> rank 0: w -= rate * mean(g) --+--> w        all messages pass through rank 0
rank 3: its examples -> g3 --+                                  +--> w
"""

from collections.abc import Callable

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import new_like
from ..optim.gradient_descent import gradient


def own_gradient(comm: Comm, w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return the gradient of the loss on this rank's share of the examples: the rank-th of comm.size equal parts.

    Args:    w: (d,), x: (n, d), y: (n,): the same on every rank.
    Returns: (d,) array, different per rank.
    Raises:  ValueError if comm.size does not divide n, because then the mean over ranks is not the mean over
    examples.
    """
    n, rest = divmod(len(y), comm.size)
    if rest:
        raise ValueError(f"{len(y)} examples cannot be shared equally by {comm.size} ranks: {rest} would be left over")
    mine = slice(comm.rank * n, (comm.rank + 1) * n)
    return gradient(w, x[mine], y[mine])


def average_gradients(comm: Comm, g: np.ndarray) -> np.ndarray:
    """Replace the gradient of every rank by the mean over all ranks.

    Args:    g: (d,) float array or tensor, different on every rank; overwritten with
             the mean.
    Returns: g, with the same bits on every rank.
    Raises:  only what comm raises: ValueError if g is longer on one rank than on
             another, CommTimeout if a rank does not answer before the deadline.
    Steps of communication: one all_reduce.
    """
    comm.all_reduce(g)  # now the sum
    g /= comm.size
    return g


def step_together(
    comm: Comm,
    w: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    rate: float,
    average: Callable[[Comm, np.ndarray], np.ndarray] = average_gradients,
) -> np.ndarray:
    """Return the weights after one step along the mean of the ranks' gradients.

    Args:    w: (d,), x: (n, d), y: (n,): the same on every rank; average: average_gradients(comm, g).
    Returns: (d,) new array, the same on every rank.
    """
    return w - rate * average(comm, own_gradient(comm, w, x, y))


def server_step(comm: Comm, w: np.ndarray, g: np.ndarray, rate: float) -> np.ndarray:
    """Collect the workers' gradients on rank 0, update the weights, send them out.

    With p ranks, rank 0 is the server, and ranks 1 to p - 1 are the workers.

    Args:    w: (d,) float array or tensor, overwritten with the new weights on every
             rank. Before the step, only rank 0 holds the weights.
             g: (d,) the gradient of a worker, left as it is. Rank 0 has no examples:
             ignore its g.
             rate: the learning rate.
    Returns: w, the new weights, with the same bits on every rank.
    Raises:  only what comm raises: ValueError if w and g differ in length,
             CommTimeout if a rank does not answer before the deadline.
    Steps: the server receives p - 1 messages one after the other, then sends p - 1.
    Bytes: the server receives (p - 1) * d * itemsize bytes and sends as many. A worker
    sends d * itemsize bytes and receives as many. A number has itemsize bytes.
    Ref: Li et al. 2014, "Parameter Server".
    """
    if comm.rank == 0:
        total = 0 * w
        arriving = new_like(w, w.shape)
        for worker in range(1, comm.size):
            total += comm.recv(arriving, worker)
        w -= rate * total / (comm.size - 1)
        for worker in range(1, comm.size):
            comm.send(w, worker)
    else:
        comm.send(g, 0)
        comm.recv(w, 0)
    return w


def step_with_server(
    comm: Comm,
    w: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    rate: float,
    step: Callable[[Comm, np.ndarray, np.ndarray, float], np.ndarray] = server_step,
) -> np.ndarray:
    """Return the weights after one step in which rank 0 serves and each of the others has its share of the examples.

    Args:    w: (d,), x: (n, d), y: (n,): the same on every rank; step: server_step(comm, w, g, rate).
    Returns: (d,) new array, the same on every rank.
    Raises:  ValueError if comm.size - 1 workers cannot share n examples equally, or there is no worker.
    """
    workers = comm.size - 1
    if workers < 1 or len(y) % workers:
        raise ValueError(f"{len(y)} examples cannot be shared equally by {workers} workers and a server")
    if comm.rank == 0:
        return step(comm, w.copy(), np.zeros_like(w), rate)
    n = len(y) // workers
    mine = slice((comm.rank - 1) * n, comm.rank * n)
    return step(comm, w.copy(), gradient(w, x[mine], y[mine]), rate)

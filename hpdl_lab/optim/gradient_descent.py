"""Gradient descent on a linear model: the smallest training there is, and the largest learning rate that is stable.

prediction = x @ w        loss(w) = mean((x @ w - y)^2) / 2        step: w <- w - rate * gradient
"""

from collections.abc import Callable, Iterator

import numpy as np


def loss(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """Return half of the mean squared error of the predictions x @ w.

    Args:    w: (d,) weights; x: (n, d) one example per row; y: (n,) the true values.
    Returns: float, at least 0.
    """
    return float(((x @ w - y) ** 2).mean() / 2)


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Compute the gradient of the loss at `w`: the slope uphill, one number per weight.

    If weight j grows by a tiny h, the loss rises by h times entry j of the gradient.
    The loss is half of the mean of the squared errors. The error of an example is its
    prediction minus its y.

    Args:    w: (d,) weights; x: (n, d) one example per row; y: (n,) the true values.
    Returns: (d,) new NumPy array; w, x and y stay as they are.
    """
    error = x @ w - y  # (n, d) @ (d,) - (n,) = (n,)
    return x.T @ error / len(y)  # (d, n) @ (n,) = (d,)


def gradient_step(w: np.ndarray, x: np.ndarray, y: np.ndarray, rate: float) -> np.ndarray:
    """Take one step downhill, against the gradient, and return the new weights.

    Args:    w: (d,) weights; x: (n, d) one example per row; y: (n,) the true values;
             rate: the learning rate, a number above 0.
    Returns: (d,) new NumPy array. w stays as it is, so that its path can be drawn.
    """
    return w - rate * gradient(w, x, y)


def largest_stable_rate(x: np.ndarray) -> float:
    """Find the learning rate above which gradient descent on `x` diverges.

    Each axis of the bowl has a limit for the rate, and the smallest limit counts. The
    eigenvalues of the symmetric matrix `curvature` below are the curvatures along the
    axes. NumPy can compute eigenvalues.

    Args:    x: (n, d) one example per row.
    Returns: float.
    """
    curvature = x.T @ x / len(x)  # (d, d): how fast the gradient changes with w
    ### BEGIN SOLUTION
    return float(2 / np.linalg.eigvalsh(curvature).max())
    ### END SOLUTION


def descend(
    x: np.ndarray,
    y: np.ndarray,
    rate: float,
    steps: int,
    step: Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray] = gradient_step,
) -> Iterator[np.ndarray]:
    """Yield the weights before the first step and after each one, starting from zero: steps + 1 arrays of (d,)."""
    w = np.zeros(x.shape[1])
    yield w
    for _ in range(steps):
        w = step(w, x, y, rate)
        yield w


def descend_in_batches(
    x: np.ndarray, y: np.ndarray, rate: float, batch: int, steps: int, seed: int = 0
) -> Iterator[np.ndarray]:
    """Yield the weights of stochastic gradient descent (SGD) from zero: steps + 1 arrays of (d,).

    Every epoch shuffles the examples and goes through all of them, one step for each mini-batch of `batch` examples;
    the last one of an epoch may be smaller.
    """
    w, rng, order = np.zeros(x.shape[1]), np.random.default_rng(seed), np.empty(0, dtype=int)
    yield w
    for _ in range(steps):
        if not len(order):
            order = rng.permutation(len(y))
        mine, order = order[:batch], order[batch:]
        w = gradient_step(w, x[mine], y[mine], rate)
        yield w

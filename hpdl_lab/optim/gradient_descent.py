"""Gradient descent on a linear model: the smallest training there is, with the largest learning rate that it bears.

prediction = x @ w        loss(w) = mean((x @ w - y)^2) / 2        step: w <- w - rate * gradient
"""

from collections.abc import Callable, Iterator

import numpy as np


def loss(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> float:
    """Half the mean squared error of the predictions x @ w.

    Args:    w: (d,) weights; x: (n, d) one example per row; y: (n,) what should have been predicted.
    Returns: float, at least 0.
    """
    return float(((x @ w - y) ** 2).mean() / 2)


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The slope of the loss at `w`: it points uphill, one number per weight.

        loss(w) = mean(error^2) / 2   with   error = x @ w - y   (n,)
        d loss / d w[j] = mean(error * x[:, j])

    Args:    w: (d,) weights; x: (n, d) one example per row; y: (n,) what should have been predicted.
    Returns: (d,) new NumPy array; w, x and y stay as they are.
    """
    error = x @ w - y  # (n, d) @ (d,) - (n,) = (n,)
    return x.T @ error / len(y)  # (d, n) @ (n,) = (d,)


def gradient_step(w: np.ndarray, x: np.ndarray, y: np.ndarray, rate: float) -> np.ndarray:
    """The weights after one step downhill, against the gradient.

    Args:    w: (d,) weights; x: (n, d) one example per row; y: (n,); rate: the learning rate, a number above 0.
    Returns: (d,) new NumPy array; w stays as it is, so that the path of all the w can be drawn.
    """
    return w - rate * gradient(w, x, y)


def largest_stable_rate(x: np.ndarray) -> float:
    """The learning rate above which gradient descent on `x` diverges.

    Along each axis of the bowl the distance to the lowest point is multiplied by (1 - rate * curvature) at every step,
    so it shrinks as long as rate * curvature < 2. The steepest axis has the last word.

    Args:    x: (n, d) one example per row.
    Returns: float: 2 / (largest curvature). The curvatures are the eigenvalues of the (d, d) matrix below.
    """
    curvature = x.T @ x / len(x)  # (d, d): how fast the gradient changes with w; the same everywhere
    ### BEGIN SOLUTION
    return float(2 / np.linalg.eigvalsh(curvature).max())
    ### END SOLUTION


def descend(
    x: np.ndarray, y: np.ndarray, rate: float, steps: int, step: Callable = gradient_step
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
    w, chance, order = np.zeros(x.shape[1]), np.random.default_rng(seed), np.empty(0, dtype=int)
    yield w
    for _ in range(steps):
        if not len(order):
            order = chance.permutation(len(y))
        mine, order = order[:batch], order[batch:]
        w = gradient_step(w, x[mine], y[mine], rate)
        yield w

"""Answers to the exercises of notebook 01 that a check must reject or accept; CI proves both."""

import numpy as np

from ..optim.gradient_descent import gradient

# -- gradient: wrong ---------------------------------------------------------------------------------------------------


def forgets_the_mean(w, x, y):
    return x.T @ (x @ w - y)


def points_downhill(w, x, y):
    return x.T @ (y - x @ w) / len(y)


def forgets_the_half(w, x, y):
    return 2 * x.T @ (x @ w - y) / len(y)


def of_the_absolute_error(w, x, y):
    return x.T @ np.sign(x @ w - y) / len(y)


def one_number_for_all(w, x, y):
    return (x.T @ (x @ w - y)).mean()


def forgets_to_transpose(w, x, y):
    return x @ (x @ w - y) / len(y)


def changes_y(w, x, y):
    y -= x @ w
    return -x.T @ y / len(y)


def never_converges(w, x, y):
    while True:
        w = w - gradient(w, x, y)


# -- gradient: right ---------------------------------------------------------------------------------------------------


def with_a_loop(w, x, y):
    total = np.zeros(len(w))
    for row, target in zip(x, y, strict=True):
        total += (row @ w - target) * row
    return total / len(y)


def as_a_mean_of_rows(w, x, y):
    return ((x @ w - y)[:, None] * x).mean(axis=0)


# -- gradient_step: wrong ----------------------------------------------------------------------------------------------


def climbs(w, x, y, rate):
    return w + rate * gradient(w, x, y)


def ignores_the_rate(w, x, y, rate):
    return w - gradient(w, x, y)


def returns_the_way(w, x, y, rate):
    return -rate * gradient(w, x, y)


def steps_in_place(w, x, y, rate):
    w -= rate * gradient(w, x, y)
    return w


def stays(w, x, y, rate):
    return w.copy()


def steps_and_forgets(w, x, y, rate):
    w = w - rate * gradient(w, x, y)


# -- gradient_step: right ----------------------------------------------------------------------------------------------


def steps_on_a_copy(w, x, y, rate):
    w = w.copy()
    w -= rate * x.T @ (x @ w - y) / len(y)
    return w


# -- largest_stable_rate: wrong ----------------------------------------------------------------------------------------


def one_over_curvature(x):
    return 1 / np.linalg.eigvalsh(x.T @ x / len(x)).max()


def flattest_axis(x):
    return 2 / np.linalg.eigvalsh(x.T @ x / len(x)).min()


def sum_of_axes(x):
    return 2 / np.trace(x.T @ x / len(x))


def rate_of_the_sum(x):
    return 2 / np.linalg.eigvalsh(x.T @ x).max()


def all_axes(x):
    return 2 / np.linalg.eigvalsh(x.T @ x / len(x))


def always_one(x):
    return 1.0


# -- largest_stable_rate: right ----------------------------------------------------------------------------------------


def by_bisection(x):
    """Try it out: does the distance to the bottom grow after many steps?"""
    low, high = 0.0, 10.0
    for _ in range(14):
        rate = (low + high) / 2
        w, y = np.ones(x.shape[1]), np.zeros(len(x))
        for _ in range(1000):
            w = w - rate * gradient(w, x, y)
            if np.abs(w).max() > 1e6:
                break
        low, high = (low, rate) if np.abs(w).max() > 1 else (rate, high)
    return low


def by_norm(x):
    return 2 * len(x) / np.linalg.norm(x, 2) ** 2

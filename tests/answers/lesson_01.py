"""Answers to the exercises of notebook 01 that a check must reject or accept; CI proves both."""

import numpy as np

from hpdl_lab.optim.gradient_descent import gradient


def sum_of(examples, w, x, y):
    total = np.zeros(len(w))
    for i in examples:
        total += (x[i] @ w - y[i]) * x[i]
    return total / len(y)


def with_a_loop(w, x, y):
    total = np.zeros(len(w))
    for row, target in zip(x, y, strict=True):
        total += (row @ w - target) * row
    return total / len(y)


def as_a_mean_of_rows(w, x, y):
    return ((x @ w - y)[:, None] * x).mean(axis=0)


def by_automatic_differentiation(w, x, y):
    import torch

    w = torch.tensor(w, requires_grad=True)
    (((torch.tensor(x) @ w - torch.tensor(y)) ** 2).mean() / 2).backward()
    return w.grad.numpy()


def steps_on_a_copy(w, x, y, rate):
    w = w.copy()
    w -= rate * x.T @ (x @ w - y) / len(y)
    return w


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


def by_power_iteration(x):
    curvature, axis = x.T @ x / len(x), np.random.default_rng(0).standard_normal(x.shape[1])
    for _ in range(200):
        axis = curvature @ axis
        axis /= np.linalg.norm(axis)
    return 2 / (axis @ curvature @ axis)


WRONG = {
    "1.1": """
mean @as_a_mean_of_rows: a sum over the examples, not their mean
    ((x @ w - y)[:, None] * x).mean(axis=0) => x.T @ (x @ w - y)
sign @as_a_mean_of_rows: the gradient points uphill
    ((x @ w - y)[:, None] * x).mean(axis=0) => x.T @ (y - x @ w) / len(y)
factor @as_a_mean_of_rows: the loss has a 1/2 in front of the square
    ((x @ w - y)[:, None] * x).mean(axis=0) => 2 * x.T @ (x @ w - y) / len(y)
value @as_a_mean_of_rows: the gradient of the absolute error
    ((x @ w - y)[:, None] * x).mean(axis=0) => x.T @ np.sign(x @ w - y) / len(y)
returns @as_a_mean_of_rows: one number per weight
    ((x @ w - y)[:, None] * x).mean(axis=0) => (x.T @ (x @ w - y)).mean()
returns @as_a_mean_of_rows: something of type list: a NumPy array of shape (2,)
    ((x @ w - y)[:, None] * x).mean(axis=0) => list(gradient(w, x, y))
returns: something of type Tensor: a NumPy array of shape (2,)
    error = x @ w - y => import torch
    x.T @ error / len(y) => torch.from_numpy(gradient(w, x, y))
returns @as_a_mean_of_rows: something of dtype float32
    ((x @ w - y)[:, None] * x).mean(axis=0) => gradient(w, x, y).astype(np.float32)
returns: something of shape (2, 1)
    return x.T @ (x @ w - y)[:, None] / len(y)
returns @as_a_mean_of_rows: something of shape (50,)
    0 => 1
value @as_a_mean_of_rows: first multiply for every example
    ((x @ w - y)[:, None] * x) => (x @ w - y).mean() * x
value: Each weight uses only its own column
    return w * (x**2).mean(axis=0) - x.T @ y / len(y)
mean: the median over the examples
    return np.median((x @ w - y)[:, None] * x, axis=0)
mean @as_a_mean_of_rows: You divided by 49
    ((x @ w - y)[:, None] * x).mean(axis=0) => x.T @ (x @ w - y) / (len(y) - 1)
factor @as_a_mean_of_rows: half as much
    ((x @ w - y)[:, None] * x).mean(axis=0) => gradient(w, x, y) / 2
sign @as_a_mean_of_rows: the signs are lost
    ((x @ w - y)[:, None] * x).mean(axis=0) => abs(gradient(w, x, y))
precision @as_a_mean_of_rows: The first digits are right
    ((x @ w - y)[:, None] * x).mean(axis=0) => gradient(w, x, y).round(5)
loop @as_a_mean_of_rows: The last example is missing
    ((x @ w - y)[:, None] * x).mean(axis=0) => sum_of(range(len(y) - 1), w, x, y)
loop @as_a_mean_of_rows: The first example is missing
    ((x @ w - y)[:, None] * x).mean(axis=0) => sum_of(range(1, len(y)), w, x, y)
loop @as_a_mean_of_rows: Only the first example is in it
    ((x @ w - y)[:, None] * x).mean(axis=0) => sum_of(range(1), w, x, y)
raises @as_a_mean_of_rows: does a loop go one step too far?
    ((x @ w - y)[:, None] * x).mean(axis=0) => sum_of(range(len(y) + 1), w, x, y)
loop: The last weight has been left out
    slope, error = np.zeros(len(w)), x @ w - y
    for j in range(len(w) - 1):
        slope[j] = (error * x[:, j]).mean()
    return slope
raises @as_a_mean_of_rows: raised ValueError
    ((x @ w - y)[:, None] * x).mean(axis=0) => x @ (x @ w - y) / len(y)
input: changed y
    error = x @ w - y => y -= x @ w
    x.T @ error => -x.T @ y
timeout: Is there a loop that never ends?
    while True:
        w = w - gradient(w, x, y)
""",
    "1.2": """
sign: a step uphill
    w - rate => w + rate
rate: was not used
    return w - gradient(w, x, y)
value: start from w
    w - rate => -rate
input: changed w
    w -= rate * gradient(w, x, y)
    return w
steps: Those are 20 steps
    for _ in range(20):
        w = w - rate * gradient(w, x, y)
    return w
steps: Those are 2 steps
    for _ in range(2):
        w = w - rate * gradient(w, x, y)
    return w
steps: the bottom of the bowl
    w - rate * gradient(w, x, y) => np.linalg.lstsq(x, y, rcond=None)[0]
steps: one for each example
    for row, target in zip(x, y, strict=True):
        w = w - rate * (row @ w - target) * row
    return w
gradient: 50 times as large: a sum
    * gradient(w, x, y) => * x.T @ (x @ w - y)
gradient: You used only the direction
    slope = gradient(w, x, y)
    return w - rate * slope / np.linalg.norm(slope)
gradient @steps_on_a_copy: before any weight moves
    -     w -= rate * x.T @ (x @ w - y) / len(y)
    +     for j in range(len(w)):
    +         w[j] -= rate * gradient(w, x, y)[j]
gradient: You took the gradient at w = 0
    gradient(w, => gradient(np.zeros(len(w)),
rate: a step of rate 0.5
    w - rate * gradient => w - 0.5 * gradient
returns: something of type list: a NumPy array of shape (2,)
    return [a - rate * b for a, b in zip(w, gradient(w, x, y), strict=True)]
loop: The last weight has been left out
    w, slope = w.copy(), gradient(w, x, y)
    for j in range(len(w) - 1):
        w[j] -= rate * slope[j]
    return w
value: no step was taken
    w - rate * gradient(w, x, y) => w.copy()
returns: returned nothing
    return => w =
""",
    "1.3": """
value: How far may it overshoot?
    return 1 / np.linalg.eigvalsh(x.T @ x / len(x)).max()
axis: the steepest one diverges first
    return 2 / np.linalg.eigvalsh(x.T @ x / len(x)).min()
axis @by_norm: safe, but smaller than it need be
    * len(x) / np.linalg.norm(x, 2) ** 2 => / np.trace(x.T @ x / len(x))
mean: the curvature is x.T @ x / n
    return 2 / np.linalg.eigvalsh(x.T @ x).max()
returns: the rate is one number
    return 2 / np.linalg.eigvalsh(x.T @ x / len(x))
entry @by_norm: 2 / (largest entry of the matrix)
    * len(x) / np.linalg.norm(x, 2) ** 2 => / (x.T @ x / len(x)).max()
entry @by_norm: 2 / (largest entry of the matrix)
    * len(x) / np.linalg.norm(x, 2) ** 2 => / np.diag(x.T @ x / len(x)).max()
entry @by_norm: 2 / (largest sum of a row)
    * len(x) / np.linalg.norm(x, 2) ** 2 => / abs(x.T @ x / len(x)).sum(axis=0).max()
axis: made of all curvatures
    return 2 / np.linalg.norm(x.T @ x / len(x))
axis: of one axis, but not of the steepest
    return 2 / np.linalg.eig(x.T @ x / len(x))[0][-1]
axis: of one axis, but not of the steepest
    return 2 / np.linalg.eigvalsh(x.T @ x / len(x))[min(1, x.shape[1] - 1)]
mean: subtracted the mean from the columns
    x = x - x.mean(axis=0)
    return 2 / np.linalg.eigvalsh(x.T @ x / len(x)).max()
mean: square it, and divide by n
    return 2 / np.linalg.norm(x, 2)
returns: your function returned tensor
    curvature = x.T @ x / len(x) => import torch
    return float(2 / np.linalg.eigvalsh(curvature).max()) => return torch.tensor(by_norm(x))
value @by_norm: It would diverge.
    2 * len(x) / np.linalg.norm(x, 2) ** 2 => 1.0
""",
}
RIGHT = {
    "1.1": (with_a_loop, as_a_mean_of_rows, by_automatic_differentiation),
    "1.2": (steps_on_a_copy,),
    "1.3": (by_bisection, by_norm, by_power_iteration),
}
COMPLETED = {
    "1.3": ["curvatures.max()"],
}

"""Answers to the exercises of notebook 01 that a check must reject or accept; CI proves both."""

import numpy as np

from hpdl_lab.optim.gradient_descent import gradient

from . import WrongAnswer

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


def as_a_list(w, x, y):
    return list(gradient(w, x, y))


def as_a_tensor(w, x, y):
    import torch

    return torch.from_numpy(gradient(w, x, y))


def in_float32(w, x, y):
    return gradient(w, x, y).astype(np.float32)


def as_a_column(w, x, y):
    return x.T @ (x @ w - y)[:, None] / len(y)


def mean_of_the_wrong_axis(w, x, y):
    return ((x @ w - y)[:, None] * x).mean(axis=1)


def product_of_means(w, x, y):
    return (x @ w - y).mean() * x.mean(axis=0)


def each_weight_alone(w, x, y):
    """Right where the columns of x have nothing in common."""
    return w * (x**2).mean(axis=0) - x.T @ y / len(y)


def median_for_mean(w, x, y):
    return np.median((x @ w - y)[:, None] * x, axis=0)


def divides_by_one_less(w, x, y):
    return x.T @ (x @ w - y) / (len(y) - 1)


def halves(w, x, y):
    return gradient(w, x, y) / 2


def loses_the_signs(w, x, y):
    return abs(gradient(w, x, y))


def rounds(w, x, y):
    return gradient(w, x, y).round(5)


def sum_of(examples, w, x, y):
    total = np.zeros(len(w))
    for i in examples:
        total += (x[i] @ w - y[i]) * x[i]
    return total / len(y)


def forgets_the_last_example(w, x, y):
    return sum_of(range(len(y) - 1), w, x, y)


def forgets_the_first_example(w, x, y):
    return sum_of(range(1, len(y)), w, x, y)


def one_example_too_many(w, x, y):
    return sum_of(range(len(y) + 1), w, x, y)


def returns_inside_the_loop(w, x, y):
    return sum_of(range(1), w, x, y)


def forgets_the_last_weight(w, x, y):
    slope, error = np.zeros(len(w)), x @ w - y
    for j in range(len(w) - 1):
        slope[j] = (error * x[:, j]).mean()
    return slope


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


def by_automatic_differentiation(w, x, y):
    import torch

    w = torch.tensor(w, requires_grad=True)
    (((torch.tensor(x) @ w - torch.tensor(y)) ** 2).mean() / 2).backward()
    return w.grad.numpy()


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


def twenty_steps(w, x, y, rate):
    for _ in range(20):
        w = w - rate * gradient(w, x, y)
    return w


def a_step_too_many(w, x, y, rate):
    for _ in range(2):
        w = w - rate * gradient(w, x, y)
    return w


def walks_to_the_bottom(w, x, y, rate):
    return np.linalg.lstsq(x, y, rcond=None)[0]


def a_step_for_every_example(w, x, y, rate):
    for row, target in zip(x, y, strict=True):
        w = w - rate * (row @ w - target) * row
    return w


def follows_the_sum(w, x, y, rate):
    return w - rate * x.T @ (x @ w - y)


def steps_of_equal_length(w, x, y, rate):
    slope = gradient(w, x, y)
    return w - rate * slope / np.linalg.norm(slope)


def gradient_for_every_weight(w, x, y, rate):
    w = w.copy()
    for j in range(len(w)):
        w[j] -= rate * gradient(w, x, y)[j]
    return w


def gradient_at_zero(w, x, y, rate):
    return w - rate * gradient(np.zeros(len(w)), x, y)


def rate_of_its_own(w, x, y, rate):
    return w - 0.5 * gradient(w, x, y)


def steps_as_a_list(w, x, y, rate):
    return [a - rate * b for a, b in zip(w, gradient(w, x, y), strict=True)]


def leaves_the_last_weight(w, x, y, rate):
    w, slope = w.copy(), gradient(w, x, y)
    for j in range(len(w) - 1):
        w[j] -= rate * slope[j]
    return w


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


def largest_entry(x):
    return 2 / (x.T @ x / len(x)).max()


def largest_on_the_diagonal(x):
    """Right where the columns of x have nothing in common."""
    return 2 / np.diag(x.T @ x / len(x)).max()


def largest_row(x):
    """Right for the data of the notebook: two columns of the same size."""
    return 2 / abs(x.T @ x / len(x)).sum(axis=0).max()


def norm_of_the_matrix(x):
    """Nearly right where one axis is much steeper than all others."""
    return 2 / np.linalg.norm(x.T @ x / len(x))


def last_of_unsorted_axes(x):
    return 2 / np.linalg.eig(x.T @ x / len(x))[0][-1]


def second_axis(x):
    """Right for two weights."""
    return 2 / np.linalg.eigvalsh(x.T @ x / len(x))[min(1, x.shape[1] - 1)]


def of_the_covariance(x):
    """Right for columns with mean 0."""
    x = x - x.mean(axis=0)
    return 2 / np.linalg.eigvalsh(x.T @ x / len(x)).max()


def of_a_singular_value(x):
    return 2 / np.linalg.norm(x, 2)


def rate_as_a_tensor(x):
    import torch

    return torch.tensor(by_norm(x))


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


def by_power_iteration(x):
    curvature, axis = x.T @ x / len(x), np.random.default_rng(0).standard_normal(x.shape[1])
    for _ in range(200):
        axis = curvature @ axis
        axis /= np.linalg.norm(axis)
    return 2 / (axis @ curvature @ axis)


# -- by exercise -------------------------------------------------------------------------------------------------------

WRONG = {
    "1.1": (
        WrongAnswer(forgets_the_mean, "mean", "a sum over the examples, not their mean"),
        WrongAnswer(points_downhill, "sign", "the gradient points uphill"),
        WrongAnswer(forgets_the_half, "factor", "the loss has a 1/2 in front of the square"),
        WrongAnswer(of_the_absolute_error, "value", "the gradient of the absolute error"),
        WrongAnswer(one_number_for_all, "returns", "one number per weight"),
        WrongAnswer(as_a_list, "returns", "something of type list: a NumPy array of shape (2,)"),
        WrongAnswer(as_a_tensor, "returns", "something of type Tensor: a NumPy array of shape (2,)"),
        WrongAnswer(in_float32, "returns", "something of dtype float32"),
        WrongAnswer(as_a_column, "returns", "something of shape (2, 1)"),
        WrongAnswer(mean_of_the_wrong_axis, "returns", "something of shape (50,)"),
        WrongAnswer(product_of_means, "value", "first multiply for every example"),
        WrongAnswer(each_weight_alone, "value", "alone in it with its own column"),
        WrongAnswer(median_for_mean, "mean", "the median over the examples"),
        WrongAnswer(divides_by_one_less, "mean", "You divided by 49"),
        WrongAnswer(halves, "factor", "half as much"),
        WrongAnswer(loses_the_signs, "sign", "the signs are lost"),
        WrongAnswer(rounds, "precision", "The first digits are right"),
        WrongAnswer(forgets_the_last_example, "loop", "The last example is missing"),
        WrongAnswer(forgets_the_first_example, "loop", "The first example is missing"),
        WrongAnswer(returns_inside_the_loop, "loop", "Only the first example is in it"),
        WrongAnswer(one_example_too_many, "raises", "does a loop go one step too far?"),
        WrongAnswer(forgets_the_last_weight, "loop", "The last weight has been left out"),
        WrongAnswer(forgets_to_transpose, "raises", "raised ValueError"),
        WrongAnswer(changes_y, "input", "changed its argument y"),
        WrongAnswer(never_converges, "timeout", "Is there a loop that never ends?"),
    ),
    "1.2": (
        WrongAnswer(climbs, "sign", "a step uphill"),
        WrongAnswer(ignores_the_rate, "rate", "was not used"),
        WrongAnswer(returns_the_way, "value", "start from w"),
        WrongAnswer(steps_in_place, "input", "changed its argument w"),
        WrongAnswer(twenty_steps, "steps", "Those are 20 steps"),
        WrongAnswer(a_step_too_many, "steps", "Those are 2 steps"),
        WrongAnswer(walks_to_the_bottom, "steps", "the bottom of the bowl"),
        WrongAnswer(a_step_for_every_example, "steps", "one for each example"),
        WrongAnswer(follows_the_sum, "gradient", "50 times as large: a sum"),
        WrongAnswer(steps_of_equal_length, "gradient", "Only the direction"),
        WrongAnswer(gradient_for_every_weight, "gradient", "before any weight moves"),
        WrongAnswer(gradient_at_zero, "gradient", "that at w = 0"),
        WrongAnswer(rate_of_its_own, "rate", "a step of rate 0.5"),
        WrongAnswer(steps_as_a_list, "returns", "something of type list: a NumPy array of shape (2,)"),
        WrongAnswer(leaves_the_last_weight, "loop", "The last weight has been left out"),
        WrongAnswer(stays, "value", "no step was taken"),
        WrongAnswer(steps_and_forgets, "returns", "returned nothing"),
    ),
    "1.3": (
        WrongAnswer(one_over_curvature, "value", "How far may it overshoot?"),
        WrongAnswer(flattest_axis, "axis", "the steepest one diverges first"),
        WrongAnswer(sum_of_axes, "axis", "safe, but smaller than it need be"),
        WrongAnswer(rate_of_the_sum, "mean", "the curvature is x.T @ x / n"),
        WrongAnswer(all_axes, "returns", "The rate is one number"),
        WrongAnswer(largest_entry, "entry", "2 / (largest entry of the matrix)"),
        WrongAnswer(largest_on_the_diagonal, "entry", "2 / (largest entry of the matrix)"),
        WrongAnswer(largest_row, "entry", "2 / (largest sum of a row)"),
        WrongAnswer(norm_of_the_matrix, "axis", "made of all curvatures"),
        WrongAnswer(last_of_unsorted_axes, "axis", "of one axis, but not of the steepest"),
        WrongAnswer(second_axis, "axis", "of one axis, but not of the steepest"),
        WrongAnswer(of_the_covariance, "mean", "took the mean off the columns"),
        WrongAnswer(of_a_singular_value, "mean", "square it, and divide by n"),
        WrongAnswer(rate_as_a_tensor, "returns", "your function returned Tensor"),
        WrongAnswer(always_one, "value", "It would diverge."),
    ),
}
RIGHT = {
    "1.1": (with_a_loop, as_a_mean_of_rows, by_automatic_differentiation),
    "1.2": (steps_on_a_copy,),
    "1.3": (by_bisection, by_norm, by_power_iteration),
}

"""Notebook 01: the gradient, a step, and the largest learning rate that is stable. One process, no ranks."""

import numbers

import numpy as np

from ...optim import gradient_descent as reference
from ...units import counted
from ..checkers import because, reason
from ..ranks import alone, capital, kind, number, shown, unlike
from ..record import Answer, Broken, Exercise, Passed, Reason, Rows

SHAPES = ((50, 2), (7, 1), (1, 3), (200, 5))  # (examples, weights)
MOST_STEPS = 100  # that a function may take in the place of one and learns how many they were
MAKES = {"list": " np.array(...) makes one.", "tuple": " np.array(...) makes one.", "Tensor": " .numpy() makes one."}


COLUMNS = "Each weight uses only its own column here. The error of an example comes from all weights."
MEANS = "That is the mean error times the mean input: first multiply for every example, then average."
DIRECTION = "You used only the direction of the gradient: on a steeper slope the step is longer."


def _problem(n: int, d: int) -> tuple[np.ndarray, ...]:
    """Return w (d,), x (n, d), y (n,): random, the same in every run."""
    rng = np.random.default_rng([n, d])
    return rng.standard_normal(d), rng.standard_normal((n, d)), rng.standard_normal(n)


def _check_vector(got: np.ndarray, expected: np.ndarray, begun: np.ndarray, n: int, others: Rows) -> None:
    """Raise Broken for a wrong vector. others: see `reason`; begun: what a loop over weights begins with."""
    d = len(expected)
    where = f"For {counted(n, 'example')} and {counted(d, 'weight')}"
    if unlike(got, expected):
        raise Broken(f"""returns: {where} your function returned {unlike(got, expected)}: {kind(expected)} was asked
            for, one number per weight.{MAKES.get(type(got).__name__, "")}""")
    wrong = ~np.isclose(got, expected, rtol=1e-9, atol=1e-12)
    if wrong.any():
        j = int(np.argmax(wrong))
        with np.errstate(all="ignore"):  # it may be anything
            why = reason(got, others) or _in_general(got, expected, begun)
        text = f"number {j} of the result should be {number(expected[j])} and is {number(got[j])}."
        raise because(why, f"{where}, {text}")


def _in_general(got: np.ndarray, expected: np.ndarray, begun: np.ndarray) -> Reason:
    """Return the Reason for a wrong array, whatever it was to be."""
    if np.allclose(got, expected, rtol=1e-3):
        return "precision: The first digits are right: is it rounded, float32, or a quotient of small differences?"
    if len(got) > 1 and np.allclose(got, [*expected[:-1], begun[-1]]):
        return "loop: The last weight has been left out: a loop over the weights ends one step too early."
    return "value: "


def _check_gradient(fn: Answer) -> Passed:
    for n, d in SHAPES:
        w, x, y = _problem(n, d)
        expected = reference.gradient(w, x, y)
        got = alone(fn, w, x, y, where=f"for x of shape {x.shape}", keep="w x y")
        _check_vector(got, expected, 0 * w, n, _other_gradients(w, x, y, expected))
    w, x, y = _problem(50, 2)
    slope = (reference.loss(w + [1e-6, 0], x, y) - reference.loss(w - [1e-6, 0], x, y)) / 2e-6
    return Passed(
        f"the right slope for {len(SHAPES)} shapes of data",
        f"at w = ({w[0]:.3f}, {w[1]:.3f}) the first number is {fn(w, x, y)[0]:.6f}; the loss, measured left and "
        f"right of it, rises by {slope:.6f} per unit",
    )


def _other_gradients(w: np.ndarray, x: np.ndarray, y: np.ndarray, right: np.ndarray) -> Rows:
    """Return rows of wrong gradients."""
    n, d, error = len(x), len(w), x @ w - y
    pulls = error[:, None] * x  # (n, d): of every example
    half = " Or did you divide by x.size?" if d == 2 else ""
    return (
        (-right, "sign: The sign is reversed: the gradient points uphill, towards a larger loss."),
        (n * right, f"mean: That is {n} times as much: a sum over the examples, not their mean."),
        (2 * right, "factor: That is twice as much: the loss has a 1/2 in front of the square."),
        (
            right / 2,
            f"factor: That is half as much: the slope of e² is 2e, and this 2 cancels the 1/2 of the loss.{half}",
        ),
        (right * n / max(n - 1, 1), f"mean: You divided by {n - 1}: there are {n} examples."),
        (pulls[:-1].sum(axis=0) / n, "loop: The last example is missing: the loop is one step too short."),
        (pulls[1:].sum(axis=0) / n, "loop: The first example is missing: the loop begins one step too late."),
        (pulls[0] / n, "loop: Only the first example is in it: does the loop end at a `return`?"),
        (x.T @ np.sign(error) / n, "value: That is the gradient of the absolute error; here the error is squared."),
        (w * (x**2).mean(axis=0) - x.T @ y / n, f"value: {COLUMNS}"),
        (error.mean() * x.mean(axis=0), f"value: {MEANS}"),
        (abs(right), "sign: The size is right; the signs are lost."),
        (np.median(pulls, axis=0), "mean: That is the median over the examples, not the mean."),
    )


def _check_gradient_step(fn: Answer) -> Passed:
    for n, d in SHAPES:
        for rate in (0.1, 0.03):
            w, x, y = _problem(n, d)
            got = alone(fn, w, x, y, rate, where=f"for x of shape {x.shape}", keep="w x y")
            _check_vector(got, reference.gradient_step(w, x, y, rate), w, n, _other_steps(w, x, y, rate, got))
    w, x, y = _problem(50, 2)
    before, after = reference.loss(w, x, y), reference.loss(fn(w, x, y, 0.1), x, y)
    return Passed(
        f"the right step for {len(SHAPES)} shapes of data",
        f"one step of rate 0.1 takes the loss from {before:.4f} to {after:.4f}",
    )


def _other_steps(w: np.ndarray, x: np.ndarray, y: np.ndarray, rate: float, got: np.ndarray) -> Rows:
    """Yield rows of what is not one step of this rate."""
    n, slope, at_0 = len(x), reference.gradient(w, x, y), reference.gradient(0 * w, x, y)
    way = "value: That is the way to go, not the place where you arrive: start from w."
    yield from (
        (w + rate * slope, "sign: That is a step uphill: go against the gradient."),
        (w - slope, f"rate: The rate is {rate}, and was not used: w - rate * gradient."),
        (w - rate**2 * slope, "rate: The rate was used twice."),
        (w - rate * n * slope, f"gradient: Your gradient is {n} times as large: a sum, not a mean."),
        (w - rate * slope / np.linalg.norm(slope), f"gradient: {DIRECTION}"),
        (w - rate * at_0, "gradient: You took the gradient at w = 0. It changes with every step: take it at w."),
        (-rate * slope, way),
        (rate * slope, way),
        (w, "value: That is w itself: no step was taken."),
    )
    if why := _too_many_steps(got, w, x, y, rate) or _another_rate(got, w, slope, rate):
        yield got, why


def _too_many_steps(got: np.ndarray, w: np.ndarray, x: np.ndarray, y: np.ndarray, rate: float) -> Reason | None:
    """Return the Reason if `got` is the end of more than one step, or None."""
    asked = "One step was asked for: the caller repeats it."
    for steps, moved in enumerate(reference.descend(x, y - x @ w, rate, MOST_STEPS)):  # as seen from w
        if np.allclose(got, w + moved):
            return f"steps: Those are {steps} steps. {asked}"
    by_example, by_weight = w, w.copy()
    for row, target in zip(x, y, strict=True):
        by_example = by_example - rate * (row @ by_example - target) * row
    if np.allclose(got, by_example):
        return f"steps: Those are {len(y)} steps, one for each example. {asked}"
    for j in range(len(w)):
        by_weight[j] -= rate * reference.gradient(by_weight, x, y)[j]
    if np.allclose(got, by_weight):
        return "gradient: The gradient was taken again for every weight: take it once, at w, before any weight moves."
    if np.allclose(reference.gradient(got, x, y), 0, atol=1e-3):
        return f"steps: That is the bottom of the bowl. {asked}"
    return None


def _another_rate(got: np.ndarray, w: np.ndarray, slope: np.ndarray, rate: float) -> Reason | None:
    """Return the Reason if `got` is a step of another rate, or None."""
    used = float((w - got) @ slope / (slope @ slope))
    if len(w) > 1 and np.allclose(got, w - used * slope) and abs(used / rate - 1) > 1e-3:
        return f"rate: That is a step of rate {number(used)}: here the rate is {rate}."
    return None


def _check_largest_stable_rate(fn: Answer) -> Passed:
    for n, d, common in ((50, 2, 3.0), (7, 1, 0.0), (200, 5, 0.5), (30, 3, 1.0)):
        rng = np.random.default_rng([n, d])
        x = (common * rng.standard_normal((n, 1)) + rng.standard_normal((n, d))) * np.linspace(1, 1.5, d) + 0.4
        where, expected = f"for x of shape {x.shape}", reference.largest_stable_rate(x)
        got = alone(fn, x, where=where, keep="x")
        if not isinstance(got[()] if isinstance(got, np.ndarray) else got, numbers.Real):
            raise Broken(f"returns: {capital(where)} your function returned {shown(got)}: the rate is one number.")
        if not abs(got - expected) <= 0.01 * expected:
            raise _why_rate(float(got), expected, x)
    return Passed(
        f"within 1% for 4 sets of data; for the last of them {got:.4f}",
        f"200 steps at 1% less: {_remaining(x, 0.99 * got):.3g} of the distance to the bottom is left; "
        f"at 1% more: {_remaining(x, 1.01 * got):.3g} times the distance",
    )


def _remaining(x: np.ndarray, rate: float, steps: int = 200) -> float:
    """Return the distance to the bottom after descent along the steepest axis, as a multiple of the first distance."""
    w, y = np.linalg.eigh(x.T @ x)[1][:, -1], np.zeros(len(x))
    for _ in range(steps):
        w = reference.gradient_step(w, x, y, rate)
    return float(np.linalg.norm(w))


def _why_rate(got: float, expected: float, x: np.ndarray) -> Broken:
    """Return Broken for a rate that is not the largest stable one."""
    n, d = x.shape
    curvature = x.T @ x / n
    curvatures = np.linalg.eigvalsh(curvature)
    most, around_mean = curvatures.max(), np.linalg.eigvalsh(np.atleast_2d(np.cov(x.T, bias=True))).max()
    entry = """entry: That is 2 / (largest entry of the matrix). The axes of the bowl are not the weights if the
        columns of x rise and fall together: the curvatures are the eigenvalues."""
    one_axis = "axis: That is the rate of one axis, but not of the steepest: take the largest eigenvalue."
    no_mean = "mean: You subtracted the mean from the columns of x. The model has no constant: x.T @ x / n."
    known = (
        (1 / most, "value: 1 / curvature jumps straight to the bottom of that axis. How far may it overshoot?"),
        (2 / curvatures.min(), "axis: That is the rate of the flattest axis: the steepest one diverges first."),
        (2 / np.diag(curvature).max(), entry),
        (2 / abs(curvature).max(), entry),
        (2 / curvatures.sum(), "axis: That is 2 / (sum of the curvatures): safe, but smaller than it need be."),
        *((2 / c, one_axis) for c in curvatures),
        (2 / np.linalg.norm(curvature), "axis: That is 2 / np.linalg.norm(curvature), made of all curvatures."),
        (2 / abs(curvature).sum(axis=0).max(), "entry: That is 2 / (largest sum of a row), not of an eigenvalue."),
        (2 / around_mean, no_mean),
        (2 / (around_mean * n / (n - 1)), no_mean),
        (2 / (most * n), "mean: The loss is a mean over the examples, so the curvature is x.T @ x / n."),
        (
            2 / np.sqrt(most * n),
            "mean: A singular value of x is the root of n * curvature: square it, and divide by n.",
        ),
    )
    why = reason(got, known, lambda a, b: np.isclose(a, b, rtol=1e-6))
    where = f"For {counted(n, 'example')} and {counted(d, 'weight')}"
    return because(
        why or "value: " + ("It would diverge." if got > expected else "A larger one still converges."),
        f"{where} the largest stable rate is {number(expected)}, and you say {number(got)}.",
    )


EXERCISES = (
    Exercise("1.1", "the gradient", reference.gradient, 1, _check_gradient),
    Exercise("1.2", "a gradient step", reference.gradient_step, 1, _check_gradient_step),
    Exercise("1.3", "the largest stable learning rate", reference.largest_stable_rate, 1, _check_largest_stable_rate),
)

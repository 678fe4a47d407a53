"""Notebook 01: the gradient, a step, and the largest learning rate that is stable. One process, no ranks."""

import numpy as np

from ..optim import gradient_descent as reference
from . import answers_01 as answers
from .ranks import number, simulate
from .record import Broken, Exercise, Passed, WrongAnswer

SHAPES = ((50, 2), (7, 1), (1, 3), (200, 5))  # (examples, weights)


def problem(n, d):
    """w (d,), x (n, d), y (n,): random, the same in every run."""
    rng = np.random.default_rng([n, d])
    return rng.standard_normal(d), rng.standard_normal((n, d)), rng.standard_normal(n)


def call(fn, *args, unchanged):
    """fn(*args), with deadline and errors as on ranks; `unchanged` names the arguments that fn must not change."""
    before = [np.copy(a) for a in args]
    (out, after), *_ = simulate(
        1, lambda comm, *copies: (fn(*copies), copies), *args, where=f"for x of shape {shape_of(args)}"
    )
    for name, old, new in zip(unchanged, before, after, strict=False):
        if name and not np.array_equal(old, new):
            message = f"Your function changed its argument {name}: make a new array, and leave {name} as it was."
            raise Broken("input", message)
    if out is None:
        raise Broken("returns", "Your function returned nothing: is there a `return`?")
    try:
        return np.asarray(out, dtype=float)
    except (TypeError, ValueError):
        raise Broken(
            "returns", f"Your function returned {out!r}, a {type(out).__name__}: numbers were asked for."
        ) from None


def shape_of(args):
    return next(a.shape for a in args if getattr(a, "ndim", 0) == 2)


def check_vector(got, expected, n, d, explain):
    """`explain(got, expected)` returns (invariant, sentence) or None for a vector of the right shape."""
    where = f"For {n} examples and {d} weights"
    if np.shape(got) != expected.shape:
        message = f"{where} the result has shape {np.shape(got)}: it should be {expected.shape}, one number per weight."
        raise Broken("shape", message)
    if not np.allclose(got, expected, rtol=1e-6, atol=1e-12):
        j = int(np.argmax(~np.isclose(got, expected, rtol=1e-6, atol=1e-12)))
        failed, why = explain(np.asarray(got), expected) or ("value", "")
        message = f"{where}, number {j} of the result should be {number(expected[j])} and is {number(got[j])}. {why}"
        raise Broken(failed, message.rstrip())


def check_gradient(fn, runner=None):
    for n, d in SHAPES:
        w, x, y = problem(n, d)

        def explain(got, expected, n=n, x=x, w=w, y=y):
            for factor, failed, why in (
                (-1, "sign", "The sign is the other way round: the gradient points uphill, towards a larger loss."),
                (n, "mean", f"That is {n} times as much: a sum over the examples, not their mean."),
                (2, "factor", "That is twice as much: the loss has a 1/2 in front of the square."),
                (-2, "factor", "That is twice as much, and the sign is the other way round."),
                (n / len(w), "mean", f"You divided by the {len(w)} weights, not by the {n} examples."),
            ):
                if np.allclose(got, factor * expected, rtol=1e-6):
                    return failed, why
            if np.allclose(got, x.T @ np.sign(x @ w - y) / n):
                return "value", "That is the gradient of the absolute error; here the error is squared."

        check_vector(call(fn, w, x, y, unchanged=("w", "x", "y")), reference.gradient(w, x, y), n, d, explain)
    w, x, y = problem(50, 2)
    slope = (reference.loss(w + [1e-6, 0], x, y) - reference.loss(w - [1e-6, 0], x, y)) / 2e-6
    here = f"at w = ({w[0]:.3f}, {w[1]:.3f})"
    facts = (
        f"the right slope for {len(SHAPES)} shapes of data",
        f"{here} the first number is {fn(w, x, y)[0]:.6f}; the loss, measured left and right of it, rises by "
        f"{slope:.6f} per unit",
    )
    return Passed(facts)


def check_gradient_step(fn, runner=None):
    for n, d in SHAPES:
        for rate in (0.1, 0.03):
            w, x, y = problem(n, d)
            slope = reference.gradient(w, x, y)

            def explain(got, expected, w=w, slope=slope, rate=rate):
                if np.allclose(got, w + rate * slope):
                    return "sign", "That is a step uphill: go against the gradient."
                if np.allclose(got, w - slope):
                    return "rate", f"The rate is {rate}, and was not used: w - rate * gradient."
                if np.allclose(got, -rate * slope) or np.allclose(got, rate * slope):
                    return "value", "That is the way to go, not the place where you arrive: start from w."
                if np.allclose(got, w):
                    return "value", "That is w itself: no step was taken."

            got = call(fn, w, x, y, rate, unchanged=("w", "x", "y"))
            check_vector(got, w - rate * slope, n, d, explain)
    w, x, y = problem(50, 2)
    before, after = reference.loss(w, x, y), reference.loss(fn(w, x, y, 0.1), x, y)
    return Passed(
        (
            f"the right step for {len(SHAPES)} shapes of data",
            f"one step of rate 0.1 takes the loss from {before:.4f} to {after:.4f}",
        )
    )


def check_largest_stable_rate(fn, runner=None):
    for n, d in ((50, 2), (7, 1), (200, 5), (30, 3)):
        _, x, _ = problem(n, d)
        x = x * np.linspace(1, 3, d)
        got, expected = call(fn, x, unchanged=("x",)), reference.largest_stable_rate(x)
        if got.ndim:
            raise Broken("shape", f"The rate is one number; your function returned {got.size}: {got}.")
        if not abs(got - expected) <= 0.01 * expected:
            raise Broken(*why_rate(float(got), expected, x))
    return Passed(
        (
            f"within 1% for 4 sets of data; for the last of them {got:.4f}",
            f"200 steps at 1% less: {remaining(x, 0.99 * got):.3g} of the distance to the bottom is left; "
            f"at 1% more: {remaining(x, 1.01 * got):.3g} times the distance",
        )
    )


def remaining(x, rate, steps=200):
    """Distance to the bottom after descent along the steepest axis, as a multiple of that at the start."""
    w, y = np.linalg.eigh(x.T @ x)[1][:, -1], np.zeros(len(x))
    for _ in range(steps):
        w = reference.gradient_step(w, x, y, rate)
    return float(np.linalg.norm(w))


def why_rate(got, expected, x):
    """(invariant, sentence) for a rate that is not the largest stable one."""
    curvatures = np.linalg.eigvalsh(x.T @ x / len(x))
    start = (
        f"For {len(x)} examples and {x.shape[1]} weights the largest stable rate is {number(expected)}, and you say "
        f"{number(got)}. "
    )
    known = (
        (
            1 / curvatures.max(),
            "value",
            "1 / curvature jumps straight to the bottom of that axis. How far may it overshoot?",
        ),
        (2 / curvatures.min(), "axis", "That is the rate of the flattest axis: the steepest one diverges first."),
        (curvatures.max(), "value", "That is the largest curvature itself."),
        (2 / curvatures.sum(), "axis", "That is 2 / (sum of the curvatures): safe, but smaller than it need be."),
        (
            2 / (curvatures.max() * len(x)),
            "mean",
            "The loss is a mean over the examples, so the curvature is x.T @ x / n.",
        ),
    )
    for value, failed, why in known:
        if np.isclose(got, value, rtol=1e-6):
            return failed, start + why
    return "value", start + ("It would diverge." if got > expected else "A larger one still converges.")


EXERCISES = (
    Exercise(
        id="1.1",
        title="the gradient",
        reference=reference.gradient,
        stars=1,
        check=check_gradient,
        parallel=False,
        hints={
            "": (
                "Two steps: first the error of every example, then, for every weight, the mean of error times input.",
                "error = x @ w - y has one number per example. x.T @ error sums error * input over the examples.",
                "error = x @ w - y\nreturn x.T @ error / len(y)",
            ),
            "mean": (
                "The loss is a mean over the examples. Which number do you divide by?",
                "The number of examples is len(y), which is also len(x).",
                "return x.T @ error / len(y)",
            ),
            "input": (
                "In Python w -= ... changes the caller's array.",
                "x @ w - y makes a new array; `w -= 1` does not.",
                "error = x @ w - y\nreturn x.T @ error / len(y)",
            ),
        },
        wrong_answers=(
            WrongAnswer(answers.forgets_the_mean, "mean", "a sum over the examples, not their mean"),
            WrongAnswer(answers.points_downhill, "sign", "the gradient points uphill"),
            WrongAnswer(answers.forgets_the_half, "factor", "the loss has a 1/2 in front of the square"),
            WrongAnswer(answers.of_the_absolute_error, "value", "the gradient of the absolute error"),
            WrongAnswer(answers.one_number_for_all, "shape", "one number per weight"),
            WrongAnswer(answers.forgets_to_transpose, "raises", "raised ValueError"),
            WrongAnswer(answers.changes_y, "input", "changed its argument y"),
            WrongAnswer(answers.never_converges, "timeout", "Is there a loop that never ends?"),
        ),
        right_answers=(answers.with_a_loop, answers.as_a_mean_of_rows),
        explanation=(
            "Each example pulls every weight by error times input: far-off predictions pull hard, and an input of "
            "zero cannot have been the culprit. The mean of these pulls is the slope. Because it is a mean over "
            "examples, several ranks can share the examples and average: that is notebook 02."
        ),
    ),
    Exercise(
        id="1.2",
        title="a gradient step",
        reference=reference.gradient_step,
        stars=1,
        check=check_gradient_step,
        parallel=False,
        hints={
            "": (
                "The gradient points uphill. Where do you want to go, and how far?",
                "gradient(w, x, y) is the slope at w; the rate says how much of it to walk.",
                "return w - rate * gradient(w, x, y)",
            ),
            "input": (
                "w -= ... changes the caller's array; then the path that is drawn has only one point.",
                "w - step makes a new array.",
                "return w - rate * gradient(w, x, y)",
            ),
        },
        wrong_answers=(
            WrongAnswer(answers.climbs, "sign", "a step uphill"),
            WrongAnswer(answers.ignores_the_rate, "rate", "was not used"),
            WrongAnswer(answers.returns_the_way, "value", "start from w"),
            WrongAnswer(answers.steps_in_place, "input", "changed its argument w"),
            WrongAnswer(answers.stays, "value", "no step was taken"),
            WrongAnswer(answers.steps_and_forgets, "returns", "returned nothing"),
        ),
        right_answers=(answers.steps_on_a_copy,),
        explanation=(
            "Downhill is against the gradient. The learning rate turns a slope into a distance, and has no natural "
            "size: that is the next exercise."
        ),
    ),
    Exercise(
        id="1.3",
        title="the largest stable learning rate",
        reference=reference.largest_stable_rate,
        stars=1,
        check=check_largest_stable_rate,
        parallel=False,
        hints={
            "": (
                "On one axis with curvature c a step multiplies the distance to the bottom by 1 - rate * c. When "
                "does it shrink?",
                "|1 - rate * c| < 1 holds while rate * c < 2. It must hold for every axis, so for the largest c.",
                "np.linalg.eigvalsh(curvature) gives the curvatures of all axes: return 2 / the largest of them.",
            ),
        },
        wrong_answers=(
            WrongAnswer(answers.one_over_curvature, "value", "How far may it overshoot?"),
            WrongAnswer(answers.flattest_axis, "axis", "the steepest one diverges first"),
            WrongAnswer(answers.sum_of_axes, "axis", "safe, but smaller than it need be"),
            WrongAnswer(answers.rate_of_the_sum, "mean", "the curvature is x.T @ x / n"),
            WrongAnswer(answers.all_axes, "shape", "The rate is one number"),
            WrongAnswer(answers.always_one, "value", "It would diverge."),
        ),
        right_answers=(answers.by_bisection, answers.by_norm),
        explanation=(
            "At 2 / curvature every step overshoots the bottom by exactly the distance it came from, for ever. The "
            "steepest axis gets there first, while the flattest is still crawling: the ratio of the two, the "
            "condition number, says how many steps the whole descent takes."
        ),
    ),
)

"""The functions behind notebooks 01 and 02: gradient, step, stable rate, and the same step taken by several ranks."""

import numpy as np
import pytest

from hpdl_lab.comm import sim
from hpdl_lab.data import diabetes
from hpdl_lab.optim.gradient_descent import descend, gradient, largest_stable_rate, loss
from hpdl_lab.parallel.gradient_descent import own_gradient, step_together
from tests.wording import raises

X, Y = diabetes.load()


def test_the_gradient_is_the_slope_of_the_loss():
    w, h = np.array([0.3, -0.2]), 1e-6
    slope = [(loss(w + h * e, X, Y) - loss(w - h * e, X, Y)) / (2 * h) for e in np.eye(2)]
    assert gradient(w, X, Y) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(("share", "converges"), [(0.5, True), (0.99, True), (1.01, False), (1.5, False)])
def test_descent_converges_below_the_largest_stable_rate_and_not_above(share, converges):
    path = list(descend(X, Y, share * largest_stable_rate(X), 300))
    best = np.linalg.lstsq(X, Y, rcond=None)[0]
    assert len(path) == 301
    assert (np.abs(path[-1] - best).max() < 0.01) == converges


@pytest.mark.parametrize("p", [1, 2, 4])
def test_ranks_that_average_take_the_step_of_one(p):
    x, y, w = X[:440], Y[:440], np.array([0.1, 0.2])
    together = sim.run(p, step_together, w, x, y, 0.5)
    assert np.abs(np.array(together) - (w - 0.5 * gradient(w, x, y))).max() < 1e-15
    assert all(np.array_equal(together[0], other) for other in together)


def test_examples_that_cannot_be_shared_equally_are_refused():
    with raises(ValueError, "442 examples", "4 ranks", "2"):
        sim.run(4, own_gradient, np.zeros(2), X, Y)

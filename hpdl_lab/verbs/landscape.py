"""`lab.landscape`: gradient descent on the bowl of a loss, one panel per learning rate, drawn step by step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from ..optim.gradient_descent import descend, loss
from ..plots import landscape as bowls
from ..plots import live
from ..plots.style import Figure
from ..units import require_int, require_number
from .result import Result

Step: TypeAlias = Callable[[np.ndarray, np.ndarray, np.ndarray, float], np.ndarray]  # f(w, x, y, rate)
MOST_RATES = 5  # panels that are still readable side by side


@dataclass(frozen=True, repr=False)
class LandscapeResult(Result):
    """Result of `lab.landscape`.

    verdicts: {rate: "too low", "good", "too high" or "diverges"}; losses: {rate: (steps + 1,)}; paths: weights.
    """

    verdicts: dict[float, str]
    losses: dict[float, np.ndarray] = field(repr=False)
    paths: dict[float, np.ndarray] = field(repr=False)
    figure: Figure = field(repr=False)

    def __repr__(self) -> str:
        return "\n".join(f"rate {r:g}: loss {self.losses[r][-1]:.3g}, {word}" for r, word in self.verdicts.items())


def landscape(
    step: Step,
    x: np.ndarray,
    y: np.ndarray,
    rates: float | Iterable[float],
    steps: int = 20,
    prediction: float | None = None,
) -> LandscapeResult:
    """Walk down the loss of a linear model with two weights, once per learning rate, and say how each walk went.

    Args:    step: f(w, x, y, rate), returns the weights after one step, such as optim.gradient_descent.gradient_step.
             x: (n, 2), y: (n,): the examples; rates: up to five numbers above 0; steps: of every walk, at least 2.
             prediction: a rate that you guess, which becomes one of the five and is marked.
    Returns: LandscapeResult.
    Raises:  ValueError for another number of weights, no or too many rates, or a step of another shape; TypeError for
             a step that is no function.
    """
    rates = [float(r) for r in (rates if isinstance(rates, Iterable) else [rates])]
    if prediction is not None and prediction not in rates:
        rates.append(float(require_number("the rate that you guess", prediction, above=0)))
    if not 1 <= len(rates) <= MOST_RATES or min(rates) <= 0 or len(set(rates)) < len(rates):
        raise ValueError(f"rates must be 1 to {MOST_RATES} different numbers above 0, got {rates}")
    if not callable(step):
        raise TypeError(f"lab.landscape needs a function f(w, x, y, rate) that takes one step, got {step!r}")
    if np.ndim(x) != 2 or np.shape(x)[1] != 2:
        raise ValueError(f"a landscape has two weights, so x must have shape (n, 2), got {np.shape(x)}")
    if np.shape(y) != np.shape(x)[:1]:
        raise ValueError(f"y needs one number for each of the {len(x)} examples in x, got shape {np.shape(y)}")
    require_int("steps", steps, 2)
    with np.errstate(all="ignore"):  # diverging is part of the lesson
        paths = {rate: _walk(step, x, y, rate, steps) for rate in rates}
    best = np.linalg.lstsq(x, y, rcond=None)[0]
    reach = 1.6 * max(np.abs(path[0] - best).max() for path in paths.values())
    bowl = bowls.Bowl(lambda w: loss(w, x, y), best, reach)
    title = f"{steps} steps of gradient descent"
    alt = "paths of gradient descent on contours of the loss"
    plot = live.Live(bowls.draw, height=bowls.height(len(rates)), alt=alt)
    for k in range(1, steps + 1) if plot.shown else ():
        plot.update(bowl, {rate: path[:k] for rate, path in paths.items()}, steps, title, prediction)
        plot.rest()
    figure = plot.finish(bowl, paths, steps, title, prediction)
    above = {rate: bowl.above(path) for rate, path in paths.items()}
    verdicts = {rate: bowls.outcome(paths[rate], above[rate]) for rate in rates}
    return LandscapeResult(verdicts, {rate: a + bowl.least for rate, a in above.items()}, paths, figure)


def _walk(step: Step, x: np.ndarray, y: np.ndarray, rate: float, steps: int) -> np.ndarray:
    """Return (steps + 1, 2) weights, from zero."""
    path = []
    for w in descend(x, y, rate, steps, step):
        if np.shape(w) != (2,):
            raise ValueError(f"a step must return the 2 weights, got shape {np.shape(w)}")
        path.append(np.array(w, dtype=float))  # a copy: a step may change w in place
    return np.array(path)

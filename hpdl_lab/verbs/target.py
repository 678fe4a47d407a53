"""`lab.time_to_target`: how many steps a batch needs, how long they take on several ranks, and the best of both."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from .. import data as sets
from .. import models
from ..comm.base import Row
from ..features import cores
from ..optim import large_batch as optim
from ..parallel.large_batch import RATES, fitted, train_until
from ..plots import live
from ..plots.large_batch import draw_target
from ..plots.style import Figure
from ..trace import seconds_text
from ..units import counted, require_int, require_number
from .result import Result, text_table
from .world import world_of


@dataclass(frozen=True, repr=False)
class TargetResult(Result):
    """Result of `lab.time_to_target`.

    rows: {ranks, batch, seed, steps, seconds} of every training; job: the optim.large_batch.TrainingJob that fits them.

    predicted: {(batch, ranks): s} by your function for that job; measured: the same, mean over seeds.
    """

    where: str
    target: float
    rows: list[Row]
    job: optim.TrainingJob
    predicted: dict[tuple[int, int], float]
    figure: Figure = field(repr=False)

    @property
    def measured(self) -> dict[tuple[int, int], float]:
        found: dict[tuple[int, int], list[float]] = {}
        for row in self.rows:
            found.setdefault((row["batch"], row["ranks"]), []).append(row["seconds"])
        return {at: float(np.mean(values)) for at, values in found.items()}

    @property
    def best(self) -> tuple[int, int]:
        """The fastest (batch, ranks)."""
        return min(self.measured, key=self.measured.__getitem__)

    def __repr__(self) -> str:
        measured, ranks = self.measured, sorted({r["ranks"] for r in self.rows})
        lines = []
        for batch in sorted({r["batch"] for r in self.rows}):
            steps = np.mean([r["steps"] for r in self.rows if r["batch"] == batch])
            pairs = [f"{seconds_text(measured[batch, p])} ({seconds_text(self.predicted[batch, p])})" for p in ranks]
            lines.append([f"{batch:,}", f"{steps:,.0f}", *pairs])
        head = f"time to {self.target:.0%} on {self.where}, and in brackets what your function says"
        named = [counted(p, "rank") for p in ranks]
        foot = (
            f"{self.job.least_steps:,.0f} steps at least, and twice as many with {self.job.noise_scale:,.0f} examples"
        )
        return "\n".join([head, *text_table(["batch", "steps", *named], lines), foot])


def time_to_target(
    seconds_to_target: Callable[[int, int, optim.TrainingJob], float] = optim.seconds_to_target,
    *,
    target: float = 0.97,
    ranks: Iterable[int] | None = None,
    seeds: int = 2,
    prediction: dict[str, int] | None = None,
    deadline: float = 10.0,
) -> TargetResult:
    """Train on the digits until `target` of the test set is right, with several batches and ranks, and fit the model.

    Args:    seconds_to_target: f(batch, ranks, job), such as your answer to exercise 7.5.
             target: test accuracy, 0 to 1; ranks: default 1 and 2, as far as there are cores; seeds: of the shuffling.
             prediction: {"batch": 32, "ranks": 2}, the fastest; deadline: s, the longest that a rank may wait.
    Returns: TargetResult.
    Raises:  ValueError without engines, as simulated ranks compute in no time.
    """
    require_number("target", target, 0, 1)
    require_int("seeds", seeds, 1)
    here = world_of()
    if here.simulated:
        raise ValueError("lab.time_to_target measures engines, and simulated ranks compute in no time: lab.start(2)")
    counts = sorted({1, *([min(2, here.ranks, cores())] if ranks is None else ranks)})
    if not callable(seconds_to_target):
        raise TypeError(f"seconds_to_target={seconds_to_target!r}: a function f(batch, ranks, job) is needed")
    if prediction is not None and (not isinstance(prediction, dict) or set(prediction) != {"batch", "ranks"}):
        raise ValueError(f'a prediction is {{"batch": 32, "ranks": 2}}, got {prediction!r}')
    data, several = sets.load("digits"), sorted(RATES)
    rows: list[Row] = []
    plot = live.Live(draw_target, alt="steps and seconds to the target against batch")
    title = f"Time to {target:.0%} of the digits, {here}"

    def state(job: optim.TrainingJob | None = None, best: tuple[int, int] | None = None) -> tuple[object, ...]:
        said = "points: measured; dotted: the steps of McCandlish et al. 2018 times a model of a step"
        return several, job, counts, rows, best, prediction, title, said, "Ring: the fastest. Star: your guess."

    def on_row(row: Row) -> None:
        rows.append(row)
        plot.update(*state())

    for p in counts:
        model = models.build_for(data, "mlp")
        world_of(p).run(train_until, model, data, target, several, seeds, deadline=deadline, on_row=on_row)
    job = fitted(rows)
    predicted = {(batch, p): float(seconds_to_target(batch, p, job)) for batch, p in product(several, counts)}
    found = TargetResult(str(here), target, rows, job, predicted, plot.figure)
    plot.finish(*state(job, found.best))
    return found

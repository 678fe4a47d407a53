"""`lab.batches`: the same epochs with larger and larger batches, and what still learns."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .. import data as sets
from ..comm.base import Row
from ..optim import large_batch as optim
from ..parallel.large_batch import SWEEPS, Sweep, Training, train_all
from ..plots import live
from ..plots.colors import SERIES
from ..plots.large_batch import draw
from ..plots.style import Figure
from ..units import counted, require_int, require_number
from .result import Result, text_table
from .world import world_of


@dataclass(frozen=True, repr=False)
class BatchesResult(Result):
    """Result of `lab.batches`.

    rows: {name, batch, seed, steps, seconds, accuracy, loss} of every training, of the test set after its epochs.

    score: "accuracy" or, of a text, "loss".
    """

    where: str
    names: list[str]
    score: str
    rows: list[Row]
    figure: Figure = field(repr=False)

    def scores(self, name: str, batch: int) -> list[float]:
        """Return the score of every seed, in their order."""
        rows = sorted(self.rows, key=lambda row: row["seed"])
        return [row[self.score] for row in rows if (row["name"], row["batch"]) == (name, batch)]

    def __repr__(self) -> str:
        found = sorted({row["batch"] for row in self.rows})
        steps = {row["batch"]: row["steps"] for row in self.rows}
        text = "{:.1%}" if self.score == "accuracy" else "{:.2f}"
        names = self.names
        lines = [
            [f"{b:,}", f"{steps[b]:,}", *(text.format(np.mean(s)) if (s := self.scores(n, b)) else "" for n in names)]
            for b in found
        ]
        head = f"test {self.score} after the same epochs, mean over seeds, {self.where}"
        return "\n".join([head, *text_table(["batch", "steps", *names], lines)])


def batches(
    batches: int | Iterable[int] | None = None,
    methods: str | Iterable[str] | None = None,
    *,
    data: str = "digits",
    rate: float | None = None,
    epochs: float | None = None,
    seeds: int = 3,
    learning_rate: optim.Rate = optim.learning_rate,
    trust_ratio: optim.Ratio = optim.trust_ratio,
    prediction: dict[str, float] | None = None,
    deadline: float = 10.0,
) -> BatchesResult:
    """Train with several batches for the same number of epochs, by several methods, and compare what was learned.

        lab.batches((32, 1024), ("plain", "linear"))              does the rate of a batch of 32 suit 1,024 examples?
        lab.batches(learning_rate=mine, trust_ratio=mine)         with your answers to exercises 7.1 and 7.2
        lab.batches(data="text")                                  a GPT on Moby-Dick; takes some minutes

    Every engine trains whole models of its own, so that as many trainings run at once as there are engines.

    Args:    batches: examples per step; methods: names of parallel.large_batch.SWEEPS: "plain" keeps the rate of the
             smallest batch, "linear" scales it, "warm-up" reaches it gradually, "LARS", "LAMB". Default all.
             data: "digits" or "text"; rate: of plain, linear and warm-up with the base batch; epochs: of each training.
             seeds: trainings of each kind, which differ in initial parameters and order of the examples.
             prediction: {method: score with the largest batch}; deadline: s, the longest that a rank may wait.
    Returns: BatchesResult.
    """
    sweep, several, asked = _asked_sweep(data, batches, methods, rate, epochs)
    require_int("seeds", seeds, 1)
    for name, value in (prediction or {}).items():
        require_number(f"your guess for {name}", value, 0)
    world, loaded = world_of(), sets.load(data)
    too_large = [b for b in several if b > len(loaded.train_y)]
    if too_large:
        raise ValueError(f"a batch of {too_large[0]:,} is more than the {len(loaded.train_y):,} examples of {data}")
    twins = {name: [n for n in asked if _same(sweep, name, n)] for name in asked}  # with the base batch
    kinds = [(name, b) for b in several for name in asked if b != sweep.base_batch or name == twins[name][0]]
    trainings = [Training(name, b, seed) for name, b in kinds for seed in range(seeds)]
    score, guessing = ("accuracy", 1 / loaded.classes) if loaded.positions == 1 else ("loss", math.log(loaded.classes))
    colors = {name: color for name, color in zip(sweep.methods, SERIES, strict=False) if name in asked}
    rows: list[Row] = []
    plot = live.Live(draw, alt=f"test {score} against batch")

    def state() -> tuple[object, ...]:
        title = f"{sweep.model} on {data}: {_counted_epochs(sweep.epochs)} with any batch, {world}"
        said = f"test {score}"
        if seeds > 1:
            said += f": mean of {counted(seeds, 'seed')}, and all between the best and the worst"
        steps = f"{max(1, round(sweep.epochs * len(loaded.train_y) / several[-1])):,} steps"
        foot = f"{steps} with the largest batch. The rate of every training falls to 0 as a cosine."
        return rows, several, colors, score, guessing, prediction, title, said, foot

    def on_row(row: Row) -> None:
        names = twins[row["name"]] if row["batch"] == sweep.base_batch else [row["name"]]
        rows.extend({**row, "name": name} for name in names)
        plot.update(*state())

    world.run(train_all, sweep, loaded, trainings, learning_rate, trust_ratio, deadline=deadline, on_row=on_row)
    return BatchesResult(str(world), asked, score, rows, plot.finish(*state()))


def _same(sweep: Sweep, one: str, other: str) -> bool:
    """Return True if two methods are the same training with the base batch: nothing to scale, nothing to warm up to."""
    return sweep.methods[one][:2] == sweep.methods[other][:2]


def _counted_epochs(epochs: float) -> str:
    return f"{epochs:g} epoch{'' if epochs == 1 else 's'}"


def _asked_sweep(
    data: str,
    batches: int | Iterable[int] | None,
    methods: str | Iterable[str] | None,
    rate: float | None,
    epochs: float | None,
) -> tuple[Sweep, list[int], list[str]]:
    """Return (Sweep, batches in ascending order, names of methods). Raises ValueError, LookupError."""
    if data not in SWEEPS:
        raise LookupError(f"data={data!r}: lab.batches knows rates for {', '.join(SWEEPS)}")
    sweep = SWEEPS[data]
    wanted = sweep.batches if batches is None else [batches] if isinstance(batches, int | str) else batches
    for batch in wanted:
        require_int("a batch", batch, 1)
    several = sorted(set(wanted))
    names = [methods] if isinstance(methods, str) else list(dict.fromkeys(methods or sweep.methods))
    if unknown := [name for name in names if name not in sweep.methods]:
        raise ValueError(f"no method is called {unknown[0]!r}: {', '.join(sweep.methods)}")
    if not several:
        raise ValueError("no batch to train with: give some, such as (32, 1024)")
    if rate is not None:
        require_number("rate", rate, above=0)
        plain = sweep.methods["plain"].optimizer
        changed = {name: m._replace(rate=rate) for name, m in sweep.methods.items() if m.optimizer == plain}
        sweep = sweep._replace(methods=sweep.methods | changed)
    if epochs is not None:
        require_number("epochs", epochs, above=0)
        sweep = sweep._replace(epochs=epochs)
    return sweep, several, names

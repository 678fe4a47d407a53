"""The worth of a batch: the test set after the same epochs with larger and larger batches."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..optim.large_batch import TrainingJob, seconds_to_target
from .colors import GRAY, INK, SERIES
from .measure import DOTS
from .style import Axes, Figure, Look, Rows, footnote, heading, label_ends, log_axis, x_label


def _batch_axis(ax: Axes, batches: Sequence[int], name: str = "batch (examples per step)") -> None:
    """Make the x axis logarithmic, labelled at the batches that were measured."""
    ax.set_xscale("log", base=2)
    ax.set_xlim(batches[0] / 1.15, batches[-1] * 1.15)
    ax.xaxis.set_major_locator(FixedLocator(batches))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda b, _: f"{b:,.0f}"))
    x_label(ax, name)


def draw(
    figure: Figure,
    rows: Rows,
    batches: Sequence[int],
    colors: dict[str, str],
    score: str = "accuracy",
    guessing: float | None = None,
    prediction: dict[str, float] | None = None,
    title: str = "",
    subtitle: str = "",
    foot: str = "",
) -> None:
    """Fill `figure` from rows: dicts with name, batch, seed and `score`, "accuracy" or "loss" of the test set.

    Args:    batches: ascending; colors: of the methods, by name; guessing: the score of a guess.
             prediction: {name: score at the largest batch}.
    """
    ax = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.84, bottom=0.2, top=0.8)
    _batch_axis(ax, batches)
    worst = guessing if guessing is not None else 0.0
    ax.set_ylim((0, 1.02) if score == "accuracy" else (0.5 * worst, 1.15 * worst))
    if score == "accuracy":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    if guessing is not None:
        ax.axhline(guessing, color=INK, linewidth=0.8, linestyle=(0, (1, 1.2)))
        ax.annotate("guessing", (batches[0], guessing), (0, 3), textcoords="offset points", fontsize=8.5)
    ends = []
    shift = np.linspace(-0.04, 0.04, max(len(colors), 2))  # side by side, so that bars do not hide each other
    for (name, color), aside in zip(colors.items(), shift, strict=False):
        found = {b: [r[score] for r in rows if (r["name"], r["batch"]) == (name, b)] for b in batches}
        at = [b for b in batches if found[b]]
        means = [float(np.mean(found[b])) for b in at]
        positions = [b * 2**aside for b in at]
        ax.plot(positions, means, "o-", color=color, zorder=3)
        for position, b in zip(positions, at, strict=True):
            ax.plot([position] * 2, [min(found[b]), max(found[b])], color=color, linewidth=4, alpha=0.3)
        if means:
            ends.append((means[-1], name, color, False))
        if prediction and name in prediction:
            ax.plot(
                [batches[-1]], [prediction[name]], "*", color=color, mec=INK, markersize=13, zorder=6, clip_on=False
            )
    label_ends(ax, ends)
    heading(figure, title, subtitle)
    footnote(figure, foot)


def draw_target(
    figure: Figure,
    batches: Sequence[int],
    job: TrainingJob | None,
    ranks: Sequence[int],
    rows: Rows = (),
    asked: tuple[int, int] | None = None,
    prediction: dict[str, int] | None = None,
    title: str = "",
    subtitle: str = "",
    foot: str = "",
) -> None:
    """Draw the steps that each batch needs, and the seconds that they take on several numbers of ranks.

    Args:    batches: ascending, of the axes; job: the model, or None as long as there is none; ranks: keys of its
             all_reduce_s; rows: dicts with batch, ranks, steps, seconds; asked, prediction: a batch and ranks.
    """
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    figure.subplots_adjust(left=0.085, right=0.87, bottom=0.2, top=0.79, wspace=0.27)
    left.set_title("steps to the target")
    ticks = [b for k, b in enumerate(batches) if k % max(1, len(batches) // 4) == 0]
    for ax in (left, right):
        _batch_axis(ax, ticks)
        ax.set_xlim(batches[0] / 1.2, batches[-1] * 1.2)
    steps, seconds, ends = [float(r["steps"]) for r in rows], [float(r["seconds"]) for r in rows], []
    grid = np.geomspace(batches[0], batches[-1], 60).round()
    hour = 3600.0 if not rows else 1.0  # a model of a large job, or what was measured here
    right.set_title("hours to the target" if hour > 1 else "seconds to the target")
    if job is not None:
        needed = job.least_steps * (1 + job.noise_scale / grid)
        left.plot(grid, needed, color=GRAY, linestyle=DOTS)
        left.axhline(job.least_steps, color=INK, linewidth=0.8)
        left.axvline(job.noise_scale, color=INK, linewidth=0.8)
        left.annotate(f"S_min {job.least_steps:,.0f}", (batches[-1], job.least_steps), (0, -11), **AT, ha="right")
        left.annotate("noise scale", (job.noise_scale, 1), (3, -9), ("data", "axes fraction"), "offset points")
        steps += [*needed, job.least_steps / 1.5]
    for p, color in zip(ranks, SERIES, strict=False):
        if job is not None:
            curve = [seconds_to_target(int(b), p, job) / hour for b in grid]
            right.plot(grid, curve, color=color, linestyle=DOTS if rows else "-")
            ends.append((curve[-1], f"{p:,} rank{'s' * (p > 1)}", color, bool(asked and p == asked[1])))
            seconds += curve
        for ax, what in ((left, "steps"), (right, "seconds")):
            found = {b: [r[what] for r in rows if (r["batch"], r["ranks"]) == (b, p)] for b in batches}
            for b, values in found.items():
                ax.plot([b] * len(values), values, "o", color=color, alpha=0.35, markersize=4)
            points = [(b, float(np.mean(values))) for b, values in found.items() if values]
            ax.plot(*zip(*points, strict=True), "o", color=color, zorder=4) if points else None
    if job is not None:
        for at, look in ((asked, {"marker": "o", "markersize": 10}), (_pair(prediction), {"marker": "*"})):
            if at and at[1] in ranks:
                color = SERIES[list(ranks).index(at[1])]
                look = {"color": color, "mec": INK, "zorder": 6, "markersize": 13, **look}
                right.plot([at[0]], [seconds_to_target(*at, job) / hour], clip_on=False, **look)
    log_axis(left, steps)
    log_axis(right, seconds, "" if hour > 1 else "s")
    label_ends(right, ends)
    heading(figure, title, subtitle)
    footnote(figure, foot)


AT: Look = {"textcoords": "offset points", "fontsize": 8.5}


def _pair(prediction: dict[str, int] | None) -> tuple[int, int] | None:
    return (prediction["batch"], prediction["ranks"]) if prediction else None

"""What a batch is worth: the test set after the same epochs with larger and larger batches."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .colors import INK, SERIES
from .style import Axes, Figure, Rows, heading, label_ends, note, x_label


def batch_axis(ax: Axes, batches: Sequence[int], name: str = "batch (examples per step)") -> None:
    """A logarithmic x axis, labelled at the batches that were measured."""
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
    names: Sequence[str],
    score: str = "accuracy",
    chance: float | None = None,
    prediction: dict[str, float] | None = None,
    title: str = "",
    subtitle: str = "",
    foot: str = "",
) -> None:
    """Fill `figure` from rows: dicts with name, batch, seed and `score`, "accuracy" or "loss" of the test set.

    Args:    batches: ascending; names: of the methods; chance: the score of a guess; prediction: {name: score at the
             largest batch}.
    """
    ax = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.84, bottom=0.2, top=0.8)
    batch_axis(ax, batches)
    worst = chance if chance is not None else 0.0
    ax.set_ylim((0, 1.02) if score == "accuracy" else (0, 1.3 * worst))
    if score == "accuracy":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    if chance is not None:
        ax.axhline(chance, color=INK, linewidth=0.8, linestyle=(0, (1, 1.2)))
        ax.annotate("guessing", (batches[0], chance), (0, 3), textcoords="offset points", fontsize=8.5)
    ends = []
    shift = np.linspace(-0.04, 0.04, max(len(names), 2))  # side by side, so that bars do not hide each other
    for name, color, aside in zip(names, SERIES, shift, strict=False):
        found = {b: [r[score] for r in rows if (r["name"], r["batch"]) == (name, b)] for b in batches}
        at = [b for b in batches if found[b]]
        means = [float(np.mean(found[b])) for b in at]
        places = [b * 2**aside for b in at]
        ax.plot(places, means, "o-", color=color, zorder=3)
        for place, b in zip(places, at, strict=True):
            ax.plot([place] * 2, [min(found[b]), max(found[b])], color=color, linewidth=4, alpha=0.3)
        if means:
            ends.append((means[-1], name, color, False))
        if prediction and name in prediction:
            ax.plot(
                [batches[-1]], [prediction[name]], "*", color=color, mec=INK, markersize=13, zorder=6, clip_on=False
            )
    label_ends(ax, ends)
    heading(figure, title, subtitle)
    note(figure, foot)

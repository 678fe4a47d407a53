"""Pictures behind sliders: small, and drawn in less than a tenth of a second, most of which is text and ticks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from ..trace import number_text
from .colors import BLUE, GRAY, INK, VERMILION
from .landscape import Bowl
from .style import Axes, Figure, amounts, heading, log_axis, x_label

HEIGHT = 3.3  # inches
DAY, YEAR = 86400.0, 365.25 * 86400
LINES = {"an hour": 3600.0, "a day": DAY, "a month": YEAR / 12, "a year": YEAR, "a century": 100 * YEAR}


def panels(figure: Figure, titles: Sequence[str], **grid: Any) -> list[Axes]:
    """Axes side by side, with their titles and room for a heading."""
    axes = figure.subplots(1, len(titles), squeeze=False, **grid)[0]
    figure.subplots_adjust(left=0.085, right=0.975, bottom=0.185, top=0.79, wspace=0.24)
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
    return list(axes)


def decades(ax: Axes, low: float, high: float, unit: str = "") -> None:
    """A logarithmic x axis."""
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(amounts(unit) if unit else FuncFormatter(lambda v, _: number_text(v)))


# -- training ---------------------------------------------------------------------------------------------------------


def days(figure: Figure, counts: np.ndarray, seconds: np.ndarray, count: int, least: int, title: str) -> None:
    """Training time against accelerators. count: those that are asked; least: those whose memories hold the model."""
    ax = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.975, bottom=0.185, top=0.85)
    decades(ax, counts[0], counts[-1])
    low, high = min(seconds[-1], 3600.0), max(seconds[0], YEAR)
    ax.set_yscale("log")
    ax.set_ylim(low / 2, high * 2)
    shown = {name: at for name, at in LINES.items() if low / 2 < at < high * 2}
    ax.set_yticks(list(shown.values()), list(shown))
    ax.yaxis.set_minor_locator(NullLocator())
    fits = counts >= least
    ax.plot(counts, seconds, color=GRAY, linestyle=(0, (1, 1.2)))
    ax.plot(counts[fits], seconds[fits], color=BLUE)
    if least > counts[0]:
        ax.axvspan(counts[0], min(least, counts[-1]), color=VERMILION, alpha=0.1, linewidth=0)
        text = "their memories do not hold the model's state"
        ax.annotate(text, (0, 0), (6, 6), "axes fraction", "offset points", color=VERMILION, fontsize=9)
    now = float(np.interp(count, counts, seconds))
    ax.plot([count], [now], "o", color=BLUE if count >= least else VERMILION, markersize=9, zorder=5, clip_on=False)
    x_label(ax, "accelerators")
    heading(figure, title)


def descent(
    figure: Figure, bowl: Bowl, path: np.ndarray, at: np.ndarray, above: np.ndarray, unit: str, title: str
) -> None:
    """Fill `figure` with a path on the loss and the loss along it.

    Args:    path: (k, 2) weights; at: (k,) steps, or epochs, taken; above: (k,) loss above the least; unit: of `at`.
    """
    left, right = panels(figure, ("the path of the weights", "loss above the least"), width_ratios=(1, 1.25))
    left.contour(*bowl.axes, bowl.grid, levels=bowl.levels, colors=[GRAY], linewidths=0.6, alpha=0.7)
    left.plot(*bowl.best, "*", color=INK, markersize=11, zorder=3)
    left.plot(
        *np.clip(path, -1e6, 1e6).T, color=BLUE, linewidth=0.9, marker="o" if len(path) < 100 else "", markersize=3
    )
    left.set_xlim(bowl.axes[0][0], bowl.axes[0][-1])
    left.set_ylim(bowl.axes[1][0], bowl.axes[1][-1])
    left.xaxis.set_major_locator(MaxNLocator(4))
    left.yaxis.set_major_locator(MaxNLocator(4))
    left.grid(False)
    x_label(left, "weight 0")
    left.set_ylabel("weight 1")
    right.plot(at, np.clip(above, 1e-9, 1e9), color=VERMILION if above[-1] > above[0] else BLUE, linewidth=1.2)
    right.set_xlim(0, at[-1])
    log_axis(right, (1e-6, 1.0))
    right.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    x_label(right, unit)
    heading(figure, title)

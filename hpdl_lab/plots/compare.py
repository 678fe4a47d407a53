"""Strategies beside each other: the loss against steps, and the test accuracy against the bytes that were sent."""

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .colors import GRAY, INK, SERIES
from .style import Axes, Figure, amounts, heading, log_axis, spread_labels, x_label

SMOOTH = 10  # steps over which losses are averaged
MARKS = "osD^v"


class Scored(Protocol):
    """A strategy. nbytes: sent by a rank in all steps; losses: one per step."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> float: ...

    @property
    def losses(self) -> Sequence[float]: ...

    @property
    def test_accuracy(self) -> float: ...


def draw(
    figure: Figure, rows: Sequence[Scored], steps: int, title: str = "", guesses: dict[str, float] | None = None
) -> None:
    """Fill `figure`. guesses: {name: test accuracy}."""
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.35))
    figure.subplots_adjust(left=0.07, right=0.82, bottom=0.15, top=0.8, wspace=0.2)
    looks = list(itertools.islice(((c, m) for m in MARKS for c in SERIES), len(rows)))
    for row, (color, mark) in zip(rows, looks, strict=True):
        kernel = np.ones(min(SMOOTH, len(row.losses))) / min(SMOOTH, len(row.losses))
        line = np.convolve(row.losses, kernel, "valid")
        dashes = "-" if mark == MARKS[0] else (0, (4, 2))
        left.plot(np.arange(len(line)) + len(kernel), line, color=color, linewidth=1.2, linestyle=dashes)
    log_axis(left, [value for row in rows for value in (min(row.losses), row.losses[0])] or [3.0])
    left.set_xlim(0, steps)
    left.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    left.set_title("training loss")
    x_label(left, "step")

    sent = [row.nbytes for row in rows] or [1.0]
    right.set_xscale("log")
    right.set_xlim(min(sent) / 1.7, max(sent) * 1.7)
    right.xaxis.set_major_formatter(amounts("B"))
    right.xaxis.set_minor_formatter(lambda *_: "")
    reached = [row.test_accuracy for row in rows] or [0.0, 1.0]
    reached += [accuracy for name, accuracy in (guesses or {}).items() if any(row.name == name for row in rows)]
    room = 0.08 * (max(reached) - min(reached)) + 0.005
    right.set_ylim(min(reached) - room, max(reached) + room)
    right.yaxis.set_major_locator(MaxNLocator(7, steps=(1, 2, 5, 10)))
    right.yaxis.set_major_formatter(PercentFormatter(1))
    right.set_title("test accuracy")
    x_label(right, "sent by a rank in all steps")
    known = {row.name: (row.nbytes, color) for row, (color, _) in zip(rows, looks, strict=True)}
    for row, (color, mark) in zip(rows, looks, strict=True):
        right.plot([row.nbytes], [row.test_accuracy], mark, color=color, markersize=7, clip_on=False)
    for name, accuracy in (guesses or {}).items():
        if name in known:
            right.plot([known[name][0]], [accuracy], "*", color=known[name][1], mec=INK, markersize=13, clip_on=False)
    _names(right, rows, looks)
    heading(figure, title, "Up and to the left is better." + " Stars: your guess." * bool(guesses))


def _names(ax: Axes, rows: Sequence[Scored], looks: Sequence[tuple[str, str]]) -> None:
    """Write a column with the mark and the name of each strategy, in the order of accuracy, each beside its height."""
    order = sorted(range(len(rows)), key=lambda i: rows[i].test_accuracy)
    at = [ax.transData.transform((1, rows[i].test_accuracy))[1] for i in order]
    for height, i in zip(spread_labels(at, 15.0, ax.bbox.y0, ax.bbox.y1), order, strict=True):
        y = (height - ax.bbox.y0) / ax.bbox.height
        color, mark = looks[i]
        ax.plot([1.04], [y], mark, color=color, markersize=6, transform=ax.transAxes, clip_on=False)
        ax.text(1.075, y, rows[i].name, va="center", fontsize=8.5, color=INK, transform=ax.transAxes)
        ax.plot([1.0, 1.02], [(at[order.index(i)] - ax.bbox.y0) / ax.bbox.height, y], color=GRAY, linewidth=0.5,
                transform=ax.transAxes, clip_on=False)  # fmt: skip

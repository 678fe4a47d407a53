"""A vector on its way from GPU to GPU in blocks: when each block is in which stage, and the time for any block size."""

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.ticker import MaxNLocator

from ..units import amount_text
from .colors import BLUE, GRAY, GREEN, INK, ORANGE, SKY
from .measure import DASHES, DOTS
from .style import Axes, Figure, Rows, amounts, footnote, heading, legend, log_axis, rows_only, size_axis, x_label

NAMES = ("copy out", "wire", "copy in")
MOST_BARS = 1000  # more are too narrow to be seen
NARROWEST = 1 / 250  # of the axis: about a pixel, so that a short stage is seen
Times = Sequence[tuple[Sequence[float], Sequence[float]]]  # of each stage: when each block begins, and when it ends
Curve = Callable[[np.ndarray], list[float]]  # s for each size of a block


def _draw_stages(ax: Axes, times: Times, end: float = 0.0) -> None:
    """Draw the three stages of every block over time, blocks in two shades in turn; the axis ends at `end` s."""
    boxes, faces, end = [], [], max(end, times[-1][1][-1])
    for row, (begins, ends) in enumerate(times):
        if len(begins) * len(times) > MOST_BARS:
            begins, ends = [begins[0]], [ends[-1]]
        for k, (begin, until) in enumerate(zip(begins, ends, strict=True)):
            until = max(until, begin + NARROWEST * end)
            boxes.append([(begin, row - 0.38), (until, row - 0.38), (until, row + 0.38), (begin, row + 0.38)])
            faces.append((BLUE, SKY)[k % 2] if row == 1 else (ORANGE, "#F0B97D")[k % 2])
    ax.add_collection(PolyCollection(boxes, facecolors=faces, linewidths=0))
    ax.set_xlim(0, end)
    rows_only(ax, len(times), NAMES)
    ax.xaxis.set_major_formatter(amounts("s"))
    ax.xaxis.set_major_locator(MaxNLocator(4))
    x_label(ax, "time")


def _draw_curve(ax: Axes, sizes: Sequence[float], curve: Curve, best: float, more: Sequence[float] = ()) -> None:
    """Draw the model's time for blocks of any of the range of `sizes`, a star at its least. more: s to show."""
    grid = np.geomspace(min(sizes), max(sizes), 80)
    line = curve(grid)
    size_axis(ax, sizes)
    log_axis(ax, [*line, *more], "s")
    ax.plot(grid, line, color=GRAY, linestyle=DOTS, zorder=2)
    ax.plot([best], curve(np.array([best])), "*", color=GREEN, markersize=13, zorder=4)
    x_label(ax, "block size")


def draw(
    figure: Figure,
    rows: Rows,
    curve: Curve | None = None,
    best: float = 0.0,
    times: Times = (),
    wire: float = 0.0,
    prediction: float | None = None,
    title: str = "",
    subtitle: str = "",
    foot: str = "",
) -> None:
    """Fill `figure` from rows: dicts with block (bytes), seconds, p25, p75; those with "recorded" are drawn dashed.

    Args:    curve, best: the model, and the block with its least time (bytes); times: of the stages with that block.
             wire: s of one message with all bytes, which needs no copies; prediction: bytes of the best block.
    """
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    figure.subplots_adjust(left=0.085, right=0.975, bottom=0.2, top=0.76, wspace=0.3)
    blocks = [row["block"] for row in rows] or [1, 2]
    if curve is not None:
        _draw_curve(left, blocks, curve, best, [*(row["seconds"] for row in rows), wire])
        left.axhline(wire, color=INK, linewidth=1, zorder=1)
        at = ("axes fraction", "data"), "offset points"
        left.annotate("the wire alone", (1, wire), (-2, 3), *at, ha="right", fontsize=8.5)
        _draw_stages(right, times)
        right.set_title(f"on paper, blocks of {amount_text(best)}")
    if prediction is not None:
        left.axvline(prediction, color=BLUE, linewidth=1.6, linestyle=DASHES, zorder=1)
        where = ("data", "axes fraction"), "offset points"
        left.annotate("your guess", (prediction, 1), (4, -10), *where, color=BLUE)
    for recorded in (True, False):
        points = [(row["block"], row["seconds"]) for row in rows if ("recorded" in row) is recorded]
        look = {"linestyle": DASHES, "markerfacecolor": "white"} if recorded else {"linestyle": ""}
        left.plot([x for x, _ in points], [y for _, y in points], marker="o", color=BLUE, zorder=5, **look)
    for row in rows:
        left.plot([row["block"]] * 2, [row["p25"], row["p75"]], color=BLUE, linewidth=3, alpha=0.3)
    left.set_title("time for any block size")
    entries = [(BLUE, "measured"), (GRAY, "model"), (GREEN, "its best block")]
    legend(figure, entries, 0.085, 0.86)
    heading(figure, title)
    footnote(figure, subtitle or foot)


def draw_model(
    figure: Figure,
    times: Times,
    sizes: Sequence[float],
    curve: Curve,
    best: float,
    block: float,
    took: float,
    end: float,
) -> None:
    """Draw the stages with blocks of one size, and that size among all. block: bytes; took: its time, s."""
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    figure.subplots_adjust(left=0.085, right=0.975, bottom=0.185, top=0.88, wspace=0.24)
    left.set_title("when each block is in which stage")
    _draw_stages(left, times, end)
    right.set_title("time for any block size")
    _draw_curve(right, sizes, curve, best)
    right.plot([block], [took], "o", color=BLUE, markersize=9, zorder=5)
    x_label(right, "block size (star: the best)")

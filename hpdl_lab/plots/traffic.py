"""Who talked to whom: bytes sent from every rank to every other, beside what was expected."""

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from ..trace import number_text
from .style import BLUE, FAINT, INK, VERMILION, heading

SHADES = LinearSegmentedColormap.from_list("traffic", ["#FFFFFF", "#9CC8E3", BLUE, "#00324F"])
MOST_NUMBERS = 8  # ranks up to which every cell says its number
ONE_LINE = 42  # points of a cell's width that "97.7 KiB" needs; where there are fewer, the unit has a line of its own


def matrix(events, size):
    """(size, size) bytes: row = sender, column = receiver; counted from the "send" events."""
    out = np.zeros((size, size), dtype=np.int64)
    for e in events:
        if e.op == "send":
            out[e.rank, e.peer] += e.nbytes
    return out


def draw(figure, got, expected=None, title=""):
    """Fill `figure` with one heat map, or with two where `expected` is given: cells that differ are framed.

    Args:    got, expected: (p, p) arrays of bytes as `matrix` makes them.
    """
    panels = [("who sent to whom", got)] if expected is None else [("yours", got), ("a right answer", expected)]
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.16, top=0.78, wspace=0.25)
    most = max(1, *(int(m.max()) for _, m in panels))
    for ax, (name, values) in zip(axes, panels, strict=True):
        heat_map(ax, values, most)
        ax.set_title(f"{name}: up to {cell_text(int(values.sum(axis=1).max()))} per rank")
    if expected is not None:
        for row, column in np.argwhere(got != expected):
            axes[0].add_patch(frame(row, column))
    heading(figure, title)


def heat_map(ax, values, most):
    """One matrix as shaded cells, with numbers where they fit."""
    p = len(values)
    edges = np.arange(p + 1) - 0.5
    ax.pcolormesh(edges, edges, values, cmap=SHADES, vmin=0, vmax=most, edgecolors=FAINT, linewidth=0.8)
    ax.invert_yaxis()
    ax.grid(False)
    every = max(1, p // 8)
    ax.set_xticks(range(0, p, every))
    ax.set_yticks(range(0, p, every))
    ax.set_xlabel("to rank")
    ax.set_ylabel("from rank")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    if p <= MOST_NUMBERS:
        narrow = ax.bbox.width / ax.figure.dpi * 72 / p < ONE_LINE
        for (row, column), nbytes in np.ndenumerate(values):
            color = "white" if nbytes > 0.45 * most else INK
            text = cell_text(nbytes) if nbytes else ""
            text, points = (text.replace(" ", "\n"), 7.5) if narrow else (text, 8.5)
            ax.text(column, row, text, ha="center", va="center", fontsize=points, linespacing=1, color=color)


def frame(row, column):
    """A frame around one cell."""
    return Rectangle((column - 0.47, row - 0.45), 0.94, 0.9, fill=False, edgecolor=VERMILION, linewidth=2)


def cell_text(nbytes):
    """Bytes as short as a cell needs them: 12000 -> "12,000 B", 4194304 -> "4 MiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= max(scale, 100_000):
            return f"{number_text(nbytes / scale)} {unit}"
    return f"{nbytes:,} B"

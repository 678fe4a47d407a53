"""The look of all pictures: colors that color-blind people tell apart, sizes, ticks in bytes and seconds.

Figures are made without pyplot, so that importing this package chooses no backend and no picture is shown twice.
"""

import math
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, TypeAlias

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter, NullLocator

from ..trace import number_text
from ..units import bytes_text
from .colors import FAINT, GRAY, INK, VERMILION

Row: TypeAlias = dict[str, Any]  # numbers and words, by their names
Rows: TypeAlias = Sequence[Row]  # reported by ranks, or measured by a sweep
Look: TypeAlias = dict[str, Any]  # keywords of matplotlib
Dash: TypeAlias = str | tuple[int, tuple[float, ...]]  # of a line, as matplotlib takes it
Entry: TypeAlias = tuple[str | Artist, str]  # of a legend: a color, or what is drawn; and its name
Draw: TypeAlias = Callable[Concatenate[Figure, ...], object]  # fills an empty figure
OVERSUBSCRIBED = "oversubscribed: time-slicing, not scaling"

WIDTH, HEIGHT = 8.4, 3.9  # inches; 840 x 390 pixels at DPI: fits JupyterLab's notebook column without scaling
DPI = 100

DRAWING = threading.RLock()  # matplotlib's settings belong to all threads of a notebook
LOOK = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the same picture on every machine
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # fixed: to find a free place costs a quarter of the drawing
    "axes.labelsize": 9.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRAY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "figure.facecolor": "white",  # readable in JupyterLab's dark theme, too
    "savefig.facecolor": "white",
    "path.simplify": True,
}


@contextmanager
def style_context() -> Generator[None]:
    """Give new matplotlib objects this package's look; the caller's settings come back at the end."""
    with DRAWING, matplotlib.rc_context(LOOK):
        yield


def new_figure(width: float = WIDTH, height: float = HEIGHT) -> Figure:
    """Return an empty figure of `width` x `height` inches, known to no backend but Agg."""
    with style_context():
        figure = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(figure)
    return figure


def size_axis(ax: Axes, sizes: Iterable[float]) -> None:
    """Make the x axis logarithmic and label measured sizes: the first, the last, and as many between as fit."""
    sizes = sorted(set(sizes))
    ax.set_xscale("log", base=2)
    room = math.log2(sizes[-1] / sizes[0]) / 4.2  # between two labels
    ticks = [sizes[-1]]
    for n in reversed(sizes[:-1]):
        if math.log2(ticks[-1] / n) >= room and (n == sizes[0] or math.log2(n / sizes[0]) >= room):
            ticks.append(n)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: bytes_text(n)))
    ax.set_xlim(sizes[0] / 1.6, sizes[-1] * 1.6)
    x_label(ax, "message size")


def x_label(ax: Axes, text: str) -> None:
    """Name the x axis, at a fixed distance: to find one costs time at every frame of a live picture."""
    ax.set_xlabel(text)
    ax.xaxis.set_label_coords(0.5, -20 / 72 / (ax.bbox.height / DPI), ax.transAxes)


def log_axis(ax: Axes, values: Iterable[float], unit: str = "") -> None:
    """Make the y axis logarithmic over the positive `values`, with at most nine labels, in `unit` if given."""
    values = [v for v in values if v > 0]
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    ax.set_yscale("log")
    ax.set_ylim(low / 1.7, high * 1.7)
    first, last = math.floor(math.log10(low / 1.7)), math.ceil(math.log10(high * 1.7))
    powers = range(first, last + 1, max(1, math.ceil((last - first) / 8)))
    steps = (1,) if last - first > 4 else (1, 3) if last - first > 1 else (1, 2, 5)
    ax.yaxis.set_major_locator(FixedLocator([m * 10.0**k for k in powers for m in steps]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(amounts(unit) if unit else FuncFormatter(lambda v, _: number_text(v)))


def amounts(unit: str) -> EngFormatter:
    """Return the formatter of an axis: 1e-6 -> "1 µs", 2e6 -> "2 MB"."""
    return EngFormatter(unit)


def label_ends(ax: Axes, labels: list[tuple[float, str, str, bool]], gap: float = 14.0) -> None:
    """Write names in a column to the right of `ax`, at the heights of the ends of curves, moved apart.

    Args:    labels: list of (y, text, color, bold), y in data coordinates; gap: least distance, in pixels.
    """
    ends = sorted((ax.transData.transform((1, y))[1], text, color, bold) for y, text, color, bold in labels)
    heights = spread_labels([end[0] for end in ends], gap, ax.bbox.y0, ax.bbox.y1)
    for height, (_, text, color, bold) in zip(heights, ends, strict=True):
        y = (height - ax.bbox.y0) / ax.bbox.height
        weight = "bold" if bold else "normal"
        ax.text(1.02, y, text, color=color, va="center", fontweight=weight, transform=ax.transAxes)


def spread_labels(heights: list[float], gap: float, bottom: float, top: float) -> list[float]:
    """Return ascending `heights`, moved as little as needed to be `gap` apart, and into [bottom, top] if they fit."""
    out = []
    for h in heights:
        out.append(max(h, bottom, out[-1] + gap if out else bottom))
    ceiling = top
    for i in reversed(range(len(out))):
        out[i] = min(out[i], ceiling)
        ceiling = out[i] - gap
    return out


def tile(x: float, y: float) -> list[tuple[float, float]]:
    """Return the corners of a cell around (x, y) in a table whose cells are 1 apart."""
    return [(x - 0.44, y - 0.42), (x + 0.44, y - 0.42), (x + 0.44, y + 0.42), (x - 0.44, y + 0.42)]


def bare(ax: Axes) -> None:
    """Take frame, grid and the marks of ticks off."""
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def rows_only(ax: Axes, n: int, names: Sequence[str]) -> None:
    """Make rows 0 to n - 1 from top to bottom, with their names at the left and no lines between them."""
    ax.set_ylim(n - 0.5, -0.5)
    ax.set_yticks(range(len(names)), names, fontsize=8.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


def legend(
    where: Figure | Axes, entries: Sequence[Entry], x: float, y: float, size: float = 8.5, columns: int = 0
) -> None:
    """Draw colors with their names in a line from (x, y), shares of the figure or axes."""
    handles = [Patch(color=look) if isinstance(look, str) else look for look, _ in entries]
    look: Look = {
        "frameon": False,
        "fontsize": size,
        "handlelength": 0.9,
        "handleheight": 0.9,
        "handletextpad": 0.4,
    }
    look |= {"columnspacing": 1.1, "borderpad": 0, "borderaxespad": 0, "loc": "center left"}
    where.legend(
        handles, [text for _, text in entries], bbox_to_anchor=(x, y), ncols=columns or max(1, len(entries)), **look
    )


def heading(figure: Figure, title: str, subtitle: str = "") -> None:
    """Write the title of a picture, and a line below it in plain type."""
    figure.text(0.012, 0.975, title, fontsize=11, fontweight="bold", va="top")
    figure.text(0.012, 0.905, subtitle, va="top")


def oversubscribed_note(rows: Rows) -> str:
    """Return the line that belongs on a picture with points of more ranks than cores; "" if it has none."""
    crowd = [r for r in rows if r["ranks"] > r["cores"]]
    if not crowd:
        return ""
    row = max(crowd, key=lambda r: r["ranks"])
    return f"{row['ranks']} ranks on {row['cores']} cores, gray points: {OVERSUBSCRIBED}"


def stamp(figure: Figure, text: str) -> None:
    """Write the place of a recording at the top right: beside the title, or a line lower if that is too long."""
    box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": VERMILION, "linestyle": (0, (4, 2))}
    others = [other.get_window_extent() for other in figure.texts if other.get_text()]
    mark = figure.text(0.985, 0.965, text, fontsize=9, color=VERMILION, ha="right", va="top", bbox=box)
    if mark.get_window_extent().count_overlaps(others):
        mark.set_y(0.895)


def footnote(figure: Figure, text: str) -> None:
    """Write a line of small print at the foot of the figure."""
    figure.text(0.012, 0.016, text, fontsize=8.5, color="#555555", ha="left", va="bottom")

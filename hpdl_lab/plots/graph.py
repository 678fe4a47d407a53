"""Graphs and matrices over ranks: gossip's weights and how fast they bring agreement, and who sent how much to whom."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from ..parallel.gossip import lambda2
from ..trace import Event, number_text
from ..units import amount_text, counted
from .colors import BLUE, FAINT, GRAY, INK, SERIES, SKY, VERMILION
from .style import Axes, Figure, Look, bare, heading, label_ends, log_axis, x_label

MOST_RANKS = 32  # of the picture of one graph
MOST_NUMBERED = 8  # ranks up to which every cell says its number
GUESSED = 20  # steps, after which an attendee guesses how far apart ranks are
FLOOR = 1e-15  # relative disagreement that is rounding, not gossip
SHADES = LinearSegmentedColormap.from_list("traffic", ["#FFFFFF", "#9CC8E3", BLUE, "#00324F"])


def _cells(
    ax: Axes,
    values: np.ndarray,
    shades: Colormap | str,
    most: float,
    text_of: Callable[[float], str],
    points: float,
) -> None:
    """Draw a matrix over ranks as shaded cells, with numbers if they fit."""
    n = len(values)
    edges = np.arange(n + 1) - 0.5
    ax.pcolormesh(edges, edges, values, cmap=shades, vmin=0, vmax=most, edgecolors=FAINT, linewidth=0.7)
    ax.invert_yaxis()
    every = max(1, n // 8)
    ax.set_xticks(range(0, n, every))
    ax.set_yticks(range(0, n, every))
    bare(ax)
    for (row, column), value in np.ndenumerate(values) if n <= MOST_NUMBERED else ():
        if value > 1e-12:
            color = "white" if shades is SHADES and value > 0.45 * most else INK
            look: Look = {
                "ha": "center",
                "va": "center",
                "fontsize": points,
                "linespacing": 1,
                "color": color,
            }
            ax.text(column, row, text_of(value), **look)


def draw(figure: Figure, name: str, weights: np.ndarray) -> None:
    """Fill `figure` with a graph, given as the (n, n) weights of one gossip step, and with the weights as a matrix.

    The wider a line, the larger the weight of what goes along it.
    """
    n = len(weights)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    figure.subplots_adjust(left=0.02, right=0.985, bottom=0.1, top=0.78, wspace=0.14)
    draw_edges(left, weights)
    _cells(right, weights, "Blues", 1.5 * weights.max(), "{:.2f}".format, 7.5)
    right.set_aspect("equal")
    right.set_title("weights of a step: row i makes rank i's", fontsize=9.5)
    low, high = min(_degrees(weights)), max(_degrees(weights))
    neighbors = f"{low} to {high} neighbors" if low < high else counted(low, "neighbor")
    heading(figure, f"{name.capitalize()} of {n} ranks: {neighbors} each", mixing(lambda2(weights)))


def draw_edges(ax: Axes, weights: np.ndarray) -> None:
    """Draw ranks and lines between neighbors; the wider a line, the larger the weight."""
    n, positions = len(weights), _on_page(weights)
    ax.set_aspect("equal")
    ax.axis("off")
    ax.set_xlim(-1.2, 1.2)
    ax.set_ylim(-1.2, 1.2)
    pairs = [(i, j) for i, j in itertools.combinations(range(n), 2) if weights[i, j] > 0]
    widths = [0.6 + 6 * weights[pair] for pair in pairs]
    ax.add_collection(
        LineCollection([(positions[i], positions[j]) for i, j in pairs], colors=BLUE, linewidths=widths, zorder=1)
    )
    size, points = (18, 9) if n <= 16 else (14, 7.5)
    ax.plot(*zip(*positions, strict=True), "o", color=SKY, markeredgecolor="white", markersize=size, zorder=2)
    for i, (x, y) in enumerate(positions):
        ax.text(x, y, str(i), ha="center", va="center_baseline", fontsize=points, zorder=3)


def _degrees(weights: np.ndarray) -> np.ndarray:
    """Return how many neighbors each rank has."""
    return (weights > 0).sum(axis=1) - (np.diag(weights) > 0)


def _on_page(weights: np.ndarray) -> list[tuple[float, float]]:
    """Return (x, y) of every rank: on a circle, or in its center for a hub that alone is everybody's neighbor."""
    n, known = len(weights), _degrees(weights)
    hub = n > 3 and known[0] == n - 1 and known[1:].max() < n - 1
    rim = n - 1 if hub else n
    circle = [(math.sin(2 * math.pi * i / rim), math.cos(2 * math.pi * i / rim)) for i in range(rim)]
    return [(0.0, 0.0), *circle] if hub else circle


def mixing(second: float) -> str:
    """Return what the second eigenvalue means, in words."""
    if second < 1e-9:
        return "spectral gap 1 - λ₂ = 1: all agree after one step"
    text = f"spectral gap 1 - λ₂ = {1 - second:.6f}: differences shrink by λ₂ = {second:.6f} per step"
    if second < 1 - 1e-9:
        text += f", to a tenth in {number_text(max(1.0, math.log(10) / -math.log(second)))} steps"
    return text


def draw_gossip(
    figure: Figure,
    errors: dict[str, Sequence[float]],
    promises: dict[str, float | None],
    steps: int,
    title: str = "",
    guesses: dict[str, float] | None = None,
) -> None:
    """Fill `figure` with the disagreement of ranks against steps, one curve per graph.

    Args:    errors: {name: (k + 1,) disagreement so far, before the first step and after each}.
             promises: {name: lambda2, or None if weights change from step to step}; steps: how many there will be.
             guesses: {name: disagreement that the attendee expects after GUESSED steps}.
    """
    ax = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.77, bottom=0.16, top=0.8)
    relative = {name: np.maximum(np.asarray(e) / (e[0] or 1.0), FLOOR) for name, e in errors.items()}
    lowest = max(FLOOR, min((float(e.min()) for e in relative.values()), default=0.1))
    bound = [second**steps for second in promises.values() if second]
    guesses = {name: apart for name, apart in (guesses or {}).items() if name in errors and GUESSED <= steps}
    log_axis(ax, [1.0, max(min([lowest, *bound, *guesses.values()]), FLOOR), *guesses.values()])
    ends = []
    k = np.arange(steps + 1)
    for (name, error), color in zip(relative.items(), itertools.cycle(SERIES), strict=False):
        second = promises[name]
        if second is not None:
            ax.plot(k, np.maximum(second ** k.astype(float), FLOOR), color=color, linewidth=1, linestyle=(0, (4, 2)))
        ax.plot(range(len(error)), error, "o", color=color, markersize=4, clip_on=False)
        if name in guesses:
            ax.plot(GUESSED, guesses[name], "*", color=color, mec=INK, markersize=13, clip_on=False, zorder=5)
        text = f"{name}: λ₂ = {second:.3f}" if second is not None else name
        ends.append((error[-1], text, color, False))
    ax.set_xlim(0, steps)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    x_label(ax, "gossip steps")
    label_ends(ax, ends)
    ax.axhline(FLOOR, color=GRAY, linewidth=0.8)
    subtitle = "Points: how far apart the ranks are, over how far they were. Dashed: λ₂ to the power of steps."
    heading(figure, title, subtitle + " Stars: your guess." * bool(guesses))


def traffic_of(events: Sequence[Event], size: int) -> np.ndarray:
    """Return (size, size) bytes: row = sender, column = receiver; counted from the "send" events."""
    out = np.zeros((size, size), dtype=np.int64)
    for e in events:
        if e.op == "send":
            out[e.rank, e.peer] += e.nbytes
    return out


def draw_traffic(figure: Figure, got: np.ndarray, expected: np.ndarray | None = None, title: str = "") -> None:
    """Fill `figure` with one matrix of bytes, or with two if `expected` is given: cells that differ are framed.

    Args:    got, expected: (p, p) arrays of bytes as `traffic_of` makes them.
    """
    panels = [("who sent to whom", got)] if expected is None else [("yours", got), ("a right answer", expected)]
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.16, top=0.78, wspace=0.25)
    most = max(1, *(int(m.max()) for _, m in panels))
    for ax, (name, values) in zip(axes, panels, strict=True):
        narrow = ax.bbox.width / figure.dpi * 72 / len(values) < 42  # points that "97.7 kB" needs
        _cells(ax, values, SHADES, most, _in_two_lines if narrow else amount_text, 7.5 if narrow else 8.5)
        ax.set_xlabel("to rank")
        ax.set_ylabel("from rank")
        ax.set_title(f"{name}: up to {amount_text(int(values.sum(axis=1).max()))} per rank")
    for row, column in np.argwhere(got != expected) if expected is not None else ():
        look: Look = {"fill": False, "edgecolor": VERMILION, "linewidth": 2}
        axes[0].add_patch(Rectangle((column - 0.47, row - 0.45), 0.94, 0.9, **look))
    heading(figure, title)


def _in_two_lines(nbytes: float) -> str:
    return amount_text(nbytes).replace(" ", "\n")

"""A heat map of the tokens that go to each expert on each rank; and how a bias evens the load out."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from .colors import BLUE, GRAY, INK, SERIES, VERMILION
from .style import Axes, Entry, Figure, Rows, footnote, heading, legend

HEIGHT = 4.6  # inches
MOST_LINES = 96  # of the heat map: with more tokens, neighbors share one


def draw(figure: Figure, rows: Rows, experts: int, title: str = "", subtitle: str = "") -> None:
    """Fill `figure` from a row for each copy: dicts with token, source (its rank), expert, rank (the expert's).

    Above: copies of each expert, in its rank's color, and of each rank; below: the tokens that bring them.
    """
    tokens, ranks = 1 + max(row["token"] for row in rows), 1 + max(row["rank"] for row in rows)
    load, table = np.zeros(experts), np.zeros((min(tokens, MOST_LINES), experts))
    rank_of = np.arange(experts) * ranks // experts
    for row in rows:
        load[row["expert"]] += 1
        table[row["token"] * len(table) // tokens, row["expert"]] += 1
        rank_of[row["expert"]] = row["rank"]
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    figure.subplots_adjust(left=0.09, right=0.985, bottom=0.17, top=0.83, hspace=0.08)
    _draw_loads(above, load, rank_of)
    below.imshow(table, cmap="Blues", aspect="auto", interpolation="nearest", vmin=0, vmax=max(table.max(), 1))
    below.grid(False)
    below.set(xlabel="expert", ylabel="token")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    starts = {row["source"]: row["token"] for row in reversed(rows)}  # the first token of each rank
    below.set_yticks([t * len(table) / tokens - 0.5 for t in starts.values()], [str(t) for t in starts.values()])
    for first in starts.values():
        below.axhline(first * len(table) / tokens - 0.5, color=GRAY, linewidth=0.8)
    for ax in (above, below):
        for edge in np.flatnonzero(np.diff(rank_of)):
            ax.axvline(edge + 0.5, color=GRAY, linewidth=0.8)
    heading(figure, title, subtitle)
    footnote(figure, "Lines: where the tokens, and the experts, of the next rank begin. Dashed: the mean load.")


def _draw_loads(ax: Axes, load: np.ndarray, rank_of: np.ndarray) -> None:
    """Draw a bar for each expert, in the color of its rank, over which stands the rank's sum."""
    colors = [color for _, color in zip(range(1 + rank_of.max()), cycle(SERIES), strict=False)]
    ax.bar(range(len(load)), load, 0.8, color=[colors[rank] for rank in rank_of])
    ax.axhline(load.mean(), color=INK, linewidth=1, linestyle="--")
    ax.grid(False)
    ax.set(ylabel="copies", ylim=(0, 1.3 * load.max()))
    for rank in range(1 + rank_of.max()):
        mine = np.flatnonzero(rank_of == rank)
        if len(mine):
            text = f"rank {rank}: {load[mine].sum():,.0f}"
            ax.text(mine.mean(), 1.27 * load.max(), text, ha="center", va="top", fontsize=8.5, color=colors[rank])


def draw_balance(figure: Figure, loads: Sequence[Sequence[int]], imbalances: Sequence[float], title: str = "") -> None:
    """Fill `figure` from loads[step][expert]: before the first and after the last update, and the imbalance between."""
    bars, course = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.08, right=0.985, bottom=0.2, top=0.76, wspace=0.22)
    positions = np.arange(len(loads[0]))
    bars.bar(positions - 0.2, loads[0], 0.4, color=GRAY)
    bars.bar(positions + 0.2, loads[-1], 0.4, color=BLUE)
    bars.axhline(np.mean(loads[-1]), color=VERMILION, linewidth=1.4)
    bars.set(xlabel="expert", ylabel="copies")
    course.plot(range(len(imbalances)), imbalances, color=BLUE)
    course.axhline(1, color=VERMILION, linewidth=1.4)
    course.set(xlabel="updates of the bias", ylabel="largest load / mean load", ylim=(0, 1.1 * max(imbalances)))
    heading(figure, title)
    entries: list[Entry] = [(GRAY, "before"), (BLUE, "after")]
    entries.append((Line2D([], [], color=VERMILION, linewidth=1.4), "the mean"))
    legend(figure, entries, 0.08, 0.83)

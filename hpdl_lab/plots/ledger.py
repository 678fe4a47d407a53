"""The memory of a rank in several ways to train: a stacked bar by formula, below it what was counted, dotted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from matplotlib.lines import Line2D

from ..units import amount_text
from .colors import INK, VERMILION
from .grid import MEASURED, MEMORY, OVER
from .style import Entry, Figure, amounts, footnote, heading, legend

if TYPE_CHECKING:
    from ..parallel.grid.ledger import Counted
    from ..parallel.grid.memory import Memory

HEIGHT = 5.6  # inches


def draw(
    figure: Figure,
    predicted: Mapping[str, Memory],
    counted: Mapping[str, Counted],
    limit: int | None = None,
    prediction: Mapping[str, float] | None = None,
    title: str = "",
) -> None:
    """Fill `figure`, HEIGHT inches tall.

    Args:    predicted: by way; counted: the same for ways that are done. limit: bytes that a rank may hold.
             prediction: {way: bytes} that the attendee expects.
    """
    ax = figure.add_axes((0.19, 0.075, 0.775, 0.735))
    longest = max([held.total for held in predicted.values()] + [c.held.total for c in counted.values()] + [1])
    for y, (way, held) in enumerate(predicted.items()):
        bars = [(y - 0.2, held, {})] + ([(y + 0.2, counted[way].held, MEASURED)] if way in counted else [])
        for at, memory, look in bars:
            left = 0.0
            for name, color in MEMORY.items():
                ax.barh(at, getattr(memory, name), 0.38, left, color=color, **look)
                left += getattr(memory, name)
        if way in counted:
            most, total = counted[way].most, counted[way].held.total
            at = max(total, 1.012 * (most or 0))
            ax.text(at, y + 0.2, f" {amount_text(total)}", va="center", fontsize=8.5, bbox=OVER, zorder=4)
            if most is not None:
                ax.plot([most], [y + 0.2], "D", color=INK, markersize=5, zorder=6)
        if prediction and way in prediction:
            ax.plot([prediction[way]], [y], "*", color=INK, markersize=12, zorder=7, clip_on=False)
            longest = max(longest, prediction[way])
    ax.set_ylim(max(len(predicted), 1) - 0.5, -0.5)
    ax.set_yticks(range(len(predicted)), list(predicted))
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, 1.12 * max(longest, limit or 0))
    ax.xaxis.set_major_formatter(amounts("B"))
    if limit is not None:
        ax.axvline(limit, color=VERMILION, linewidth=2)
        where = ("data", "axes fraction"), "offset points"
        ax.annotate(f"limit {amount_text(limit)}", (limit, 1), (3, 3), *where, color=VERMILION, fontsize=9)
    heading(figure, title, "the fullest rank holds; above: by formula, below, dotted: counted")
    diamond = Line2D([], [], marker="D", linestyle="", color=INK, markersize=5)
    entries: list[Entry] = [(color, name) for name, color in MEMORY.items()]
    if any(c.most is not None for c in counted.values()):
        entries.append((diamond, "most at once, by torch's profiler"))
    legend(figure, entries, 0.012, 0.862, size=8.5)
    footnote(figure, "Stars: your guesses." if prediction else "")

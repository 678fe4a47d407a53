"""The picture behind the slider of published models."""

from collections.abc import Sequence

from matplotlib.ticker import NullLocator

from ..units import amount_text
from .colors import BLUE, FAINT, GREEN, INK, VERMILION
from .explore import decades, panels
from .grid import OVER
from .style import Figure, amounts, heading, label_ends, log_axis, rows_only, x_label

LEAST_ROWS = 6  # a bar is as tall as with so many


def draw_published(
    figure: Figure,
    grids: Sequence[str],
    held: Sequence[float],
    limit: float,
    curves: dict[str, list[float]],
    lengths: Sequence[int],
    model: str,
    positions: int,
    title: str,
) -> None:
    """Draw how far a model is cut until it fits into the memory of a GPU, and the bytes of caches for longer texts.

    Args:    grids: names; held: bytes of the fullest rank of each; limit: bytes of a GPU.
             curves: {model: bytes of the cache of one sequence of each of `lengths` tokens}.
    """
    left, right = panels(figure, ("training: bytes of the fullest GPU", "the cache of one sequence"))
    figure.subplots_adjust(left=0.16, right=0.86, bottom=0.16, top=0.8, wspace=0.32)
    rows_only(left, max(len(grids), LEAST_ROWS), list(grids))
    colors = [GREEN if nbytes <= limit else FAINT for nbytes in held]
    left.barh(range(len(grids)), held, height=0.7, color=colors)
    left.set_xscale("log")
    left.set_xlim(min(*held, limit) / 3, max(*held, limit) * 6)
    left.xaxis.set_major_formatter(amounts("B"))
    left.xaxis.set_minor_locator(NullLocator())
    left.axvline(limit, color=VERMILION, linewidth=1.6)
    for y, nbytes in enumerate(held):
        left.text(nbytes, y, f" {amount_text(nbytes)}", va="center", fontsize=8.5, bbox=OVER, zorder=5)
    x_label(left, f"the line: {amount_text(limit)}, which a GPU has")
    decades(right, lengths[0], lengths[-1])
    log_axis(right, [n for curve in curves.values() for n in curve], "B")
    ends = []
    for name, curve in curves.items():
        mine = name == model
        right.plot(lengths, curve, color=BLUE if mine else INK, linewidth=2.6 if mine else 0.9, zorder=2 + mine)
        ends.append((curve[-1], name, BLUE if mine else INK, mine))
    if model in curves:
        right.plot([positions], [curves[model][lengths.index(positions)]], "o", color=BLUE, markersize=9, zorder=5)
    label_ends(right, ends)
    x_label(right, "tokens")
    heading(figure, title)

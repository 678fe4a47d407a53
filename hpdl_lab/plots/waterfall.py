"""The bars of a training step: each begins where the one above it ends."""

from __future__ import annotations

from collections.abc import Mapping

from .colors import BLUE, FAINT, GRAY, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from .style import Figure, footnote, heading, rows_only

COLORS = (ORANGE, VERMILION, SKY, GREEN, PURPLE, BLUE, YELLOW, GRAY, INK)


def draw(figure: Figure, bars: Mapping[str, float], before: Mapping[str, float] | None, title: str, foot: str) -> None:
    """Fill `figure`. bars, before: seconds of each bar, the whole step last; before: of an earlier waterfall, gray."""
    ax = figure.add_axes((0.2, 0.15, 0.77, 0.72))
    longest = 1e3 * max([*bars.values(), *(before or {}).values()])
    for values, tall, offset in ((before, 0.22, 0.3), (bars, 0.5, -0.1)):
        end = 0.0
        for row, (seconds, color) in enumerate(zip((values or {}).values(), COLORS, strict=False)):
            begin = 0.0 if row == len(bars) - 1 else end
            ax.barh(row + offset, 1e3 * seconds, tall, 1e3 * begin, color=FAINT if values is before else color)
            end = begin + seconds
            if values is bars:
                ax.text(
                    1e3 * max(begin, end) + longest / 100,
                    row + offset,
                    f"{1e3 * seconds:.1f}",
                    va="center",
                    fontsize=8.5,
                )
    ax.set_xlim(min(0.0, 1e3 * min(bars.values())), 1.08 * longest)
    ax.set_xlabel("ms of a step, the mean of all ranks")
    rows_only(ax, len(bars), list(bars))
    heading(figure, title)
    footnote(figure, foot)

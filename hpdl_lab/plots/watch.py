"""The parts of a step of a watched script: a bar for each rank."""

from collections.abc import Mapping, Sequence

from .colors import BLUE, GRAY, GREEN, INK, ORANGE, VERMILION, YELLOW
from .style import Figure, heading, legend, rows_only

COLORS = {
    "data": ORANGE,
    "forward": GREEN,
    "backward": YELLOW,
    "exposed communication": VERMILION,
    "optimizer": BLUE,
    "rest": GRAY,
}


def draw(figure: Figure, rows: Sequence[Mapping[str, float]], title: str) -> None:
    """Fill `figure`. rows: for each rank the s of the parts of a step, by the names of COLORS."""
    ax = figure.add_axes((0.09, 0.16, 0.89, 0.6))
    for row, parts in enumerate(rows):
        begin = 0.0
        for name, color in COLORS.items():
            ax.barh(row, 1e3 * parts[name], 0.6, 1e3 * begin, color=color)
            begin += parts[name]
        ax.text(1e3 * begin, row, f" {1e3 * begin:.1f} ms", va="center", color=INK, fontsize=9)
    ax.set_xlim(0, 1.12e3 * max(sum(parts.values()) for parts in rows))
    ax.set_xlabel("ms of a step, the median")
    rows_only(ax, len(rows), [f"rank {row}" for row in range(len(rows))])
    legend(figure, [(color, name) for name, color in COLORS.items()], 0.09, 0.83)
    heading(figure, title)

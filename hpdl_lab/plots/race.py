"""A race as a picture: the parts of the hours of a simulated plan, or the losses of a real one, and the guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.lines import Line2D

from ..trace import seconds_text
from .colors import BLUE, GRAY, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from .style import Figure, footnote, heading, legend, rows_only, x_label

HOUR = 3600.0
PARTS = {  # of a simulated race, in the order of the bar
    "compute": (GREEN, "compute"),
    "tp": (PURPLE, "tp messages"),
    "pp": (SKY, "pp messages"),
    "dp": (ORANGE, "dp left over"),
    "bubble": ("#9AA7B4", "waiting for stages"),
    "checkpoints": (BLUE, "checkpoints"),
    "repeated": (VERMILION, "computed twice"),
    "restart": (YELLOW, "restart"),
}


def draw_simulated(
    figure: Figure, laps: Mapping[str, Mapping[str, float]], expected: Mapping[str, float], title: str, foot: str
) -> None:
    """Fill `figure`. laps: {name: {part: s}}; expected: {name: s}, drawn as stars."""
    ax = figure.add_axes((0.14, 0.17, 0.82, 0.52))
    longest = max([sum(parts.values()) for parts in laps.values()] + [*expected.values()]) / HOUR
    for row, (name, parts) in enumerate(laps.items()):
        left = 0.0
        for part, (color, _) in PARTS.items():
            ax.barh(row, parts.get(part, 0.0) / HOUR, 0.5, left, color=color)
            left += parts.get(part, 0.0) / HOUR
        ax.text(left + longest / 100, row, f"{left:.1f} h", va="center", fontsize=8.5)
        ax.plot([expected[name] / HOUR], [row - 0.36], "*", color=INK, markersize=12, clip_on=False)
    ax.set_xlim(0, 1.12 * longest)
    rows_only(ax, len(laps), list(laps))
    x_label(ax, "hours")
    heading(figure, title)
    legend(figure, list(PARTS.values()), 0.012, 0.82, size=8.2)
    footnote(figure, foot)


def draw_here(
    figure: Figure,
    curves: Sequence[tuple[str, Sequence[float], Sequence[float]]],
    target: float,
    expected_s: float,
    title: str,
    foot: str,
) -> None:
    """Fill `figure`. curves: (name, seconds, losses) of each training; expected_s: of the attendee."""
    ax = figure.add_axes((0.09, 0.17, 0.87, 0.6))
    for name, seconds, losses in curves:
        ax.plot(seconds, losses, color=GRAY if name == "reference" else BLUE, linewidth=1.2)
    ax.axhline(target, color=GREEN, linewidth=1.5)
    ax.axvline(expected_s, color=INK, linewidth=1.5, linestyle=(0, (4, 2)))
    ax.set_ylim(bottom=target - 0.5)
    ax.set_xlim(0, 1.05 * max([expected_s, *(s[-1] for _, s, _ in curves if s)]))
    ax.set_ylabel("loss of a batch")
    x_label(ax, "seconds of training")
    heading(figure, title)
    dashed = Line2D([], [], color=INK, linestyle=(0, (4, 2)))
    entries = [(BLUE, "your plan"), (GRAY, "reference"), (GREEN, f"loss {target}, on hidden text")]
    legend(figure, [*entries, (dashed, f"you expected {seconds_text(expected_s)}")], 0.012, 0.84)
    footnote(figure, foot)

"""The computing of one rank of a pipeline, and under it the all-to-alls of its micro-batches: hidden or exposed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..trace import seconds_text
from .collective import write_at
from .colors import VERMILION
from .schedule import COLORS, DIGIT, NAMES, ink, shade
from .style import Axes, Figure, footnote, heading, legend, rows_only

if TYPE_CHECKING:
    from ..parallel.pipeline.overlap import Bar

LANE, TOP, BETWEEN, FOOT = 0.34, 0.95, 0.5, 0.72  # inches: of a lane; above, between and below the panels
LEFT, RIGHT = 0.105, 0.985  # shares of the width
TALL = 0.8  # of a bar in its lane


class Panel(NamedTuple):
    """A rank's computing and sending in one schedule. exposed: s of sending under which it computes nothing."""

    name: str
    seconds: float
    exposed: float
    computing: Sequence[Bar]
    sending: Sequence[Bar]


def height(panels: Sequence[Panel]) -> float:
    """Return inches of a figure of `panels`."""
    return TOP + FOOT + len(panels) * (2 * LANE + BETWEEN) - BETWEEN


def draw(figure: Figure, panels: Sequence[Panel], title: str, guess: float | None = None) -> None:
    """Fill `figure`, `height(panels)` inches tall. guess: s of all-to-all still exposed in the last panel, or None."""
    tall = figure.get_size_inches()[1]
    end = 1e3 * max(panel.seconds for panel in panels)
    for i, panel in enumerate(panels):
        bottom = 1 - (TOP + i * (2 * LANE + BETWEEN) + 2 * LANE) / tall
        ax = figure.add_axes((LEFT, bottom, RIGHT - LEFT, 2 * LANE / tall))
        ax.set_xlim(0, end)
        _draw_lane(ax, 0, panel.computing)
        _draw_lane(ax, 1, panel.sending)
        alone = [(1e3 * a, 1e3 * (b - a)) for bar in panel.sending for a, b in _uncovered(bar, panel.computing)]
        ax.broken_barh(alone, (1 + TALL / 2, 0.1), facecolors=VERMILION)
        rows_only(ax, 2, ["computes", "all-to-all"])
        ax.axvline(1e3 * panel.seconds, color="black", linewidth=1)
        ax.set_title(panel.name, fontsize=9.5, pad=3)
        text = f"{seconds_text(panel.seconds)}, {seconds_text(panel.exposed)} of all-to-all exposed"
        if guess is not None and panel is panels[-1]:
            text += f"; your guess: {seconds_text(guess)}"
        ax.set_title(text, loc="right", fontsize=8.5, fontweight="normal", pad=3)
        ax.set_xlabel("time, ms" if panel is panels[-1] else "")
    heading(figure, title)
    kinds = {bar.action.kind for panel in panels for bar in panel.computing}
    entries = [(color, NAMES[kind]) for kind, color in COLORS.items() if kind in kinds]
    legend(figure, [*entries, (VERMILION, "exposed")], LEFT, 1 - 0.5 / tall)
    footnote(figure, "A number is a micro-batch, where there is room: compare the two lanes.")


def _uncovered(bar: Bar, computing: Sequence[Bar]) -> list[tuple[float, float]]:
    """Return [(begin, end)] of `bar` in which there is nothing of `computing`, which is in order."""
    begins, ends = [bar.begin], []
    for other in computing:
        if other.end > bar.begin and other.begin < bar.end:
            ends.append(max(other.begin, bar.begin))
            begins.append(min(other.end, bar.end))
    return [(a, b) for a, b in zip(begins, [*ends, bar.end], strict=True) if a < b]


def _draw_lane(ax: Axes, lane: int, bars: Sequence[Bar]) -> None:
    """Draw each of `bars`, with its number if it is wide enough."""
    scale = ax.get_window_extent().width / ax.figure.dpi / ax.get_xlim()[1]  # inches of a ms
    spans = [(1e3 * bar.begin, 1e3 * (bar.end - bar.begin)) for bar in bars]
    faces = [shade(bar.action) for bar in bars]
    ax.broken_barh(spans, (lane - TALL / 2, TALL), facecolors=faces, edgecolors="white", linewidth=0.5)
    numbers: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)  # by (text, color)
    for (begin, wide), face, bar in zip(spans, faces, bars, strict=True):
        text = str(bar.action.micro_batch)
        if wide * scale >= DIGIT * len(text) + 0.012:
            numbers[text, ink(face)].append((begin + wide / 2, float(lane)))
    for (text, color), points in numbers.items():
        write_at(ax, text, points, 6, color)

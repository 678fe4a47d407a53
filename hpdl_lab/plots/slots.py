"""Slots over steps: who has each of them, and when it was empty although somebody waited."""

from collections.abc import Sequence

from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator

from .collective import write_at
from .colors import BLUE, FAINT, ORANGE, PURPLE
from .schedule import SHADES, ink
from .style import Axes, Figure, footnote, heading, legend, rows_only, x_label

HEIGHT = 4.3  # inches of two schedules of a few slots
Steps = Sequence[dict[int, int]]  # {request: tokens read} of each step


def draw(figure: Figure, schedules: dict[str, Steps], slots: int, least: int) -> None:
    """Draw a panel for each schedule of the same requests, on one time axis. least: steps that no schedule can beat."""
    longest = max(map(len, schedules.values()))
    panels = figure.subplots(len(schedules), 1, sharex=True, squeeze=False)[:, 0]
    figure.subplots_adjust(left=0.075, right=0.985, bottom=0.165, top=0.79, hspace=0.46)
    for ax, (name, steps) in zip(panels, schedules.items(), strict=True):
        rows = slot_rows(steps, slots)
        empty = sum(row.count(None) for row in rows)
        rows_only(ax, slots, [f"slot {k}" for k in range(slots)])
        ax.set_xlim(0, longest)
        ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        ax.axvline(least, color=PURPLE, linewidth=1.4, linestyle=(0, (4, 2)), zorder=4)
        _boxes(ax, rows, steps)
        share = empty / (slots * len(steps))
        ax.set_title(f"{name}: {len(steps)} steps, {empty} of {slots * len(steps)} slots empty ({share:.0%})")
    x_label(panels[-1], "step")
    heading(figure, f"{len({r for step in schedules[name] for r in step})} requests on {slots} slots")
    key = [(BLUE, "generates"), (ORANGE, "reads its prompt"), (FAINT, "empty"), (PURPLE, f"{least}: the least")]
    legend(figure, key, 0.012, 0.875)
    footnote(
        figure, "A box is one request in one step; its number is the request's. The least: sum of lengths / slots."
    )


def slot_rows(steps: Steps, slots: int) -> list[list[int | None]]:
    """Return for each slot its request in each step. A request has one slot to its end: the lowest that is free."""
    last = {request: at for at, step in enumerate(steps) for request in step}
    rows: list[list[int | None]] = [[None] * len(steps) for _ in range(slots)]
    held: dict[int, int] = {}
    for at, step in enumerate(steps):
        held = {request: row for request, row in held.items() if last[request] >= at}
        for request in step:
            if request not in held:
                held[request] = next(row for row in range(slots) if row not in held.values())
            rows[held[request]][at] = request
    return rows


def _boxes(ax: Axes, rows: list[list[int | None]], steps: Steps) -> None:
    """Draw a box for each slot and step, with the number of its request at its beginning."""
    begun: set[int] = set()
    corners: list[list[tuple[float, float]]] = []
    faces: list[tuple[float, ...]] = []
    for k, row in enumerate(rows):
        for at, request in enumerate(row):
            corners.append([(at, k - 0.42), (at + 1, k - 0.42), (at + 1, k + 0.42), (at, k + 0.42)])
            if request is None:
                faces.append(to_rgb(FAINT))
                continue
            white = SHADES[request % len(SHADES)]
            color = to_rgb(BLUE if request in begun and steps[at][request] == 1 else ORANGE)
            faces.append(tuple(white + (1 - white) * part for part in color))
            if request not in begun:
                write_at(ax, str(request), [(at + 0.5, k)], 6.5, ink(faces[-1]))
            begun.add(request)
    ax.add_collection(PolyCollection(corners, facecolors=faces, edgecolors="white", linewidths=0.6, zorder=1.5))

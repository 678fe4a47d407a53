"""Pictures of a Dataflow: which rank sends which chunk to whom, and whose data each chunk holds afterwards.

Columns are ranks, rows are chunks. Arrows run above the columns; cells that were sent have a dot, cells that have
received a frame. A number counts the ranks in a sum; if nothing is added it names the rank whose data it is.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from ..collectives.dataflow import before_and_after
from ..trace import number_text
from ..units import bytes_text, counted
from .colors import FAINT, GRAY, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from .style import WIDTH, Axes, Figure, Look, bare, footnote, heading, tile

if TYPE_CHECKING:
    from ..collectives.dataflow import Dataflow
    from ..collectives.steps import Move

COLLECTIVES = (
    "broadcast", "scatter", "gather", "all_gather", "reduce", "reduce_scatter", "all_reduce", "all_to_all"
)  # fmt: skip


# -- panels -----------------------------------------------------------------------------------------------------------

SHADES = ("#FFFFFF", "#DCEBF5", "#A9CFE8", "#6BAED6", "#3182BD", "#0B559F")
ADDS, COPIES = VERMILION, "#00347A"  # the colors of messages; the blue is dark enough to be seen on green
UNKNOWN = "#F3E3D3"  # of cells whose content is no sum of the ranks' data

MOST_RANKS = 16  # with more, the cells are too small to read
MOST_NUMBERED = 20  # rows up to which every cell has its number
MOST_LISTED = 20  # messages that are written out next to a step
LEFT, HEAD, FOOT = 0.72, 0.5, 0.32  # inches: left of, above and below the panels
ABOVE, BELOW, GAP = 0.2, 0.24, 0.16  # inches: the title of a panel, its ranks, the space to the next one
TALLEST = 8.3  # inches of a page of panels


class _Cells(NamedTuple):
    """Sizes of one panel, in inches: of a cell, of the strip above for the arrows; points of its numbers."""

    cell: float
    cell_height: float
    strip: float
    points: float


def _small_grid(flow: Dataflow) -> _Cells:
    """Return the grid of one of many panels."""
    p, k = flow.p, flow.k
    cell = 0.31 if p <= 4 else 0.215 if p <= 8 else 0.15
    return _Cells(cell, min(cell, 2.4 / k), 0.28 + 0.035 * flow.reach, 9 if p <= 4 else 7.5 if p <= 8 else 6.2)


def _large_grid(flow: Dataflow) -> _Cells:
    """Return the grid of one step that has a page for itself."""
    p, k = flow.p, flow.k
    cell = min(0.62, 5.2 / p)
    return _Cells(cell, min(0.36, 3.8 / k), 0.4 + 0.045 * flow.reach, 9.5 if p <= 8 else 8.5)


class Sheet:
    """Places of the panels of a Dataflow on a page. shown: the steps that have one, 0 for the start."""

    def __init__(self, flow: Dataflow) -> None:
        self.grid = grid = _small_grid(flow)
        self.width, self.inner = flow.p * grid.cell, grid.strip + flow.k * grid.cell_height
        self.panel_height = ABOVE + self.inner + BELOW
        panels, columns = len(flow.steps) + 1, max(1, int((WIDTH - LEFT) / (self.width + GAP)))
        rows = min(-(-panels // columns), max(1, int((TALLEST - HEAD - FOOT) / self.panel_height)))
        self.shown = spared(panels, columns * rows)
        self.columns = -(-len(self.shown) // rows)
        self.pitch = min((WIDTH - LEFT) / self.columns, self.width + 4 * GAP)
        self.height = HEAD + FOOT + rows * self.panel_height

    def box(self, place: int) -> tuple[float, float, float, float]:
        """Return (left, bottom, width, height) of the panel at `place`, as shares of the page."""
        row, column = divmod(place, self.columns)
        bottom = self.height - HEAD - row * self.panel_height - ABOVE - self.inner
        left = LEFT + column * self.pitch
        return left / WIDTH, bottom / self.height, self.width / WIDTH, self.inner / self.height


def spared(panels: int, room: int) -> list[int]:
    """Return which of `panels` are drawn if there is room for `room`: all, or the first ones and the last two."""
    if panels <= room:
        return list(range(panels))
    tail = 2 if room > 3 else 1
    return [*range(room - tail), *range(panels - tail, panels)]


def draw(figure: Figure, flow: Dataflow) -> None:
    """Fill `figure`, `Sheet(flow).height` inches tall, with one panel per step, as many as are readable."""
    sheet = Sheet(flow)
    before = -1
    for place, i in enumerate(sheet.shown):
        ax = figure.add_axes(sheet.box(place))
        _panel(ax, flow, i, sheet.grid, named=place % sheet.columns == 0)
        title = "start" if i == 0 else f"step {i - 1}"
        ax.set_title(title if i == before + 1 else f"…  {title}", fontsize=9, pad=3)
        before = i
    left_out = len(flow.steps) + 1 - len(sheet.shown)
    _titles(figure, flow, f"{left_out} step{'s are' if left_out > 1 else ' is'} not drawn." if left_out else "")


def draw_step(figure: Figure, flow: Dataflow, i: int) -> None:
    """Fill `figure`, `step_height(flow)` inches tall, with the state after `i` steps and its messages as a list."""
    grid, height = _large_grid(flow), step_height(flow)
    inner = grid.strip + flow.k * grid.cell_height
    top = height - HEAD - ABOVE
    width = flow.p * grid.cell
    ax = figure.add_axes((LEFT / WIDTH, (top - inner) / height, width / WIDTH, inner / height))
    _panel(ax, flow, i, grid, named=True)
    title = f"step {i - 1}, of 0 to {len(flow.steps) - 1}" if i else "start"
    ax.set_title(title, pad=3)
    lines = messages(flow, i)
    if len(lines) > MOST_LISTED:
        lines = [*lines[: MOST_LISTED - 1], f"and {len(lines) - MOST_LISTED + 1} more"]
    figure.text((LEFT + width + 0.25) / WIDTH, top / height, "\n".join(lines), va="top", fontsize=9, linespacing=1.25)
    _titles(figure, flow)


def step_height(flow: Dataflow) -> float:
    """Return inches of a figure for `draw_step`."""
    grid = _large_grid(flow)
    listed = min(MOST_LISTED, max(map(len, flow.steps), default=1))
    return HEAD + ABOVE + max(grid.strip + flow.k * grid.cell_height, 0.165 * listed) + BELOW + FOOT


def title_of(flow: Dataflow) -> str:
    """Return what is drawn: the name, the steps, what is sent."""
    sent = flow.vectors_sent()
    low, high = number_text(sent.min()), number_text(sent.max())
    share = low if low == high else f"{low} to {high}"
    steps = counted(len(flow.steps), "step")
    return f"{flow.name} on {flow.p} ranks: {steps}, a rank sends {share} vector{'s' if high != '1' else ''}"


def _titles(figure: Figure, flow: Dataflow, left_out: str = "") -> None:
    """Write what is drawn, above; how to read it, below."""
    heading(figure, title_of(flow))
    numbers = "Number: ranks in the sum" if flow.adds else "Number: whose data"
    arrows = "Orange arrows add, blue copy." if flow.adds else ""
    footnote(figure, f"{numbers} (green: done).  {arrows}  Dot: sent, frame: received.  {left_out}")


def messages(flow: Dataflow, i: int) -> list[str]:
    """Return the messages of step `i`, one line each: "0 → 1   chunk 2"."""
    if not i:
        return [f"each rank has {'a vector' if flow.held[0].any(axis=2).all() else 'its part'}"]
    return [f"{m.source} → {m.dest}   {_cargo(flow, m)}" for m in sorted(flow.steps[i - 1])]


def _cargo(flow: Dataflow, move: Move) -> str:
    """Return what a message carries, in words."""
    if move.first < 0:
        return bytes_text(move.nbytes)
    first, last, _ = flow.chunks(move)
    if (first, last) == (0, flow.k):
        return "the whole vector"
    return f"{flow.noun} {first}" if last - first == 1 else f"{flow.noun}s {first}-{last - 1}"


def _panel(ax: Axes, flow: Dataflow, i: int, grid: _Cells, named: bool) -> None:
    """Draw the state after `i` steps, with the arrows of the last one; `named`: with the names of the chunks."""
    p, k = flow.p, flow.k
    ax.set_xlim(-0.5, p - 0.5)
    ax.set_ylim(k - 0.5, -0.5 - grid.strip / grid.cell_height)
    ax.set_xticks(range(p), [str(r) for r in range(p)])
    every = max(1, round(0.16 / grid.cell_height))
    names = [(c, f"{flow.noun} {c}") for c in range(0, k, every)] if k > 1 else [(0, "vector")]
    if named:
        ax.set_yticks([c for c, _ in names], [name for _, name in names])
    else:
        ax.set_yticks([])
    ax.tick_params(length=0, labelsize=8 if p <= 8 else 7.5, pad=1)
    bare(ax)
    _cells(ax, flow, i, grid)
    if named:
        ax.annotate("rank", (0, 0), (-3, -3), "axes fraction", "offset points", fontsize=8, ha="right", va="top")
    for move in flow.steps[i - 1] if i else ():
        color = ADDS if move.add else COPIES
        if move.first >= 0:
            _mark(ax, move, flow.chunks(move), grid, color)
        ax.add_patch(_arrow(move, flow.reach, grid, color))


def _cells(ax: Axes, flow: Dataflow, i: int, grid: _Cells) -> None:
    """Draw every chunk of every rank, shaded by how far its sum has come."""
    held, corners, faces, numbers = flow.held[i], [], [], {}
    for r, c in itertools.product(range(flow.p), range(flow.k)):
        text, face, color = cell(held[r, c], flow.wanted[r, c], flow.adds)
        corners.append(tile(r, c))
        faces.append(face)
        numbers.setdefault((text, color), []).append((r, c))
    ax.add_collection(PolyCollection(corners, facecolors=faces, edgecolors=FAINT, linewidths=0.8, zorder=1))
    for (text, color), places in numbers.items() if flow.k <= MOST_NUMBERED else ():
        if text:
            write_at(ax, text, places, grid.points, color)


def write_at(ax: Axes, text: str, places: list[tuple[float, float]], points: float, color: str) -> None:
    """Write the same short text at many (x, y), as one shape: hundreds of texts of their own would take a second."""
    shape = TextPath((0, 0), text, size=points)
    middle = shape.get_extents().get_points().mean(axis=0)
    shape = Path(shape.vertices - middle, shape.codes)
    inches = Affine2D().scale(1 / 72) + ax.figure.dpi_scale_trans
    look: Look = {"facecolors": color, "linewidths": 0, "transform": inches, "zorder": 2}
    ax.add_collection(PathCollection([shape], offsets=places, offset_transform=ax.transData, **look), autolim=False)


def cell(held: np.ndarray, wanted: np.ndarray, adds: bool) -> tuple[str, str, str]:
    """Return (text, face, color of the text) of one cell, from (p,) how often it holds each rank's data."""
    if (held < 0).any():
        return "?", UNKNOWN, INK
    if not held.any():
        return "", SHADES[0], INK
    count = int(held.sum())
    if wanted.any() and (held == wanted).all():
        face, color = GREEN, "white"
    elif adds:
        shade = 1 + round((len(SHADES) - 2) * min(1.0, math.log(count) / math.log(max(2, len(held)))))
        face, color = SHADES[shade], "white" if shade > 3 else INK
    else:
        face, color = SHADES[2], INK
    if held.max() > 1:  # somebody's data is in it twice
        color = VERMILION
    return str(count) if adds else str(int(held.argmax())), face, color


def _mark(ax: Axes, move: Move, chunks: tuple[int, int, int], grid: _Cells, color: str) -> None:
    """Draw a dot in the cells that were sent, a frame around cells that have received."""
    first, last, into = chunks
    for c in range(first, last):
        look: Look = {"markersize": grid.points * 0.47, "markeredgecolor": "white", "markeredgewidth": 0.6}
        ax.plot(move.source + 0.3, c - 0.27, "o", color=color, zorder=4, **look)
    height = last - first - 0.1
    box = Rectangle((move.dest - 0.47, into - 0.45), 0.94, height, fill=False, edgecolor=color, linewidth=1.5)
    ax.add_patch(box)


def _arrow(move: Move, reach: int, grid: _Cells, color: str) -> FancyArrowPatch:
    """Return an arrow from column to column above the cells: the farther, the higher; inside if to the right."""
    right = move.dest > move.source
    inset = 0.22 if right else -0.05
    x0, x1 = move.source + inset, move.dest - inset
    rows = grid.strip / grid.cell_height  # the strip, in units of the y axis
    far = abs(move.dest - move.source) / reach
    bottom = -0.56
    peak = bottom - (rows - 0.1) * (0.3 + 0.7 * far) / 0.75 * (0.86 if right else 1.0)
    path = Path([(x0, bottom), (x0, peak), (x1, peak), (x1, bottom)], [Path.MOVETO, *[Path.CURVE4] * 3])
    look: Look = {
        "arrowstyle": "-|>",
        "mutation_scale": grid.points * 0.85,
        "color": color,
        "linewidth": 1.2,
        "shrinkA": 0,
    }
    return FancyArrowPatch(path=path, clip_on=False, zorder=3, **look)


# -- the eight --------------------------------------------------------------------------------------------------------

HUES = (SKY, ORANGE, PURPLE, YELLOW, "#B7D7A8", "#C9B79C")  # of the ranks whose data it is
SUM = GREEN
EIGHT_LEFT, EIGHT_TOP, EIGHT_ROW, COLUMNS = 0.32, 0.62, 0.54, 2  # inches; collectives in a row


def height_of_eight(p: int) -> float:
    """Return inches of a figure for p ranks."""
    return EIGHT_TOP + 0.3 - (-len(COLLECTIVES) // COLUMNS) * (EIGHT_ROW + p * 0.2)


def draw_eight(figure: Figure, p: int) -> None:
    """Draw whose data every rank holds before and after each of the eight collectives. Letters are ranks."""
    inches, width = figure.get_figheight(), (WIDTH - EIGHT_LEFT) / COLUMNS
    for i, name in enumerate(COLLECTIVES):
        row, column = divmod(i, COLUMNS)
        top = inches - EIGHT_TOP - row * (EIGHT_ROW + p * 0.2)
        left = EIGHT_LEFT + column * width
        half = (width - 0.75) / 2
        figure.text(left / WIDTH, top / inches, name, fontsize=10.5, fontweight="bold", va="bottom")
        for k, held in enumerate(before_and_after(name, p)):
            x = left + k * (half + 0.4)
            ax = figure.add_axes((x / WIDTH, (top - 0.06 - p * 0.2) / inches, half / WIDTH, p * 0.2 / inches))
            _eight_panel(ax, held, moved=k == 1 and name == "all_to_all")
        middle = top - 0.06 - p * 0.1
        ends = [((left + half + dx) / WIDTH, middle / inches) for dx in (0.08, 0.34)]
        look: Look = {"arrowstyle": "-|>", "mutation_scale": 14, "color": GRAY, "linewidth": 1.6}
        figure.add_artist(FancyArrowPatch(*ends, transform=figure.transFigure, **look))
    heading(figure, f"Eight collectives on {p} ranks: before and after")
    letters = ", ".join(f"{chr(ord('A') + r)} from rank {r}" for r in range(min(p, 3)))
    footnote(figure, f"A column is a rank, a row is a chunk. {letters} ...; Σ is the sum over all ranks.")


def _eight_panel(ax: Axes, held: np.ndarray, moved: bool = False) -> None:
    """Draw one state. held: (p, p, p) whose data each rank's chunks hold; moved: chunk r of everybody is at r."""
    p = len(held)
    corners, faces = [], []
    for r in range(p):
        for c in range(p):
            owners = held[r, c].nonzero()[0]
            corners.append(tile(r, c))
            faces.append("white" if not len(owners) else SUM if len(owners) > 1 else HUES[owners[0]])
            if len(owners):
                chunk = r if moved else c
                text = f"Σ{chunk}" if len(owners) > 1 else f"{chr(ord('A') + owners[0])}{chunk}"
                color = "white" if len(owners) > 1 else INK
                ax.text(r, c, text, ha="center", va="center_baseline", fontsize=8.5, color=color)
    ax.add_collection(PolyCollection(corners, facecolors=faces, edgecolors=FAINT, linewidths=0.8))
    ax.set_xlim(-0.5, p - 0.5)
    ax.set_ylim(p - 0.5, -0.5)
    ax.set_xticks(range(p), [f"rank {r}" if p <= 4 else str(r) for r in range(p)])
    ax.set_yticks([])
    ax.tick_params(length=0, labelsize=8, pad=1)
    bare(ax)

"""A collective, step by step: which rank sends which chunk to whom, and whose data each chunk holds afterwards.

Columns are ranks, rows are chunks. Arrows run above the columns; cells that were sent have a dot, cells that have
received a frame. A number counts the ranks in a sum; where nothing is added it names the rank whose data it is.
"""

import itertools
import math
from typing import NamedTuple

from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D

from ..trace import number_text
from .style import FAINT, GREEN, INK, VERMILION, WIDTH, bytes_text, heading, note, tile

SHADES = ("#FFFFFF", "#DCEBF5", "#A9CFE8", "#6BAED6", "#3182BD", "#0B559F")
ADDS, COPIES = VERMILION, "#00347A"  # the colors of messages; the blue is dark enough to be seen on green
UNKNOWN = "#F3E3D3"  # of cells whose content is no sum of the ranks' data

MOST_RANKS = 16  # with more, the cells are too small to read
MOST_NUMBERED = 20  # rows up to which every cell has its number
MOST_LISTED = 20  # messages that are written out beside a step
LEFT, HEAD, FOOT = 0.72, 0.5, 0.32  # inches: beside, above and below the panels
ABOVE, BELOW, GAP = 0.2, 0.24, 0.16  # inches: the title of a panel, its ranks, the space to the next one
TALLEST = 8.3  # inches of a page of panels


class Grid(NamedTuple):
    """Sizes of one panel, in inches: of a cell, of the strip above for the arrows; points of its numbers."""

    cell: float
    cell_height: float
    strip: float
    points: float


def small_grid(story):
    """The grid of one of many panels."""
    p, k = story.p, story.k
    cell = 0.31 if p <= 4 else 0.215 if p <= 8 else 0.15
    return Grid(cell, min(cell, 2.4 / k), 0.28 + 0.035 * story.reach, 9 if p <= 4 else 7.5 if p <= 8 else 6.2)


def large_grid(story):
    """The grid of one step that has a page for itself."""
    p, k = story.p, story.k
    cell = min(0.62, 5.2 / p)
    return Grid(cell, min(0.36, 3.8 / k), 0.4 + 0.045 * story.reach, 9.5 if p <= 8 else 8.5)


class Sheet:
    """How the panels of a story lie on a page. shown: the steps that have one, 0 for the start."""

    def __init__(self, story):
        self.grid = grid = small_grid(story)
        self.width, self.inner = story.p * grid.cell, grid.strip + story.k * grid.cell_height
        self.panel_height = ABOVE + self.inner + BELOW
        panels, columns = len(story.steps) + 1, max(1, int((WIDTH - LEFT) / (self.width + GAP)))
        rows = min(-(-panels // columns), max(1, int((TALLEST - HEAD - FOOT) / self.panel_height)))
        self.shown = spared(panels, columns * rows)
        self.columns = -(-len(self.shown) // rows)
        self.pitch = min((WIDTH - LEFT) / self.columns, self.width + 4 * GAP)
        self.height = HEAD + FOOT + rows * self.panel_height

    def box(self, place):
        """(left, bottom, width, height) of the panel at `place`, as shares of the page."""
        row, column = divmod(place, self.columns)
        bottom = self.height - HEAD - row * self.panel_height - ABOVE - self.inner
        left = LEFT + column * self.pitch
        return left / WIDTH, bottom / self.height, self.width / WIDTH, self.inner / self.height


def spared(panels, room):
    """Which of `panels` are drawn where there is room for `room`: all, or the first ones and the last two."""
    if panels <= room:
        return list(range(panels))
    tail = 2 if room > 3 else 1
    return [*range(room - tail), *range(panels - tail, panels)]


def draw(figure, story):
    """Fill `figure`, `Sheet(story).height` inches tall, with one panel per step, as many as are readable."""
    sheet = Sheet(story)
    before = -1
    for place, i in enumerate(sheet.shown):
        ax = figure.add_axes(sheet.box(place))
        panel(ax, story, i, sheet.grid, named=place % sheet.columns == 0)
        title = "start" if i == 0 else f"step {i}"
        ax.set_title(title if i == before + 1 else f"…  {title}", fontsize=9, pad=3)
        before = i
    left_out = len(story.steps) + 1 - len(sheet.shown)
    titles(figure, story, f"{left_out} step{'s are' if left_out > 1 else ' is'} not drawn." if left_out else "")


def draw_step(figure, story, i):
    """Fill `figure`, `step_height(story)` inches tall, with the state after `i` steps and its messages as a list."""
    grid, height = large_grid(story), step_height(story)
    inner = grid.strip + story.k * grid.cell_height
    top = height - HEAD - ABOVE
    width = story.p * grid.cell
    ax = figure.add_axes((LEFT / WIDTH, (top - inner) / height, width / WIDTH, inner / height))
    panel(ax, story, i, grid, named=True)
    title = f"step {i} of {len(story.steps)}" if i else "start"
    ax.set_title(title, pad=3)
    lines = messages(story, i)
    if len(lines) > MOST_LISTED:
        lines = [*lines[: MOST_LISTED - 1], f"and {len(lines) - MOST_LISTED + 1} more"]
    figure.text((LEFT + width + 0.25) / WIDTH, top / height, "\n".join(lines), va="top", fontsize=9, linespacing=1.25)
    titles(figure, story)


def step_height(story):
    """Inches of a figure for `draw_step`."""
    grid = large_grid(story)
    listed = min(MOST_LISTED, max((len(step.moves) for step in story.steps), default=1))
    return HEAD + ABOVE + max(grid.strip + story.k * grid.cell_height, 0.165 * listed) + BELOW + FOOT


def title_of(story):
    """What is drawn: the name, the steps, what is sent."""
    sent = story.vectors_sent()
    low, high = number_text(sent.min()), number_text(sent.max())
    share = low if low == high else f"{low} to {high}"
    steps = f"{len(story.steps)} step{'s' if len(story.steps) != 1 else ''}"
    return f"{story.name} on {story.p} ranks: {steps}, a rank sends {share} vector{'s' if high != '1' else ''}"


def titles(figure, story, left_out=""):
    """What is drawn, above; how to read it, below."""
    heading(figure, title_of(story))
    numbers = "Number: ranks in the sum" if story.adds else "Number: whose data"
    arrows = "Orange arrows add, blue copy." if story.adds else ""
    note(figure, f"{numbers} (green: done).  {arrows}  Dot: sent, frame: received.  {left_out}")


def messages(story, i):
    """The messages of step `i`, one line each: "0 → 1   chunk 2"."""
    if not i:
        return [f"each rank has {'a vector' if story.held.any(axis=2).all() else 'its part'}"]
    return [f"{m.source} → {m.dest}   {cargo(story, m)}" for m in sorted(story.steps[i - 1].moves)]


def cargo(story, move):
    """What a message carries, in words."""
    if move.first < 0:
        return bytes_text(move.nbytes)
    if (move.first, move.last) == (0, story.k):
        return "the whole vector"
    one = move.last - move.first == 1
    return f"{story.noun} {move.first}" if one else f"{story.noun}s {move.first}-{move.last - 1}"


def panel(ax, story, i, grid, named):
    """The state after `i` steps, with the arrows of the step that led to it; `named`: with the names of the chunks."""
    p, k = story.p, story.k
    ax.set_xlim(-0.5, p - 0.5)
    ax.set_ylim(k - 0.5, -0.5 - grid.strip / grid.cell_height)
    ax.set_xticks(range(p), [str(r) for r in range(p)])
    every = max(1, round(0.16 / grid.cell_height))
    names = [(c, f"{story.noun} {c}") for c in range(0, k, every)] if k > 1 else [(0, "vector")]
    ax.set_yticks(*(zip(*names, strict=True) if named else ([],)))
    ax.tick_params(length=0, labelsize=8 if p <= 8 else 7.5, pad=1)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    cells(ax, story, i, grid)
    if named:
        ax.annotate("rank", (0, 0), (-3, -3), "axes fraction", "offset points", fontsize=8, ha="right", va="top")
    for move in story.steps[i - 1].moves if i else ():
        color = ADDS if move.add else COPIES
        if move.first >= 0:
            mark(ax, move, grid, color)
        ax.add_patch(arrow(move, story.reach, grid, color))


def cells(ax, story, i, grid):
    """Every chunk of every rank, shaded by how far its sum has come."""
    held, corners, faces, numbers = story.state(i), [], [], {}
    for r, c in itertools.product(range(story.p), range(story.k)):
        text, face, color = cell(held[r, c], story.wanted[r, c], story.adds)
        corners.append(tile(r, c))
        faces.append(face)
        numbers.setdefault((text, color), []).append((r, c))
    ax.add_collection(PolyCollection(corners, facecolors=faces, edgecolors=FAINT, linewidths=0.8, zorder=1))
    for (text, color), places in numbers.items() if story.k <= MOST_NUMBERED else ():
        if text:
            write(ax, text, places, grid.points, color)


def write(ax, text, places, points, color):
    """The same short text at many (x, y), as one shape: hundreds of texts of their own would take a second."""
    shape = TextPath((0, 0), text, size=points)
    middle = shape.get_extents().get_points().mean(axis=0)
    shape = Path(shape.vertices - middle, shape.codes)
    inches = Affine2D().scale(1 / 72) + ax.figure.dpi_scale_trans
    look = {"facecolors": color, "linewidths": 0, "transform": inches, "zorder": 2}
    ax.add_collection(PathCollection([shape], offsets=places, offset_transform=ax.transData, **look), autolim=False)


def cell(held, wanted, adds):
    """(text, face, color of the text) of one cell, from (p,) how often it holds each rank's data."""
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


def mark(ax, move, grid, color):
    """A dot in the cells that were sent, a frame around those that have received."""
    for c in range(move.first, move.last):
        look = {"markersize": grid.points * 0.47, "markeredgecolor": "white", "markeredgewidth": 0.6}
        ax.plot(move.source + 0.3, c - 0.27, "o", color=color, zorder=4, **look)
    height = move.last - move.first - 0.1
    box = Rectangle((move.dest - 0.47, move.into - 0.45), 0.94, height, fill=False, edgecolor=color, linewidth=1.5)
    ax.add_patch(box)


def arrow(move, reach, grid, color):
    """From column to column above the cells: the farther, the higher; to the right inside, to the left outside."""
    right = move.dest > move.source
    inset = 0.22 if right else -0.05
    x0, x1 = move.source + inset, move.dest - inset
    rows = grid.strip / grid.cell_height  # the strip, in units of the y axis
    far = abs(move.dest - move.source) / reach
    bottom = -0.56
    peak = bottom - (rows - 0.1) * (0.3 + 0.7 * far) / 0.75 * (0.86 if right else 1.0)
    path = Path([(x0, bottom), (x0, peak), (x1, peak), (x1, bottom)], [Path.MOVETO, *[Path.CURVE4] * 3])
    look = {"arrowstyle": "-|>", "mutation_scale": grid.points * 0.85, "color": color, "linewidth": 1.2, "shrinkA": 0}
    return FancyArrowPatch(path=path, clip_on=False, zorder=3, **look)

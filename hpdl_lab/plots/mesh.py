"""A mesh of ranks as a grid: who stands where, and below, axis by axis, who belongs to one group."""

import itertools
import math
from collections.abc import Iterator, Sequence

from matplotlib.patches import Rectangle

from ..mesh import Grid
from .colors import BLUE, GRAY, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from .style import Axes, Figure, Look, footnote, heading

TINTS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, YELLOW, GRAY)
WORDS = {
    "dp": ("dp groups", "add gradients"),
    "pp": ("pp groups", "pass activations"),
    "tp": ("tp groups", "share each layer"),
    "cp": ("cp groups", "share a sequence"),
    "ep": ("ep groups", "exchange tokens"),
}
MOST_CELLS = 128  # that can be distinguished, with their numbers
ACROSS = 17  # cells in a row on the width of a page
TOP, FOOT, BETWEEN = 0.42, 0.36, 0.3  # inches: of the title, of the foot, above the groups
TALL, FLAT, SMALL = 0.46, 0.3, 0.24  # inches: height of a cell if there are few rows, or many; of one below
FEW_ROWS = 6


class _Layout:
    """Positions of cells: the last axis across, the one before it downwards, one table for each position of the others.

    Only the first tables are drawn if there are more than MOST_CELLS ranks; `left_out` counts the others.
    """

    def __init__(self, grid: Grid) -> None:
        axes = [(axis, size) for axis, size in zip(grid.axes, grid.sizes, strict=True) if size > 1]
        self.grid = grid
        self.axes = [axis for axis, _ in axes]
        self.across = axes[-1] if axes else ("", 1)
        self.down = axes[-2] if len(axes) > 1 else ("", 1)
        self.leading = axes[:-2]
        cells = self.across[1] * self.down[1]
        tables = list(itertools.product(*(range(size) for _, size in self.leading)))
        fit = max(1, MOST_CELLS // cells)
        self.tables, self.left_out = tables[:fit], len(tables) - len(tables[:fit])
        self.step = self.across[1] + 1.1  # from one table to the next, in cells
        self.per_row = max(1, min(len(self.tables), int(ACROSS // self.step)))
        self.table_rows = math.ceil(len(self.tables) / self.per_row)
        self.head = 0.5 if not self.axes else 1.15 if self.leading else 0.75  # above a table, in cells
        self.tall = self.down[1] + self.head
        self.cell = TALL if self.table_rows * self.tall <= FEW_ROWS else FLAT  # inches

    @property
    def width(self) -> float:
        return self.per_row * self.step

    @property
    def height(self) -> float:
        return self.table_rows * self.tall

    def cells(self) -> Iterator[tuple[float, float, int]]:
        """Yield (x, y, rank) of every cell that is drawn, y downwards."""
        for k, coordinates in enumerate(self.tables):
            left, top = (k % self.per_row) * self.step, (k // self.per_row) * self.tall
            where = dict(zip((axis for axis, _ in self.leading), coordinates, strict=True))
            for i, j in itertools.product(range(self.down[1]), range(self.across[1])):
                here = where | {axis: n for axis, n in ((self.down[0], i), (self.across[0], j)) if axis}
                yield left + j, top + i, self.grid.rank(**here)

    def labels(self) -> Iterator[tuple[float, float, str, str, bool]]:
        """Yield (x, y, text, align, bold) of the coordinates next to the cells: of tables, columns and rows."""
        for k, coordinates in enumerate(self.tables):
            left, top = (k % self.per_row) * self.step, (k // self.per_row) * self.tall
            title = " ".join(f"{axis} {n}" for (axis, _), n in zip(self.leading, coordinates, strict=True))
            if title:
                yield left - 0.45, top - 1.28, title, "left", True
            for j in range(self.across[1]) if self.across[0] else ():
                yield left + j, top - 0.72, f"{self.across[0]} {j}", "center", False
            for i in range(self.down[1]) if self.down[0] and k % self.per_row == 0 else ():
                yield left - 0.58, top + i, f"{self.down[0]} {i}", "right", False


def height(grid: Grid) -> float:
    """Return inches of the picture of a grid."""
    layout = _Layout(grid)
    below = BETWEEN + SMALL * layout.height if layout.axes else 0
    return TOP + layout.cell * layout.height + below + FOOT


def draw(figure: Figure, grid: Grid, hosts: Sequence[str] = (), title: str = "", foot: str = "") -> None:
    """Fill `figure` with the grid.

    Args:    hosts: for each rank the host, such as "node1"; may be empty.
    """
    layout = _Layout(grid)
    tall = figure.get_size_inches()[1]
    share = layout.cell * layout.height / tall
    ax = figure.add_axes((0.07, 1 - TOP / tall - share, 0.91, share))
    _table(ax, layout)
    for x, y, rank in layout.cells():
        _box(ax, x, y, "#EEF3F8")
        where = hosts[rank] if rank < len(hosts) else ""
        look: Look = {"ha": "center", "va": "center", "fontsize": 11 if layout.cell == TALL else 9}
        ax.text(x, y - (0.14 if where else 0), f"{rank}", fontweight="bold", **look)
        if where:
            ax.text(x, y + 0.24, where, ha="center", va="center", fontsize=6.8, color="#555555")
    for x, y, text, align, bold in layout.labels():
        weight = "bold" if bold else "normal"
        ax.text(x, y, text, ha=align, va="center", fontsize=8.2, color="#555555", fontweight=weight)
    for k, axis in enumerate(layout.axes):
        _groups_of(figure, layout, axis, k, SMALL * layout.height / tall, FOOT / tall)
    if any(len(grid.groups(axis)) > len(TINTS) for axis in layout.axes):
        foot = f"Colored: the first {len(TINTS)} groups of each axis.  {foot}"
    if layout.left_out:
        foot = f"Not drawn: {layout.left_out} more tables like these.  {foot}"
    heading(figure, title)
    footnote(figure, foot)


def _groups_of(figure: Figure, layout: _Layout, axis: str, k: int, share: float, bottom: float) -> None:
    """Draw the grid once more, small: the ranks of one group along `axis` have one color."""
    n = len(layout.axes)
    left = 0.07 + k * 0.91 / n
    ax = figure.add_axes((left, bottom, 0.91 / n - 0.04, share))
    _table(ax, layout)
    groups = layout.grid.groups(axis)
    group_of = {rank: i for i, group in enumerate(groups) for rank in group}
    for x, y, rank in layout.cells():
        group = group_of[rank]  # colors that come again would join what does not belong together
        _box(ax, x, y, TINTS[group] if group < len(TINTS) else "#FFFFFF", alpha=0.55)
        if layout.width <= 10:
            ax.text(x, y, f"{rank}", ha="center", va="center", fontsize=7.5)
    name, what = WORDS[axis]
    text = f"{len(groups)} {name if len(groups) > 1 else name[:-1]} of {len(groups[0])}: {what}"
    ax.text(-0.5, -0.62, text, fontsize=8.2, va="bottom", color=INK)


def _table(ax: Axes, layout: _Layout) -> None:
    """Make axes without frame in which a cell is 1 x 1, from the left."""
    ax.set_xlim(-0.5, max(layout.width, 7.0) - 0.5)
    ax.set_ylim(layout.height - layout.head - 0.5, -layout.head - 0.5)
    ax.axis("off")


def _box(ax: Axes, x: float, y: float, color: str, alpha: float = 1.0) -> None:
    look: Look = {"facecolor": color, "alpha": alpha, "edgecolor": "#AAB7C4", "linewidth": 0.8}
    ax.add_patch(Rectangle((x - 0.46, y - 0.44), 0.92, 0.88, **look))

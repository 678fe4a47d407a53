"""The ring all-reduce, step by step: which rank passes which chunk on, and whose contributions each chunk holds."""

from typing import NamedTuple

from matplotlib.patches import FancyArrowPatch, Rectangle

from .style import FAINT, GREEN, GREY, INK, VERMILION, heading

SHADES = ("#FFFFFF", "#DCEBF5", "#A9CFE8", "#6BAED6", "#3182BD", "#0B559F")


GAP, HEAD = 0.55, 0.5  # inches: between rows of panels, above all of them
MOST_RANKS = 6  # with more, the cells are too small to read


class Step(NamedTuple):
    """One step of all ranks at once: rank r sends chunk `chunks[r]` to r + 1, which adds it or, later, copies it."""

    phase: str  # "reduce-scatter" or "all-gather"
    chunks: tuple


def schedule(p):
    """The 2(p - 1) steps of collectives/ring.py on p ranks."""
    scatter = [Step("reduce-scatter", tuple((r - i - 1) % p for r in range(p))) for i in range(p - 1)]
    gather = [Step("all-gather", tuple((r - i) % p for r in range(p))) for i in range(p - 1)]
    return scatter + gather


def holdings(p, steps):
    """After each of `steps`: a (rank, chunk) table of the sets of ranks whose contributions are in that chunk."""
    held = [[{r} for _ in range(p)] for r in range(p)]
    out = [held]
    for step in steps:
        after = [[set(c) for c in row] for row in held]
        for r, c in enumerate(step.chunks):
            to = (r + 1) % p
            after[to][c] = held[r][c] | held[to][c] if step.phase == "reduce-scatter" else set(held[r][c])
        held = after
        out.append(held)
    return out


def height(p):
    """Inches of a figure for `p` ranks in which cells are about square."""
    return rows_of(p) * (0.27 * p + GAP) + HEAD


def rows_of(p):
    """Reduce-scatter and all-gather get a row each, unless all of it fits into one."""
    return 1 if p < 4 else 2


def draw(figure, p, upto=None):
    """Fill `figure` with one panel per step; `upto` steps have been done (None: all), the others are empty frames.

    Columns are ranks, rows are chunks; a cell's shade and number say from how many ranks it holds the sum.
    """
    steps = schedule(p)
    tables = holdings(p, steps)
    upto = len(steps) if upto is None else upto
    rows, inches = rows_of(p), figure.get_figheight()
    columns = -(-len(tables) // rows)
    axes = figure.subplots(rows, columns, squeeze=False).flat
    panel_height = (inches - HEAD) / rows - GAP
    bottom, top = (GAP - 0.25) / inches, 1 - (HEAD + 0.25) / inches
    figure.subplots_adjust(left=0.08, right=0.985, bottom=bottom, top=top, wspace=0.14, hspace=GAP / panel_height)
    for i, ax in enumerate(axes):
        if i >= len(tables):
            ax.axis("off")
            continue
        panel(ax, tables[i], steps[i - 1] if i else None, i <= upto)
        weight, color = "bold" if i == upto else "normal", INK if i <= upto else GREY
        title = "start" if i == 0 else f"{i}. {steps[i - 1].phase}"
        ax.set_title(title, fontsize=9 if p < 6 else 8, fontweight=weight, color=color)
        if i % columns == 0:
            ax.set_yticks(range(p), [f"chunk {c}" for c in range(p)])
            ax.annotate("rank", (0, 0), (-4, -3.5), "axes fraction", "offset points", fontsize=8, ha="right", va="top")
    heading(figure, f"Ring all-reduce on {p} ranks: each cell says from how many ranks it holds the sum")


def panel(ax, table, step, done):
    """One state of all ranks, with the arrows of the step that led to it."""
    p = len(table)
    ax.set_xlim(-0.5, p - 0.5)
    ax.set_ylim(p - 0.5, -0.5)
    ax.set_xticks(range(p), [str(r) for r in range(p)])
    ax.set_yticks([])
    ax.tick_params(length=0, labelsize=8)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    for r in range(p):
        for c in range(p):
            count = len(table[r][c])
            shade = round(count / p * (len(SHADES) - 1))
            face = (GREEN if count == p else SHADES[shade]) if done else "white"
            ax.add_patch(Rectangle((r - 0.42, c - 0.42), 0.84, 0.84, facecolor=face, edgecolor=FAINT))
            if done:
                color = "white" if shade > 3 else INK
                ax.text(r, c, str(count), ha="center", va="center", fontsize=9, color=color)
    if step is not None and done:
        for r, c in enumerate(step.chunks):
            wraps = r == p - 1
            start, stop = ((r + 0.2, c), (p - 0.42, c)) if wraps else ((r + 0.2, c), (r + 0.8, c))
            ax.add_patch(arrow(start, stop, p))
            if wraps:  # and comes in again from the left
                ax.add_patch(arrow((-0.58, c), (-0.2, c), p))


def arrow(start, stop, p):
    """A short arrow between two cells, smaller where the cells are."""
    look = {"arrowstyle": "-|>", "mutation_scale": 8 if p < 5 else 5, "color": VERMILION, "linewidth": 1.4}
    return FancyArrowPatch(start, stop, clip_on=False, **look)

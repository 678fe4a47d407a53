"""A search over grids: step time against memory of every grid, the limit, the best one, and the attendee's guess."""

from ..trace import seconds_text
from .grid import bytes_amount
from .style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION, heading, log_axis, note, x_label

HEIGHT = 4.4
COLORS = (BLUE, SKY, GREEN, ORANGE, PURPLE)
MOST_NAMED = 4  # grids that get a label, besides the best and the guess


def draw(figure, rows, best=None, guess=None, title="", foot=""):
    """Fill `figure`.

    Args:    rows: grid.model.Predictions; best: the one that is marked, or None; guess: the row that the attendee
             expects to be the best, or None.
    """
    ax = figure.add_axes((0.09, 0.16, 0.6, 0.66))
    stages = sorted({row.grid["pp"] for row in rows})
    shade = {pp: COLORS[min(i, len(COLORS) - 1)] for i, pp in enumerate(grouped(stages))}
    for row in rows:
        color = shade[group_of(row.grid["pp"], shade)] if row.fits else "#C4C4C4"
        marker = "s" if row.recompute else "o"
        ax.plot(row.memory.total, row.seconds, marker, color=color, markersize=7, alpha=0.85, zorder=3 + row.fits)
    limit = rows[0].limit
    totals = [row.memory.total for row in rows]
    ax.set_xscale("log")
    ax.set_xlim(min(*totals, limit) / 1.5, max(*totals, limit) * 1.5)
    log_axis(ax, [row.seconds for row in rows], seconds_text)
    ax.xaxis.set_major_formatter(lambda v, _: bytes_amount(v))
    narrow = max(*totals, limit) < 100 * min(*totals, limit)
    ax.xaxis.set_minor_formatter(lambda v, _: bytes_amount(v) if narrow and f"{v:.0e}"[0] in "25" else "")
    ax.tick_params(axis="x", which="minor", labelsize=7.5, labelcolor=GREY)
    ax.axvline(limit, color=VERMILION, linewidth=1.8)
    ax.set_ylabel("predicted step")
    x_label(ax, "bytes on the fullest rank")
    for row, color, size in ((best, INK, 17), (guess, BLUE, 13)):
        if row is not None:
            ax.plot(row.memory.total, row.seconds, "o", mfc="none", mec=color, mew=2, markersize=size, zorder=6)
    beside(figure, rows, best, guess, shade)
    heading(figure, title, f"limit {bytes_amount(limit)} per rank (red); grey: does not fit; square: recomputed")
    note(figure, foot)


def grouped(stages):
    """The numbers of stages that get a color of their own: all, or powers of about four."""
    if len(stages) <= len(COLORS):
        return stages
    return sorted({stages[round(i * (len(stages) - 1) / (len(COLORS) - 1))] for i in range(len(COLORS))})


def group_of(pp, shade):
    """The largest number with a color that is no more than pp."""
    return max(key for key in shade if key <= pp)


def beside(figure, rows, best, guess, shade):
    """The colors, and the fastest grids that fit, as a list."""
    x, y = 0.72, 0.8
    steps = sorted(shade)
    for i, pp in enumerate(steps):
        last = "" if i + 1 == len(steps) or steps[i + 1] == pp + 1 else f" to {steps[i + 1] - 1}"
        more = " and more" if i + 1 == len(steps) and max(row.grid["pp"] for row in rows) > pp else last
        figure.text(x, y, "●", fontsize=10, va="center", color=shade[pp])
        figure.text(x + 0.022, y, f"pp {pp}{more}", fontsize=8.5, va="center")
        y -= 0.043
    y -= 0.03
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(row.memory.total for row in rows)
        figure.text(x, y, f"Nothing fits: the least\nis {bytes_amount(least)}.", fontsize=9, va="top", color=VERMILION)
    shown = sorted(fitting, key=lambda row: row.seconds)[: MOST_NAMED + 1]
    for row in shown + ([guess] if guess is not None and guess not in shown else []):
        mark = "best" if row is best else ""
        mark = ", ".join(filter(None, [mark, "yours" if row is guess else ""]))
        color = BLUE if row is guess else INK
        weight = "bold" if mark else "normal"
        figure.text(x, y, f"{name_of(row)}   {mark}", fontsize=8.5, va="center", fontweight=weight, color=color)
        told = f"{seconds_text(row.seconds)}, {bytes_amount(row.memory.total)}, bubble {abs(row.bubble):.0%}"
        figure.text(x, y - 0.036, told if row.fits else f"{told}: too much", fontsize=8, va="center", color=GREY)
        y -= 0.09


def name_of(row):
    return "dp {} pp {} tp {}".format(*(row.grid[axis] for axis in ("dp", "pp", "tp")))

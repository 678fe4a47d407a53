"""One hybrid grid as a picture: what a rank holds, how long a step takes and why, what goes over each axis; a search
over all of them: step time against memory.

Every bar is predicted; below it, once the grid has run, the measured one, dotted. Bytes are decimal: 1 MB is 10^6.
"""

from ..trace import seconds_text
from ..units import amount_text, counted
from .style import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    amounts,
    heading,
    legend,
    log_axis,
    note,
    rows_only,
    x_label,
)  # fmt: skip

HEIGHT = 4.7  # inches
MEMORY = {"parameters": BLUE, "gradients": SKY, "optimizer": ORANGE, "activations": GREEN}
TIME = {"compute": GREEN, "tp": PURPLE, "pp": SKY, "dp": ORANGE, "bubble": "#9AA7B4", "cores": FAINT}
NAMES = {"tp": "tp messages", "pp": "pp messages", "dp": "dp left over", "bubble": "waiting for stages"}
AXES = {"tp": PURPLE, "pp": SKY, "dp": ORANGE}
MEASURED = {"hatch": "....", "edgecolor": INK, "linewidth": 0.8}
OVER = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
FAR = 8  # times the bar: a limit beyond it is told in words


def draw(figure, row, measured=None, why="", title=""):
    """Fill `figure`, HEIGHT inches tall.

    Args:    row: a grid.model.Prediction, or None where the grid cannot be. measured: record with seconds, bubble,
             memory (parameters, gradients, optimizer, activations, total), links, how; or None; memory and links may
             be None. why: the sentence about what cannot be.
    """
    heading(figure, title, "" if row is None else told(row))
    if row is None:
        figure.text(0.5, 0.5, "this grid cannot be", ha="center", fontsize=13, color=VERMILION, fontweight="bold")
        figure.text(0.5, 0.42, why, ha="center", va="top", fontsize=9, wrap=True)
        return
    memory(figure.add_axes((0.115, 0.64, 0.86, 0.13)), row, measured)
    time(figure.add_axes((0.115, 0.355, 0.86, 0.13)), row, measured)
    links(figure.add_axes((0.115, 0.095, 0.5, 0.12)), row, measured)
    bubble(figure.add_axes((0.735, 0.095, 0.24, 0.12)), row, measured)
    if measured is not None:
        note(figure, f"Dotted: {measured.how}.")
    elif row.limit < row.memory.total:
        note(figure, "It needs more than a rank may hold: another grid, recomputation or more micro-batches need less.")


def told(row):
    """The line below the title."""
    batches = counted(row.micro_batches, "micro-batch", "micro-batches")
    more = f"{batches} of {row.micro_batch}, {row.schedule}"
    return f"{more}{', activations recomputed' if row.recompute else ''}: {seconds_text(row.seconds)} a step"


def memory(ax, row, measured):
    """A stacked bar of what the fullest rank holds, and the limit."""
    bars = [(row.memory, {})]
    if measured is not None and measured.memory is not None:
        bars.append((measured.memory, MEASURED))
    longest = max(held.total for held, _ in bars)
    inside = row.limit <= FAR * longest
    for y, (held, look) in enumerate(bars):
        left = 0.0
        for name, color in MEMORY.items():
            ax.barh(y, getattr(held, name), 0.72, left, color=color, **look)
            left += getattr(held, name)
        ax.text(left, y, f" {amount_text(left)}", va="center", fontsize=8.5, bbox=OVER, zorder=5)
    frame(ax, 1.14 * max(longest, row.limit if inside else 0), names(len(bars), measured))
    over = not row.fits
    if inside:
        ax.axvline(row.limit, color=VERMILION, linewidth=2)
    limit = f"limit {amount_text(row.limit)}{', which is exceeded' if over else ''}"
    ax.set_title("the fullest rank holds", fontsize=9.5, pad=16)
    ax.set_title(limit, loc="right", fontsize=9, pad=16, color=VERMILION)
    held = [(color, f"{name} {amount_text(getattr(row.memory, name))}") for name, color in MEMORY.items()]
    legend(ax, held, 0, 1.1, size=8.2)
    ax.xaxis.set_major_formatter(amounts("B"))


def time(ax, row, measured):
    """A stacked bar of what a step consists of."""
    bars = 1 if measured is None else 2
    left = 0.0
    for name, color in TIME.items():
        ax.barh(0, row.parts[name], 0.72, left, color=color, edgecolor=GREY, linewidth=0.4)
        left += row.parts[name]
    ax.text(left, 0, f" {seconds_text(row.seconds)}", va="center", fontsize=8.5)
    longest = row.seconds
    if measured is not None:
        ax.barh(1, measured.seconds, 0.72, color=YELLOW, **MEASURED)
        ax.text(measured.seconds, 1, f" {seconds_text(measured.seconds)}", va="center", fontsize=8.5)
        longest = max(longest, measured.seconds)
    frame(ax, 1.14 * longest, names(bars, measured))
    ax.set_title("a step takes", fontsize=9.5, pad=16)
    shown = {name: color for name, color in TIME.items() if name != "cores"}
    if row.parts["cores"]:
        core = f"light grey: waiting for a core {seconds_text(row.parts['cores'])}"
        ax.set_title(core, loc="right", fontsize=8.2, pad=18, fontweight="normal")
    parts = [(color, f"{NAMES.get(name, name)} {seconds_text(row.parts[name])}") for name, color in shown.items()]
    legend(ax, parts, 0, 1.1, size=8.2)
    ax.xaxis.set_major_formatter(amounts("s"))


def links(ax, row, measured):
    """Bytes that the busiest rank sends along each axis; what is measured beside them, as text."""
    sent = sent_over(row.links)
    most = max([*sent.values(), 1])
    for y, (axis, color) in enumerate(AXES.items()):
        ax.barh(y, sent[axis], 0.72, color=color)
        text = amount_text(sent[axis])
        if measured is not None and measured.links is not None:
            text += f"   measured {amount_text(measured.links[axis])}"
        ax.text(sent[axis], y, f" {text}", va="center", fontsize=8.5)
    frame(ax, 1.75 * most, list(AXES))
    ax.set_xticks([])
    ax.set_title("bytes that a rank sends per step; tied weights count as dp", fontsize=9.5, pad=3)


def sent_over(links):
    """Bytes over "tp", "pp", "dp": gradients of tied weights, which two stages add up, count among those of dp."""
    return links | {"dp": links["dp"] + links.get("shared", 0)}


def bubble(ax, row, measured):
    """The share of the pipeline's time in which its ranks wait."""
    shares = [row.bubble] + ([measured.bubble] if measured is not None and measured.bubble is not None else [])
    for y, (share, look) in enumerate(zip(shares, ({}, MEASURED), strict=False)):
        ax.barh(y, share, 0.72, color="#9AA7B4", **look)
        ax.text(share, y, f" {abs(share):.1%}", va="center", fontsize=8.5)
    frame(ax, 1.0, names(len(shares), measured))
    ax.set_xticks([])
    ax.set_title("bubble", fontsize=9.5, pad=3)


def names(bars, measured):
    """What the bars are called, the first of which is predicted."""
    return ["predicted", measured.kind] if bars == 2 else ["predicted"]


def frame(ax, right, names):
    """Axes of a bar for each of `names`, from top to bottom."""
    ax.set_xlim(0, right or 1)
    rows_only(ax, len(names), names)
    ax.locator_params(axis="x", nbins=6)


# -- a search ----------------------------------------------------------------------------------------------------------

SEARCH_HEIGHT = 4.4
SHADES = (BLUE, SKY, GREEN, ORANGE, PURPLE)
MOST_NAMED = 4  # grids that get a label, besides the best and the guess


def draw_search(figure, rows, best=None, guess=None, title="", foot=""):
    """Fill `figure`.

    Args:    rows: grid.model.Predictions; best: the one that is marked, or None; guess: the row that the attendee
             expects to be the best, or None.
    """
    ax = figure.add_axes((0.09, 0.16, 0.6, 0.66))
    stages = sorted({row.grid["pp"] for row in rows})
    shade = {pp: SHADES[min(i, len(SHADES) - 1)] for i, pp in enumerate(grouped(stages))}
    for row in rows:
        color = shade[group_of(row.grid["pp"], shade)] if row.fits else "#C4C4C4"
        marker = "s" if row.recompute else "o"
        ax.plot(row.memory.total, row.seconds, marker, color=color, markersize=7, alpha=0.85, zorder=3 + row.fits)
    limit = rows[0].limit
    totals = [row.memory.total for row in rows]
    ax.set_xscale("log")
    ax.set_xlim(min(*totals, limit) / 1.5, max(*totals, limit) * 1.5)
    log_axis(ax, [row.seconds for row in rows], "s")
    ax.xaxis.set_major_formatter(amounts("B"))
    narrow = max(*totals, limit) < 100 * min(*totals, limit)
    ax.xaxis.set_minor_formatter(lambda v, _: amount_text(v) if narrow and f"{v:.0e}"[0] in "25" else "")
    ax.tick_params(axis="x", which="minor", labelsize=7.5, labelcolor=GREY)
    ax.axvline(limit, color=VERMILION, linewidth=1.8)
    ax.set_ylabel("predicted step")
    x_label(ax, "bytes on the fullest rank")
    for row, color, size in ((best, INK, 17), (guess, BLUE, 13)):
        if row is not None:
            ax.plot(row.memory.total, row.seconds, "o", mfc="none", mec=color, mew=2, markersize=size, zorder=6)
    beside(figure, rows, best, guess, shade)
    heading(figure, title, f"limit {amount_text(limit)} per rank (red); gray: does not fit; square: recomputed")
    note(figure, foot)


def grouped(stages):
    """The numbers of stages that get a color of their own: all, or powers of about four."""
    if len(stages) <= len(SHADES):
        return stages
    return sorted({stages[round(i * (len(stages) - 1) / (len(SHADES) - 1))] for i in range(len(SHADES))})


def group_of(pp, shade):
    """The largest number with a color that is no more than pp."""
    return max(key for key in shade if key <= pp)


def beside(figure, rows, best, guess, shade):
    """The colors, and the fastest grids that fit, as a list."""
    x, steps, entries = 0.72, sorted(shade), []
    for i, pp in enumerate(steps):
        last = "" if i + 1 == len(steps) or steps[i + 1] == pp + 1 else f" to {steps[i + 1] - 1}"
        more = " and more" if i + 1 == len(steps) and max(row.grid["pp"] for row in rows) > pp else last
        entries.append((shade[pp], f"pp {pp}{more}"))
    legend(figure, entries, x, 0.82 - 0.0215 * len(entries), columns=1)
    y = 0.77 - 0.043 * len(entries)
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(row.memory.total for row in rows)
        figure.text(x, y, f"Nothing fits: the least\nis {amount_text(least)}.", fontsize=9, va="top", color=VERMILION)
    shown = sorted(fitting, key=lambda row: row.seconds)[: MOST_NAMED + 1]
    for row in shown + ([guess] if guess is not None and guess not in shown else []):
        mark = "best" if row is best else ""
        mark = ", ".join(filter(None, [mark, "yours" if row is guess else ""]))
        color = BLUE if row is guess else INK
        weight = "bold" if mark else "normal"
        figure.text(x, y, f"{name_of(row)}   {mark}", fontsize=8.5, va="center", fontweight=weight, color=color)
        told = f"{seconds_text(row.seconds)}, {amount_text(row.memory.total)}, bubble {abs(row.bubble):.0%}"
        figure.text(x, y - 0.036, told if row.fits else f"{told}: too much", fontsize=8, va="center", color=GREY)
        y -= 0.09


def name_of(row):
    return "dp {} pp {} tp {}".format(*(row.grid[axis] for axis in ("dp", "pp", "tp")))

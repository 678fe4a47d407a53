"""One hybrid grid as a picture: what a rank holds, how long a step takes and why, what goes over each axis.

Every bar is predicted; below it, once the grid has run, the measured one, dotted. Bytes are decimal: 1 MB is 10^6.
"""

from ..trace import number_text, seconds_text
from .style import BLUE, FAINT, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION, YELLOW, counted, heading, note

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
        ax.text(left, y, f" {bytes_amount(left)}", va="center", fontsize=8.5, bbox=OVER, zorder=5)
    frame(ax, 1.14 * max(longest, row.limit if inside else 0), names(len(bars), measured))
    over = not row.fits
    if inside:
        ax.axvline(row.limit, color=VERMILION, linewidth=2)
    limit = f"limit {bytes_amount(row.limit)}{', which is exceeded' if over else ''}"
    ax.set_title("the fullest rank holds", fontsize=9.5, pad=16)
    ax.set_title(limit, loc="right", fontsize=9, pad=16, color=VERMILION)
    legend(ax, [(name, color, getattr(row.memory, name)) for name, color in MEMORY.items()], bytes_amount)
    ax.xaxis.set_major_formatter(lambda v, _: bytes_amount(v) if v else "0")


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
    legend(ax, [(NAMES.get(name, name), color, row.parts[name]) for name, color in shown.items()], seconds_text)
    ax.xaxis.set_major_formatter(lambda v, _: seconds_text(v) if v else "0")


def links(ax, row, measured):
    """Bytes that the busiest rank sends along each axis; what is measured beside them, as text."""
    sent = sent_over(row.links)
    most = max([*sent.values(), 1])
    for y, (axis, color) in enumerate(AXES.items()):
        ax.barh(y, sent[axis], 0.72, color=color)
        text = bytes_amount(sent[axis])
        if measured is not None and measured.links is not None:
            text += f"   measured {bytes_amount(measured.links[axis])}"
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
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_yticks(range(len(names)), names, fontsize=8.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.locator_params(axis="x", nbins=6)


def legend(ax, entries, text_of):
    """Each color with its name and amount, in a line above the bars. entries: (name, color, amount)."""
    x, figure = 0.0, ax.figure
    for name, color, amount in entries:
        ax.text(x, 1.1, "■", fontsize=10, va="center", color=color, transform=ax.transAxes)
        text = ax.text(x + 0.02, 1.1, f"{name} {text_of(amount)}", fontsize=8.2, va="center", transform=ax.transAxes)
        x += 0.045 + text.get_window_extent(figure.canvas.get_renderer()).width / ax.get_window_extent().width


def bytes_amount(nbytes):
    """Three digits and a decimal unit: 237056 -> "237 kB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * scale:
            return f"{number_text(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"

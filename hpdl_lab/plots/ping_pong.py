"""What a message costs: measured times over sizes, the line alpha + beta n through them, and a prediction."""

import numpy as np

from ..trace import number_text, seconds_text
from .style import BLUE, GREY, INK, VERMILION, heading, label_ends, log_axis, note, size_axis


def draw(figure, rows, fit=None, prediction=None, title="", foot=""):
    """Fill `figure` from rows: dicts with size (bytes), seconds (median, one way), p25, p75.

    Args:    fit: (alpha s, beta s/byte), or None as long as there is none; prediction: {bytes: seconds} or None.
    """
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.085, right=0.83, bottom=0.2, top=0.785, wspace=0.27)
    guess = sorted((prediction or {}).items())
    sizes = sorted({r["size"] for r in rows} | {n for n, _ in guess}) or [8, 2**20]
    lines = [(guess, INK, (0, (5, 2)), "your prediction")] if guess else []
    if fit:
        line = np.geomspace(sizes[0], sizes[-1], 60)
        lines.append(([(n, fit[0] + fit[1] * n) for n in line], VERMILION, "-", "α + β n"))
    measured = [(r["size"], r["seconds"]) for r in sorted(rows, key=lambda r: r["size"])]
    points = measured + [point for line, *_ in lines for point in line]
    for ax, value, text in ((left, seconds_of, seconds_text), (right, bandwidth, number_text)):
        size_axis(ax, sizes)
        log_axis(ax, [value(n, t) for n, t in points], text)
        for line, color, dash, _ in lines:
            marker = {"marker": "*"} if color == INK else {}
            ax.plot([n for n, _ in line], [value(n, t) for n, t in line], color=color, linestyle=dash, **marker)
        ax.plot([n for n, _ in measured], [value(n, t) for n, t in measured], "o", color=BLUE, zorder=4)
    for r in rows:
        left.plot([r["size"]] * 2, [r["p25"], r["p75"]], color=BLUE, linewidth=3, alpha=0.3)
    left.set_title("time of a message, one way")
    right.set_title("bytes / time, GB/s")
    ends = [(bandwidth(*line[-1]), name, color, False) for line, color, _, name in lines]
    if measured:
        ends.append((bandwidth(*measured[-1]), "measured", BLUE, True))
    label_ends(right, ends)
    if fit:
        parts_of(left, right, *fit)
    heading(figure, title, sentence(*fit) if fit else "")
    note(figure, foot)


def parts_of(left, right, alpha, beta):
    """Where latency decides, and where bandwidth does."""
    if alpha > 0:
        left.axhline(alpha, color=GREY, linewidth=1, linestyle=(0, (1, 1.5)), zorder=1)
        left.annotate("α", (0, alpha), (4, 3), ("axes fraction", "data"), "offset points", color=GREY)
    if beta > 0:
        right.axhline(1e-9 / beta, color=GREY, linewidth=1, linestyle=(0, (1, 1.5)), zorder=1)
        right.annotate("1/β", (0, 1e-9 / beta), (4, -12), ("axes fraction", "data"), "offset points", color=GREY)


def sentence(alpha, beta):
    """The two numbers, and the size at which both parts are equal."""
    text = f"α = {seconds_text(alpha)} per message"
    if beta > 0:
        text += f", 1/β = {number_text(1e-9 / beta)} GB/s"
    if alpha > 0 and beta > 0:
        text += f"; at {float(f'{alpha / beta:.2g}'):,.0f} B half of the time is α"
    return text


def seconds_of(_, seconds):
    """What the left panel shows."""
    return seconds


def bandwidth(nbytes, seconds):
    """GB/s: what the right panel shows."""
    return nbytes / seconds / 1e9

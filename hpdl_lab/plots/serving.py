"""Throughput against latency of an engine that serves requests: measured points, the model's line, and a prediction."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

from .colors import BLUE, GRAY, INK, ORANGE
from .style import Axes, Figure, Rows, footnote, heading, legend, log_axis, oversubscribed_note, x_label

DOTS, DASHES = (0, (1, 1.2)), (0, (5, 2))
APART = 36, 14  # pixels from the name of one point to the name of another


def draw(
    figure: Figure,
    rows: Rows,
    model: Sequence[tuple[float, float]] = (),
    prediction: float | None = None,
    title: str = "",
    foot: str = "",
) -> None:
    """Fill `figure` with the time between two tokens of a request, and the time to its first one, against tokens/s.

    Args:    rows: dicts of inference.load.serve_rates: throughput (tokens/s), between_s, between_p95_s, first_s,
             first_p95_s, rate, ranks, cores; those with "done" < "requests" are still under way, and hollow.
             model: [(tokens/s, s between two tokens)] for 1, 2, ... running requests; prediction: tokens/s at most.
    """
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    figure.subplots_adjust(left=0.085, right=0.975, bottom=0.2, top=0.735, wspace=0.24)
    ends = [r["throughput"] for r in rows] + [x for x, _ in model] + [prediction or 0.0]
    for ax, name, key in ((left, "between two tokens of a request", "between"), (right, "to its first token", "first")):
        line = model if ax is left else ()
        times = [r[f"{key}{end}"] for r in rows for end in ("_s", "_p95_s")] + [t for _, t in line]
        log_axis(ax, times, "s")
        ax.set_xlim(0, 1.08 * max([1.0, *ends]))
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        ax.set_title(f"time {name}")
        x_label(ax, "tokens per second")
        _points(ax, rows, key, names=ax is left)
        if line:
            ax.plot(*zip(*line, strict=True), color=INK, linestyle=DOTS, zorder=2, label="model: bytes, α and β")
        if prediction:
            ax.axvline(prediction, color=ORANGE, linestyle=DASHES, zorder=1, label="your guess")
    if ends[:-1] or prediction:
        legend(figure, [*zip(*left.get_legend_handles_labels(), strict=True)], 0.46, 0.845)
    now = "waiting for the first requests"
    if rows:
        now = f"requests arrive at {rows[0]['rate']:g} to {rows[-1]['rate']:g} per s"
    if rows and rows[-1]["done"] < rows[-1]["requests"]:
        now = f"{rows[-1]['rate']:g} requests/s: {rows[-1]['done']} of {rows[-1]['requests']} have ended"
    heading(figure, title, oversubscribed_note(rows) or now)
    footnote(figure, foot)


def _points(ax: Axes, rows: Rows, key: str, names: bool) -> None:
    """Draw medians, with a line up to what 95% of the requests stay below. names: write the rates if they fit."""
    written: list[np.ndarray] = []  # (x, y) in pixels
    ax.plot([r["throughput"] for r in rows], [r[f"{key}_s"] for r in rows], color=GRAY, linewidth=0.8, zorder=2)
    for i, r in enumerate(rows):
        color = GRAY if r["ranks"] > r["cores"] else BLUE
        face = color if r["done"] == r["requests"] else "white"
        x, y, high = r["throughput"], r[f"{key}_s"], r[f"{key}_p95_s"]
        label = None if i else "measured: median, 95%"
        ax.errorbar([x], [y], [[0], [max(0, high - y)]], fmt="o", color=color, mfc=face, capsize=3, label=label)
        at = ax.transData.transform((x, y))
        if names and all(abs(at[0] - px) > APART[0] or abs(at[1] - py) > APART[1] for px, py in written):
            written.append(at)
            ax.annotate(f"{r['rate']:g}/s", (x, y), (0, -12), textcoords="offset points", fontsize=8, ha="center")

"""Efficiency against ranks: strong and weak scaling, predicted, ideal, modelled, simulated and measured.

Efficiency, the speedup over the number of ranks, because on it 2 ranks and 1,024 fit into one panel, the ideal is a
level line, and a spread of 5% is seen. One kind of scaling alone leaves room for the speedup itself next to it, whose
ideal is the diagonal.
"""

import textwrap
from collections.abc import Sequence

from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..parallel.scaling.laws import Fit
from ..trace import number_text
from .colors import BLUE, GRAY, GREEN, INK, ORANGE, PURPLE
from .style import Axes, Dash, Figure, Look, Row, Rows, footnote, heading, oversubscribed_note

PANELS = {"strong": "strong: the same work on more ranks", "weak": "weak: the same work per rank"}
HEIGHT = 4.3  # inches
DOTS, DASHES, LONG = (0, (1, 1.2)), (0, (5, 2)), (0, (6, 3))
MOST_TICKS = 9
FOOT = 124  # letters of small print in a line
TOP = 1.18  # of the efficiency axis, if nothing is higher
HIGHEST = 2.0  # what is above, such as a prediction of 8 times on 2 ranks, is drawn at the edge


def draw(
    figure: Figure,
    rows: Rows,
    simulated: Rows = (),
    model: Rows = (),
    prediction: dict[int, float] | None = None,
    fits: Sequence[Fit] = (),
    title: str = "",
    foot: str = "",
    kind: str | None = None,
) -> None:
    """Fill `figure` with one panel for each kind of scaling; or with speedup and efficiency of `kind` alone.

    Args:    rows, simulated, model: dicts with kind ("strong" or "weak"), ranks, cores, rate (median, units per s),
             p25, p75, speedup, efficiency, exposed, overlap, imbalance; see verbs/scaling.py. Those with "recorded" are
             drawn dashed.
             prediction: {ranks: speedup}; fits: of any kind and source.
             title, foot: text above and below.
    """
    kinds = [kind] if kind else [kind for kind in PANELS if any(r["kind"] == kind for r in (*rows, *simulated))]
    axes = figure.subplots(1, max(len(kinds), 1) + bool(kind), squeeze=False)[0]
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.24, top=0.72, wspace=0.17 + 0.06 * bool(kind))
    if kind:
        _speedup_panel(axes[0], rows, simulated, prediction or {})
        axes = axes[1:]
    for ax, one in zip(axes, kinds, strict=False):
        points, followed, modelled = ([r for r in source if r["kind"] == one] for source in (rows, simulated, model))
        _panel(ax, points, followed, modelled, prediction, [fit for fit in fits if fit.kind == one])
        ax.set_title(PANELS[one])
        ax.set_ylabel("speedup / ranks" if one == kinds[0] else "")
    heading(figure, title, oversubscribed_note(rows))
    _legend(figure, rows, simulated, model, prediction, fits)
    footnote(figure, textwrap.fill(foot, FOOT))


def _panel(
    ax: Axes, rows: Rows, simulated: Rows, model: Rows, predicted: dict[int, float] | None, fits: Sequence[Fit]
) -> None:
    """Draw one kind of scaling: efficiency against ranks."""
    rows, simulated, model = (sorted(source, key=lambda r: r["ranks"]) for source in (rows, simulated, model))
    every = sorted({r["ranks"] for r in (*rows, *simulated, *model)} | set(predicted or ()))
    highest = [r["p75"] / r["rate"] * r["efficiency"] for r in rows] + [r["efficiency"] for r in (*simulated, *model)]
    highest += [speedup / p for p, speedup in (predicted or {}).items()]
    top = min(HIGHEST, max(TOP, *(1.1 * value for value in highest)))
    _rank_axis(ax, every)
    ax.set_ylim(0, top)
    ax.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 1, 1.5, 2]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    ax.axhline(1, color=INK, linewidth=1.1, linestyle=LONG, zorder=1)
    for fit in fits:
        if fit.serial is not None:
            dense = [every[0] * (every[-1] / every[0]) ** (i / 60) for i in range(61)]
            values = [fit.speedup(p) * fit.fewest / p for p in dense]
            ax.plot(dense, values, color=PURPLE, linewidth=1.0, linestyle="-" if fit.source == "measured" else DASHES)
    _curve(ax, simulated, GREEN, "-")
    _curve(ax, model, INK, DOTS)
    for r in simulated:
        face = GREEN if r["how"] == "messages" else "white"
        ax.plot([r["ranks"]], [r["efficiency"]], "s", color=GREEN, markerfacecolor=face, markersize=5, zorder=3)
    if predicted:
        points = sorted(predicted.items())
        heights = [min(speedup / p, top) for p, speedup in points]
        ax.plot([p for p, _ in points], heights, "*", color=ORANGE, markersize=9, linestyle=DASHES, linewidth=1.2)
    recorded, rows = [r for r in rows if "recorded" in r], [r for r in rows if "recorded" not in r]
    _curve(ax, recorded, BLUE, DASHES)
    if rows:
        ax.plot([r["ranks"] for r in rows], [r["efficiency"] for r in rows], color=GRAY, linewidth=1, zorder=3)
    for r in (*recorded, *rows):
        _measured_point(ax, r)
    _ends(ax, rows or recorded, simulated)


def _speedup_panel(ax: Axes, rows: Rows, simulated: Rows, predicted: dict[int, float]) -> None:
    """Draw speedup against ranks, both logarithmic; the ideal is the diagonal."""
    every = sorted({r["ranks"] for r in (*rows, *simulated)} | set(predicted))
    _rank_axis(ax, every)
    ends = [min(every, default=1), max(every, default=2)]
    ax.plot(ends, ends, color=INK, linewidth=1.1, linestyle=LONG, zorder=1)
    points = sorted(simulated, key=lambda r: r["ranks"])
    ax.plot([r["ranks"] for r in points], [r["speedup"] for r in points], "s-", color=GREEN, markersize=5, zorder=2)
    if predicted:
        ax.plot(*zip(*sorted(predicted.items()), strict=True), "*", color=ORANGE, markersize=9, linestyle=DASHES)
    for r in rows:
        color = GRAY if r["ranks"] > r["cores"] else BLUE
        face = "white" if "recorded" in r else color
        ax.plot([r["ranks"]], [r["speedup"]], "o", color=color, markerfacecolor=face, markersize=7, zorder=5)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}x"))
    ax.set_title("speedup; the diagonal is ideal")


def _rank_axis(ax: Axes, every: list[int]) -> None:
    """Make the x axis logarithmic, labelled at as many of the numbers of ranks as fit."""
    ax.set_xscale("log", base=2)
    every = every or [1, 2]
    ax.set_xlim(every[0] / 1.25, every[-1] * (1.35 if every[-1] / every[0] < 16 else 3.4))
    stride = -(-len(every) // MOST_TICKS)
    ax.xaxis.set_major_locator(FixedLocator(every[::-1][::stride]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda p, _: f"{p:,.0f}"))
    ax.set_xlabel("ranks")


def _curve(ax: Axes, rows: Rows, color: str, dash: Dash) -> None:
    ax.plot([r["ranks"] for r in rows], [r["efficiency"] for r in rows], color=color, linestyle=dash, zorder=2)


def _measured_point(ax: Axes, row: Row) -> None:
    """Draw one measurement with its quartiles; gray if ranks share cores."""
    y, low, high = (row[key] / row["rate"] * row["efficiency"] for key in ("rate", "p25", "p75"))
    color = GRAY if row["ranks"] > row["cores"] else BLUE
    bars = [[max(0, y - low)], [max(0, high - y)]]
    face = "white" if "recorded" in row else color
    ax.errorbar([row["ranks"]], [y], bars, fmt="o", color=color, mfc=face, capsize=4, markersize=7, zorder=5)


def _ends(ax: Axes, rows: Rows, simulated: Rows) -> None:
    """Write the speedup at the last point of the measured and of the simulated curve, in bold."""
    for last, color in ((rows[-1:], BLUE), (simulated[-1:], GREEN)):
        for r in last:
            if color == BLUE and simulated and simulated[-1]["ranks"] == r["ranks"]:
                continue
            color = GRAY if r["ranks"] > r["cores"] else color
            text = f"{number_text(r['speedup'])}x"
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
            where = (r["ranks"], r["efficiency"])
            ax.annotate(text, where, (7, 3), textcoords="offset points", color=color, fontweight="bold", bbox=paper)


def _legend(
    figure: Figure, rows: Rows, simulated: Rows, model: Rows, prediction: dict[int, float] | None, fits: Sequence[Fit]
) -> None:
    """Name in one line what is drawn."""
    hows = {r["how"] for r in simulated}
    fitted = {fit.source for fit in fits if fit.serial is not None}
    square: Look = {"marker": "s", "color": GREEN, "markersize": 5}
    point: Look = {"marker": "o", "color": BLUE, "linestyle": "", "markersize": 7}
    entries: list[tuple[bool, str, Look]] = [
        (bool(prediction), "your guess", {"marker": "*", "color": ORANGE, "linestyle": DASHES, "markersize": 9}),
        (True, "ideal", {"color": INK, "linestyle": LONG, "linewidth": 1.1}),
        (bool(model), "α-β-overlap model", {"color": INK, "linestyle": DOTS}),
        ("messages" in hows, "simulated by messages", square),
        ("schedule" in hows, "by schedule", square | {"markerfacecolor": "white"}),
        (any("recorded" not in r for r in rows), "measured, p25-p75", point),
        (any("recorded" in r for r in rows), "recorded", point | {"markerfacecolor": "white", "linestyle": DASHES}),
        (bool(fitted), "fitted law", {"color": PURPLE, "linewidth": 1.0, "linestyle": DASHES}),
    ]
    shown = [(Line2D([], [], **look), text) for there, text, look in entries if there]
    handles, labels = zip(*shown, strict=True)
    figure.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(0.006, 0.855), ncol=len(shown), frameon=False,
        fontsize=8.2, handlelength=1.6, columnspacing=0.8, handletextpad=0.4, borderpad=0,
    )  # fmt: skip

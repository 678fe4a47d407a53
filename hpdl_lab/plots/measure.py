"""Time and bandwidth against message size: of collectives, with peers, model and prediction; of single messages."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..trace import number_text, seconds_text
from .colors import BLUE, FAINT, GRAY, INK, SERIES, VERMILION, YOURS
from .style import (
    Axes,
    Dash,
    Figure,
    Look,
    Row,
    Rows,
    footnote,
    heading,
    label_ends,
    log_axis,
    oversubscribed_note,
    size_axis,
)

LEAST_WIDE = 1024  # bytes
DOTS, DASHES, DASHDOT = (0, (1, 1.2)), (0, (5, 2)), (0, (4, 1.5))  # the model, the prediction, simulated ranks
SPARSE = (0, (1, 3))  # the model of what is measured alone


Points: TypeAlias = list[tuple[float, float, float]]  # (size in bytes, seconds, GB/s)


@dataclass(frozen=True)
class Reference:
    """A curve that was not measured: {size in bytes: seconds}, with the text that names it."""

    name: str
    seconds: Mapping[int, float] | Mapping[float, float]

    def points(self, factor: float) -> Points:
        """Return [(size, seconds, bus bandwidth in GB/s)] in order of size; `factor` is busbw over algbw."""
        return [(n, t, factor * n / t / 1e9) for n, t in sorted(self.seconds.items()) if t > 0]


def _two_panels(
    figure: Figure, sizes: Iterable[float], points: Points, titles: Sequence[str], more: Iterable[float] = ()
) -> tuple[Axes, Axes]:
    """Return (left, right) axes over message sizes with room for `points` (size, seconds, GB/s) and `more` bandwidths.

    The bandwidth begins at LEAST_WIDE bytes: below, latency alone decides, and makes it 1e-5 GB/s.
    """
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.085, right=0.83, bottom=0.2, top=0.785, wspace=0.27)
    sizes = list(sizes) or [4, 2**22]
    wide = [n for n in sizes if n >= LEAST_WIDE] or sizes
    bandwidths = [*(gbps for n, _, gbps in points if n >= min(wide)), *more]
    for ax, some, values, unit, title in zip(
        (left, right), (sizes, wide), ([point[1] for point in points], bandwidths), ("s", ""), titles, strict=True
    ):
        size_axis(ax, some)
        log_axis(ax, values, unit)
        ax.set_title(title)
    return left, right


def draw(
    figure: Figure,
    rows: Rows,
    yours: str,
    factor: float,
    models: Sequence[Reference] = (),
    prediction: Reference | None = None,
    title: str = "",
    foot: str = "",
    simulated: dict[str, dict[int, float]] | None = None,
    link_GBps: float | None = None,
    cross: float | None = None,
) -> None:
    """Fill `figure` from the rows of a sweep; see `collectives.sweep.sweep_sizes`.

    Args:    rows: dicts with name, size (bytes), time_us (median), p25_us, p75_us, busbw_GBps, ranks, cores.
             Those with "recorded" are drawn dashed.
             yours: the name drawn in bold; factor: busbw over algbw, which turns times of references into bandwidths.
             models: drawn dotted; title, foot: text above and below.
             simulated: {name: {size: seconds}}, drawn dashed with the measured curves of these names.
             link_GBps: what a link carries, which no bus bandwidth can exceed; None if that is not known.
             cross: the size at which the attendee expects curves to cross, or None.
    """
    asked: list[tuple[Reference | None, Dash, str]] = [
        *((model, dash, GRAY) for model, dash in zip(reversed(models), (DOTS, SPARSE), strict=False)),
        (prediction, DASHES, INK),
    ]
    references = [(ref, dash, color) for ref, dash, color in asked if ref and ref.points(factor)]
    virtual = {name: Reference(name, seconds) for name, seconds in (simulated or {}).items()}
    points = [(r["size"], r["time_us"] / 1e6, r["busbw_GBps"]) for r in rows]
    points += [p for ref in (*virtual.values(), *(ref for ref, *_ in references)) for p in ref.points(factor)]
    titles = "time per call (less is better)", "bus bandwidth, GB/s (more is better)"
    sizes = [*(p[0] for p in points), *([cross] if cross else [])]
    left, right = _two_panels(figure, sizes, points, titles, [link_GBps] if link_GBps else [])

    def dashed(found: Points, color: str, linestyle: Dash, linewidth: float, marker: str = "") -> float:
        look: Look = {"color": color, "linestyle": linestyle, "linewidth": linewidth, "marker": marker, "zorder": 2}
        sizes, seconds, speeds = zip(*found, strict=True)
        left.plot(sizes, seconds, **look)
        right.plot(sizes, speeds, **look)
        return speeds[-1]

    ends = []  # height, name, color, bold
    for ref, dash, color in references:
        found = ref.points(factor)
        end = dashed(found, color=color, linestyle=dash, linewidth=1.6, marker="*" * (len(found) == 1))
        ends.append((end, ref.name, color, False))
    if cross:
        left.axvline(cross, color=BLUE, linewidth=1.6, linestyle=DASHES, zorder=1)
        at = ("data", "axes fraction"), "offset points"
        left.annotate("your guess", (cross, 1), (4, -12), *at, color=BLUE)
    if link_GBps:
        right.axhline(link_GBps, color=INK, linewidth=1.0, zorder=1)
        ends.append((link_GBps, "the link", INK, False))
    others = [name for name in dict.fromkeys(r["name"] for r in rows) if name != yours]
    colors = dict(zip(others, itertools.cycle(SERIES[1:]), strict=False)) | {yours: YOURS}
    curves: dict[tuple[str, bool], list[Row]] = {}
    for row in sorted(rows, key=lambda r: r["size"]):
        curves.setdefault((row["name"], "recorded" in row), []).append(row)
    for name, color in colors.items():
        for recorded in (False, True):
            if curve := curves.get((name, recorded)):
                _draw_measured(left, right, curve, color, name == yours, recorded)
                if not recorded or (name, False) not in curves:  # one name is enough for two curves of a color
                    short = name if len(name) <= 16 else name[:15] + "…"
                    ends.append((curve[-1]["busbw_GBps"], short, color, name == yours))
        if name in virtual and (found := virtual[name].points(factor)):
            dashed(found, color=color, linestyle=DASHDOT, linewidth=1.2)
    label_ends(right, ends)
    heading(figure, title, oversubscribed_note(rows))
    footnote(figure, foot)


def _draw_measured(left: Axes, right: Axes, curve: Rows, color: str, bold: bool, recorded: bool = False) -> None:
    """Draw one function's curve in both panels, with its quartiles as a band; gray points if ranks exceed cores."""
    sizes = [r["size"] for r in curve]
    look: Look = {
        "color": color,
        "linewidth": 2.6 if bold else 1.5,
        "zorder": 4 if bold else 3,
        "marker": "o",
    }
    if recorded:
        look |= {"linestyle": DASHES, "markerfacecolor": "white"}
    if oversubscribed_note(curve):
        look |= {"markerfacecolor": FAINT, "markeredgecolor": GRAY}
    left.plot(sizes, [r["time_us"] / 1e6 for r in curve], **look)
    low, high = ([r[key] / 1e6 for r in curve] for key in ("p25_us", "p75_us"))
    left.fill_between(sizes, low, high, color=color, alpha=0.18, linewidth=0)
    right.plot(sizes, [r["busbw_GBps"] for r in curve], **look)


# -- a message --------------------------------------------------------------------------------------------------------


def draw_ping_pong(
    figure: Figure,
    rows: Rows,
    fit: tuple[float, float] | None = None,
    prediction: dict[int, float] | None = None,
    title: str = "",
    foot: str = "",
) -> None:
    """Fill `figure` from rows: dicts with size (bytes), seconds (median, one way), p25, p75.

    Args:    fit: (alpha s, beta s/byte), or None as long as there is none; prediction: {bytes: seconds}.
    """
    points = [(r["size"], r["seconds"], r["size"] / r["seconds"] / 1e9) for r in rows]
    lines: list[tuple[str, Points, Look]] = []
    if prediction:
        look: Look = {"color": INK, "linestyle": DASHES, "marker": "*"}
        lines.append(("your guess", Reference("", prediction).points(1), look))
    sizes = sorted({p[0] for p in points} | set(prediction or ()))
    if fit:
        line = {n: fit[0] + fit[1] * n for n in np.geomspace(sizes[0], sizes[-1], 60)}
        lines.append(("α + β n", Reference("", line).points(1), {"color": VERMILION}))
    every = points + [point for _, line, _ in lines for point in line]
    left, right = _two_panels(figure, sizes, every, ("time of a message, one way", "bytes / time, GB/s"))
    for _, line, look in lines:
        left.plot(*zip(*(p[:2] for p in line), strict=True), **look)
        right.plot(*zip(*(p[::2] for p in line), strict=True), **look)
    for ax, step in ((left, 1), (right, 2)):
        ax.plot([p[0] for p in points], [p[step] for p in points], "o", color=BLUE, zorder=4)
    for r in rows:
        left.plot([r["size"]] * 2, [r["p25"], r["p75"]], color=BLUE, linewidth=3, alpha=0.3)
    ends = [(line[-1][2], name, look["color"], False) for name, line, look in lines]
    label_ends(right, ends + [(p[2], "measured", BLUE, True) for p in sorted(points)[-1:]])
    if fit:  # the levels that latency alone, and bandwidth alone, would reach
        for ax, y, text, below in ((left, fit[0], "α", 3), (right, 1e-9 / fit[1] if fit[1] else 0, "1/β", -12)):
            if y > 0:
                ax.axhline(y, color=GRAY, linewidth=1, linestyle=DOTS, zorder=1)
                where = ("axes fraction", "data"), "offset points"
                ax.annotate(text, (0, y), (4, below), *where, color=GRAY)
    heading(figure, title, alpha_beta_text(*fit) if fit else "")
    footnote(figure, foot)


def alpha_beta_text(alpha: float, beta: float) -> str:
    """Return the two numbers, and the size at which both parts are equal."""
    text = f"α = {seconds_text(alpha)} per message"
    if beta > 0:
        text += f", 1/β = {number_text(1e-9 / beta)} GB/s"
    if alpha > 0 and beta > 0:
        text += f"; at {float(f'{alpha / beta:.2g}'):,.0f} B half of the time is α"
    return text

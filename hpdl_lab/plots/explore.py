"""Pictures behind sliders: small, and drawn in less than a tenth of a second, mostly for text and ticks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import ListedColormap
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ..parallel.scaling.overlap import StepProfile
from ..schedules import Evaluation, Schedule
from ..trace import number_text
from ..units import bytes_text, counted
from . import schedule as bars
from .colors import BLUE, GRAY, GREEN, INK, ORANGE, PURPLE, SERIES, SKY, VERMILION
from .graph import draw_edges
from .grid import MEMORY as LEDGER
from .landscape import Bowl
from .measure import DOTS
from .style import Axes, Figure, amounts, heading, label_ends, legend, log_axis, rows_only, size_axis, x_label

if TYPE_CHECKING:
    from ..parallel.grid.memory import Memory

HEIGHT = 3.3  # inches
DAY, YEAR = 86400.0, 365.25 * 86400
LINES = {"an hour": 3600.0, "a day": DAY, "a month": YEAR / 12, "a year": YEAR, "a century": 100 * YEAR}


def panels(figure: Figure, titles: Sequence[str], width_ratios: Sequence[float] | None = None) -> list[Axes]:
    """Return axes side by side, with their titles and room for a heading."""
    axes = figure.subplots(1, len(titles), squeeze=False, width_ratios=width_ratios)[0]
    figure.subplots_adjust(left=0.085, right=0.975, bottom=0.185, top=0.79, wspace=0.24)
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
    return list(axes)


def decades(ax: Axes, low: float, high: float, unit: str = "") -> None:
    """Make the x axis logarithmic."""
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(amounts(unit) if unit else FuncFormatter(lambda v, _: number_text(v)))


def mark(ax: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Draw stars at what the attendee has guessed, for which the y axis makes room."""
    low, high = ax.get_ylim()
    for x, y in points:
        ax.plot([x], [y], "*", color=INK, markersize=12, zorder=6, clip_on=False)
        low, high = min(low, y / 1.1), max(high, y * 1.1)
    ax.set_ylim(low, high)
    right = ax.transLimits.transform(ax.transScale.transform(points[0]))[0] > 0.6  # so the text has no room
    ax.annotate(
        "your guess",
        points[0],
        (-8 if right else 8, -3),
        textcoords="offset points",
        ha="right" if right else "left",
        fontweight="bold",
        zorder=6,
    )


# -- training ---------------------------------------------------------------------------------------------------------


def draw_days(figure: Figure, counts: np.ndarray, seconds: np.ndarray, count: int, least: int, title: str) -> None:
    """Draw training time against accelerators.

    count: as asked; least: the fewest whose memories hold the model.
    """
    ax = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.975, bottom=0.185, top=0.85)
    decades(ax, counts[0], counts[-1])
    low, high = min(seconds[-1], 3600.0), max(seconds[0], YEAR)
    ax.set_yscale("log")
    ax.set_ylim(low / 2, high * 2)
    shown = {name: at for name, at in LINES.items() if low / 2 < at < high * 2}
    ax.set_yticks(list(shown.values()), list(shown))
    ax.yaxis.set_minor_locator(NullLocator())
    fits = counts >= least
    ax.plot(counts, seconds, color=GRAY, linestyle=(0, (1, 1.2)))
    ax.plot(counts[fits], seconds[fits], color=BLUE)
    if least > counts[0]:
        ax.axvspan(counts[0], min(least, counts[-1]), color=VERMILION, alpha=0.1, linewidth=0)
        text = "their memories do not hold the model's state"
        ax.annotate(text, (0, 0), (6, 6), "axes fraction", "offset points", color=VERMILION, fontsize=9)
    now = float(np.interp(count, counts, seconds))
    ax.plot([count], [now], "o", color=BLUE if count >= least else VERMILION, markersize=9, zorder=5, clip_on=False)
    x_label(ax, "accelerators")
    heading(figure, title)


def draw_descent(
    figure: Figure, bowl: Bowl, path: np.ndarray, at: np.ndarray, above: np.ndarray, unit: str, title: str
) -> None:
    """Fill `figure` with a path on the loss and the loss along it.

    Args:    path: (k, 2) weights; at: (k,) steps, or epochs, taken; above: (k,) loss above the least; unit: of `at`.
    """
    left, right = panels(figure, ("the path of the weights", "loss above the least"), width_ratios=(1, 1.25))
    left.contour(*bowl.axes, bowl.grid, levels=bowl.levels, colors=[GRAY], linewidths=0.6, alpha=0.7)
    left.plot(*bowl.best, "*", color=INK, markersize=11, zorder=3)
    left.plot(
        *np.clip(path, -1e6, 1e6).T, color=BLUE, linewidth=0.9, marker="o" if len(path) < 100 else "", markersize=3
    )
    left.set_xlim(bowl.axes[0][0], bowl.axes[0][-1])
    left.set_ylim(bowl.axes[1][0], bowl.axes[1][-1])
    left.xaxis.set_major_locator(MaxNLocator(4))
    left.yaxis.set_major_locator(MaxNLocator(4))
    left.grid(False)
    x_label(left, "weight 0")
    left.set_ylabel("weight 1")
    right.plot(at, np.clip(above, 1e-9, 1e9), color=VERMILION if above[-1] > above[0] else BLUE, linewidth=1.2)
    right.set_xlim(0, at[-1])
    log_axis(right, (1e-6, 1.0))
    right.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    x_label(right, unit)
    heading(figure, title)


# -- messages ---------------------------------------------------------------------------------------------------------


def draw_gossip(figure: Figure, name: str, weights: np.ndarray, curves: dict[str, np.ndarray]) -> None:
    """Draw a graph, and how far its ranks are apart after each step; in gray on other graphs."""
    left, right = panels(figure, ("", "differences left, on this graph and on others"), width_ratios=(1, 1.5))
    figure.subplots_adjust(left=0.02, right=0.85, top=0.88, wspace=0.16)
    draw_edges(left, weights)
    lowest = 1e-6
    log_axis(right, (lowest, 1.0))
    ends = []
    for other, curve in curves.items():
        mine = other == name
        right.plot(curve, color=BLUE if mine else GRAY, linewidth=2.4 if mine else 1, zorder=2 + mine)
        ends.append((max(float(curve[-1]), lowest), other, BLUE if mine else GRAY, mine))
    label_ends(right, ends)
    right.set_xlim(0, len(curves[name]) - 1)
    x_label(right, "gossip steps")


def draw_message(figure: Figure, points: Sequence[tuple[int, float]], size: int, alpha: float, beta: float) -> None:
    """Draw alpha + beta n over measured points (bytes, s); the size as asked, and the one at which both are equal."""
    left, right = panels(figure, ("time of a message", "bytes / time, GB/s"))
    figure.subplots_adjust(top=0.86)
    n = np.geomspace(8, 2**26, 70)
    line, half = alpha + beta * n, alpha / beta
    for ax, of in ((left, lambda n, t: t), (right, lambda n, t: n / t / 1e9)):
        size_axis(ax, (8, 2**26))
        ax.plot(n, of(n, line), color=VERMILION)
        if points:
            sizes, seconds = (np.array(column) for column in zip(*points, strict=True))
            ax.plot(sizes, of(sizes, seconds), "o", color=BLUE, zorder=4)
        ax.plot([size], [of(size, alpha + beta * size)], "o", color=VERMILION, markersize=9, zorder=5)
        if 8 < half < 2**26:
            ax.axvline(half, color=GRAY, linewidth=1, linestyle=DOTS)
            ax.annotate("n½", (half, 1), (3, -10), ("data", "axes fraction"), "offset points", color=GRAY)
    log_axis(left, (1e-7, 0.1), "s")  # it stands still while sliders move
    log_axis(right, (1e-4, 1e3))


def draw_algorithms(
    figure: Figure,
    names: Sequence[str],
    ranks: Sequence[int],
    sizes: np.ndarray,
    here: np.ndarray,
    winners: np.ndarray,
    p: int,
    size: int,
) -> None:
    """Draw times of algorithms against size, and which of them is fastest for which size and number of ranks.

    Args:    here: (names, sizes) s among p ranks; winners: (ranks, sizes) index of the fastest; p, size: those asked.
    """
    left, right = panels(figure, (f"{p} ranks: time", "the fastest"))
    figure.subplots_adjust(top=0.83, bottom=0.16, wspace=0.2)
    legend(figure, list(zip(SERIES, names, strict=False)), 0.012, 0.965, size=9)
    for curve, color in zip(here, SERIES, strict=False):
        left.plot(sizes, curve, color=color, linewidth=1.4)
    size_axis(left, sizes[::14])
    log_axis(left, here[here > 0], "s")
    left.axvline(size, color=INK, linewidth=1, linestyle=DOTS)
    row, column = ranks.index(p), int(np.searchsorted(sizes, size))
    for k in np.flatnonzero(np.diff(winners[row])):
        left.plot(*np.sqrt([sizes[k] * sizes[k + 1], here[:, k : k + 2].min(axis=0).prod()]), "D", color=INK, zorder=6)
    colors = ListedColormap(SERIES[: len(names)])
    right.pcolormesh(winners, cmap=colors, vmin=-0.5, vmax=len(names) - 0.5, alpha=0.85)
    right.plot([column + 0.5], [row + 0.5], "o", color="white", markeredgecolor=INK, markersize=9)
    shown = range(0, len(sizes), 7)
    right.set_xticks([k + 0.5 for k in shown], [bytes_text(sizes[k]) for k in shown])
    rows = [k for k, n in enumerate(ranks) if n & (n - 1) == 0]
    right.set_yticks([k + 0.5 for k in rows], [str(ranks[k]) for k in rows])
    right.grid(False)
    right.set_ylabel("ranks")
    x_label(right, "message size")


def draw_segments(
    figure: Figure,
    ranks: int,
    count: int,
    took: float,
    counts: np.ndarray,
    times: np.ndarray,
    best: int,
    least: float,
) -> None:
    """Draw when each rank receives which segment of a chain broadcast, and its time for any number of segments."""
    left, right = panels(figure, ("when each rank receives a segment", "time for any number of segments"))
    figure.subplots_adjust(top=0.88)
    each = took / (count + ranks - 2)
    drawn = count if count * ranks <= 1024 else 1  # more are too narrow to be seen
    lasts = each * count / drawn
    boxes, faces = [], []
    for rank in range(1, ranks):
        for k in range(drawn):
            begin = (rank - 1) * each + k * lasts
            boxes.append(
                [(begin, rank - 0.4), (begin + lasts, rank - 0.4), (begin + lasts, rank + 0.4), (begin, rank + 0.4)]
            )
            faces.append((BLUE, SKY)[k % 2])
    left.add_collection(PolyCollection(boxes, facecolors=faces, linewidths=0))
    left.set_xlim(0, max(times[0], took))
    rows_only(left, ranks, [f"rank {r}" for r in range(ranks)])
    left.xaxis.set_major_formatter(amounts("s"))
    left.xaxis.set_major_locator(MaxNLocator(5))
    x_label(left, "time")
    right.plot(counts, times, color=GRAY)
    decades(right, counts[0], counts[-1])
    log_axis(right, times, "s")
    right.plot([best], [least], "*", color=GREEN, markersize=13, zorder=4)
    right.plot([count], [took], "o", color=BLUE, markersize=9, zorder=5)
    x_label(right, "segments (star: the best)")


# -- training on several ranks ----------------------------------------------------------------------------------------


def draw_buckets(
    figure: Figure,
    profile: StepProfile,
    sent: Sequence[tuple[float, float]],
    layers: int,
    seconds: float,
    limits: np.ndarray,
    curve: Sequence[float],
    limit: int,
    exposed: float,
) -> None:
    """Draw a step with buckets over time, and the exposed communication for any bucket size.

    sent: (begin, end) of each bucket.
    """
    left, right = panels(figure, ("a step", "exposed communication"), width_ratios=(1.7, 1))
    figure.subplots_adjust(left=0.12, right=0.96, top=0.88, wspace=0.22)
    begin, each = profile.forward, (profile.backward - profile.forward) / layers
    left.broken_barh([(0, begin)], (-0.35, 0.7), color=SKY)
    left.broken_barh(
        [(begin + k * each, each) for k in range(layers)], (-0.35, 0.7), color=GREEN, edgecolor="white", linewidth=0.3
    )
    boxes = [(a, b - a) for a, b in sent]
    left.broken_barh(boxes, (0.65, 0.7), color=ORANGE, edgecolor="white", linewidth=0.4)
    left.broken_barh(
        [(profile.end, seconds - profile.end)], (-0.35, 0.7), facecolor="white", edgecolor=VERMILION, hatch="////"
    )
    rows_only(left, 2, ["compute", "all-reduce"])
    longest = profile.end + max(*curve, exposed)
    left.set_xlim(0, 1.02 * longest)
    left.xaxis.set_major_formatter(amounts("s"))
    left.xaxis.set_major_locator(MaxNLocator(5))
    x_label(left, "time (blue: forward, green: backward, hatched: exposed)")
    right.plot(limits, curve, color=GRAY)
    decades(right, limits[0], limits[-1], "B")
    right.set_ylim(0, 1.1 * max(curve))
    right.yaxis.set_major_formatter(amounts("s"))
    right.yaxis.set_major_locator(MaxNLocator(5))
    right.plot([limit], [exposed], "o", color=VERMILION, markersize=9, clip_on=False, zorder=5)
    x_label(right, "bucket size")


def draw_memory_bytes(
    figure: Figure,
    moved: dict[str, tuple[float, float]],
    counts: Sequence[int],
    curves: dict[str, list[float]],
    linked: list[float],
    ranks: int,
) -> None:
    """Draw the bytes that all-reduces read and write, and their least time on ranks that share a memory.

    Args:    moved: {name: (read, written)} per byte of a tensor, on each rank; curves: {name: s for each of counts}.
             linked: s of a ring over links for each of counts; ranks: one of counts.
    """
    left, right = panels(figure, ("moved by a rank, per byte", "least time"), width_ratios=(1, 1.15))
    figure.subplots_adjust(left=0.15, right=0.83, wspace=0.24)
    rows_only(left, len(moved), list(moved))
    read, written = (np.array(column) for column in zip(*moved.values(), strict=True))
    left.barh(range(len(moved)), read, height=0.6, color=BLUE)
    left.barh(range(len(moved)), written, left=read, height=0.6, color=ORANGE)
    left.set_xlim(0, 11)
    legend(figure, [(BLUE, "read"), (ORANGE, "written")], 0.15, 0.945)
    right.set_xscale("log", base=2)
    right.set_xlim(counts[0], counts[-1])
    right.xaxis.set_major_locator(FixedLocator(counts))
    right.xaxis.set_major_formatter(FuncFormatter(lambda p, _: f"{p:g}"))
    right.xaxis.set_minor_locator(NullLocator())
    log_axis(right, [*linked, *(value for curve in curves.values() for value in curve)], "s")
    ends = [(linked[-1], "ring, links", GRAY, False)]
    right.plot(counts, linked, color=GRAY, linestyle=DOTS)
    for (name, curve), color in zip(curves.items(), (BLUE, VERMILION, ORANGE, PURPLE), strict=True):
        right.plot(counts, curve, color=color)
        right.plot([ranks], [curve[counts.index(ranks)]], "o", color=color, clip_on=False, zorder=5)
        ends.append((curve[-1], name, color, False))
    label_ends(right, ends)
    x_label(right, "ranks")


def draw_tensor(
    figure: Figure, counts: Sequence[int], times: np.ndarray, tp: int, node: int, links: tuple[str, str], title: str
) -> None:
    """Draw the time of one layer on more and more ranks, and what each is still worth. times: (counts, 2) s."""
    left, right = panels(figure, ("forward and backward", "how much of one GPU each rank is worth"))
    positions = np.arange(len(counts))
    edges = [INK if n == tp else "none" for n in counts]
    left.bar(positions, times[:, 0], color=GREEN, edgecolor=edges)
    left.bar(positions, times[:, 1], bottom=times[:, 0], color=ORANGE, edgecolor=edges)
    left.yaxis.set_major_formatter(amounts("s"))
    worth = times[0].sum() / times.sum(axis=1) / np.array(counts)
    right.plot(positions, worth, "o-", color=BLUE)
    right.plot([counts.index(tp)], [worth[counts.index(tp)]], "o", color=BLUE, markersize=10)
    right.set_ylim(0, 1.05)
    right.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
    for ax in (left, right):
        ax.set_xlim(-0.6, len(counts) - 0.4)
        ax.set_xticks(positions, [str(n) for n in counts])
        ax.yaxis.set_major_locator(MaxNLocator(5))
        ax.grid(axis="x", visible=False)
        x_label(ax, "tp")
        inside = sum(n <= node for n in counts)
        if inside < len(counts):
            ax.axvline(inside - 0.5, color=VERMILION, linewidth=1.2, linestyle=DOTS)
            where = ("data", "axes fraction"), "offset points"
            ax.annotate(f"{links[1]} →", (inside - 0.5, 1), (3, -9), *where, color=VERMILION, fontsize=8.5)
            ax.annotate(f"← {links[0]}", (inside - 0.5, 1), (-3, -9), *where, color=VERMILION, fontsize=8.5, ha="right")
    heading(figure, title)
    legend(figure, [(GREEN, "computing"), (ORANGE, "sending")], 0.78, 0.945)


def draw_ledger(
    figure: Figure,
    stages: Sequence[Memory],
    stage: int,
    counts: Sequence[int],
    curves: Sequence[Sequence[float]],
    ranks: int,
    memory: float,
    sent: Sequence[float],
    title: str,
) -> None:
    """Draw what a rank holds and sends at each stage of ZeRO, and what it holds with more ranks, against a GPU.

    Args:    stages: what a rank holds at each; stage: the one that is asked.
             curves: for each stage, bytes of a rank for each of `counts` ranks; memory: GB.
             sent: for each stage, bytes that a rank sends in a step.
    """
    titles = "a rank holds", "sends over dp in a step", "holds, with more ranks"
    left, sends, right = panels(figure, titles, width_ratios=(1, 0.85, 1.1))
    figure.subplots_adjust(top=0.72, right=0.9, bottom=0.16, wspace=0.42)
    limit = 1e9 * memory
    bottoms = np.zeros(len(stages))
    edges = [INK if n == stage else "white" for n in range(len(stages))]
    for name, color in LEDGER.items():
        sizes = np.array([getattr(held, name) for held in stages], dtype=float)
        left.bar(range(len(stages)), sizes, 0.72, bottom=bottoms, color=color, edgecolor=edges, linewidth=1.1)
        bottoms += sizes
    left.set_ylim(0, 1.08 * max(*bottoms, limit if limit < 4 * max(bottoms) else 0))
    sends.bar(range(len(sent)), sent, 0.72, color=GRAY, edgecolor=edges, linewidth=1.1)
    sends.set_ylim(0, 1.08 * max(*sent, 1))
    for ax in (left, sends):
        ax.set_xticks(range(len(stages)), ["none", "1", "2", "3"])
        x_label(ax, "stage of ZeRO")
        ax.grid(axis="x", visible=False)
        ax.yaxis.set_major_formatter(amounts("B"))
        ax.yaxis.set_major_locator(MaxNLocator(5))
    left.axhline(limit, color=VERMILION, linewidth=1.6)
    decades(right, counts[0] / 1.3, counts[-1] * 1.3)
    log_axis(right, [*(nbytes for curve in curves for nbytes in curve), limit], "B")
    names = ("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3")
    ends = [(limit, f"{memory:g} GB", VERMILION, True)]
    for n, (curve, color) in enumerate(zip(curves, (GRAY, SKY, PURPLE, BLUE), strict=True)):
        right.plot(counts, curve, color=color, linewidth=2.6 if n == stage else 1.2, zorder=2 + (n == stage))
        ends.append((curve[-1], names[n], color, n == stage))
        if n == stage and ranks in counts:
            here = curve[counts.index(ranks)]
            right.plot([ranks], [here], "o", color=color if here <= limit else VERMILION, markersize=9, zorder=5)
    right.axhline(limit, color=VERMILION, linewidth=1.6)
    label_ends(right, ends)
    x_label(right, "ranks")
    heading(figure, title)
    legend(figure, [(color, name) for name, color in LEDGER.items()], 0.012, 0.9, size=8.5)


PIPELINE_HEIGHT = 4.9


def draw_pipeline(
    figure: Figure, schedule: Schedule, times: Evaluation, curves: dict[str, list[tuple[int, float]]], now: int
) -> None:
    """Draw a schedule over time with what it holds, and the bubbles of several schedules against micro-batches."""
    ax = figure.add_axes((bars.LEFT, 0.465, bars.MIDDLE - bars.LEFT, 0.37))
    held = figure.add_axes((bars.MIDDLE + 0.075, 0.465, bars.RIGHT - bars.MIDDLE - 0.1, 0.37))
    bars.axis(ax, schedule, times.makespan)
    ax.locator_params(axis="x", nbins=6)  # every tick costs a millisecond
    bars.bars(ax, schedule, times)
    bars.waits(ax, times)
    bars.activations(held, times)
    bars.kinds_of(figure, schedule, figure.get_figheight())
    heading(figure, f"{schedule.name}: {bars.of_schedule(schedule)}")
    below = figure.add_axes((bars.LEFT, 0.1, bars.MIDDLE - bars.LEFT, 0.25))
    ends = []
    for (name, curve), color in zip(curves.items(), SERIES, strict=False):
        mine = name == schedule.name
        if curve:
            below.plot(*zip(*curve, strict=True), color=color, linewidth=2.6 if mine else 1.2, zorder=2 + mine)
            ends.append((curve[-1][1], name, color, mine))
        for m, share in curve:
            if mine and m == now:
                below.plot([m], [share], "o", color=color, markersize=8, zorder=5)
    below.set_xscale("log", base=2)
    below.set_xlim(1, 32)
    below.xaxis.set_major_locator(FixedLocator([1, 2, 4, 8, 16, 32]))
    below.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    below.set_ylim(0, 100)
    below.yaxis.set_major_locator(FixedLocator([0, 50, 100]))
    below.set_ylabel("bubble, %")
    label_ends(below, ends)
    x_label(below, "micro-batches")


def draw_share(
    figure: Figure, shares: np.ndarray, curves: dict[str, Sequence[float]], now: float, published: float, title: str
) -> None:
    """Draw s of a step against the share of the peak that layers reach, per grid; the first is the published one."""
    ax = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.78, bottom=0.185, top=0.87)
    ax.axhspan(0.85 * published, 1.15 * published, color=GREEN, alpha=0.15, linewidth=0)
    ax.axhline(published, color=GREEN, linewidth=1)
    ends: list[tuple[float, str, str, bool]] = [(published, f"published: {published:g} s ± 15%", GREEN, False)]
    for (name, curve), color in zip(curves.items(), (BLUE, VERMILION, PURPLE, ORANGE), strict=False):
        mine = color == BLUE
        ax.plot(100 * shares, curve, color=color, linewidth=2.6 if mine else 1.2)
        ends.append((curve[-1], name, color, mine))
        ax.plot([100 * now], [curve[int(np.searchsorted(shares, now))]], "o", color=color, zorder=5)
    ax.set_xlim(100 * shares[0], 100 * shares[-1])
    ax.set_ylim(0, 1.1 * max(map(max, curves.values())))
    ax.yaxis.set_major_formatter(amounts("s"))
    label_ends(ax, ends)
    x_label(ax, "share of the peak that layers reach, %")
    heading(figure, title)


def draw_copies(figure: Figure, memory: Sequence[float], shares: Sequence[float], now: int, title: str) -> None:
    """Draw goodput against GB of a host: memory[n] and shares[n] with n copies. now: the number that is chosen."""
    ax = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.975, bottom=0.185, top=0.87)
    percents = [100 * share for share in shares]
    ax.plot(memory, percents, "o-", color=BLUE)
    ax.plot(memory[now], percents[now], "o", color=VERMILION, markersize=11, zorder=5)
    for n, (x, y) in enumerate(zip(memory, percents, strict=True)):
        text = counted(n, "copy", "copies") if n else "no copy"
        ax.annotate(text, (x, y), (0, -18), textcoords="offset points", ha="center", zorder=6)
    ax.set_xlim(-0.06 * memory[-1], 1.06 * memory[-1])
    ax.set_ylim(min(percents) - 8, 100)
    ax.set_ylabel("goodput, %")
    x_label(ax, "memory per host for copies, GB")
    heading(figure, title)

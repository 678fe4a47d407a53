"""A hybrid grid as a picture, and a search over all of them: step time against memory.

The picture of one says what a rank holds, how long a step takes and why, and what goes over each axis.

Every bar is predicted; below it, once the grid has run, the measured one, dotted. Bytes are decimal: 1 MB is 10^6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from matplotlib.lines import Line2D

from ..trace import seconds_text
from ..units import amount_text, counted
from .colors import BLUE, FAINT, GRAY, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from .style import Axes, Entry, Figure, Look, amounts, footnote, heading, legend, log_axis, rows_only, x_label

if TYPE_CHECKING:
    from ..parallel.grid.memory import Memory
    from ..parallel.grid.model import Prediction

HEIGHT = 4.7  # inches
MEMORY = {"parameters": BLUE, "gradients": SKY, "optimizer": ORANGE, "activations": GREEN, "temporaries": PURPLE}
AXES = {"tp": PURPLE, "pp": SKY, "dp": ORANGE}
MORE = {"cp": BLUE, "ep": VERMILION}  # axes that are drawn if there are several ranks along them
TIME = {"compute": GREEN, "tp": PURPLE, **MORE, "pp": SKY, "dp": ORANGE, "bubble": "#9AA7B4", "cores": FAINT}
NAMES = {"tp": "tp messages", "pp": "pp messages", "dp": "dp left over", "bubble": "waiting for stages"}
MEASURED: Look = {"hatch": "....", "edgecolor": INK, "linewidth": 0.8}
OVER = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
FAR = 8  # times the bar: a limit beyond it is said in words


class StepRun(Protocol):
    """A step as it was run. kind: "measured" or "simulated"; how: in words; the others as of a Prediction."""

    @property
    def kind(self) -> str: ...

    @property
    def how(self) -> str: ...

    @property
    def seconds(self) -> float: ...

    @property
    def bubble(self) -> float | None: ...

    @property
    def memory(self) -> Memory | None: ...

    @property
    def links(self) -> Mapping[str, float] | None: ...


def draw(
    figure: Figure,
    row: Prediction | None,
    measured: StepRun | None = None,
    why: str = "",
    title: str = "",
    optimizer: str = "",
) -> None:
    """Fill `figure`, HEIGHT inches tall.

    Args:    row: None if the grid cannot be; why: the sentence about that; optimizer: its name, such as "momentum".
    """
    heading(figure, title, "" if row is None else _subtitle(row))
    if row is None:
        figure.text(0.5, 0.5, "this grid cannot be", ha="center", fontsize=13, color=VERMILION, fontweight="bold")
        figure.text(0.5, 0.42, why, ha="center", va="top", fontsize=9, wrap=True)
        return
    _draw_memory(figure.add_axes((0.115, 0.64, 0.86, 0.13)), row, measured, optimizer)
    _time(figure.add_axes((0.115, 0.355, 0.86, 0.13)), row, measured)
    _links(figure.add_axes((0.115, 0.095, 0.5, 0.12)), row, measured)
    _draw_bubble(figure.add_axes((0.735, 0.095, 0.24, 0.12)), row, measured)
    if measured is not None:
        footnote(figure, f"Dotted: {measured.how}.")
    elif row.limit < row.memory.total:
        footnote(
            figure, "It needs more than a rank may hold: another grid, recomputation or more micro-batches need less."
        )


def _subtitle(row: Prediction) -> str:
    """Return the line below the title."""
    batches = counted(row.micro_batches, "micro-batch", "micro-batches")
    more = f"{batches} of {row.micro_batch}, {row.schedule}"
    return f"{more}{', activations recomputed' if row.recompute else ''}: {seconds_text(row.seconds)} a step"


def _draw_memory(ax: Axes, row: Prediction, measured: StepRun | None, optimizer: str) -> None:
    """Draw a stacked bar of what the fullest rank holds, and the limit."""
    bars: list[tuple[Memory, Look]] = [(row.memory, {})]
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
    _frame(ax, 1.14 * max(longest, row.limit if inside else 0), _names(len(bars), measured))
    over = not row.fits
    if inside:
        ax.axvline(row.limit, color=VERMILION, linewidth=2)
    limit = f"limit {amount_text(row.limit)}{', which is exceeded' if over else ''}"
    ax.set_title("the fullest rank holds", fontsize=9.5, pad=16)
    ax.set_title(limit, loc="right", fontsize=9, pad=16, color=VERMILION)
    called = {"optimizer": f"optimizer ({optimizer})" if optimizer else "optimizer"}
    shown = {name: color for name, color in MEMORY.items() if name != "temporaries" or row.memory.temporaries}
    parts = [(c, f"{called.get(name, name)} {amount_text(getattr(row.memory, name))}") for name, c in shown.items()]
    legend(ax, parts, 0, 1.1, size=8.2)
    ax.xaxis.set_major_formatter(amounts("B"))


def _time(ax: Axes, row: Prediction, measured: StepRun | None) -> None:
    """Draw a stacked bar of the parts of a step."""
    bars = 1 if measured is None else 2
    left = 0.0
    for name, color in TIME.items():
        ax.barh(0, row.parts[name], 0.72, left, color=color, edgecolor=GRAY, linewidth=0.4)
        left += row.parts[name]
    ax.text(left, 0, f" {seconds_text(row.seconds)}", va="center", fontsize=8.5)
    longest = row.seconds
    if measured is not None:
        ax.barh(1, measured.seconds, 0.72, color=YELLOW, **MEASURED)
        ax.text(measured.seconds, 1, f" {seconds_text(measured.seconds)}", va="center", fontsize=8.5)
        longest = max(longest, measured.seconds)
    _frame(ax, 1.14 * longest, _names(bars, measured))
    ax.set_title("a step takes", fontsize=9.5, pad=16)
    shown = {name: c for name, c in TIME.items() if name != "cores" and (name not in MORE or row.grid[name] > 1)}
    if row.parts["cores"]:
        core = f"light gray: waiting for a core {seconds_text(row.parts['cores'])}"
        ax.set_title(core, loc="right", fontsize=8.2, pad=18, fontweight="normal")
    called = {**NAMES, "tp": "tp", "pp": "pp", "bubble": "waiting"} if shown.keys() & MORE else NAMES  # they must fit
    parts = [(color, f"{called.get(name, name)} {seconds_text(row.parts[name])}") for name, color in shown.items()]
    legend(ax, parts, 0, 1.1, size=8.2)
    ax.xaxis.set_major_formatter(amounts("s"))


def _links(ax: Axes, row: Prediction, measured: StepRun | None) -> None:
    """Draw the bytes that the busiest rank sends along each axis; what is measured next to them, as text."""
    sent = sent_over(row.links)
    most = max([*sent.values(), 1])
    axes = AXES | {axis: color for axis, color in MORE.items() if row.grid[axis] > 1}
    for y, (axis, color) in enumerate(axes.items()):
        ax.barh(y, sent[axis], 0.72, color=color)
        text = amount_text(sent[axis])
        if measured is not None and measured.links is not None:
            text += f"   measured {amount_text(measured.links[axis])}"
        ax.text(sent[axis], y, f" {text}", va="center", fontsize=8.5)
    _frame(ax, 1.75 * most, list(axes))
    ax.set_xticks([])
    ax.set_title("bytes that a rank sends per step; tied weights count as dp", fontsize=9.5, pad=3)


def sent_over(links: dict[str, float]) -> dict[str, float]:
    """Return bytes over each axis: gradients of tied weights, which two stages add up, count as dp."""
    return links | {"dp": links["dp"] + links.get("shared", 0)}


def _draw_bubble(ax: Axes, row: Prediction, measured: StepRun | None) -> None:
    """Draw the share of the pipeline's time in which its ranks wait."""
    shares = [row.bubble] + ([measured.bubble] if measured is not None and measured.bubble is not None else [])
    for y, (share, look) in enumerate(zip(shares, ({}, MEASURED), strict=False)):
        ax.barh(y, share, 0.72, color="#9AA7B4", **look)
        ax.text(share, y, f" {abs(share):.1%}", va="center", fontsize=8.5)
    _frame(ax, 1.0, _names(len(shares), measured))
    ax.set_xticks([])
    ax.set_title("bubble", fontsize=9.5, pad=3)


def _names(bars: int, measured: StepRun | None) -> list[str]:
    """Return the names of the bars; the first one is predicted."""
    return ["predicted", measured.kind] if measured is not None and bars == 2 else ["predicted"]


def _frame(ax: Axes, right: float, names: Sequence[str]) -> None:
    """Make axes of a bar for each of `_names`, from top to bottom."""
    ax.set_xlim(0, right or 1)
    rows_only(ax, len(names), names)
    ax.locator_params(axis="x", nbins=6)


# -- a search ----------------------------------------------------------------------------------------------------------

SEARCH_HEIGHT = 4.4
SHADES = (BLUE, SKY, GREEN, ORANGE, PURPLE)


def draw_search(
    figure: Figure,
    rows: Sequence[Prediction],
    best: Prediction | None = None,
    guess: Prediction | None = None,
    title: str = "",
    foot: str = "",
    seconds: float | None = None,
) -> None:
    """Fill `figure`.

    Args:    best: the row that is marked; guess: the row that the attendee expects to be the best; seconds: of its
             step, as the attendee expects.
    """
    ax = figure.add_axes((0.09, 0.16, 0.63, 0.66))
    stages = sorted({row.grid["pp"] for row in rows})
    shade = {pp: SHADES[min(i, len(SHADES) - 1)] for i, pp in enumerate(_grouped(stages))}
    for row in rows:
        color = shade[_group_of(row.grid["pp"], shade)] if row.fits else "#C4C4C4"
        marker = "s" if row.recompute else "o"
        ax.plot(row.memory.total, row.seconds, marker, color=color, markersize=7, alpha=0.85, zorder=3 + row.fits)
    limit = rows[0].limit
    totals = [row.memory.total for row in rows]
    ax.set_xscale("log")
    ax.set_xlim(min(*totals, limit) / 1.5, max(*totals, limit) * 1.5)
    log_axis(ax, [*(row.seconds for row in rows), *([seconds] if seconds else [])], "s")
    if seconds:
        ax.axhline(seconds, color=BLUE, linewidth=1.6, linestyle=(0, (4, 2)))
    ax.xaxis.set_major_formatter(amounts("B"))
    narrow = max(*totals, limit) < 100 * min(*totals, limit)
    ax.xaxis.set_minor_formatter(lambda v, _: amount_text(v) if narrow and f"{v:.0e}"[0] in "25" else "")
    ax.tick_params(axis="x", which="minor", labelsize=7.5, labelcolor=GRAY)
    ax.axvline(limit, color=VERMILION, linewidth=1.8)
    ax.set_ylabel("predicted step")
    x_label(ax, "bytes on the fullest rank")
    for row, color, size in ((best, INK, 17), (guess, BLUE, 13)):
        if row is not None:
            ax.plot(row.memory.total, row.seconds, "o", mfc="none", mec=color, mew=2, markersize=size, zorder=6)
    steps = sorted(shade)
    entries: list[Entry] = []
    for pp, following in zip(steps, [*steps[1:], max(row.grid["pp"] for row in rows) + 1], strict=True):
        entries.append((shade[pp], f"pp {pp}" if following == pp + 1 else f"pp {pp} to {following - 1}"))
    entries += [(_circle(INK), f"best: {grid_name(best)}")] if best is not None else []
    entries += [(_circle(BLUE), f"your guess: {grid_name(guess)}")] if guess is not None else []
    entries += [(Line2D([], [], color=BLUE, linestyle="--"), f"your guess: {seconds_text(seconds)}")] if seconds else []
    legend(figure, entries, 0.75, 0.6, columns=1)
    if best is None:
        least = amount_text(min(totals))
        figure.text(0.75, 0.8, f"Nothing fits: the least\nis {least}.", fontsize=9, va="top", color=VERMILION)
    heading(figure, title, f"limit {amount_text(limit)} per rank (red); gray: does not fit; square: recomputed")
    footnote(figure, foot)


def _grouped(stages: list[int]) -> list[int]:
    """Return the numbers of stages that get a color of their own: all, or powers of about four."""
    if len(stages) <= len(SHADES):
        return stages
    return sorted({stages[round(i * (len(stages) - 1) / (len(SHADES) - 1))] for i in range(len(SHADES))})


def _group_of(pp: int, shade: dict[int, str]) -> int:
    """Return the largest number with a color that is no more than pp."""
    return max(key for key in shade if key <= pp)


def _circle(color: str) -> Line2D:
    return Line2D([], [], marker="o", linestyle="", mfc="none", mec=color, mew=2, markersize=9)


def grid_name(row: Prediction) -> str:
    axes = ("dp", "pp", "tp", *(axis for axis in MORE if row.grid[axis] > 1))
    return " ".join(f"{axis} {row.grid[axis]}" for axis in axes)

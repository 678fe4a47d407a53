"""Events over time: a lane per rank; strategies one under the other; Horovod's rows of gradients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..trace import Event, seconds_text
from .colors import BLUE, FAINT, GRAY, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from .style import Axes, Figure, Look, footnote, heading, legend, rows_only

if TYPE_CHECKING:
    from ..parallel.horovod import TraceRow

# The messages of one rank overlap (a sendrecv sends while it receives), so a lane has three rows.
ROWS = {"send": 1, "recv": 2}
COLORS = {
    "send": BLUE,
    "recv": SKY,
    "compute": GREEN,
    "forward": GREEN,
    "backward": YELLOW,
    "add gradients": ORANGE,
    "copy out": ORANGE,
    "copy in": YELLOW,
    "produce": GREEN,
    "consume": YELLOW,
    "other work": "#7A5195",
    "input": "#7A5195",
    "update": "#8C6D31",
    "all_reduce": PURPLE,
    "barrier": "#BBBBBB",
    "wait": GRAY,
    "injected delay": VERMILION,
}
STAGED = re.compile(r" \d+ stage \d+$")  # the micro-batch and the stage of an action of a pipeline
SPARE = (INK, "#B15928", "#3B6B8C")  # of operations that somebody else has named
ROW = 0.25  # height, if a lane has 1
TOPS = (-0.405, -0.135, 0.135)
MOST_LABELLED = 16  # ranks: with more, a row is too thin for text
MOST_EVENTS = 150  # per rank: what can be distinguished on the width of a page
MOST_NAMES = 6  # of operations in a line


def draw(
    figure: Figure,
    events: Sequence[Event],
    title: str = "",
    foot: str = "",
    guess: float | None = None,
    recorded: bool = False,
) -> None:
    """Fill `figure` with the bars of `events`, of any number of ranks.

    guess: the seconds that the attendee expects. recorded: bars are pale, with dashed edges.
    """
    ax = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.985, bottom=0.19, top=0.8)
    shown = [e._replace(op=_kind_of(e.op)) for e in last_events(events)]
    lanes = sorted({(e.rank, lane) for e in events for lane in ("", e.lane)})  # a rank that ended early keeps its lane
    axis = _TimeAxis(shown)
    foot = f"The times above are means per rank.  {foot}"
    if len(shown) < len(events):
        whole = seconds_text(_TimeAxis(events).span / 1e9)
        foot = f"Drawn: the last {seconds_text(axis.span / 1e9)} of {whole}.  {foot}"
    entries = []
    for op, color in colors_of(shown).items():
        rows = [[e for e in shown if (e.rank, e.lane) == lane and e.op == op] for lane in lanes]
        look = _dashed(color) if recorded else {"facecolors": color}
        for y, row in enumerate(rows):
            ax.broken_barh([axis.bar(e) for e in row], (y + TOPS[ROWS.get(op, 0)], ROW), **look)
            if op in ROWS and len(lanes) <= MOST_LABELLED:
                _write_peers(ax, axis, row, y + TOPS[ROWS[op]] + ROW / 2, op)
        mean = sum(busy_ns(row) for row in rows) / 1e9 / max(len({rank for rank, _ in lanes}), 1)
        entries.append((color, f"{op} {seconds_text(mean)}" if mean else op))
    rows_only(ax, max(len(lanes), 1), [lane or f"rank {rank}" for rank, lane in lanes])
    for y, ((_, lane), text) in enumerate(zip(lanes, ax.get_yticklabels(), strict=True)):
        if lane:
            text.set(fontsize=7.5, color=GRAY)
            ax.axhspan(y - 0.5, y + 0.5, color="#F4F4F4", lw=0, zorder=0)
    end = axis.span / axis.scale
    if guess is not None:
        end = max(end, 1.02e9 * guess / axis.scale)
        ax.axvline(1e9 * guess / axis.scale, color=BLUE, linewidth=1.6, linestyle=(0, (4, 2)), zorder=6)
        foot = f"Blue: your guess, {seconds_text(guess)}.  {foot}"
    ax.set_xlim(0, end)
    ax.set_xlabel(f"time, {axis.unit}")
    heading(figure, title)
    lines = -(-len(entries) // MOST_NAMES)
    legend(figure, entries, 0.085, 0.86, columns=-(-len(entries) // max(lines, 1)))
    footnote(figure, foot)


def _dashed(color: str) -> Look:
    """Return the look of bars that were recorded."""
    return {"facecolors": (color, 0.45), "edgecolors": color, "linestyle": (0, (3, 2)), "linewidth": 1}


def _kind_of(op: str) -> str:
    """Return the kind that is drawn in one color: "forward" for "forward 3 stage 1"."""
    return STAGED.sub("", op)


class _TimeAxis:
    """Places of events in the picture: origin and span in ns, and `scale` ns per `unit` of the axis."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.origin = min((e.t0_ns for e in events), default=0)
        self.span = max((e.t1_ns for e in events), default=1) - self.origin or 1
        units = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1))
        self.unit, self.scale = next((unit, scale) for unit, scale in units if self.span >= scale)

    def bar(self, event: Event) -> tuple[float, float]:
        """Return (start, width): a pixel narrower than the event, to part neighbors, and at least a pixel wide."""
        pixel = self.span / 900
        start = (event.t0_ns - self.origin) / self.scale
        return start, max(event.t1_ns - event.t0_ns - pixel, pixel) / self.scale


def last_events(events: Sequence[Event]) -> list[Event]:
    """Return the events since the moment at which no rank has more than MOST_EVENTS left, in order of time."""
    by_rank: dict[int, list[Event]] = {}
    for e in sorted(events, key=lambda e: e.t0_ns):
        by_rank.setdefault(e.rank, []).append(e)
    long = [row for row in by_rank.values() if len(row) > MOST_EVENTS]  # the others are drawn from their beginning
    start = max((row[-MOST_EVENTS].t0_ns for row in long), default=0)
    return sorted((e for e in events if e.t0_ns >= start), key=lambda e: e.t0_ns)


def colors_of(events: Sequence[Event]) -> dict[str, str]:
    """Return {op: color} in the order of the rows of a lane; operations that are not in COLORS get spare ones."""
    known = list(COLORS)
    position = {op: known.index(op) if op in COLORS else len(known) for op in {e.op for e in events}}
    ops = sorted(position, key=lambda op: (ROWS.get(op, 0), position[op], op))
    spare = iter(SPARE * len(ops))
    return {op: COLORS.get(op) or next(spare) for op in ops}


def _write_peers(ax: Axes, axis: _TimeAxis, row: list[Event], y: float, op: str) -> None:
    """Write the peer's rank in every bar of a message that is wide enough for it and not covered by another."""
    arrow, color = ("→", "white") if op == "send" else ("←", INK)
    ends, starts = [0, *(e.t1_ns for e in row)], [*(e.t0_ns for e in row[1:]), float("inf")]
    for before, e, after in zip(ends, row, starts, strict=False):
        if e.peer >= 0 and e.t1_ns - e.t0_ns > axis.span / 28 and before <= e.t0_ns and e.t1_ns <= after:
            x = ((e.t0_ns + e.t1_ns) / 2 - axis.origin) / axis.scale
            ax.text(x, y, f"{arrow}{e.peer}", ha="center", va="center", fontsize=7.5, color=color)


def busy_ns(events: Sequence[Event]) -> int:
    """Return the time covered by the events of one rank; time in which they overlap counts once."""
    total, end = 0, -1
    for e in sorted(events, key=lambda e: e.t0_ns):
        total += max(0, e.t1_ns - max(e.t0_ns, end))
        end = max(end, e.t1_ns)
    return total


# -- strategies one under the other -----------------------------------------------------------------------------------

STEP = {"forward": GREEN, "backward": YELLOW, "wait": "#BBBBBB", "send": BLUE, "recv": SKY}
STEP_NAMES = {"wait": "waiting", "send": "sending", "recv": "receiving"}
PANEL, MARGIN = 0.95, 1.4  # inches: of one timeline; of title and foot together
FORMULAS = "b, f, B, r: broadcast, forward, backward and reduction of a layer; ∥: layer by layer, at the same time."
BAR = 0.72  # of a lane's height


class DesignShown(Protocol):
    """A step with one strategy. events: of one rank; formula, predicted: its seconds in letters and by arithmetic."""

    @property
    def name(self) -> str: ...

    @property
    def seconds(self) -> float: ...

    @property
    def exposed(self) -> float: ...

    @property
    def formula(self) -> str: ...

    @property
    def predicted(self) -> float | None: ...

    @property
    def events(self) -> Sequence[Event]: ...


def designs_height(n: int) -> float:
    """Return inches of a figure with n timelines."""
    return MARGIN + n * PANEL


def draw_designs(figure: Figure, found: Sequence[DesignShown], title: str, guess: float | None = None) -> None:
    """Fill `figure` with `found`. guess: the seconds of the last one that the attendee expects."""
    tall = figure.get_size_inches()[1]
    axes = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    figure.subplots_adjust(left=0.115, right=0.985, bottom=0.72 / tall, top=1 - 0.85 / tall, hspace=0.62)
    longest = max(d.seconds for d in found) * 1e3
    for ax, design in zip(axes, found, strict=True):
        _two_lanes(ax, design.events)
        ax.set_xlim(0, longest * 1.02)
        ax.axvline(design.seconds * 1e3, color=INK, linewidth=1)
        text = f"{seconds_text(design.seconds)}, {design.exposed:.0%} exposed"
        if design.predicted:
            text = f"{design.formula}  =  {seconds_text(design.predicted)};   here {text}"
        ax.set_title(design.name, fontsize=9.5, pad=3)
        ax.set_title(text, loc="right", fontsize=8.5, fontweight="normal", pad=3)
    if guess is not None:
        axes[-1].axvline(guess * 1e3, color=BLUE, linewidth=1.6, linestyle=(0, (4, 2)), zorder=6)
    axes[-1].set_xlabel("virtual time, ms")
    heading(figure, title)
    legend(figure, [(color, STEP_NAMES.get(op, op)) for op, color in STEP.items()], 0.115, 1 - 0.5 / tall)
    end = "A black line: the end of the step."
    end += "" if guess is None else f"  Blue: your guess, {seconds_text(guess)}."
    footnote(figure, FORMULAS if any(d.formula for d in found) else end)


def _two_lanes(ax: Axes, events: Sequence[Event]) -> None:
    """Draw the rank's own thread, in which it waits or computes, and below it the messages in its background."""
    for op, color in STEP.items():
        for y, lane in enumerate(("", "background")):
            bars = [(e.t0_ns / 1e6, (e.t1_ns - e.t0_ns) / 1e6) for e in events if e.op == op and e.lane == lane]
            whole = op not in ("send", "recv")
            ax.broken_barh(bars, (y if op == "recv" else y - BAR / 2, BAR if whole else BAR / 2), facecolors=color)
    rows_only(ax, 2, ["rank 0", "background" if any(e.lane for e in events) else ""])
    ax.get_yticklabels()[1].set_color(GRAY)


# -- Horovod's timeline -----------------------------------------------------------------------------------------------

ACTIVITIES = {
    "NEGOTIATE_ALLREDUCE": FAINT,
    "ALLREDUCE": GRAY,
    "MEMCPY_IN_FUSION_BUFFER": GREEN,
    "MPI_ALLREDUCE": BLUE,
    "MEMCPY_OUT_FUSION_BUFFER": PURPLE,
}


def horovod_height(rows: Sequence[TraceRow]) -> float:
    """Return inches of a figure of `rows`, as parallel.horovod.to_horovod makes them."""
    return 1.55 + 0.155 * max(len(gradients_of(rows)), 6)


def gradients_of(rows: Sequence[TraceRow]) -> dict[int, str]:
    """Return {pid: name of the gradient}, in the order in which they are drawn."""
    return {row["pid"]: str(row["args"]["name"]) for row in rows if row.get("name") == "process_name"}


def draw_horovod(figure: Figure, rows: Sequence[TraceRow], title: str, foot: str = "") -> None:
    """Fill `figure` with a row per gradient, from its negotiation to its sum."""
    names, tall = gradients_of(rows), figure.get_size_inches()[1]
    ax = figure.subplots()
    figure.subplots_adjust(left=0.24, right=0.985, bottom=0.68 / tall, top=1 - 0.8 / tall)
    position = {pid: y for y, pid in enumerate(names)}
    for name, pid, begin, end in activities(rows):
        half = 0.42 if name in ("NEGOTIATE_ALLREDUCE", "ALLREDUCE") else 0.3
        bar = [(begin / 1e3, (end - begin) / 1e3)]
        ax.broken_barh(bar, (position[pid] - half, 2 * half), facecolors=ACTIVITIES[name])
    for row in rows:
        if row["ph"] == "X":
            ax.plot([row["ts"] / 1e3], [position[row["pid"]]], "|", color=ORANGE, markersize=7)
    rows_only(ax, len(names), list(names.values()))
    ax.tick_params(axis="y", labelsize=7.5)
    ax.set_xlabel("time, ms")
    heading(figure, title)
    entries = [(color, name) for name, color in {**ACTIVITIES, "a rank is ready": ORANGE}.items()]
    legend(figure, entries, 0.012, 1 - 0.52 / tall, size=7)
    footnote(figure, foot)


def activities(rows: Sequence[TraceRow]) -> list[tuple[str, int, float, float]]:
    """Return (activity, pid, begin, end) of every pair of begin and end, the outer ones first."""
    open_: dict[int, list[tuple[str, float]]] = {}
    found = []
    for row in rows:
        stack = open_.setdefault(row["pid"], [])
        if row["ph"] == "B":
            stack.append((row["name"], row["ts"]))
        elif row["ph"] == "E":
            name, begin = stack.pop()
            found.append((len(stack), name, row["pid"], begin, row["ts"]))
    return [(name, pid, begin, end) for _, name, pid, begin, end in sorted(found, key=lambda f: f[0])]

"""Who did what, when: one lane per rank, below it one for its background, one bar per event."""

import re

from ..trace import seconds_text
from .style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION, YELLOW, heading, note

# The messages of one rank overlap (a sendrecv sends while it receives), so a lane has three rows.
ROWS = {"send": 1, "recv": 2}
COLORS = {
    "send": BLUE,
    "recv": SKY,
    "compute": GREEN,
    "forward": GREEN,
    "backward": YELLOW,
    "add gradients": ORANGE,
    "input": "#7A5195",
    "update": "#8C6D31",
    "all_reduce": PURPLE,
    "barrier": "#BBBBBB",
    "wait": GREY,
    "injected delay": VERMILION,
}
STAGED = re.compile(r" \d+ stage \d+$")  # the micro-batch and the stage of an action of a pipeline
SPARE = (INK, "#B15928", "#3B6B8C")  # of operations that somebody else has named
ROW = 0.25  # height, where a lane has 1
TOPS = (-0.405, -0.135, 0.135)
MOST_LABELLED = 16  # ranks: with more, a row is too thin for text
MOST_EVENTS = 150  # per rank: what can be told apart on the width of a page


def draw(figure, events, title="", foot=""):
    """Fill `figure` with the bars of `events`, a list of trace.Event of any number of ranks."""
    ax = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.985, bottom=0.19, top=0.8)
    shown = [e._replace(op=kind_of(e.op)) for e in last_events(events)]
    lanes = lanes_of(events)  # a rank that ended early keeps its lane
    ranks = len({rank for rank, _ in lanes})
    colors = colors_of(shown)
    axis = TimeAxis(shown)
    foot = f"The times above are means per rank.  {foot}"
    if len(shown) < len(events):
        foot = (
            f"Drawn: the last {seconds_text(axis.span / 1e9)} of {seconds_text(TimeAxis(events).span / 1e9)}.  {foot}"
        )
    totals = {}
    for op, color in colors.items():
        rows = [[e for e in shown if (e.rank, e.lane) == lane and e.op == op] for lane in lanes]
        for y, row in enumerate(rows):
            ax.broken_barh([axis.bar(e) for e in row], (y + TOPS[ROWS.get(op, 0)], ROW), facecolors=color)
            if op in ROWS and len(lanes) <= MOST_LABELLED:
                write_peers(ax, axis, row, y + TOPS[ROWS[op]] + ROW / 2, op)
        totals[op] = sum(busy_ns(row) for row in rows) / 1e9 / max(ranks, 1)
    ax.set_ylim(max(len(lanes), 1) - 0.5, -0.5)
    name_lanes(ax, lanes)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, axis.span / axis.scale)
    ax.set_xlabel(f"time, {axis.unit}")
    heading(figure, title)
    legend(figure, colors, totals)
    note(figure, foot)


def kind_of(op):
    """What is drawn in one color: "forward" for "forward 3 stage 1"."""
    return STAGED.sub("", op)


def lanes_of(events):
    """[(rank, lane)], from top to bottom: every rank, and below it what runs beside it."""
    return sorted({(e.rank, lane) for e in events for lane in ("", e.lane)})


def name_lanes(ax, lanes):
    """Ranks at the left, what runs beside them on a tint that shows whose it is."""
    ax.set_yticks(range(len(lanes)), [lane or f"rank {rank}" for rank, lane in lanes])
    for y, ((_, lane), text) in enumerate(zip(lanes, ax.get_yticklabels(), strict=True)):
        if lane:
            text.set(fontsize=7.5, color=GREY)
            ax.axhspan(y - 0.5, y + 0.5, color="#F4F4F4", lw=0, zorder=0)


class TimeAxis:
    """Where events lie in the picture: origin and span in ns, and `scale` ns per `unit` of the axis."""

    def __init__(self, events):
        self.origin = min((e.t0_ns for e in events), default=0)
        self.span = max((e.t1_ns for e in events), default=1) - self.origin or 1
        units = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1))
        self.unit, self.scale = next((unit, scale) for unit, scale in units if self.span >= scale)

    def at(self, t_ns):
        return (t_ns - self.origin) / self.scale

    def bar(self, event):
        """(start, width): about a pixel narrower than the event, to part neighbors, and about a pixel wide at least."""
        pixel = self.span / 900
        return self.at(event.t0_ns), max(event.t1_ns - event.t0_ns - pixel, pixel) / self.scale


def last_events(events):
    """The events since the moment at which no rank has more than MOST_EVENTS left, in order of time."""
    by_rank = {}
    for e in sorted(events, key=lambda e: e.t0_ns):
        by_rank.setdefault(e.rank, []).append(e)
    long = [row for row in by_rank.values() if len(row) > MOST_EVENTS]  # the others are drawn from their beginning
    start = max((row[-MOST_EVENTS].t0_ns for row in long), default=0)
    return sorted((e for e in events if e.t0_ns >= start), key=lambda e: e.t0_ns)


def colors_of(events):
    """{op: color} in the order of the rows of a lane; operations that COLORS does not know get what is left."""
    known = list(COLORS)
    place = {op: known.index(op) if op in COLORS else len(known) for op in {e.op for e in events}}
    ops = sorted(place, key=lambda op: (ROWS.get(op, 0), place[op], op))
    spare = iter(SPARE * len(ops))
    return {op: COLORS.get(op) or next(spare) for op in ops}


def write_peers(ax, axis, row, y, op):
    """The peer's rank in every bar of a message that is wide enough for it and not covered by another."""
    arrow, color = ("→", "white") if op == "send" else ("←", INK)
    ends, starts = [0, *(e.t1_ns for e in row)], [*(e.t0_ns for e in row[1:]), float("inf")]
    for before, e, after in zip(ends, row, starts, strict=False):
        if e.t1_ns - e.t0_ns > axis.span / 28 and before <= e.t0_ns and e.t1_ns <= after:
            x = axis.at((e.t0_ns + e.t1_ns) / 2)
            ax.text(x, y, f"{arrow}{e.peer}", ha="center", va="center", fontsize=7.5, color=color)


def busy_ns(events):
    """Time covered by the events of one rank, counted once where they overlap."""
    total, end = 0, -1
    for e in sorted(events, key=lambda e: e.t0_ns):
        total += max(0, e.t1_ns - max(e.t0_ns, end))
        end = max(end, e.t1_ns)
    return total


def legend(figure, colors, totals):
    """Above the lanes: each operation in its color, with the time of a rank in it; two lines if need be."""
    entries, x, line = [], 0.087, 0
    for op, color in colors.items():
        time = f" {seconds_text(totals[op])}" if totals[op] else ""
        text = figure.text(0, 0, op + time, fontsize=8.5, va="center")
        width = text.get_window_extent().width / figure.bbox.width + 0.032
        if x + width > 1:
            x, line = 0.087, line + 1
        entries.append((text, color, x, line))
        x += width
    for text, color, x, row in entries:
        y = 0.84 + 0.053 * (line - row)
        figure.text(x, y, "■", fontsize=11, va="center", color=color)
        text.set_position((x + 0.018, y))

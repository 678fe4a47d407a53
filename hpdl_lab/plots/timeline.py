"""Who did what, when: one lane per rank, one bar per event."""

from .style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SERIES, SKY, YELLOW, heading, note, seconds_text

# The messages of one rank overlap (a sendrecv sends while it receives), so a lane has three rows.
ROWS = {"send": 1, "recv": 2}
COLORS = {
    "send": BLUE,
    "recv": SKY,
    "compute": GREEN,
    "forward": GREEN,
    "backward": YELLOW,
    "add gradients": ORANGE,
    "all_reduce": PURPLE,
    "barrier": "#BBBBBB",
}
MOST_EVENTS = 150  # per rank: what can be told apart on the width of a page


def draw(figure, events, title="", foot=""):
    """Fill `figure` with the bars of `events`, a list of trace.Event of any number of ranks."""
    ax = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.985, bottom=0.19, top=0.8)
    shown = last_events(events)
    ranks = sorted({e.rank for e in shown})
    origin = min((e.t0_ns for e in shown), default=0)
    span = max((e.t1_ns for e in shown), default=1) - origin or 1
    if len(shown) < len(events):
        whole = max(e.t1_ns for e in events) - min(e.t0_ns for e in events)
        foot = f"The last {seconds_text(span / 1e9)} of {seconds_text(whole / 1e9)} are drawn.  {foot}"
    unit, scale = next((u, s) for u, s in (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1)) if span >= s)
    colors = colors_of(shown)
    least = span / scale / 1200  # a bar is never thinner than about a pixel
    row_height = 0.27
    for lane, rank in enumerate(ranks):
        for op, color in colors.items():
            bars = [
                ((e.t0_ns - origin) / scale, max((e.t1_ns - e.t0_ns) / scale, least))
                for e in shown
                if e.rank == rank and e.op == op
            ]
            y = lane - 0.405 + row_height * ROWS.get(op, 0)
            ax.broken_barh(bars, (y, row_height * 0.92), facecolors=color, edgecolors="white", linewidth=0.3)
    ax.set_ylim(max(len(ranks), 1) - 0.5, -0.5)
    ax.set_yticks(range(len(ranks)), [f"rank {r}" for r in ranks])
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)
    ax.set_xlim(0, span / scale)
    ax.set_xlabel(f"time, {unit}")
    if len(ranks) <= 16:
        write_peers(ax, shown, ranks, origin, scale, span, row_height)
    heading(figure, title)
    totals = {
        op: sum(busy_ns([e for e in shown if e.rank == r and e.op == op]) for r in ranks) / 1e9 / len(ranks)
        for op in colors
    }
    legend(figure, colors, totals)
    note(figure, foot)


def last_events(events):
    """The events since the moment at which no rank has more than MOST_EVENTS left, in order of time."""
    by_rank = {}
    for e in sorted(events, key=lambda e: e.t0_ns):
        by_rank.setdefault(e.rank, []).append(e)
    start = max((row[-MOST_EVENTS:][0].t0_ns for row in by_rank.values()), default=0)
    return sorted((e for e in events if e.t0_ns >= start), key=lambda e: e.t0_ns)


def colors_of(events):
    """{op: color} in the order of the rows of a lane; operations that COLORS does not know get what is left."""
    known = list(COLORS)
    place = {op: known.index(op) if op in COLORS else len(known) for op in {e.op for e in events}}
    ops = sorted(place, key=lambda op: (ROWS.get(op, 0), place[op], op))
    spare = iter([c for c in SERIES if c not in COLORS.values()] * (len(ops) + 1))
    return {op: COLORS.get(op) or next(spare) for op in ops}


def write_peers(ax, events, ranks, origin, scale, span, row_height):
    """The peer's rank in every bar of a message that is wide enough for it and not covered by another."""
    arrows = {"send": "→{}", "recv": "←{}"}
    for rank, op in ((r, op) for r in ranks for op in arrows):
        row = [e for e in events if e.rank == rank and e.op == op]
        edges = [0, *(e.t1_ns for e in row)], [*(e.t0_ns for e in row), float("inf")]
        for before, e, after in zip(edges[0], row, edges[1][1:], strict=False):
            if e.t1_ns - e.t0_ns > span / 28 and e.t0_ns >= before and e.t1_ns <= after:
                x = ((e.t0_ns + e.t1_ns) / 2 - origin) / scale
                y = ranks.index(rank) - 0.405 + row_height * (ROWS[op] + 0.46)
                color = "white" if op == "send" else INK
                ax.text(x, y, arrows[op].format(e.peer), ha="center", va="center", fontsize=7.5, color=color)


def busy_ns(events):
    """Time covered by the events of one rank, counted once where they overlap."""
    total, end = 0, -1
    for e in sorted(events, key=lambda e: e.t0_ns):
        total += max(0, e.t1_ns - max(e.t0_ns, end))
        end = max(end, e.t1_ns)
    return total


def legend(figure, colors, totals):
    """One line above the lanes: each operation in its color, with the mean time that a rank spent in it."""
    x = 0.087
    for op, color in colors.items():
        figure.text(x, 0.845, "■", color=color, fontsize=12, va="center")
        time = f" {seconds_text(totals[op])}" if totals[op] else ""
        text = figure.text(x + 0.02, 0.845, op + time, fontsize=9, va="center")
        x = text.get_window_extent().x1 / figure.bbox.width + 0.022
    figure.text(x, 0.845, "(mean per rank)", fontsize=9, va="center", color=GREY)

"""The numbers below a panel of scaling: what each point was, and where its time went."""

from ..trace import number_text
from .style import BLUE, GREEN, GREY, INK, PURPLE

MOST_ROWS = 6
COLUMNS = (  # heading, right edge as a share of the panel, what it says of a point
    ("ranks", 0.09, lambda r: f"{r['ranks']:,}"),
    ("{unit}", 0.33, lambda r: number_text(r["rate"])),
    ("exposed", 0.50, lambda r: percent(r["exposed"])),
    ("overlap", 0.645, lambda r: percent(r["overlap"])),
    ("imbalance", 0.83, lambda r: f"{r['imbalance']:.2f}" if r["imbalance"] else ""),
    ("sim./meas.", 1.02, lambda r: percent(r["simulated"] / r["rate"]) if r.get("simulated") else ""),
)
LINE = 0.031  # of the figure's height, from one row to the next
FIRST = 0.1  # from the panel down to the head


def percent(value):
    return "" if value is None else f"{value:.0%}"


def table(figure, ax, rows, simulated, unit, fits):
    """Write a row for each measured point, and for simulated ones beyond them as there is room; fits: lines below."""
    most = max((r["ranks"] for r in rows), default=0)
    beyond = [r for r in simulated if r["ranks"] > most]
    measured = rows[-(MOST_ROWS - bool(beyond)) :]
    beyond = spaced(beyond, MOST_ROWS - len(measured))
    box = ax.get_position()
    y = box.y0 - FIRST
    for head, right, _ in COLUMNS:
        write(figure, box, right, y, head.format(unit=unit), INK)
    for r, color in [(r, BLUE) for r in measured] + [(r, GREEN) for r in beyond]:
        y -= LINE
        for _, right, text in COLUMNS:
            write(figure, box, right, y, text(r), GREY if r["ranks"] > r["cores"] else color)
    for line in fits:
        y -= LINE
        figure.text(box.x0, y, line, va="center", fontsize=8, color=PURPLE)


def spaced(rows, room):
    """At most `room` of the rows, the last one and others evenly before it."""
    if len(rows) <= room:
        return rows
    return [rows[round((i + 1) * len(rows) / room) - 1] for i in range(room)]


def write(figure, box, right, y, text, color):
    figure.text(box.x0 + right * box.width, y, text, ha="right", va="center", fontsize=8.2, color=color)

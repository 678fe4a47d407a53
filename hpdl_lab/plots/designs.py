"""Strategies as timelines of the same step, one under the other on one axis: rank 0, and what runs beside it."""

from ..trace import seconds_text
from .style import BLUE, GREEN, GREY, INK, SKY, YELLOW, heading, note

COLORS = {"forward": GREEN, "backward": YELLOW, "wait": "#BBBBBB", "send": BLUE, "recv": SKY}
NAMES = {"wait": "waiting", "send": "sending", "recv": "receiving"}
PANEL, MARGIN = 0.95, 1.4  # inches: of one timeline; of title and foot together
LANES = ("", "background")
FOOT = "b, f, B, r: broadcast, forward, backward and reduction of a layer; ∥: layer by layer, beside each other."
BAR = 0.72  # of a lane's height


def height(n):
    """Inches of a figure with n timelines."""
    return MARGIN + n * PANEL


def draw(figure, found, title):
    """Fill `figure` with `found`: records with name, seconds, exposed, formula, predicted, and events of one rank."""
    tall = figure.get_size_inches()[1]
    axes = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    figure.subplots_adjust(left=0.115, right=0.985, bottom=0.72 / tall, top=1 - 0.85 / tall, hspace=0.62)
    longest = max(d.seconds for d in found) * 1e3
    for ax, design in zip(axes, found, strict=True):
        timeline(ax, design.events)
        ax.set_xlim(0, longest * 1.02)
        ax.axvline(design.seconds * 1e3, color=INK, linewidth=1)
        ax.set_title(design.name, fontsize=9.5, pad=3)
        ax.set_title(told(design), loc="right", fontsize=8.5, fontweight="normal", pad=3)
    axes[-1].set_xlabel("virtual time, ms")
    heading(figure, title)
    legend(figure, tall)
    note(figure, FOOT if any(d.formula for d in found) else "A black line: the end of the step.")


def told(design):
    """What stands at the right above a timeline."""
    text = f"{seconds_text(design.seconds)}, {design.exposed:.0%} exposed"
    if not design.predicted:
        return text
    return f"{design.formula}  =  {seconds_text(design.predicted)};   here {text}"


def timeline(ax, events):
    """Two lanes: the rank's own thread, in which it waits or computes, and the messages beside it."""
    messages = [e for e in events if e.op in ("send", "recv")]
    for op, color in COLORS.items():
        for y, lane in enumerate(LANES):
            bars = [bar(e) for e in events if e.op == op and e.lane == lane]
            full = op not in ("send", "recv")
            top = y - BAR / 2 if full or op == "send" else y
            ax.broken_barh(bars, (top, BAR if full else BAR / 2), facecolors=color)
    ax.set_ylim(1.5, -0.5)
    beside = any(e.lane for e in messages)
    ax.set_yticks(range(2), ["rank 0", "background"] if beside else ["rank 0", ""], fontsize=8.5)
    ax.get_yticklabels()[1].set_color(GREY)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="y", visible=False)


def bar(event):
    return event.t0_ns / 1e6, (event.t1_ns - event.t0_ns) / 1e6


def legend(figure, tall):
    """Every color with its name, in one line under the title."""
    x = 0.115
    for op, color in COLORS.items():
        figure.text(x, 1 - 0.5 / tall, "■", fontsize=11, va="center", color=color)
        name = figure.text(x + 0.018, 1 - 0.5 / tall, NAMES.get(op, op), fontsize=8.5, va="center")
        x += name.get_window_extent().width / figure.bbox.width + 0.04

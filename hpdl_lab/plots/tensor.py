"""Four ways to cut a layer, side by side: what a rank sends, keeps and takes; model and prediction over it."""

from matplotlib.ticker import MaxNLocator

from ..trace import number_text, seconds_text
from .style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION, bytes_text, crowding, heading, note

HEIGHT = 3.7  # inches
BAR = 0.62


def draw(figure, rows, prediction=None, title="", foot=""):
    """Fill `figure` from rows of lab.tensor: dicts with name, forward, backward, weights, kept (bytes), seconds, p25,
    p75, model_forward, model_backward, model_seconds.

    prediction: bytes sent as columns and rows, forward and backward together, or None.
    """
    sent, held, time = figure.subplots(1, 3, sharey=True)
    figure.subplots_adjust(left=0.18, right=0.985, bottom=0.22, top=0.7, wspace=0.12)
    places = range(len(rows))
    stacked(sent, rows, ("forward", BLUE), ("backward", SKY))
    for y, row in zip(places, rows, strict=True):
        mark(sent, row["model_forward"] + row["model_backward"], y)
        if prediction is not None and row["way"] == "pair":
            sent.plot([prediction], [y], "*", color=INK, markersize=11, zorder=6)
    stacked(held, rows, ("weights", GREEN), ("kept", ORANGE))
    steps = GREY if crowding(rows) else PURPLE
    for y, row in zip(places, rows, strict=True):
        time.barh(y, row["seconds"], BAR, color=steps)
        time.plot([row["p25"], row["p75"]], [y, y], color=INK, linewidth=1.2)
        mark(time, row["model_seconds"], y)
    for ax, name, text in (
        (sent, "sent by a rank", mega),
        (held, "held by a rank", mega),
        (time, "a step", seconds_text),
    ):
        ax.set_title(name)
        ax.set_xlim(0, 1.12 * (ax.dataLim.x1 if rows and ax.dataLim.x1 > 0 else 1))
        ax.xaxis.set_major_formatter(lambda value, _, text=text: text(value))
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
    sent.set_yticks(list(places), [row["name"] for row in rows])
    sent.set_ylim(3.5, -0.5)
    heading(figure, title, crowding(rows).replace("points", "bars"))
    legend(figure, steps, prediction is not None)
    note(figure, foot)


def stacked(ax, rows, *parts):
    """One bar per row, of parts (key, color) one behind the other."""
    for y, row in enumerate(rows):
        left = 0
        for key, color in parts:
            ax.barh(y, row[key], BAR, left=left, color=color)
            left += row[key]


def mark(ax, value, y):
    """Where the model says the bar ends."""
    ax.plot([value, value], [y - 0.42, y + 0.42], color=VERMILION, linewidth=2, zorder=5)


def mega(nbytes):
    return "0" if not nbytes else f"{number_text(nbytes / 1e6)} MB" if nbytes >= 1e5 else bytes_text(nbytes)


def legend(figure, steps, predicted):
    """Every color with its name, in one line under the title. steps: the color of the bars of time."""
    names = [(BLUE, "■", "forward"), (SKY, "■", "backward"), (GREEN, "■", "weights")]
    names += [
        (ORANGE, "■", "kept for backward"),
        (steps, "■", "time (median)"),
        (INK, "–", "its quartiles"),
        (VERMILION, "|", "model"),
    ]
    names += [(INK, "★", "your prediction")] * predicted
    x = 0.02
    for color, sign, name in names:
        figure.text(x, 0.82, sign, fontsize=11, va="center", color=color)
        text = figure.text(x + 0.02, 0.82, name, fontsize=8.5, va="center")
        x += text.get_window_extent().width / figure.bbox.width + 0.036

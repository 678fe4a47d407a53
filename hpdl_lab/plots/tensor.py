"""Four ways to cut a layer, side by side: what a rank sends, keeps and takes; model and prediction over it."""

from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from .colors import BLUE, GRAY, GREEN, INK, ORANGE, PURPLE, SKY, VERMILION
from .style import Axes, Entry, Figure, Rows, amounts, footnote, heading, legend, oversubscribed_note, rows_only

HEIGHT = 3.7  # inches
BAR = 0.62


def draw(figure: Figure, rows: Rows, prediction: float | None = None, title: str = "", foot: str = "") -> None:
    """Fill `figure` from rows of lab.tensor.

    rows: dicts with name, forward, backward, weights, kept (bytes), seconds, p25, p75, model_forward, model_backward,
    model_seconds.

    prediction: bytes sent as columns and rows, forward and backward together, or None.
    """
    sent, held, time = figure.subplots(1, 3, sharey=True)
    figure.subplots_adjust(left=0.18, right=0.985, bottom=0.22, top=0.7, wspace=0.12)
    positions = range(len(rows))
    _stacked(sent, rows, ("forward", BLUE), ("backward", SKY))
    for y, row in zip(positions, rows, strict=True):
        _mark(sent, row["model_forward"] + row["model_backward"], y)
        if prediction is not None and row["way"] == "pair":
            sent.plot([prediction], [y], "*", color=INK, markersize=11, zorder=6)
    _stacked(held, rows, ("weights", GREEN), ("kept", ORANGE))
    steps = GRAY if oversubscribed_note(rows) else PURPLE
    for y, row in zip(positions, rows, strict=True):
        time.barh(y, row["seconds"], BAR, color=steps)
        time.plot([row["p25"], row["p75"]], [y, y], color=INK, linewidth=1.2)
        _mark(time, row["model_seconds"], y)
    for ax, name, unit in ((sent, "sent by a rank", "B"), (held, "held by a rank", "B"), (time, "a step", "s")):
        ax.set_title(name)
        ax.set_xlim(0, 1.12 * (ax.dataLim.x1 if rows and ax.dataLim.x1 > 0 else 1))
        ax.xaxis.set_major_formatter(amounts(unit))
        ax.xaxis.set_major_locator(MaxNLocator(4))
        rows_only(ax, 4, [row["name"] for row in rows])
    heading(figure, title, oversubscribed_note(rows).replace("points", "bars"))
    entries: list[Entry] = [
        (BLUE, "forward"),
        (SKY, "backward"),
        (GREEN, "weights"),
        (ORANGE, "kept for backward"),
    ]
    entries += [(steps, "time (median)"), (Line2D([], [], color=INK, linewidth=1.2), "its quartiles")]
    entries.append((Line2D([], [], color=VERMILION, marker="|", linestyle="", markeredgewidth=2), "model"))
    if prediction is not None:
        entries.append((Line2D([], [], color=INK, marker="*", linestyle="", markersize=9), "your guess"))
    legend(figure, entries, 0.012, 0.82)
    footnote(figure, foot)


def _stacked(ax: Axes, rows: Rows, *parts: tuple[str, str]) -> None:
    """Draw one bar per row, of parts (key, color) one behind the other."""
    for y, row in enumerate(rows):
        left = 0
        for key, color in parts:
            ax.barh(y, row[key], BAR, left=left, color=color)
            left += row[key]


def _mark(ax: Axes, value: float, y: float) -> None:
    """Draw a line at which, by the model, the bar ends."""
    ax.plot([value, value], [y - 0.42, y + 0.42], color=VERMILION, linewidth=2, zorder=5)

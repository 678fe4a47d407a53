"""The time of one more token, against how many there are already."""

from collections.abc import Sequence

from ..measure import Measured
from ..trace import number_text
from .colors import BLUE, INK, VERMILION
from .style import Figure, footnote, heading, label_ends, log_axis, size_axis, x_label

COLORS = (VERMILION, BLUE)


def draw(figure: Figure, times: dict[str, dict[int, Measured]], guess: Sequence[float] | None = None) -> None:
    """Draw the time of the newest token for each way, with the quartiles.

    Args:    guess: for each way, how many times as long as the first token the last one takes: stars.
    """
    ax = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.77, bottom=0.2, top=0.78)
    lengths = [*next(iter(times.values()))]
    size_axis(ax, lengths)
    ax.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
    x_label(ax, "tokens so far")
    ends, values, factors = [], [], []
    for k, (how, curve) in enumerate(times.items()):
        color, medians = COLORS[k % len(COLORS)], [found.median for found in curve.values()]
        ax.plot(lengths, medians, "o-", color=color)
        low, high = zip(*(found.quartiles for found in curve.values()), strict=True)
        ax.fill_between(lengths, low, high, color=color, alpha=0.2)
        factor = medians[-1] / medians[0]
        ends.append((medians[-1], f"{how}: {number_text(factor)}×", color, True))
        factors.append(f"{how} {number_text(factor)} times")
        values += medians
        if guess is not None and k < len(guess):
            values.append(guess[k] * medians[0])
            ax.plot([lengths[-1]], [values[-1]], "*", color=INK, markersize=12, zorder=6, clip_on=False)
    log_axis(ax, values, "s")
    label_ends(ax, ends)
    heading(
        figure, f"Token {lengths[-1]:,} takes, of the time of token 1: {', '.join(factors)}", "One layer of attention"
    )
    footnote(figure, "Stars: your guesses." if guess is not None else "")

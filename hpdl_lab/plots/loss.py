"""Training as it goes: loss and samples per second against steps."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator

from ..trace import number_text
from .colors import BLUE, GREEN
from .style import Figure, Rows, heading, log_axis, note, x_label

SMOOTH = 20  # steps over which samples/s are averaged: single steps show the operating system more than the training


def draw(figure: Figure, rows: Rows, steps: int, title: str = "", foot: str = "", lowest: float = 0.1) -> None:
    """Fill `figure` from the rows that a training reports: dicts with step, loss, samples_per_s; `steps` in all.

    lowest: a loss that is good to reach; the axis goes down to it from the beginning, so that it stands still.
    """
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    figure.subplots_adjust(left=0.075, right=0.975, bottom=0.19, top=0.78, wspace=0.24)
    x = [r["step"] for r in rows]
    losses = [r["loss"] for r in rows]
    left.plot(x, losses, color=BLUE, linewidth=1.4)
    log_axis(left, [*losses, lowest, 3.0])  # 3: about where a training starts
    left.set_title("loss of the global batch")

    rates = smoothed([r["samples_per_s"] for r in rows])
    highest = max(rates, default=0.0)
    right.plot(x, rates, color=GREEN)
    right.set_ylim(0, max(1.0, highest * 1.25))
    right.yaxis.set_major_locator(MaxNLocator(4))
    right.yaxis.set_major_formatter(EngFormatter(sep=""))
    right.set_title("samples per second")
    for ax in (left, right):
        ax.set_xlim(0, max(steps - 1, 1))
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=(1, 2, 5, 10)))
        x_label(ax, "step")
    now = "waiting for the first step"
    if rows:
        left.plot(x[-1:], losses[-1:], "o", color=BLUE, clip_on=False)
        right.plot(x[-1:], rates[-1:], "o", color=GREEN, clip_on=False)
        now = f"step {x[-1] + 1} of {steps}   loss {number_text(losses[-1])}   {rates[-1]:,.0f} samples/s"
    heading(figure, title, now)
    note(figure, foot)


def smoothed(rates: Sequence[float]) -> np.ndarray:
    """The rate over the last SMOOTH steps, at every step: n / sum(1 / rate), which is work over time."""
    rates = np.asarray(rates, dtype=float)
    timed = rates > 0
    seconds = np.cumsum(np.divide(1, rates, out=np.zeros_like(rates), where=timed))
    steps = np.cumsum(timed)
    seconds[SMOOTH:], steps[SMOOTH:] = seconds[SMOOTH:] - seconds[:-SMOOTH], steps[SMOOTH:] - steps[:-SMOOTH]
    return np.divide(steps, seconds, out=np.zeros_like(rates), where=steps > 0)

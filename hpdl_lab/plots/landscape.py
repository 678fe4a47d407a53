"""Gradient descent seen from above: contours of the loss, and the path of the weights for each learning rate."""

from collections.abc import Callable

import numpy as np
from matplotlib.ticker import MaxNLocator

from ..trace import number_text
from .colors import BLUE, GRAY, GREEN, INK, ORANGE, VERMILION
from .style import HEIGHT, Axes, Figure, heading, label_ends, log_axis, x_label

COLORS = {"too low": BLUE, "good": GREEN, "too high": ORANGE, "diverges": VERMILION}
TALL = 5.2  # inches, with the losses
LEAST, MOST = 1e-3, 1e2  # of the loss at the start: what the curves of losses show
GOOD = 0.05  # of the loss above the least that may be left at the end


def outcome(path: np.ndarray, above: np.ndarray) -> str:
    """Return the word of COLORS that one path deserves.

    Args:    path: (k + 1, 2) weights before the first step and after each one; above: (k + 1,) loss above the least.
    """
    late = above[-1 - max(1, len(above) // 4)]
    if not np.isfinite(above).all() or above[-1] > late > 1e-9 * above[0]:  # uphill at the end, not by rounding
        return "diverges"
    if above[-1] <= GOOD * above[0]:
        return "good"
    steps = np.diff(path, axis=0)
    turns = (steps[1:] * steps[:-1]).sum(axis=1) < 0  # jumps back across the valley
    return "too high" if len(turns) and turns.mean() > 0.5 else "too low"


def height(rates: int) -> float:
    """Return inches of a figure of so many learning rates."""
    return TALL if rates > 1 else HEIGHT


class Bowl:
    """A loss of two weights, evaluated once on a grid around its lowest point.

    loss: f(w) for w (2,); best: (2,) its lowest point; reach: half the width of the picture, in weights.
    """

    def __init__(self, loss: Callable[[np.ndarray], float], best: np.ndarray, reach: float) -> None:
        self.loss, self.best, self.reach, self.least = loss, np.asarray(best), reach, loss(best)
        offsets = np.linspace(-reach, reach, 61)
        self.axes = best[0] + offsets, best[1] + offsets
        self.grid = np.array([[loss(np.array((a, b))) for a in self.axes[0]] for b in self.axes[1]])
        # Square spacing: rings of a bowl at even distances.
        self.levels = self.least + (self.grid.max() - self.least) * np.linspace(0, 1, 14)[1:] ** 2

    def above(self, path: np.ndarray) -> np.ndarray:
        """Return (k + 1,) loss above the least along a path."""
        with np.errstate(all="ignore"):  # a path that diverges overflows, and says so
            return np.array([self.loss(w) - self.least for w in path])


def draw(
    figure: Figure,
    bowl: Bowl,
    paths: dict[float, np.ndarray],
    steps: int,
    title: str = "",
    guess: float | None = None,
) -> None:
    """Fill `figure` with one panel per learning rate, all of the same bowl; below several, loss against steps.

    Args:    paths: {rate: (k + 1, 2) weights so far}; steps: how many there will be; then the verdict is written.
             guess: the rate of the panel that is marked as the attendee's, or None.
    """
    several = len(paths) > 1
    bottom, top = (0.46, 0.785) if several else (0.16, 0.74)  # of the panels
    axes = figure.subplots(1, len(paths), squeeze=False, sharey=True)[0]
    figure.subplots_adjust(left=0.088, right=0.985, bottom=bottom, top=top, wspace=0.1)
    for ax, (rate, path) in zip(axes, paths.items(), strict=True):
        ax.contour(*bowl.axes, bowl.grid, levels=bowl.levels, colors=[GRAY], linewidths=0.6, alpha=0.7)
        ax.plot(*bowl.best, "*", color=INK, markersize=11, zorder=3)
        _walk(ax, bowl, rate, path, done=len(path) > steps)
        if rate == guess:
            ax.text(0.03, 0.04, "your guess", transform=ax.transAxes, fontweight="bold", zorder=5)
        x_label(ax, "weight 0")
        ax.xaxis.set_major_locator(MaxNLocator(4))  # a tick is five artists, made anew in every frame
        ax.yaxis.set_visible(ax is axes[0])
    axes[0].yaxis.set_major_locator(MaxNLocator(5))
    axes[0].set_ylabel("weight 1")
    if several:
        _losses(figure.add_axes((0.088, 0.115, 0.78, 0.2)), bowl, paths, steps)
    heading(figure, title, "Each dot is a step. The lines join weights of equal loss; the star is where it is least.")


def _losses(ax: Axes, bowl: Bowl, paths: dict[float, np.ndarray], steps: int) -> None:
    """Draw the loss above the least against steps, logarithmic: a straight line loses the same share at every step."""
    curves = {rate: bowl.above(path) for rate, path in paths.items()}
    start = next(iter(curves.values()))[0] or 1.0
    most, least = start * MOST, start * LEAST
    seen = {rate: np.clip(np.nan_to_num(curve, nan=most, posinf=most), least, most) for rate, curve in curves.items()}
    log_axis(ax, np.concatenate(list(seen.values())))
    ends = []
    for rate, above in seen.items():
        color = COLORS[outcome(paths[rate], curves[rate])] if len(above) > steps else BLUE
        ax.plot(above, color=color, linewidth=1.8)
        ends.append((above[-1], f"rate {number_text(rate)}", color, False))
    ax.set_xlim(0, steps)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    x_label(ax, "steps")
    ax.set_title("loss above the least", fontsize=10)
    label_ends(ax, ends)


def _walk(ax: Axes, bowl: Bowl, rate: float, path: np.ndarray, done: bool) -> None:
    """Draw the path so far in one panel, with its loss and, at the end, the verdict."""
    above = bowl.above(path)
    word = outcome(path, above) if done else ""
    color = COLORS[word] if done else BLUE
    far = 50 * bowl.reach  # what has left the picture is drawn at a distance that the renderer can bear
    near = np.clip(np.nan_to_num(path, nan=far, posinf=far, neginf=-far), -far, far)
    ax.plot(near[:, 0], near[:, 1], "o-", color=color, markersize=3.2, linewidth=1.3, zorder=4)
    ax.set_xlim(bowl.axes[0][[0, -1]])
    ax.set_ylim(bowl.axes[1][[0, -1]])
    ax.grid(False)
    ax.set_title(
        f"rate {number_text(rate)}" + (f": {word}" if done else ""),
        pad=19,
        fontsize=10 if len(ax.figure.axes) < 5 else 9,
    )
    loss = above[-1] + bowl.least
    text = f"loss {number_text(loss)}" if loss < 1e6 else "loss overflows"
    ax.text(0, 1.025, f"step {len(path) - 1}: {text}", transform=ax.transAxes, fontsize=9, va="bottom")

"""Gossip: a graph of ranks with the weights of its averages, and how fast several graphs bring agreement."""

import itertools
import math

import numpy as np
from matplotlib.ticker import MaxNLocator

from ..parallel.gossip import lambda2
from ..trace import number_text
from .style import BLUE, FAINT, GREY, INK, SERIES, SKY, heading, label_ends, log_axis, note, x_label

MOST_RANKS = 32  # of the picture of one graph
MOST_NUMBERED = 8  # ranks up to which every weight says its number
FLOOR = 1e-15  # relative disagreement that is rounding, not gossip


def draw(figure, name, weights):
    """Fill `figure` with a graph, given as the (n, n) weights of one gossip step, and with the weights as a matrix.

    The wider a line, the larger the weight of what goes along it.
    """
    n = len(weights)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    figure.subplots_adjust(left=0.02, right=0.985, bottom=0.1, top=0.78, wspace=0.14)
    places = on_page(weights)
    left.set_aspect("equal")
    left.axis("off")
    left.set_xlim(-1.2, 1.2)
    left.set_ylim(-1.2, 1.2)
    for i, j in itertools.combinations(range(n), 2):
        if weights[i, j] > 0:
            left.plot(*zip(places[i], places[j], strict=True), color=BLUE, linewidth=0.6 + 6 * weights[i, j], zorder=1)
    for i, (x, y) in enumerate(places):
        left.plot(x, y, "o", color=SKY, markeredgecolor="white", markersize=18 if n <= 16 else 14, zorder=2)
        left.text(x, y, str(i), ha="center", va="center_baseline", fontsize=9 if n <= 16 else 7.5, zorder=3)
    matrix(right, weights)
    degrees = (weights > 0).sum(axis=1) - (np.diag(weights) > 0)
    low, high = degrees.min(), degrees.max()
    neighbors = f"{low} to {high} neighbors" if low < high else f"{low} neighbor{'s' if low != 1 else ''}"
    second = lambda2(weights)
    heading(figure, f"{name.capitalize()} of {n} ranks: {neighbors} each", mixing(second))


def matrix(ax, weights):
    """The weights as shaded cells, row i: what rank i makes its new value of."""
    n = len(weights)
    edges = np.arange(n + 1) - 0.5
    ax.pcolormesh(
        edges, edges, weights, cmap="Blues", vmin=0, vmax=1.5 * weights.max(), edgecolors=FAINT, linewidth=0.6
    )
    ax.invert_yaxis()
    ax.set_aspect("equal")
    ax.grid(False)
    every = max(1, n // 8)
    ax.set_xticks(range(0, n, every))
    ax.set_yticks(range(0, n, every))
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_title("weights of a step: row i makes rank i's", fontsize=9.5)
    if n <= MOST_NUMBERED:
        for (i, j), w in np.ndenumerate(weights):
            if w > 1e-12:
                ax.text(j, i, f"{w:.2f}", ha="center", va="center", fontsize=7.5, color=INK)


def on_page(weights):
    """(x, y) of every rank: on a circle, but for a hub that knows everybody while the others do not."""
    n = len(weights)
    degrees = (weights > 0).sum(axis=1) - (np.diag(weights) > 0)
    hub = n > 3 and degrees[0] == n - 1 and degrees[1:].max() < n - 1
    rim = n - 1 if hub else n
    circle = [(math.sin(2 * math.pi * i / rim), math.cos(2 * math.pi * i / rim)) for i in range(rim)]
    return [(0.0, 0.0), *circle] if hub else circle


def mixing(second):
    """What the second eigenvalue means, in words."""
    if second < 1e-9:
        return "spectral gap 1 - λ₂ = 1: all agree after one step"
    text = f"spectral gap 1 - λ₂ = {1 - second:.6f}: differences shrink by λ₂ = {second:.6f} per step"
    if second < 1 - 1e-9:
        text += f", to a tenth in {number_text(max(1.0, math.log(10) / -math.log(second)))} steps"
    return text


def draw_gossip(figure, errors, promises, steps, title="", foot=""):
    """Fill `figure` with the disagreement of ranks against steps, one curve per graph.

    Args:    errors: {name: (k + 1,) disagreement so far, before the first step and after each}.
             promises: {name: lambda2, or None where weights change from step to step}; steps: how many there will be.
    """
    ax = figure.subplots()
    figure.subplots_adjust(left=0.085, right=0.77, bottom=0.16, top=0.8)
    relative = {name: np.maximum(np.asarray(e) / (e[0] or 1.0), FLOOR) for name, e in errors.items()}
    lowest = max(FLOOR, min((float(e.min()) for e in relative.values()), default=0.1))
    bound = [second**steps for second in promises.values() if second]
    log_axis(ax, [1.0, max(min([lowest, *bound]), FLOOR)], number_text)
    ends = []
    k = np.arange(steps + 1)
    for (name, error), color in zip(relative.items(), itertools.cycle(SERIES), strict=False):
        second = promises[name]
        if second is not None:
            ax.plot(k, np.maximum(second ** k.astype(float), FLOOR), color=color, linewidth=1, linestyle=(0, (4, 2)))
        ax.plot(range(len(error)), error, "o", color=color, markersize=4, clip_on=False)
        text = f"{name}: λ₂ = {second:.3f}" if second is not None else name
        ends.append((error[-1], text, color, False))
    ax.set_xlim(0, steps)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    x_label(ax, "gossip steps")
    label_ends(ax, ends)
    ax.axhline(FLOOR, color=GREY, linewidth=0.8)
    heading(
        figure,
        title,
        "Points: how far apart the ranks are, over how far they were. Dashed: λ₂ to the power of steps.",
    )
    note(figure, foot)

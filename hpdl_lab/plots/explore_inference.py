"""Pictures behind the sliders of notebooks 13 and 15."""

from collections.abc import Sequence

from matplotlib.colors import to_rgba
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ..trace import number_text
from .colors import BLUE, FAINT, GRAY, GREEN, ORANGE, SKY, VERMILION
from .explore import panels
from .style import Axes, Figure, amounts, heading, legend, log_axis, x_label


def _in_doublings(ax: Axes, counts: Sequence[int]) -> None:
    """Make the x axis logarithmic, with every other doubling named."""
    ax.set_xscale("log", base=2)
    ax.set_xlim(counts[0] / 1.5, counts[-1] * 1.5)
    ax.xaxis.set_major_locator(FixedLocator(counts[:: 2 if len(counts) > 8 else 1]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}"))
    ax.xaxis.set_minor_locator(NullLocator())


def draw_kv_cache(
    figure: Figure,
    batches: Sequence[int],
    sizes: Sequence[float],
    weights: float,
    room: float,
    points: Sequence[tuple[float, float]],
    most: int,
    batch: int,
    title: str,
) -> None:
    """Draw the bytes of cache and weights for more and more sequences, and throughput against latency of decoding.

    Args:    sizes: bytes of the cache for each of `batches`; weights, room: bytes of the model, and of the memories.
             points: (s of a token, tokens/s of all) for each of `batches`; most: sequences that fit; batch: as asked.
    """
    left, right = panels(figure, ("memory", "throughput against latency"), width_ratios=(1, 1.15))
    figure.subplots_adjust(left=0.095, top=0.74, wspace=0.3)
    lows, highs = [n / 1.35 for n in batches], [n * 1.35 for n in batches]
    widths = [high - low for low, high in zip(lows, highs, strict=True)]
    faces = [to_rgba(ORANGE if weights + n <= room else VERMILION, 1 if weights + n <= room else 0.5) for n in sizes]
    left.bar(lows, sizes, widths, align="edge", color=faces)
    left.bar(lows, [weights] * len(batches), widths, bottom=sizes, align="edge", color=SKY)
    left.axhline(room, color=VERMILION, linewidth=1.6)
    left.plot([batch], [0], "^", color=BLUE, markersize=9, clip_on=False, zorder=5)
    left.set_ylim(0, 1.6 * max(room, min(weights + sizes[batches.index(batch)], 8 * room)))
    _in_doublings(left, batches)
    left.grid(axis="x", visible=False)
    left.yaxis.set_major_formatter(amounts("B"))
    left.yaxis.set_major_locator(MaxNLocator(5))
    x_label(left, "sequences at once")
    fitting = [point for n, point in zip(batches, points, strict=True) if n <= most]
    right.plot(*zip(*points, strict=True), "o:", color=GRAY, markersize=3, linewidth=1.2)
    if fitting:
        right.plot(*zip(*fitting, strict=True), "o-", color=BLUE, markersize=4)
    color = BLUE if batch <= most else VERMILION
    right.plot(*zip(points[batches.index(batch)], strict=True), "o", color=color, markersize=9, zorder=5)
    right.set_xscale("log")
    log_axis(right, [rate for _, rate in points])
    right.xaxis.set_minor_locator(NullLocator())
    times = [seconds for seconds, _ in points]
    right.xaxis.set_major_locator(FixedLocator([m * 10.0**k for k in range(-6, 2) for m in (1, 2, 5)]))
    right.set_xlim(min(times) / 1.3, max(times) * 1.3)
    right.xaxis.set_major_formatter(amounts("s"))
    right.set_ylabel("tokens/s of all")
    x_label(right, "from one token of a sequence to the next")
    heading(figure, title)
    key = [(ORANGE, "cache"), (SKY, "weights"), (VERMILION, "memory, and what does not fit"), (BLUE, "fits")]
    legend(figure, key, 0.012, 0.885)


def draw_speculation(
    figure: Figure,
    gammas: Sequence[int],
    by_gamma: Sequence[float],
    gamma: int,
    shares: Sequence[float],
    by_acceptance: Sequence[float],
    acceptance: float,
    title: str,
) -> None:
    """Draw the speed-up against tokens that are drafted, and against the share of them that is accepted."""
    left, right = panels(figure, ("this acceptance, any γ", "this γ, any acceptance"))
    best = max(by_gamma)
    left.bar(
        gammas,
        by_gamma,
        color=[BLUE if g == gamma else GREEN if v == best else FAINT for g, v in zip(gammas, by_gamma, strict=True)],
    )
    left.xaxis.set_major_locator(FixedLocator(gammas))
    left.grid(axis="x", visible=False)
    x_label(left, "γ, tokens that are drafted (green: the best)")
    right.plot(shares, by_acceptance, color=BLUE)
    now = by_acceptance[list(shares).index(acceptance)]
    right.plot([acceptance], [now], "o", color=BLUE, markersize=9, zorder=5)
    right.set_xlim(0, 1)
    x_label(right, "acceptance")
    for ax, values in ((left, by_gamma), (right, by_acceptance)):
        ax.axhline(1, color=VERMILION, linewidth=1.4)
        ax.set_ylim(0, 1.15 * max(*values, 1.2))
        ax.yaxis.set_major_locator(MaxNLocator(5))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{number_text(v)}×"))
    heading(figure, title)


def draw_rollouts(
    figure: Figure,
    by_ranks: Sequence[float],
    generating: int,
    points: Sequence[tuple[float, float]],
    now: tuple[float, float],
    in_turn: float,
    title: str,
) -> None:
    """Draw tokens/s against GPUs that generate, and against staleness.

    Args:    by_ranks: tokens/s for 1, 2, ... GPUs that generate.
             points: (mean staleness, tokens/s); now: the one that is shown; in_turn: tokens/s of all GPUs in turn.
    """
    left, right = panels(figure, ("who generates", "tokens/s against staleness"))
    figure.subplots_adjust(left=0.095, top=0.74)
    counts = range(1, len(by_ranks) + 1)
    best = max(by_ranks)
    colors = [BLUE if n == generating else GREEN if v == best else FAINT for n, v in zip(counts, by_ranks, strict=True)]
    left.bar(counts, by_ranks, color=colors)
    left.xaxis.set_major_locator(FixedLocator([*counts]))
    left.grid(axis="x", visible=False)
    left.set_ylabel("tokens/s")
    x_label(left, "GPUs that generate (green: the best)")
    right.plot(*zip(*points, strict=True), "o-", color=GRAY, markersize=4)
    right.plot(*now, "o", color=BLUE, markersize=9, zorder=5)
    right.plot([0], [in_turn], "D", color=VERMILION, markersize=8, zorder=5, clip_on=False)
    x_label(right, "mean staleness in updates")
    for ax in (left, right):
        ax.axhline(in_turn, color=VERMILION, linewidth=1.4, linestyle=(0, (4, 2)))
        ax.set_ylim(0, 1.15 * max(best, in_turn, *(rate for _, rate in points)))
        ax.yaxis.set_major_locator(MaxNLocator(5))
        ax.yaxis.set_major_formatter(amounts(""))
    heading(figure, title)
    legend(figure, [(BLUE, "as chosen"), (VERMILION, "all GPUs generate, then all train")], 0.012, 0.885)

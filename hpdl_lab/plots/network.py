"""A network as a picture: ranks, switches, and the cables between them; cables that several ranks share stand out."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING, cast

from ..comm.network import Network, Ring
from ..comm.network.describe import bandwidth, shared_links, title
from ..trace import seconds_text
from .colors import BLUE, FAINT, GRAY, INK, SKY, VERMILION
from .style import Axes, Figure, footnote, heading

if TYPE_CHECKING:
    from ..comm.network.links import Route

MOST_RANKS = 64  # of a larger network the first ones are drawn
ROWS = {"island": 0, "rank": 1, "leaf": 2, "adapter": 2, "spine": 3, "switch": 3}  # from the bottom
WORDS = {
    "rank": "rank",
    "island": "fast switch",
    "leaf": "leaf",
    "adapter": "NIC",
    "spine": "spine",
    "switch": "switch",
}
MOST_NAMED = 6  # switches of a kind whose whole name is written
CENTER = 0.4  # of a circle of ranks, in widths: to the right stands what the cables are
ROW_INCHES, EDGE_INCHES = 0.95, 1.35  # height of a row; of heading and foot together


def height(network: Network, size: int) -> float:
    """Return inches that a picture of this network needs."""
    if isinstance(network, Ring):
        return 4.6
    return EDGE_INCHES + ROW_INCHES * len({ROWS[_kind(name)] for name in _nodes(network, min(size, MOST_RANKS))})


def draw(figure: Figure, network: Network, size: int) -> None:
    """Fill `figure` with `network` among `size` ranks."""
    shown = min(size, MOST_RANKS)
    ax = figure.add_axes((0.01, 0.08, 0.98, 0.92 - 0.62 / figure.get_figheight()))
    ax.axis("off")
    width, tall = (
        inches * share for inches, share in zip(figure.get_size_inches(), ax.get_position().size, strict=True)
    )
    ax.set_xlim(0, width)
    ax.set_ylim(0, tall)
    position = _on_circle(shown, width, tall) if isinstance(network, Ring) else _in_rows(network, shown, width, tall)
    _cables(ax, network, shown, position, width)
    _draw_ranks(ax, network, position)
    _switches(ax, position)
    subtitle = f"{shown} ranks" if shown == size else f"the first {shown} of {size:,} ranks"
    if size > 1:
        to = size // 2 if isinstance(network, Ring) else size - 1
        far = cast("Route", network.routes(0, to, size))  # None: without links, which cannot be drawn
        subtitle += f"; the farthest message takes {seconds_text(float(far.alpha))} + bytes / {bandwidth(far.beta)}"
    heading(figure, title(network), subtitle)
    if (shared_links(network, shown) > 1).any():
        footnote(figure, "orange: cables that messages share; one at a time passes, in each direction")


def _kind(name: str) -> str:
    """Return the kind of a node: "rank 3" -> "rank"."""
    return name.split()[0]


def _nodes(network: Network, size: int) -> list[str]:
    """Return the ends of all links, each once, ranks in order."""
    return list(dict.fromkeys(end for link in network.links(size) for end in (link.source, link.dest)))


def _on_circle(size: int, width: float, tall: float) -> dict[str, tuple[float, float]]:
    """Return {name: (x, y)} inches: rank 0 on top, the others clockwise."""
    radius = tall / 2 - 0.32
    turns = [2 * math.pi * r / size for r in range(size)]
    return {
        f"rank {r}": (width * CENTER + radius * math.sin(t), tall / 2 + radius * math.cos(t))
        for r, t in enumerate(turns)
    }


def _in_rows(network: Network, size: int, width: float, tall: float) -> dict[str, tuple[float, float]]:
    """Return {name: (x, y)} inches: ranks in a row, a switch over the middle of its ranks, spines spread evenly."""
    names = _nodes(network, size)
    rows = sorted({ROWS[_kind(name)] for name in names})
    level = {row: (i + 0.5) / len(rows) * tall for i, row in enumerate(rows)}
    span = width - 1.9  # to the right stands what the cables are
    x = {f"rank {r}": 0.25 + (r + 0.5) * span / size for r in range(size)}
    below = {}
    for link in network.links(size):
        if _kind(link.source) == "rank":
            below.setdefault(link.dest, []).append(x[link.source])
    x.update((name, sum(over) / len(over)) for name, over in below.items())
    idle = {name for name in names if _kind(name) == "adapter"} - set(x)  # of an island with fewer ranks
    top = [name for name in names if name not in x and name not in idle]
    x.update((name, 0.25 + (i + 0.5) * span / len(top)) for i, name in enumerate(top))
    return {name: (x[name], level[ROWS[_kind(name)]]) for name in names if name in x}


def _cables(ax: Axes, network: Network, size: int, position: dict[str, tuple[float, float]], width: float) -> None:
    """Draw every cable once; write at the right of each row what they join, how fast, how many messages share one."""
    seen: dict[tuple[str, ...], tuple[float, int]] = {}
    for link, messages in zip(network.links(size), shared_links(network, size), strict=True):
        names = (name.replace("router", "rank") for name in (link.source, link.dest))  # a ring's: drawn as one
        ends = tuple(sorted(names, key=lambda name: (ROWS[_kind(name)], name)))
        if ends[0] == ends[1] or ends[0] not in position:
            continue
        beta, most = seen.get(ends, (link.beta, 0))
        seen[ends] = beta, max(most, int(messages))
    labels: dict[tuple[str, str], tuple[str, int, float]] = {}
    for (low, high), (beta, most) in seen.items():
        (x0, y0), (x1, y1) = position[low], position[high]
        color = VERMILION if most > 1 else GRAY
        ax.plot([x0, x1], [y0, y1], color=color, linewidth=1.6 if most > 1 else 0.9, zorder=2 if most > 1 else 1)
        middle = (y0 + y1) / 2 if _kind(low) != _kind(high) else ax.get_ylim()[1] / 2
        _, known, _ = labels.get((_kind(low), _kind(high)), ("", 0, 0.0))
        labels[_kind(low), _kind(high)] = bandwidth(beta), max(known, most), middle
    for kinds, (speed, most, y) in labels.items():
        text = f"{' - '.join(WORDS[end] for end in sorted(kinds, key=lambda end: end != 'rank'))}\n{speed}"
        text += f"\nshared by up to {most} messages" if most > 1 else ""
        color = VERMILION if most > 1 else INK
        ax.text(width - 0.05, y, text, ha="right", va="center", fontsize=9, color=color, linespacing=1.35)


def _draw_ranks(ax: Axes, network: Network, position: dict[str, tuple[float, float]]) -> None:
    """Draw a disk with the number of each rank, or, if disks are small, a number outside every eighth of them."""
    centers = [position[name] for name in position if _kind(name) == "rank"]
    gap = min((math.dist(a, b) for a, b in itertools.pairwise(centers)), default=1.0)
    small = gap < 0.22
    ax.scatter(*zip(*centers, strict=True), s=(72 * min(gap * 0.84, 0.34)) ** 2, color=BLUE, linewidths=0, zorder=4)
    middle = [sum(c) / len(centers) for c in zip(*centers, strict=True)]
    for number, (x, y) in enumerate(centers):
        if small and number % 8:
            continue
        away = (x - middle[0], y - middle[1]) if isinstance(network, Ring) else (0.0, -1.0)
        dx, dy = (a / math.hypot(*away) * 0.17 if small else 0.0 for a in away)
        color = INK if small else "white"
        ax.text(x + dx, y + dy, str(number), ha="center", va="center", fontsize=8, color=color, zorder=5)


def _switches(ax: Axes, position: dict[str, tuple[float, float]]) -> None:
    """Draw a box with the name of each switch; only its number if there are many of its kind."""
    counts = Counter(map(_kind, position))
    for name, (x, y) in position.items():
        if _kind(name) != "rank":
            text = (
                name.replace(_kind(name), WORDS[_kind(name)]) if counts[_kind(name)] <= MOST_NAMED else name.split()[-1]
            )
            box = {"boxstyle": "round,pad=0.45", "facecolor": SKY, "edgecolor": FAINT}
            ax.text(x, y, text, ha="center", va="center", fontsize=8, color=INK, zorder=5, bbox=box)

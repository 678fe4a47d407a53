"""The pages of a cache: who holds each, how far it is filled, which are shared."""

from collections.abc import Sequence

from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from .colors import FAINT, GRAY, INK, SERIES
from .style import Axes, Figure, bare, footnote, heading, legend

ROW = 16  # pages in a row
MOST_PAGES = 512  # of a picture
TOP, FOOT, TALL = 0.95, 0.42, 0.42  # inches: above and below the rows, and of a row


def height(count: int) -> float:
    """Return inches of a figure of so many pages."""
    return TOP + FOOT + TALL * -(-count // ROW)


def draw(
    figure: Figure, requests: Sequence[tuple[str, Sequence[int], int]], count: int, size: int, kept: Sequence[int]
) -> None:
    """Fill `figure`, `height(count)` inches tall, with a tile for each page.

    Args:    requests: (name, pages in order of tokens, tokens in them) of each; count, size: pages, and tokens of one.
             kept: free pages whose tokens can still be found.
    """
    tall = figure.get_figheight()
    ax = figure.add_axes((0.012, FOOT / tall, 0.976, 1 - (TOP + FOOT) / tall))
    bare(ax)
    rows = -(-count // ROW)
    ax.set_xlim(0, ROW)
    ax.set_ylim(rows, 0)
    ax.set_xticks([])
    ax.set_yticks([])
    holders: dict[int, list[tuple[int, float]]] = {page: [] for page in range(count)}
    for k, (_, pages, tokens) in enumerate(requests):
        for i, page in enumerate(pages):
            holders[page].append((k, min(1.0, max(0.0, tokens / size - i))))
    _tiles(ax, holders, set(kept))
    used = sum(bool(held) for held in holders.values())
    shared = sum(len(held) > 1 for held in holders.values())
    empty = sum(1 - held[0][1] for held in holders.values() if held)
    title = f"{count - used} free + {used} used = {count} pages of {size} tokens"
    heading(figure, title)
    names = [(_color_of(k), f"{name}, {tokens} tokens") for k, (name, _, tokens) in enumerate(requests)]
    legend(figure, [*names, (FAINT, "free")], 0.012, 1 - 0.62 / tall)
    foot = f"Striped: {shared} shared pages. Ends of requests: {empty:.1f} pages are empty."
    footnote(figure, foot + (" Dots: free, but their tokens can still be found." if kept else ""))


def _color_of(k: int) -> str:
    return SERIES[k % len(SERIES)]


def _tiles(ax: Axes, holders: dict[int, list[tuple[int, float]]], kept: set[int]) -> None:
    """Draw each page as a box, filled from the left as far as its tokens go, with a stripe for each request."""
    corners, faces = [], []

    def box(x: float, y: float, wide: float, high: float, face: str) -> None:
        corners.append([(x, y), (x + wide, y), (x + wide, y + high), (x, y + high)])
        faces.append(to_rgb(face))

    for page, held in holders.items():
        x, y = page % ROW + 0.05, page // ROW + 0.1
        box(x, y, 0.9, 0.8, FAINT)
        for stripe, (k, filled) in enumerate(held):
            box(x, y + 0.8 * stripe / len(held), 0.9 * filled, 0.8 / len(held), _color_of(k))
    ax.add_collection(PolyCollection(corners, facecolors=faces, linewidths=0))
    edges = [box for box, face in zip(corners, faces, strict=True) if face == to_rgb(FAINT)]
    ax.add_collection(PolyCollection(edges, facecolors="none", edgecolors=GRAY, linewidths=0.6))
    free = [page for page, held in holders.items() if not held and page in kept]
    ax.plot([page % ROW + 0.5 for page in free], [page // ROW + 0.5 for page in free], ".", color=INK, markersize=4)

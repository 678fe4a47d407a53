"""The words that one warp asks of the 32 banks of shared memory, access by access."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import Rectangle

from .colors import BLUE, FAINT, INK, VERMILION
from .style import Figure

BANKS = 32
ROW, HEAD, FOOT = 0.2, 0.62, 0.5  # inches


def height(rows: Sequence[tuple[str, Sequence[int]]]) -> float:
    return HEAD + FOOT + ROW * max(len(rows), 3)


def draw(figure: Figure, rows: Sequence[tuple[str, Sequence[int]]], title: str) -> None:
    """Fill `figure`. rows: (such as "read sums", words asked for in each of the 32 banks) in the order of the warp."""
    tall = height(rows)
    ax = figure.add_axes((0.2, FOOT / tall, 0.77, 1 - (HEAD + FOOT) / tall))
    for y, (_, words) in enumerate(rows):
        for bank, n in enumerate(words):
            color = FAINT if n == 0 else BLUE if n == 1 else VERMILION
            ax.add_patch(Rectangle((bank - 0.45, y - 0.42), 0.9, 0.84, color=color, lw=0))
            if n > 1:
                ax.text(bank, y, str(n), ha="center", va="center", fontsize=7.5, color="white", fontweight="bold")
        turns = max(words)
        ax.text(BANKS, y, f"{turns} turn{'s' * (turns > 1)}", va="center", fontsize=8, color=INK)
    ax.set(xlim=(-0.6, BANKS + 3), ylim=(len(rows) - 0.4, -0.6), xlabel="bank of shared memory")
    ax.set_xticks(range(0, BANKS, 4), [str(bank) for bank in range(0, BANKS, 4)])
    ax.set_yticks(range(len(rows)), [text for text, _ in rows])
    ax.tick_params(axis="y", labelsize=8, length=0)
    ax.grid(False)
    ax.spines["left"].set_visible(False)
    figure.text(0.012, 1 - 0.2 / tall, title, fontsize=10.5, fontweight="bold", va="center")
    figure.text(
        0.012,
        1 - 0.43 / tall,
        "blue: one word of this bank; red: as many words of one bank, which come one after the other",
        fontsize=8.5,
        va="center",
    )

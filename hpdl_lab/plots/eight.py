"""What the eight collectives are for: whose data every rank holds, before and after."""

from matplotlib.collections import PolyCollection
from matplotlib.patches import FancyArrowPatch

from .holdings import COLLECTIVES, before_and_after
from .style import FAINT, GREEN, GREY, INK, ORANGE, PURPLE, SKY, WIDTH, YELLOW, heading, note, tile

HUES = (SKY, ORANGE, PURPLE, YELLOW, "#B7D7A8", "#C9B79C")  # of the ranks whose data it is
SUM = GREEN
LEFT, TOP, FOOT, TITLE, BELOW = 0.32, 0.62, 0.3, 0.24, 0.3  # inches
COLUMNS = 2  # of collectives


def height(p):
    """Inches of a figure for p ranks."""
    rows = -(-len(COLLECTIVES) // COLUMNS)
    return TOP + FOOT + rows * (TITLE + BELOW + p * 0.2)


def draw(figure, p):
    """Fill `figure`, `height(p)` inches tall. Columns are ranks, rows are chunks; letters are ranks, digits chunks."""
    inches, width = figure.get_figheight(), (WIDTH - LEFT) / COLUMNS
    for i, name in enumerate(COLLECTIVES):
        row, column = divmod(i, COLUMNS)
        top = inches - TOP - row * (TITLE + BELOW + p * 0.2)
        left = LEFT + column * width
        half = (width - 0.75) / 2
        figure.text(left / WIDTH, top / inches, name, fontsize=10.5, fontweight="bold", va="bottom")
        states = before_and_after(name, p)
        for k, held in enumerate(states):
            x = left + k * (half + 0.4)
            ax = figure.add_axes((x / WIDTH, (top - 0.06 - p * 0.2) / inches, half / WIDTH, p * 0.2 / inches))
            panel(ax, held, moved=k and name == "all_to_all")
        middle = top - 0.06 - p * 0.1
        ends = [((left + half + dx) / WIDTH, middle / inches) for dx in (0.08, 0.34)]
        look = {"arrowstyle": "-|>", "mutation_scale": 14, "color": GREY, "linewidth": 1.6}
        figure.add_artist(FancyArrowPatch(*ends, transform=figure.transFigure, **look))
    heading(figure, f"Eight collectives on {p} ranks: before and after")
    letters = ", ".join(f"{letter(r)} from rank {r}" for r in range(min(p, 3)))
    note(figure, f"A column is a rank, a row is a chunk. {letters} ...; Σ is the sum over all ranks.")


def letter(rank):
    """0 -> "A"."""
    return chr(ord("A") + rank)


def panel(ax, held, moved=False):
    """One state. held: (p, p, p) whose data every rank holds in every chunk; `moved`: chunk r of everybody is at r."""
    p = len(held)
    corners, faces = [], []
    for r in range(p):
        for c in range(p):
            owners = held[r, c].nonzero()[0]
            corners.append(tile(r, c))
            faces.append("white" if not len(owners) else SUM if len(owners) > 1 else HUES[owners[0]])
            if len(owners):
                chunk = r if moved else c
                text = f"Σ{chunk}" if len(owners) > 1 else f"{letter(owners[0])}{chunk}"
                color = "white" if len(owners) > 1 else INK
                ax.text(r, c, text, ha="center", va="center_baseline", fontsize=8.5, color=color)
    ax.add_collection(PolyCollection(corners, facecolors=faces, edgecolors=FAINT, linewidths=0.8))
    ax.set_xlim(-0.5, p - 0.5)
    ax.set_ylim(p - 0.5, -0.5)
    ax.set_xticks(range(p), [f"rank {r}" if p <= 4 else str(r) for r in range(p)])
    ax.set_yticks([])
    ax.tick_params(length=0, labelsize=8, pad=1)
    ax.grid(False)
    ax.spines[:].set_visible(False)

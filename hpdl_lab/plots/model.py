"""Models as pictures: each operation with its shapes, and three ways to share a model and its batch among ranks."""

from collections.abc import Sequence

from matplotlib.patches import FancyArrowPatch, Rectangle

from ..models.shapes import OperationShapes
from .colors import BLUE, GRAY, GREEN, INK, ORANGE, PURPLE, VERMILION
from .style import Axes, Figure, Look, bare, footnote, heading, legend

ROW, TOP, FOOT = 0.27, 0.45, 0.3  # inches: an operation, the titles, the note
HUES = {"linear": BLUE, "convolution": BLUE, "embedding": GREEN, "attention": ORANGE}  # the others: GRAY
RANKS = (BLUE, ORANGE, GREEN, PURPLE)
COLUMNS = (2, 14, 63, 80, 98)  # percent of the width where texts begin; the last one ends there
LAYERS = 4  # of the model that is shared
NOTHING = "#FFFFFF"


# -- shapes ------------------------------------------------------------------------------------------------------------


def shapes_height(steps: Sequence[OperationShapes]) -> float:
    """Return inches of the picture of a model's operations."""
    return TOP + ROW * (len(steps) + 2) + FOOT


def draw_shapes(figure: Figure, steps: Sequence[OperationShapes], title: str) -> None:
    """Fill `figure` with a row for the batch and one for each operation; bars are as wide as the last dimension."""
    tall = figure.get_size_inches()[1]
    ax = figure.add_axes((0.0, FOOT / tall, 1.0, 1 - (TOP + FOOT) / tall))
    ax.set(xlim=(0, 100), ylim=(len(steps) + 1.5, -0.5))
    bare(ax)
    ax.set_xticks([])
    ax.set_yticks([])
    first = steps[0].shape_in
    rows = [("batch", "", first, "", "")]
    for step in steps:
        count = "as above" if step.tied else f"{step.parameters:,}" if step.parameters else ""
        rows.append((step.name, step.module, step.shape_out, by(step.weight), count))
    widest = max(shape[-1] for _, _, shape, _, _ in rows)
    _write(ax, ("operation", "module", "what goes out", "weight", "parameters"), y=-0.1, size=8.2, color="#555555")
    for y, (name, module, shape, weight, count) in enumerate(rows, 1):
        width = max(0.4, 22 * shape[-1] / widest)
        look: Look = {"color": HUES.get(name, GRAY), "alpha": 0.85 if name in HUES else 0.4}
        ax.add_patch(Rectangle((51 - width / 2, y - 0.36), width, 0.72, linewidth=0, **look))
        _write(ax, (name, module, by(shape), weight, count), y=y, size=8.8, color=INK)
    heading(figure, title)
    footnote(figure, "A bar is as wide as the last dimension. Colors: what has weights, and attention.")


def _write(ax: Axes, texts: Sequence[str], y: float, size: float, color: str) -> None:
    """Write a row of texts, one in each column; the last one ends there."""
    for x, text in zip(COLUMNS, texts, strict=True):
        look: Look = {"ha": "right" if x == COLUMNS[-1] else "left", "va": "center"}
        ax.text(x, y, text, fontsize=size, color=color, **look)


def by(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


# -- three ways --------------------------------------------------------------------------------------------------------

WAYS: tuple[tuple[str, str, str], ...] = (  # name, what is split, what is sent
    ("one rank", "nothing is split", "nothing is sent"),
    ("data parallel", "the batch is split;\neach rank has the whole model", "sent: gradients,\nonce per step"),
    ("tensor parallel", "every layer is split;\nall ranks see the whole batch", "sent: activations,\nin every layer"),
    (
        "pipeline parallel",
        "each rank has some layers;\nthe batch comes in parts",
        "sent: activations,\nrank to rank",
    ),
)


def draw_parallelism(figure: Figure) -> None:
    """Fill `figure` with a model of four layers and its batch: on one rank, and on four in three ways."""
    for i, (name, shared, sent) in enumerate(WAYS):
        ax = figure.add_axes((0.012 + 0.247 * i, 0.24, 0.235, 0.58))
        ax.set(xlim=(0, 10), ylim=(10.4, 0))
        ax.axis("off")
        DRAWN[name](ax)
        left = 0.012 + 0.247 * i
        figure.text(left, 0.845, name, fontsize=10, fontweight="bold")
        figure.text(left, 0.245, shared, fontsize=8.4, va="top", linespacing=1.35)
        figure.text(left, 0.125, sent, fontsize=8.4, va="top", color=VERMILION, linespacing=1.35)
    heading(figure, "Four parts of a batch, four layers")
    legend(figure, [(color, f"rank {k}") for k, color in enumerate(RANKS)], 0.66, 0.95)


def _layer(ax: Axes, x: float, y: float, width: float, colors: Sequence[str], height: float = 1.05) -> None:
    """Draw a layer of the model as a bar from (x, y), cut into as many columns as there are colors."""
    for k, color in enumerate(colors):
        each = width / len(colors)
        look: Look = {"facecolor": color, "alpha": 0.75, "edgecolor": "white", "linewidth": 1.2}
        ax.add_patch(Rectangle((x + k * each, y), each, height, **look))


def batch(ax: Axes, x: float, y: float, width: float, colors: Sequence[str]) -> None:
    """Draw the batch as a row of parts, hatched, each in the color of the rank that has it."""
    for k, color in enumerate(colors):
        each = width / len(colors)
        look: Look = {"facecolor": NOTHING, "edgecolor": color, "hatch": "////", "linewidth": 1.1}
        ax.add_patch(Rectangle((x + k * each + 0.06, y), each - 0.12, 0.9, **look))


def _arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    style: str = "-|>",
    color: str = INK,
    linewidth: float | None = None,
) -> None:
    look: Look = {"color": color, "linewidth": linewidth, "mutation_scale": 8, "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle=style, **look))


def _one_rank(ax: Axes) -> None:
    batch(ax, 2, 0.2, 6, [RANKS[0]] * 4)
    for k in range(LAYERS):
        _arrow(ax, (5, 1.2 + 1.85 * k), (5, 1.85 + 1.85 * k), color=INK)
        _layer(ax, 2, 1.95 + 1.85 * k, 6, RANKS[:1])


def _data_parallel(ax: Axes) -> None:
    for r, color in enumerate(RANKS):
        x = 0.2 + 2.45 * r
        batch(ax, x, 0.2, 2.1, [color])
        for k in range(LAYERS):
            _layer(ax, x, 1.95 + 1.85 * k, 2.1, [color])
            _arrow(ax, (x + 1.05, 1.2 + 1.85 * k), (x + 1.05, 1.85 + 1.85 * k), color=INK)
    for k in range(LAYERS):
        for r in range(len(RANKS) - 1):
            x = 2.3 + 2.45 * r
            _arrow(ax, (x - 0.35, 2.5 + 1.85 * k), (x + 0.7, 2.5 + 1.85 * k), "<|-|>", color=VERMILION, linewidth=1.2)


def _tensor_parallel(ax: Axes) -> None:
    batch(ax, 2, 0.2, 6, [INK] * 4)
    for k in range(LAYERS):
        for r in range(len(RANKS)):
            x = 2.75 + 1.5 * r
            _arrow(ax, (x, 1.2 + 1.85 * k), (x, 1.85 + 1.85 * k), color=VERMILION if k else INK, linewidth=1.2)
        if k:
            ax.plot([2.75, 7.25], [1.3 + 1.85 * k] * 2, color=VERMILION, linewidth=1.2)
        _layer(ax, 2, 1.95 + 1.85 * k, 6, RANKS)


def _pipeline_parallel(ax: Axes) -> None:
    batch(ax, 2, 0.2, 6, [INK] * 4)
    for k, color in enumerate(RANKS):
        _arrow(ax, (5, 1.2 + 1.85 * k), (5, 1.85 + 1.85 * k), color=VERMILION if k else INK, linewidth=1.2)
        _layer(ax, 2, 1.95 + 1.85 * k, 6, [color])
        part = 3 - k  # while rank 0 has the last part, rank 3 has the first
        ax.text(5, 2.5 + 1.85 * k, f"part {part}", ha="center", va="center", fontsize=8.2, color=INK)


DRAWN = dict(
    zip((way[0] for way in WAYS), (_one_rank, _data_parallel, _tensor_parallel, _pipeline_parallel), strict=True)
)

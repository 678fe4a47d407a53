"""Results of verbs: one base for every result that has a figure, and a figure that is only drawn."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..plots import live
from ..plots.style import HEIGHT, WIDTH, Draw, Figure, new_figure, style_context


class Result:
    """A result with a finished `figure`. `plot()` shows it again, `save("name.png")` writes it.

    A cell that draws shows the figure by itself, and its result as text. Every later cell shows both: what came while
    no browser was there can be seen again.
    """

    if TYPE_CHECKING:  # a field of each result, which is frozen: it can be read only

        @property
        def figure(self) -> Figure: ...

    def plot(self) -> None:
        """Show the figure again."""
        live.show_figure(self.figure, alt=type(self).__name__)

    def save(self, path: str) -> str:
        """Write the figure to a PNG file; returns its path."""
        live.save_figure(self.figure, path)
        return path

    def _repr_html_(self) -> str | None:
        if live.shown_here(self.figure):
            return None
        return f"{live.html(self.figure)}<pre style='margin:0;padding:0'>{html.escape(repr(self))}</pre>"


@dataclass(frozen=True, repr=False)
class Picture(Result):
    """A figure that is only drawn.

    text: what is drawn, in a sentence. data: what it was drawn from, such as the Evaluation of a schedule.
    """

    text: str
    figure: Figure
    data: Any = field(default=None)

    def __repr__(self) -> str:
        return self.text


def picture(
    draw: Draw, *args: object, text: str, data: object = None, width: float = WIDTH, height: float = HEIGHT
) -> Picture:
    """Draw once, show, and return it as a Picture."""
    found = draw_picture(draw, *args, text=text, data=data, width=width, height=height)
    live.show_figure(found.figure, alt=text)
    return found


def draw_picture(
    draw: Draw, *args: object, text: str, data: object = None, width: float = WIDTH, height: float = HEIGHT
) -> Picture:
    """Draw once, and return it as a Picture, which is not shown yet."""
    figure = new_figure(width, height)
    with style_context():
        draw(figure, *args)
    return Picture(text, figure, data)


def text_table(head: Sequence[str], rows: Iterable[Sequence[object]], gap: int = 2) -> list[str]:
    """Return lines with columns as wide as they need: the first one from the left, the others from the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        (" " * gap)
        .join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        .rstrip()
        for row in cells
    ]

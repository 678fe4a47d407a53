"""What verbs return: one base for every result that has a figure, and the result of what is only drawn."""

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plots import live
from ..plots.style import HEIGHT, WIDTH, look, new_figure


class Result:
    """A result with a finished `figure`. `plot()` shows it again, `save("name.png")` writes it.

    A cell that draws shows the figure by itself, and its result as text. Every later cell shows both: what came while
    no browser was there can be seen again.
    """

    figure: Any

    def plot(self) -> None:
        live.show(self.figure, alt=type(self).__name__)

    def save(self, path: str) -> str:
        live.save(self.figure, path)
        return path

    def _repr_html_(self) -> str | None:
        if live.shown_here(self.figure):
            return None
        return f"{live.html(self.figure)}<pre style='margin:0;padding:0'>{html.escape(repr(self))}</pre>"


@dataclass(frozen=True, repr=False)
class Picture(Result):
    """text: what is drawn, in a sentence. data: what it was drawn from, such as the Evaluation of a schedule."""

    text: str
    figure: Any
    data: Any = field(default=None)

    def __repr__(self) -> str:
        return self.text


def picture(draw: Callable[..., None], *args: Any, text: str, **more: Any) -> Picture:
    """Draw once, show, and return it as a Picture; more: as of drawn."""
    found = drawn(draw, *args, text=text, **more)
    live.show(found.figure, alt=text)
    return found


def drawn(
    draw: Callable[..., None], *args: Any, text: str, data: Any = None, width: float = WIDTH, height: float = HEIGHT
) -> Picture:
    """Draw once, and return it as a Picture that nobody has seen."""
    figure = new_figure(width, height)
    with look():
        draw(figure, *args)
    return Picture(text, figure, data)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], gap: int = 2) -> list[str]:
    """Lines of text with columns as wide as they need: the first one from the left, the others from the right."""
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

"""Results that have a figure; what a verb that only draws returns."""

import html
from dataclasses import dataclass, field

from ..plots import live
from ..plots.style import HEIGHT, WIDTH, look, new_figure


class WithFigure:
    """A result with a finished `figure`, which `save("name.png")` writes.

    A cell that draws shows the figure by itself, and its result as text. Every later cell shows both: what came while
    no browser was there can be seen again.
    """

    def save(self, path):
        live.save(self.figure, path)

    def _repr_mimebundle_(self, include=None, exclude=None):
        if live.shown_here(self.figure):
            return {}
        text = html.escape(repr(self))
        return {"text/html": f"{live.html(self.figure)}<pre style='margin:0;padding:0'>{text}</pre>"}


@dataclass(frozen=True)
class Picture(WithFigure):
    """A finished figure, with a sentence about it."""

    text: str
    figure: object = field(repr=False)

    def __repr__(self):
        return self.text


def picture(draw, *args, text, width=WIDTH, height=HEIGHT):
    """Draw once, show, and return it as a Picture."""
    figure = new_figure(width, height)
    with look():
        draw(figure, *args)
    live.show(figure, alt=text)
    return Picture(text, figure)

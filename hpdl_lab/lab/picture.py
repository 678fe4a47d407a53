"""What a verb that only draws returns."""

from dataclasses import dataclass, field

from ..plots import live
from ..plots.style import HEIGHT, WIDTH, look, new_figure


@dataclass(frozen=True)
class Picture:
    """A finished figure, with a sentence about it. `save("name.png")` writes it."""

    text: str
    figure: object = field(repr=False)

    def __repr__(self):
        return self.text

    def save(self, path):
        live.save(self.figure, path)


def picture(draw, *args, text, width=WIDTH, height=HEIGHT):
    """Draw once, show, and return it as a Picture."""
    figure = new_figure(width, height)
    with look():
        draw(figure, *args)
    live.show(figure, alt=text)
    return Picture(text, figure)

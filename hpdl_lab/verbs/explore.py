"""The model under sliders: a function of a few named values that draws a picture and says its numbers in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeAlias

from ..plots import animation, live
from ..plots.style import Draw, Figure
from .adjustable import Adjustable, Control, Value, said_html
from .plain import plainly, sentence
from .result import Picture, draw_picture

Answer: TypeAlias = Callable[..., Picture]  # f(**values), by the names of the sliders


class Explored(Adjustable):
    """A model with the values of its sliders. picture: the Picture of them, None if they cannot be.

    Args:    name: what is explored; controls: {name: Control}; answer: f(**values), a Picture, or ValueError.
             fallback: f(), a PNG for front ends without widgets; default the picture.
    """

    def __init__(
        self,
        name: str,
        controls: dict[str, Control],
        answer: Answer,
        fallback: Callable[[], bytes] | None = None,
    ) -> None:
        super().__init__(controls)
        self.name, self.answer, self.fallback = name, answer, fallback
        self.picture: Picture | None = None
        self._answer()

    @partial(plainly, owner="explored")
    def set(self, **values: Value) -> Explored:
        """Move sliders: `explored.set(batch=32)`. Raises ValueError for a value that the slider does not have."""
        for key, value in values.items():
            require_known(self.name, self.controls, key)
            self.controls[key] = self.controls[key].at(key, value)
            self.values[key] = value
        self._answer()
        self.say("")
        return self

    def _answer(self) -> None:
        try:
            self.picture, self.why = self.answer(**self.values), ""
        except ValueError as error:
            self.picture, self.why = None, sentence(error)

    @property
    def text(self) -> str:
        """The numbers in one line, or why there are none."""
        return self.why if self.picture is None else self.picture.text

    @property
    def state(self) -> tuple[object, ...]:
        return (self.picture,)

    def figure(self) -> Figure | None:
        return None if self.picture is None else self.picture.figure

    def html(self) -> str:
        warning = self.said or self.why
        return said_html(warning, "" if warning else self.text, height_em=2.8)

    def __repr__(self) -> str:
        return self.text


def require_known(name: str, controls: Iterable[str], key: str) -> None:
    """Raise ValueError unless the slider `key` is among `controls`."""
    if key not in controls:
        raise ValueError(f"{name} has no slider {key!r}: {', '.join(controls)}")


def show_sliders(shown: Adjustable) -> None:
    """Show sliders and a picture in a notebook; in a plain terminal print the text."""
    if not live.in_notebook():
        print(shown, flush=True)
        return
    from . import widgets

    widgets.display_sliders(shown)


def step_through(
    draw: Draw, frames: Sequence[Sequence[object]], alt: str, height: float, frame_ms: int = animation.FRAME_MS
) -> None:
    """Show `draw(figure, *frame)` for each of `frames`, with a slider and a play button, or played by itself."""
    last = len(frames) - 1

    def answer(step: int) -> Picture:
        return draw_picture(draw, *frames[step], text=f"{alt}: {step} of {last}", height=height)

    controls = {"step": Control(tuple(range(len(frames))), 0, every_ms=frame_ms)}
    show_sliders(Explored(alt, controls, answer, lambda: animation.png(draw, frames, height, frame_ms)))

"""The model under sliders: a function of a few named values that draws a picture and says its numbers in one line.

An Explored holds the values and knows no widget: it works the same in a plain terminal. widgets.py shows it in a
notebook; explorers.py has the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from ..plots import animation, live
from ..plots.style import Draw
from .plain import plainly, sentence
from .result import Picture, drawn

Value: TypeAlias = float | str  # that a slider, or a menu, has chosen
Answer: TypeAlias = Callable[..., Picture]  # f(**values), by the names of the sliders


class Control(NamedTuple):
    """The choice of a slider, or of a menu if these are names.

    values: in the order of the slider; start: one of them; text: f(value), to the right of the slider.
    every_ms: of the button that plays all values one after the other; 0: there is none.
    """

    values: tuple[Any, ...]
    start: Value
    text: Callable[[Any], str] = str
    every_ms: int = 0

    @property
    def named(self) -> bool:
        return isinstance(self.start, str)

    def at(self, name: str, value: Value) -> Control:
        """Return the same that starts at `value`, a number of any size or one of the names. Raises ValueError."""
        if self.named or isinstance(value, bool | str):
            if value not in self.values or isinstance(value, bool):
                raise ValueError(f"{name}={value!r}: one of {', '.join(map(self.text, self.values))} is needed")
        elif not isinstance(value, int | float) or not self.values[0] <= value <= self.values[-1]:
            low, high = self.text(self.values[0]), self.text(self.values[-1])
            raise ValueError(f"{name}={value!r}: a number from {low} to {high} is needed")
        elif value not in self.values:
            return self._replace(values=tuple(sorted((*self.values, value))), start=value)
        return self._replace(start=value)


def logarithmic(low: float, high: float, digits: Iterable[float] = (1, 1.5, 2, 3, 4, 5, 7)) -> tuple[float, ...]:
    """Return the numbers from `low` to `high` that begin with these digits: about equally far apart in factors."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return tuple(value for k in powers for digit in digits if low <= (value := float(f"{digit}e{k}")) <= high)


def doublings(low: int, high: int) -> tuple[int, ...]:
    """Return low, 2 low, 4 low ... up to `high`."""
    return tuple(low << k for k in range((high // low).bit_length()))


class Explored:
    """A model with the values of its sliders.

    values: {name: what its slider says}; picture: the Picture of them, None if they cannot be; why: a sentence then.

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
        self.name, self.answer, self.fallback = name, answer, fallback
        self.controls = {key: control.at(key, control.start) for key, control in controls.items()}
        self.values = {key: control.start for key, control in controls.items()}
        self.picture: Picture | None = None
        self.why = ""
        self._answer()

    @partial(plainly, owner="explored")
    def set(self, **values: Value) -> Explored:
        """Move sliders: `explored.set(batch=32)`. Raises ValueError for a value that the slider does not have."""
        for key, value in values.items():
            require_known(self.name, self.controls, key)
            self.controls[key] = self.controls[key].at(key, value)
            self.values[key] = value
        self._answer()
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

    def save(self, path: str) -> str:
        """Write the picture to a PNG file; returns its path. Raises ValueError if there is no picture."""
        if self.picture is None:
            raise ValueError(self.why)
        return self.picture.save(path)

    def show(self) -> None:
        """Show sliders and a picture in a notebook; in a plain terminal print the line."""
        if not live.in_notebook():
            print(self, flush=True)
            return
        from . import widgets

        widgets.show_explored(self)

    def _ipython_display_(self) -> None:
        """Show nothing at the end of a cell: the verb has shown it already."""

    def __repr__(self) -> str:
        return self.text


def require_known(name: str, controls: Iterable[str], key: str) -> None:
    """Raise ValueError unless the slider `key` is among `controls`."""
    if key not in controls:
        raise ValueError(f"{name} has no slider {key!r}: {', '.join(controls)}")


def step_through(
    draw: Draw, frames: Sequence[Sequence[object]], alt: str, height: float, frame_ms: int = animation.FRAME_MS
) -> None:
    """Show `draw(figure, *frame)` for each of `frames`, with a slider and a play button, or played by itself."""
    last = len(frames) - 1

    def answer(step: int) -> Picture:
        return drawn(draw, *frames[step], text=f"{alt}: {step} of {last}", height=height)

    controls = {"step": Control(tuple(range(len(frames))), 0, every_ms=frame_ms)}
    Explored(alt, controls, answer, lambda: animation.png(draw, frames, height, frame_ms)).show()

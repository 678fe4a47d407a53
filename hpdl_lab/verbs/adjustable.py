"""Values that sliders set, a figure of them, and lines about it. They work the same in a plain terminal.

explore.py has models with sliders, picker.py hybrid grids; widgets.py shows both in a notebook.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

from ..plots import live
from ..plots.colors import VERMILION
from ..plots.style import Figure

Value: TypeAlias = float | str  # that a slider, or a menu, has chosen


class Control(NamedTuple):
    """The choice of a slider, of a menu if these are names, or of a box that is ticked.

    values: in the order of the slider; start: one of them; text: f(value), to the right of the slider.
    every_ms: of the button that plays all values one after the other; 0: there is none.
    label: default the name; meaning: what is shown under a pointer.
    """

    values: tuple[Any, ...]
    start: Value
    text: Callable[[Any], str] = str
    every_ms: int = 0
    label: str = ""
    meaning: str = ""

    @property
    def named(self) -> bool:
        return isinstance(self.start, str)

    def at(self, name: str, value: Value) -> Control:
        """Return the same that starts at `value`, a number of any size or one of the names. Raises ValueError."""
        kind = bool if isinstance(self.start, bool) else str if self.named else float
        if kind is not float or isinstance(value, bool | str):
            if value not in self.values or isinstance(value, bool) != (kind is bool):
                raise ValueError(f"{name}={value!r}: one of {', '.join(map(self.text, self.values))} is needed")
        elif not isinstance(value, int | float) or not self.values[0] <= value <= self.values[-1]:
            low, high = self.text(self.values[0]), self.text(self.values[-1])
            raise ValueError(f"{name}={value!r}: a number from {low} to {high} is needed")
        elif value not in self.values:
            return self._replace(values=tuple(sorted((*self.values, value))), start=value)
        return self._replace(start=value)


class RunButton(NamedTuple):
    """A button. possible: f(), whether it can be pressed now."""

    label: str
    icon: str
    call: Callable[[], object]
    possible: Callable[[], bool]


class Adjustable:
    """A figure of values that sliders set.

    values: {name: what its slider says}; why: a sentence if these cannot be, else ""; said: of the last action, or "".
    actions: its buttons; changed: called when something has changed; panel: its widgets, once a notebook shows it.
    """

    set: Callable[..., Adjustable]  # set(**values)
    actions: tuple[RunButton, ...] = ()
    fallback: Callable[[], bytes] | None = None  # f(), a PNG for front ends without widgets; default the figure

    def __init__(self, controls: dict[str, Control]) -> None:
        self.controls = {key: control.at(key, control.start) for key, control in controls.items()}
        self.values: dict[str, Value] = {key: control.start for key, control in controls.items()}
        self.why = self.said = ""
        self.changed: list[Callable[[], None]] = []
        self.panel: object = None

    @property
    def state(self) -> tuple[object, ...]:
        """The objects that the figure is drawn from."""
        raise NotImplementedError

    @property
    def sharp(self) -> bool:
        """True if every figure is drawn sharp, not only the first one."""
        return False

    def figure(self) -> Figure | None:
        """Draw the values; None if they cannot be."""
        raise NotImplementedError

    def html(self) -> str:
        """Return the lines above the picture."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Put `text` into `said`, and make the widgets follow."""
        self.said = text
        for call in self.changed:
            call()

    def save(self, path: str) -> str:
        """Write the figure to a PNG file; returns its path. Raises ValueError if there is none."""
        figure = self.figure()
        if figure is None:
            raise ValueError(self.why)
        live.save_figure(figure, path)
        return path

    def _ipython_display_(self) -> None:
        """Show nothing at the end of a cell: the verb has shown it already."""


def said_html(warning: str, text: str, height_em: float) -> str:
    """Return a line that is read out when it changes, as high as it may need to be, so that nothing moves."""
    red = f'<span style="color: {VERMILION}">{html.escape(warning)}</span>' if warning else ""
    text = " ".join(filter(None, (red, html.escape(text))))
    return f'<div aria-live="polite" style="min-height: {height_em}em">{text}</div>'


def logarithmic(low: float, high: float, digits: Iterable[float] = (1, 1.5, 2, 3, 4, 5, 7)) -> tuple[float, ...]:
    """Return the numbers from `low` to `high` that begin with these digits: about equally far apart in factors."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return tuple(value for k in powers for digit in digits if low <= (value := float(f"{digit}e{k}")) <= high)


def doublings(low: int, high: int) -> tuple[int, ...]:
    """Return low, 2 low, 4 low ... up to `high`."""
    return tuple(low << k for k in range((high // low).bit_length()))

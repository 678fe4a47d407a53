"""Sliders, menus and buttons of a notebook. No other file imports ipywidgets.

Callbacks may run while a cell runs, in a thread of the kernel. Whatever they raise is one sentence under the
buttons: otherwise it would go to the log, where no attendee looks.
"""

from __future__ import annotations

import base64
import functools
import gc
import operator
import threading
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import ipywidgets as widgets
from IPython.display import display

from ..plots import live
from .adjustable import Adjustable, Control, RunButton
from .plain import sentence

WIDE = {"description_width": "96px"}
PAGE = {"width": "840px", "max_width": "100%"}
LABELS = {"alpha": "α", "bandwidth": "1/β", "micro_batches": "micro-batches"}  # of sliders; else their names

Moved: TypeAlias = widgets.Checkbox | widgets.Dropdown | widgets.SelectionSlider
Event = TypeVar("Event")  # of a widget, as ipywidgets passes it on


class Sliders:
    """The widgets of an Adjustable: one per control, buttons, lines of text, a picture. box: what is displayed.

    size: of the picture on the page, in pixels. It is drawn sharp in the beginning, else as the Adjustable says.
    """

    def __init__(self, shown: Adjustable) -> None:
        self.shown = shown
        self.size = 0, 0
        self._following = False  # while widgets follow what was set
        self._drawn: tuple[object, ...] | None = None  # the state in the picture
        self._scale = 0.0  # how sharp it is
        self._lock = threading.RLock()
        self.line = widgets.HTML(layout=widgets.Layout(**PAGE))
        self.picture = widgets.Image(format="png", layout=widgets.Layout(**PAGE))
        self.moved = {key: self._control(key, control) for key, control in shown.controls.items()}
        self.buttons = {action.label: self._button(action) for action in shown.actions}
        rows = [widgets.HBox([self.moved[key], *self._player(key)]) for key in self.moved]
        half = -(-len(rows) // 2)
        columns = [rows] if len(rows) < 3 else [rows[:half], rows[half:]]
        sliders = widgets.HBox([widgets.VBox(column) for column in columns])
        buttons = [widgets.HBox(list(self.buttons.values()))] if self.buttons else []
        self.box = widgets.VBox([sliders, *buttons, self.line, self.picture])
        shown.changed.append(self.refresh)
        self.refresh()

    def _control(self, key: str, control: Control) -> Moved:
        """Make the slider, the menu, or the box to tick, of a control."""
        look = {"description": control.label or LABELS.get(key, key.replace("_", " ")), "style": WIDE}
        if isinstance(control.start, bool):
            moved = widgets.Checkbox(value=control.start, **look)
        else:
            kind = widgets.Dropdown if control.named else widgets.SelectionSlider
            options = [(control.text(value), value) for value in control.values]
            moved = kind(options=options, value=control.start, tooltip=control.meaning or None, **look)
        moved.observe(self._guarded(lambda change: self._move(key, change["new"])), "value")
        return moved

    def _player(self, key: str) -> list[widgets.Widget]:
        """Return the play button of a control that has one, tied to its slider."""
        control = self.shown.controls[key]
        if not control.every_ms:
            return []
        play = widgets.Play(min=0, max=len(control.values) - 1, interval=control.every_ms, show_repeat=False)
        widgets.link((play, "value"), (self.moved[key], "index"))
        return [play]

    def _button(self, action: RunButton) -> widgets.Button:
        style = "primary" if action.icon == "play" else ""
        button = widgets.Button(description=action.label, icon=action.icon, button_style=style)
        button.on_click(self._guarded(lambda _: action.call()))
        return button

    def _move(self, key: str, value: float | str) -> None:
        if not self._following:
            with self._lock:
                self.shown.set(**{key: value})

    def _guarded(self, call: Callable[[Event], object]) -> Callable[[Event], None]:
        """Return the callback, whose errors are said in a sentence."""

        def callback(event: Event) -> None:
            try:
                call(event)
            except Exception as error:
                self.shown.say(sentence(error))

        return callback

    def refresh(self) -> None:
        """Show the present state."""
        shown = self.shown
        with self._lock:
            self._following = True
            try:
                for key, value in shown.values.items():
                    widget = self.moved[key]
                    if isinstance(widget, widgets.Checkbox):
                        widget.value = bool(value)
                    elif value in [option for _, option in widget.options]:
                        widget.value = value
            finally:
                self._following = False
            for action in shown.actions:
                self.buttons[action.label].disabled = not action.possible()
            self.line.value = shown.html()
            self._draw()

    def _draw(self) -> None:
        """Make the picture anew if it would be another one, or sharper."""
        state, scale = self.shown.state, live.CRISP if self.shown.sharp or self._drawn is None else 1
        if self._drawn is not None and all(map(operator.is_, state, self._drawn)) and scale <= self._scale:
            return
        figure = self.shown.figure()
        self._drawn, self._scale = state, scale
        self.picture.layout.visibility = "visible" if figure else "hidden"
        if figure:
            self.size = live.page_size(figure)
            self.picture.value = live.png(figure, scale)


def display_sliders(shown: Adjustable) -> None:
    """Display the widgets, with a picture and the text for front ends that have none."""
    panel = shown.panel = shown.panel if isinstance(shown.panel, Sliders) else Sliders(shown)
    _keep_what_is_there()
    png = panel.picture.value if shown.fallback is None else shown.fallback()
    image, (width, height) = base64.b64encode(png).decode(), panel.size
    data = {**(panel.box._repr_mimebundle_() or {}), "image/png": image, "text/plain": repr(shown)}
    display(data, metadata={"image/png": {"width": width, "height": height}}, raw=True)


@functools.cache
def _keep_what_is_there() -> None:
    """Leave what has been imported out of garbage collections: among torch's objects each takes a quarter of a second,
    and pictures cause one every few moves of a slider."""
    gc.collect()
    gc.freeze()

"""The picker of grids as widgets of a notebook: sliders, buttons, a picture. The only file that knows ipywidgets.

Callbacks may run while a cell runs, in a thread of the kernel. Whatever they raise is one sentence under the
buttons: the log, where it would go else, is read by nobody.
"""

import base64
import html
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
from IPython.display import display

from .. import schedules
from ..plots import live
from ..plots.colors import VERMILION
from ..plots.grid import HEIGHT
from ..plots.style import new_figure
from ..trace import seconds_text
from ..units import amount_text
from .grid import AXES
from .plain import sentence

if TYPE_CHECKING:
    from .picker import Picker

if TYPE_CHECKING:
    pass

MEANING = {
    "dp": "replicas, each with its share of the batch",
    "pp": "stages of each replica",
    "tp": "ranks that share every layer",
}
WIDE = {"description_width": "96px"}


class Panel:
    """The widgets of one Picker. box: what is displayed."""

    def __init__(self, picker: "Picker") -> None:
        self.picker = picker
        self._quiet = False  # while widgets follow what was picked
        self._drawn: Any = None  # what the picture shows
        self._scale = 0  # how sharp it is
        self._lock = threading.RLock()
        sizes = divisors(picker.subject.ranks)
        self.axes = {
            axis: widgets.SelectionSlider(options=sizes, description=axis, tooltip=MEANING[axis], style=WIDE)
            for axis in AXES
        }
        batches = divisors(picker.subject.batch)
        self.micro_batches = widgets.SelectionSlider(options=batches, description="micro-batches", style=WIDE)
        self.schedule = widgets.Dropdown(options=list(schedules.CATALOG), description="schedule", style=WIDE)
        self.recompute = widgets.Checkbox(description="checkpoint activations", style=WIDE)
        self.run = widgets.Button(description="Run it", button_style="primary", icon="play")
        self.stop = widgets.Button(description="Stop", icon="stop")
        self.numbers, self.message = widgets.HTML(), widgets.HTML()
        self.picture = widgets.Image(format="png", layout=widgets.Layout(width="840px", max_width="100%"))
        for axis, slider in self.axes.items():
            slider.observe(self.guarded(self.setter(axis)), "value")
        for name in ("micro_batches", "schedule", "recompute"):
            getattr(self, name).observe(self.guarded(self.setter(name)), "value")
        self.run.on_click(self.guarded(lambda _: picker.start()))
        self.stop.on_click(self.guarded(lambda _: picker.stop()))
        left = widgets.VBox(list(self.axes.values()))
        right = widgets.VBox([self.micro_batches, self.schedule, self.recompute])
        buttons = widgets.HBox([self.run, self.stop])
        self.box = widgets.VBox([widgets.HBox([left, right]), buttons, self.message, self.numbers, self.picture])
        picker.changed.append(self.refresh)
        self.refresh()

    def setter(self, name: str) -> Callable[[Any], Any]:
        return lambda change: None if self._quiet else self.picker.set(**{name: change["new"]})

    def guarded(self, call: Callable[[Any], Any]) -> Callable[[Any], None]:
        """The callback, whose errors are text under the buttons."""

        def callback(event: Any) -> None:
            try:
                call(event)
            except Exception as error:
                self.picker.say(sentence(error))

        return callback

    def refresh(self) -> None:
        """Show what the picker says now."""
        picker = self.picker
        with self._lock:
            self._quiet = True
            try:
                for axis, slider in self.axes.items():
                    slider.value = getattr(picker.setting, axis)
                if picker.setting.micro_batches in self.micro_batches.options:
                    self.micro_batches.value = picker.setting.micro_batches
                self.schedule.value, self.recompute.value = picker.setting.schedule, picker.setting.recompute
            finally:
                self._quiet = False
            self.run.disabled = picker.prediction is None or picker.under_way is not None
            self.stop.disabled = picker.under_way is None
            self.message.value = message(picker)
            self.numbers.value = numbers(picker)
            self._draw()

    def _draw(self) -> None:
        """Make the picture anew where it would be another one, which takes a third of a second; sharp in the end."""
        picker = self.picker
        state = picker.setting, picker.measured, picker.why
        scale = live.CRISP if picker.under_way is None else 1
        if state != self._drawn or scale > self._scale:
            self._drawn, self._scale = state, scale
            self.picture.value = live.png(picker.figure(), scale)


def show(picker: "Picker") -> None:
    """Display the widgets; a front end that has none shows the picture instead, or the table."""
    if picker.panel is None:
        picker.panel = Panel(picker)
    data, metadata = picker.panel.box._repr_mimebundle_(), {}
    width, height = live.page_size(new_figure(height=HEIGHT))
    data |= {"image/png": base64.b64encode(picker.panel.picture.value).decode(), "text/plain": repr(picker)}
    metadata["image/png"] = {"width": width, "height": height}
    display(data, metadata=metadata, raw=True)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def message(picker: "Picker") -> str:
    """What does not fit and why, what has followed what, or how a run ended."""
    why = f"This grid cannot be: {picker.why}." if picker.why else ""
    parts = [f'<span style="color: {VERMILION}">{html.escape(why)}</span>' if why else "", html.escape(picker.said)]
    return f'<div aria-live="polite" style="min-height: 1.4em">{" ".join(filter(None, parts))}</div>'


def numbers(picker: "Picker") -> str:
    """The line above the picture."""
    row, taken = picker.prediction, picker.measured
    if row is None:
        return ""
    text = f"<b>predicted</b> {seconds_text(row.seconds)} a step, bubble {row.bubble:.1%}, "
    text += f"{amount_text(row.memory.total)} of {amount_text(picker.subject.limit)}"
    text += "" if row.fits else f' <b style="color: {VERMILION}">does not fit</b>'
    if taken is not None:
        text += f"; <b>{taken.kind}</b> {seconds_text(taken.seconds)} a step"
    return text

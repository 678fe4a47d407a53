"""Widgets of a notebook: the picker of grids, and models with sliders. No other file imports ipywidgets.

Callbacks may run while a cell runs, in a thread of the kernel. Whatever they raise is one sentence under the
buttons: otherwise it would go to the log, which is read by nobody.
"""

from __future__ import annotations

import base64
import functools
import gc
import html
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import ipywidgets as widgets
from IPython.display import display

from .. import schedules
from ..plots import live
from ..plots.colors import VERMILION
from ..plots.grid import HEIGHT
from ..plots.style import new_figure
from ..trace import seconds_text
from ..units import amount_text
from .plain import sentence

if TYPE_CHECKING:
    from ..parallel.grid.model import Prediction
    from ..plots.style import Figure
    from .grid import Setting, Subject
    from .result import Picture

MEANING = {
    "dp": "replicas, each with its share of the batch",
    "pp": "stages of each replica",
    "tp": "ranks that share every layer",
    "cp": "ranks that share each sequence",
    "ep": "ranks that share the experts of a layer",
    "zero": "stage of ZeRO: what replicas share out",
}
WIDE = {"description_width": "96px"}
PAGE = {"width": "840px", "max_width": "100%"}
SAID = '<div aria-live="polite" style="min-height: {}em">{}</div>'  # as many lines as it may need: nothing moves
LABELS = {"alpha": "α", "bandwidth": "1/β", "micro_batches": "micro-batches"}  # of sliders; else their names


Event = TypeVar("Event")  # of a widget, as ipywidgets passes it on
Change: TypeAlias = dict[str, Any]  # of a widget's value, likewise


class Timed(Protocol):
    """A run of a grid (picker.Measured)."""

    @property
    def kind(self) -> str: ...

    @property
    def seconds(self) -> float: ...


class Picked(Protocol):
    """The grid that is picked, as widgets show it (picker.Picker)."""

    subject: Subject
    axes: Sequence[str]
    setting: Setting
    prediction: Prediction | None
    why: str
    said: str
    changed: list[Callable[[], None]]
    panel: object

    @property
    def measured(self) -> Timed | None: ...

    @property
    def under_way(self) -> object: ...

    @property
    def set(self) -> Callable[..., object]: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def say(self, text: str) -> None: ...

    def figure(self) -> Figure: ...


class Choice(Protocol):
    """The values of a slider, or of a menu (explore.Control)."""

    @property
    def values(self) -> tuple[Any, ...]: ...

    @property
    def start(self) -> float | str: ...

    @property
    def text(self) -> Callable[[Any], str]: ...

    @property
    def every_ms(self) -> int: ...

    @property
    def named(self) -> bool: ...


class Model(Protocol):
    """A model with the values of its sliders (explore.Explored)."""

    picture: Picture | None
    why: str

    @property
    def controls(self) -> Mapping[str, Choice]: ...

    @property
    def fallback(self) -> Callable[[], bytes] | None: ...

    @property
    def set(self) -> Callable[..., object]: ...


class Panel:
    """The widgets of one Picker. box: what is displayed."""

    def __init__(self, picker: Picked) -> None:
        self.picker = picker
        self._quiet = False  # while widgets follow what was picked
        self._drawn: tuple[Setting, Timed | None, str] | None = None  # shown in the picture
        self._scale = 0.0  # how sharp it is
        self._lock = threading.RLock()
        sizes = {"zero": range(4)}
        self.axes = {
            axis: widgets.SelectionSlider(
                options=sizes.get(axis, divisors(picker.subject.ranks)),
                description=axis,
                tooltip=MEANING[axis],
                style=WIDE,
            )
            for axis in picker.axes
        }
        batches = divisors(picker.subject.batch)
        self.micro_batches = widgets.SelectionSlider(options=batches, description="micro-batches", style=WIDE)
        self.schedule = widgets.Dropdown(options=list(schedules.CATALOG), description="schedule", style=WIDE)
        self.recompute = widgets.Checkbox(description="checkpoint activations", style=WIDE)
        self.run = widgets.Button(description="Run it", button_style="primary", icon="play")
        self.stop = widgets.Button(description="Stop", icon="stop")
        self.numbers, self.message = widgets.HTML(), widgets.HTML()
        self.picture = widgets.Image(format="png", layout=widgets.Layout(**PAGE))
        for axis, slider in self.axes.items():
            slider.observe(guarded(self.setter(axis), picker.say), "value")
        for name in ("micro_batches", "schedule", "recompute"):
            getattr(self, name).observe(guarded(self.setter(name), picker.say), "value")
        self.run.on_click(guarded(lambda _: picker.start(), picker.say))
        self.stop.on_click(guarded(lambda _: picker.stop(), picker.say))
        left = widgets.VBox(list(self.axes.values()))
        right = widgets.VBox([self.micro_batches, self.schedule, self.recompute])
        buttons = widgets.HBox([self.run, self.stop])
        self.box = widgets.VBox([widgets.HBox([left, right]), buttons, self.message, self.numbers, self.picture])
        picker.changed.append(self.refresh)
        self.refresh()

    def setter(self, name: str) -> Callable[[Change], object]:
        """Return the callback that picks what the widget of this name has."""
        return lambda change: None if self._quiet else self.picker.set(**{name: change["new"]})

    def refresh(self) -> None:
        """Show the present state of the picker."""
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
        """Make the picture anew if it would be another one, which takes a third of a second; sharp in the end."""
        picker = self.picker
        state = picker.setting, picker.measured, picker.why
        scale = live.CRISP if picker.under_way is None else 1
        if state != self._drawn or scale > self._scale:
            self._drawn, self._scale = state, scale
            self.picture.value = live.png(picker.figure(), scale)


def show(picker: Picked) -> None:
    """Display the widgets; a front end that has none shows the picture instead, or the table."""
    panel = picker.panel = picker.panel if isinstance(picker.panel, Panel) else Panel(picker)
    publish(panel.box, panel.picture.value, live.page_size(new_figure(height=HEIGHT)), repr(picker))


def publish(box: widgets.Widget, png: bytes, size: tuple[int, int], text: str) -> None:
    """Display widgets, with a picture and a text for front ends that have none."""
    keep_what_is_there()
    data = {**(box._repr_mimebundle_() or {}), "image/png": base64.b64encode(png).decode(), "text/plain": text}
    display(data, metadata={"image/png": {"width": size[0], "height": size[1]}}, raw=True)


def guarded(call: Callable[[Event], object], say: Callable[[str], object]) -> Callable[[Event], None]:
    """Return the callback with its errors passed on to `say`."""

    def callback(event: Event) -> None:
        try:
            call(event)
        except Exception as error:
            say(sentence(error))

    return callback


def divisors(n: int) -> list[int]:
    """Return the divisors of n, in rising order."""
    return [d for d in range(1, n + 1) if n % d == 0]


def message(picker: Picked) -> str:
    """Return HTML: why a grid cannot be, which axes have followed, or how a run ended."""
    why = f"This grid cannot be: {picker.why}." if picker.why else ""
    parts = [f'<span style="color: {VERMILION}">{html.escape(why)}</span>' if why else "", html.escape(picker.said)]
    return SAID.format(1.4, " ".join(filter(None, parts)))


def numbers(picker: Picked) -> str:
    """Return the line above the picture, in HTML."""
    row, taken = picker.prediction, picker.measured
    if row is None:
        return ""
    text = f"<b>predicted</b> {seconds_text(row.seconds)} a step, bubble {row.bubble:.1%}, "
    text += f"{amount_text(row.memory.total)} of {amount_text(picker.subject.limit)}"
    text += "" if row.fits else f' <b style="color: {VERMILION}">does not fit</b>'
    if taken is not None:
        text += f"; <b>{taken.kind}</b> {seconds_text(taken.seconds)} a step"
    return text


# -- what is explored by sliders --------------------------------------------------------------------------------------


class Sliders:
    """The widgets of one Explored: a slider or menu per control, a line of numbers, a picture. box: what is displayed.

    The picture is drawn at the resolution of the page while sliders move, and sharp in the beginning.
    """

    def __init__(self, explored: Model) -> None:
        self.explored = explored
        self._lock = threading.RLock()
        self.line = widgets.HTML(layout=widgets.Layout(**PAGE))
        self.picture = widgets.Image(format="png", layout=widgets.Layout(**PAGE))
        self.moved = {key: self.control(key, control) for key, control in explored.controls.items()}
        rows = [widgets.HBox([self.moved[key], *self.player(key)]) for key in self.moved]
        half = -(-len(rows) // 2)
        columns = [rows] if len(rows) < 3 else [rows[:half], rows[half:]]
        sliders = widgets.HBox([widgets.VBox(column) for column in columns])
        self.box = widgets.VBox([sliders, self.line, self.picture])
        self.refresh(live.CRISP)

    def control(self, key: str, control: Choice) -> widgets.Widget:
        """Make the slider, or menu, of a control."""
        kind = widgets.Dropdown if control.named else widgets.SelectionSlider
        options = [(control.text(value), value) for value in control.values]
        label = LABELS.get(key, key.replace("_", " "))
        moved = kind(options=options, value=control.start, description=label, style=WIDE)
        moved.observe(guarded(lambda change: self.move(key, change["new"]), self.say), "value")
        return moved

    def player(self, key: str) -> list[widgets.Widget]:
        """Return the play button of a control that has one, tied to its slider."""
        control = self.explored.controls[key]
        if not control.every_ms:
            return []
        play = widgets.Play(min=0, max=len(control.values) - 1, interval=control.every_ms, show_repeat=False)
        widgets.link((play, "value"), (self.moved[key], "index"))
        return [play]

    def move(self, key: str, value: float | str) -> None:
        """Set a slider, and show the answer."""
        with self._lock:
            self.explored.set(**{key: value})
            self.refresh()

    def refresh(self, scale: float = 1) -> None:
        """Show the answer; if the values cannot be, why."""
        picture = self.explored.picture
        self.picture.layout.visibility = "visible" if picture else "hidden"
        if picture is None:
            self.say(self.explored.why)
            return
        self.line.value = SAID.format(2.8, html.escape(picture.text))
        self.picture.value = live.png(picture.figure, scale)

    def say(self, text: str) -> None:
        """Show a sentence in the place of the numbers."""
        self.line.value = SAID.format(2.8, f'<span style="color: {VERMILION}">{html.escape(text)}</span>')


def show_explored(explored: Model) -> None:
    """Display the sliders; a front end without widgets shows a picture instead, or the line."""
    panel = Sliders(explored)
    png = panel.picture.value if explored.fallback is None else explored.fallback()
    size = (0, 0) if explored.picture is None else live.page_size(explored.picture.figure)
    publish(panel.box, png, size, repr(explored))


@functools.cache
def keep_what_is_there() -> None:
    """Leave what has been imported out of garbage collections: among torch's objects each takes a quarter of a second,
    and pictures cause one every few moves of a slider."""
    gc.collect()
    gc.freeze()

"""A picture that changes in place while ranks work: no flicker, no clear_output, and the last state is always drawn."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import io
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import EngFormatter, MaxNLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..system import home, write_file
from ..trace import number_text
from .colors import BLUE, GREEN
from .style import DPI, HEIGHT, Draw, Figure, Rows, footnote, heading, log_axis, new_figure, style_context, x_label

if TYPE_CHECKING:
    from IPython.display import DisplayHandle

CRISP = 2  # pixels of a final picture per pixel of the page: sharp on high-density screens
CURVES = "curves"  # in the home folder
PERIOD = 0.18  # s from frame to frame: the eye can follow
LEAST_PAUSE = 1.0  # times what the frame before took: at least half of a core is left to the ranks


def pixels(figure: Figure, scale: float = CRISP) -> Image.Image:
    """Return the figure as an RGB image, with `scale` pixels per pixel of the page."""
    with style_context():
        canvas = cast("FigureCanvasAgg", figure.canvas)
        figure.set_dpi(DPI * scale)
        canvas.draw()
        size = canvas.get_width_height(physical=True)
        rgba = canvas.buffer_rgba()
        image = Image.frombuffer("RGBA", size, rgba, "raw", "RGBA", 0, 1).convert("RGB")  # pyrefly: ignore[bad-argument-type]
        figure.set_dpi(DPI)
    return image


def png(figure: Figure, scale: float = CRISP) -> bytes:
    """Return the figure as PNG bytes, with `scale` pixels per pixel of the page."""
    return _encoded(pixels(figure, scale))


def _encoded(image: Image.Image, alt: str = "") -> bytes:
    """Encode as PNG, with `alt` as its description."""
    file, texts = io.BytesIO(), PngInfo()
    if alt:
        texts.add_itxt("Description", alt)
    image.save(file, "png", compress_level=3, pnginfo=texts)
    return file.getvalue()


def html(figure: Figure, alt: str = "plot") -> str:
    """Return the figure as an <img> element, for the HTML of a larger answer."""
    width, _ = page_size(figure)
    data = base64.b64encode(png(figure)).decode()
    return f'<img width="{width}" style="max-width: 100%" alt="{alt}" src="data:image/png;base64,{data}">'


def show_figure(figure: Figure, alt: str = "plot") -> None:
    """Display a finished figure in the notebook; nothing in a plain script."""
    if in_notebook():
        publish(figure, alt, CRISP)


def save_figure(figure: Figure, path: str) -> None:
    """Write the figure as PNG."""
    with open(path, "wb") as file:
        file.write(png(figure))


class Live:
    """A figure redrawn by a pure function of what is known so far.

        live = Live(loss.draw)
        live.update(rows)      as often as you like: draws about five times a second
        live.finish(rows)      always draws

    `draw(figure, *args)` fills an empty figure. In a plain script nothing is shown, and only the last state is drawn.
    """

    def __init__(self, draw: Draw, height: float = HEIGHT, alt: str = "live plot") -> None:
        self.draw, self.alt = draw, alt
        self.figure = new_figure(height=height)
        self.shown = in_notebook()
        self.handle: DisplayHandle | None = None
        self.frames = 0
        self._next = 0.0  # s, when a frame may be drawn

    def update(self, *args: object) -> None:
        """Draw the present state, unless the last frame was a moment ago."""
        if self.shown and time.monotonic() >= self._next:
            self._frame(args, scale=1)

    def rest(self) -> None:
        """Sleep until the next frame may be drawn, so that `update` leaves out none."""
        time.sleep(max(0.0, self._next - time.monotonic()))

    def finish(self, *args: object) -> Figure:
        """Draw the final state; returns the figure."""
        self._frame(args, scale=CRISP)
        return self.figure

    def _frame(self, args: tuple[object, ...], scale: float) -> None:
        begin = time.monotonic()
        for ax in self.figure.axes:  # taken off as they are: clear() would empty each of them first
            self.figure.delaxes(ax)
        self.figure.clear()
        with style_context():
            self.draw(self.figure, *args)
        if self.shown:
            self.handle = publish(self.figure, self.alt, scale, self.handle)
        end = time.monotonic()
        self.frames += 1
        self._next = max(begin + PERIOD, end + LEAST_PAUSE * (end - begin))


def in_notebook() -> bool:
    """Return True if a front end shows what is displayed."""
    ipython = sys.modules.get("IPython")  # a kernel has imported it; a script need not
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def shown_here(figure: Figure) -> bool:
    """Return True if the figure has been displayed by the cell that runs now."""
    return getattr(figure, "cell", None) == cell()


def cell() -> int:
    """Return the number of the cell that runs now."""
    from IPython import get_ipython

    return get_ipython().execution_count


def page_size(figure: Figure) -> tuple[int, int]:
    """Return width and height of the figure on the page, in CSS pixels."""
    width, height = figure.get_size_inches() * DPI
    return round(width), round(height)


def publish(figure: Figure, alt: str, scale: float, handle: DisplayHandle | None = None) -> DisplayHandle:
    """Display the figure, or replace what `handle` displays; returns the handle."""
    from IPython.display import DisplayHandle

    image, again = pixels(figure, scale), handle is None and hasattr(figure, "cell")
    if scale == CRISP and not again:
        curves().keep(_encoded(image, alt), alt, _title_of(figure))
    figure.cell = cell()  # pyrefly: ignore[missing-attribute]
    width, height = page_size(figure)
    data = {"image/png": base64.b64encode(_encoded(image)).decode(), "text/plain": f"<{alt}>"}
    # The size is fixed in advance, so that the page does not move while the browser decodes the next frame.
    metadata = {"image/png": {"width": width, "height": height}}
    if handle is None:
        handle = DisplayHandle()
        handle.display(data, metadata=metadata, raw=True)
    else:
        handle.update(data, metadata=metadata, raw=True)
    return handle


class Curves:
    """Finished figures, each a PNG file in `folder`: the last one of each kind and title, without the title's numbers.

    MOST in all.
    """

    MOST = 300

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.writable = True

    def keep(self, picture: bytes, kind: str, title: str) -> None:
        """Write the PNG file; print once if it cannot be written. kind: the alt text of the figure."""
        if not self.writable:
            return
        title = re.sub(r"\d[\d.,]*", "#", title)  # numbers are what was measured
        name = re.sub(r"[^a-z]+", "_", title.lower())[:60].strip("_")
        digest = hashlib.sha256(f"{kind}\n{title}".encode(errors="replace")).hexdigest()[:8]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_file(self.folder / f"{name}_{digest}.png", picture)
        except OSError as error:
            self.writable = False
            print(f"Your figures are not kept for `hpdl report`: cannot write {self.folder} ({error.strerror}).")
        with contextlib.suppress(OSError):  # another kernel may have removed it
            for old in sorted(self.folder.glob("*.png"), key=os.path.getmtime)[: -self.MOST]:
                old.unlink()


@functools.cache
def curves() -> Curves:
    """Return the figures of this user, in a folder next to the progress file."""
    return Curves(home() / CURVES)


def _title_of(figure: Figure) -> str:
    """Return the title that `heading` has written, the largest bold text; "" if there is none."""
    bold = [text for text in figure.texts if text.get_fontweight() == "bold"]
    return max(bold, key=lambda text: text.get_fontsize()).get_text() if bold else ""


SMOOTH = 20  # steps over which samples/s are averaged: single steps show the operating system more than the training


def draw(figure: Figure, rows: Rows, steps: int, title: str = "", foot: str = "", lowest: float = 0.1) -> None:
    """Fill `figure` from the rows that a training reports: dicts with step, loss, samples_per_s; `steps` in all.

    Rows with a loss_scale show that in the place of samples per second.
    lowest: a good loss; the axis goes down to it from the beginning, so that it stands still.
    """
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    figure.subplots_adjust(left=0.075, right=0.975, bottom=0.19, top=0.78, wspace=0.24)
    x = [r["step"] for r in rows]
    losses = [r["loss"] for r in rows]
    left.plot(x, losses, color=BLUE, linewidth=1.4)
    log_axis(left, [*losses, lowest, 3.0])  # 3: about the loss at the start of a training
    left.set_title("loss of the global batch")

    rates = smoothed([r["samples_per_s"] for r in rows])
    shown = [r["loss_scale"] for r in rows if "loss_scale" in r] or rates
    if shown is rates:
        right.plot(x, rates, color=GREEN)
        right.set_ylim(0, max(1.0, max(rates, default=0.0) * 1.25))
        right.yaxis.set_major_locator(MaxNLocator(4))
        right.yaxis.set_major_formatter(EngFormatter(sep=""))
        right.set_title("samples per second")
    else:
        right.step(x, shown, color=GREEN)
        right.set_yscale("log", base=2)
        right.set_title("loss scale")
    for ax in (left, right):
        ax.set_xlim(0, max(steps - 1, 1))
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=(1, 2, 5, 10)))
        x_label(ax, "step")
    now = "waiting for the first step"
    if rows:
        left.plot(x[-1:], losses[-1:], "o", color=BLUE, clip_on=False)
        right.plot(x[-1:], shown[-1:], "o", color=GREEN, clip_on=False)
        now = f"step {x[-1] + 1} of {steps}   loss {number_text(losses[-1])}   {rates[-1]:,.0f} samples/s at the moment"
    heading(figure, title, now)
    footnote(figure, foot)


def smoothed(rates: Sequence[float]) -> np.ndarray:
    """Return the rate over the last SMOOTH steps, at every step: n / sum(1 / rate), which is work over time."""
    single = np.asarray(rates, dtype=float)
    timed = single > 0
    seconds = np.cumsum(np.divide(1, single, out=np.zeros_like(single), where=timed))
    steps = np.cumsum(timed)
    seconds[SMOOTH:], steps[SMOOTH:] = seconds[SMOOTH:] - seconds[:-SMOOTH], steps[SMOOTH:] - steps[:-SMOOTH]
    return np.divide(steps, seconds, out=np.zeros_like(single), where=steps > 0)

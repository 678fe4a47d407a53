"""A picture that moves by itself: an animated PNG, for the HTML of an answer."""

import base64
import io
from collections import Counter
from collections.abc import Iterable

import numpy as np
from PIL import Image

from .live import CRISP, page_size, pixels
from .style import HEIGHT, Draw, new_figure, style_context

FRAME_MS = 900  # long enough to follow every arrow of a step
COLORS = 128  # of all frames together
LAST_MS = 3500  # then it starts again
RGB = 1 << 16, 1 << 8, 1  # a color as one number


def html(
    draw: Draw,
    frames: Iterable[Iterable[object]],
    alt: str = "animation",
    height: float = HEIGHT,
    frame_ms: int = FRAME_MS,
) -> str:
    """Return `png` as an <img> element."""
    data = base64.b64encode(png(draw, frames, height, frame_ms)).decode()
    width, _ = page_size(new_figure(height=height))
    return f'<img width="{width}" style="max-width: 100%" alt="{alt}" src="data:image/png;base64,{data}">'


def png(draw: Draw, frames: Iterable[Iterable[object]], height: float = HEIGHT, frame_ms: int = FRAME_MS) -> bytes:
    """Return a PNG that shows `draw(figure, *frame)` for each of `frames`, one after the other forever."""
    images = []
    for frame in frames:
        figure = new_figure(height=height)
        with style_context():
            draw(figure, *frame)
        images.append(pixels(figure, CRISP))
    images = _in_one_palette(images)
    file = io.BytesIO()
    durations = [frame_ms] * (len(images) - 1) + [LAST_MS]
    images[0].save(file, "png", save_all=True, append_images=images[1:], duration=durations, loop=0)
    return file.getvalue()


def _in_one_palette(images: list[Image.Image]) -> list[Image.Image]:
    """Return the frames with one byte per pixel, a third of the size.

    The most frequent colors of all frames stay as they are; each other one becomes the nearest of these.
    """
    counts: Counter[tuple[int, ...] | float] = Counter()
    for image in images:
        counts.update({color: count for count, color in image.getcolors(image.width * image.height) or ()})
    colors = np.array([color for color, _ in counts.most_common()])
    kept = colors[:COLORS]
    index = np.zeros(1 << 24, np.uint8)  # of every color; Pillow's own search confuses colors that are alike
    index[colors @ RGB] = np.abs(colors[:, None] - kept).sum(axis=2).argmin(axis=1)
    frames = [Image.fromarray(index[np.asarray(image) @ RGB]) for image in images]
    for frame in frames:
        frame.putpalette(kept.astype(np.uint8).tobytes())
    return frames

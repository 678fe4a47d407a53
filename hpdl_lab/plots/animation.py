"""A picture that moves by itself: an animated PNG, for the HTML of an answer."""

import base64
import io

from PIL import Image

from .live import CRISP, page_size, pixels
from .style import HEIGHT, look, new_figure

FRAME_MS = 900  # long enough to follow every arrow of a step
COLORS = 128  # of all frames together
LAST_MS = 3500  # then it starts again


def show(draw, frames, alt, height, frame_ms=FRAME_MS):
    """Display the animation in the notebook."""
    from IPython.display import HTML, display

    display(HTML(html(draw, frames, alt, height, frame_ms)))


def html(draw, frames, alt="animation", height=HEIGHT, frame_ms=FRAME_MS):
    """`draw(figure, *frame)` for each of `frames`, one after the other for ever, as an <img> element."""
    images = []
    for frame in frames:
        figure = new_figure(height=height)
        with look():
            draw(figure, *frame)
        images.append(pixels(figure, CRISP))
    images = in_one_palette(images)
    file = io.BytesIO()
    durations = [frame_ms] * (len(images) - 1) + [LAST_MS]
    images[0].save(file, "png", save_all=True, append_images=images[1:], duration=durations, loop=0)
    data = base64.b64encode(file.getvalue()).decode()
    width, _ = page_size(figure)
    return f'<img width="{width}" style="max-width: 100%" alt="{alt}" src="data:image/png;base64,{data}">'


def in_one_palette(images):
    """The frames with one byte per pixel: a third of the size. The last one, where all is done, has all the colors."""
    palette = images[-1].quantize(COLORS)
    return [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images]

"""A picture that moves by itself: an animated PNG, for the HTML of an answer."""

import base64
import io

from PIL import Image

from .live import CRISP, page_size, png
from .style import HEIGHT, look, new_figure

FRAME_MS = 900  # long enough to follow every arrow of a step
LAST_MS = 3500  # then it starts again


def show(draw, frames, alt, height):
    """Display the animation in the notebook."""
    from IPython.display import HTML, display

    display(HTML(html(draw, frames, alt, height)))


def html(draw, frames, alt="animation", height=HEIGHT):
    """`draw(figure, *frame)` for each of `frames`, one after the other for ever, as an <img> element."""
    images = []
    for frame in frames:
        figure = new_figure(height=height)
        with look():
            draw(figure, *frame)
        images.append(Image.open(io.BytesIO(png(figure, CRISP))))
    file = io.BytesIO()
    durations = [FRAME_MS] * (len(images) - 1) + [LAST_MS]
    images[0].save(file, "png", save_all=True, append_images=images[1:], duration=durations, loop=0)
    data = base64.b64encode(file.getvalue()).decode()
    width, _ = page_size(figure)
    return f'<img width="{width}" style="max-width: 100%" alt="{alt}" src="data:image/png;base64,{data}">'

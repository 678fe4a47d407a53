"""The picture of formats of numbers: bits and ranges as the standards have them, all texts within the figure."""

import math

from matplotlib.text import Text

from hpdl_lab import lab
from hpdl_lab.plots.formats import formats


def test_bits_and_ranges_are_those_of_the_standards():
    """IEEE 754 for 32 and 16 bits; Micikevicius et al. 2022, arXiv:2209.05433, for 8."""
    found = {row.name: row for row in formats()}
    assert {name: (row.exponent, row.fraction) for name, row in found.items()} == {
        "float32": (8, 23),
        "bfloat16": (8, 7),
        "float16": (5, 10),
        "float8_e5m2": (5, 2),
        "float8_e4m3fn": (4, 3),
    }
    assert found["float16"].smallest == 2**-24 and found["float16"].largest == 65504
    assert found["float8_e4m3fn"].largest == 448 and math.isclose(found["float32"].largest, 3.4028235e38, rel_tol=1e-7)


def test_every_format_has_its_row_and_all_texts_are_within_the_figure():
    shown = lab.show("formats")
    assert "float16 from 6e-08 to 6.6e+04" in repr(shown)
    figure = shown.figure
    figure.canvas.draw()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    assert {row.name for row in shown.data} <= {text.get_text() for text in texts}
    assert all(figure.bbox.contains(*corner) for t in texts for corner in t.get_window_extent().get_points())
    cells = [patch for patch in figure.axes[0].patches]
    assert len(cells) == sum(1 + row.exponent + row.fraction for row in shown.data) == 32 + 16 + 16 + 8 + 8

"""The picture of formats of numbers: bits and ranges as the standards have them, all texts within the figure."""

import math

import pytest
import torch
from matplotlib.text import Text

from hpdl_lab import lab
from hpdl_lab.parallel.rounding import BLOCK, SCALES, compare_formats, round_to
from hpdl_lab.plots.formats import formats
from tests.wording import raises


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


def texts_of(figure):
    """What stands in the figure; all of it is within its bounds."""
    figure.canvas.draw()
    texts = [text for text in figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    assert all(figure.bbox.contains(*corner) for t in texts for corner in t.get_window_extent().get_points())
    return {text.get_text() for text in texts}


def test_every_format_has_its_row_and_all_texts_are_within_the_figure():
    shown = lab.show("formats")
    assert "float16 from 6e-08 to 6.6e+04" in repr(shown)
    figure = shown.figure
    assert {row.name for row in shown.data} <= texts_of(figure)
    cells = [patch for patch in figure.axes[0].patches]
    assert len(cells) == sum(1 + row.exponent + row.fraction for row in shown.data) == 32 + 16 + 16 + 8 + 8


def test_numbers_that_a_format_has_stay_and_others_need_a_scale():
    """e4m3 has 448 and 2^-9, 3 bits of fraction; e5m2 57,344 and 2^-16, 2 bits."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    x = torch.tensor([448.0, 2**-9, 1.125, -1.25, 0.0])
    assert torch.equal(round_to(x, e4m3), x) and round_to(torch.tensor([2**-11]), e4m3) == 0
    assert torch.equal(round_to(torch.tensor([57344.0, 2**-16, 1.125]), e5m2), torch.tensor([57344.0, 2**-16, 1.0]))
    small = torch.tensor([7, 8, 9, 10, 11]) * 2.0**-20
    assert not round_to(small, e4m3).any() and torch.allclose(round_to(small, e4m3, SCALES[1]), small, rtol=2**-4)
    outlier = torch.cat([small.repeat(BLOCK)[: 2 * BLOCK], torch.full((3,), 100.0)])  # the last block is not full
    whole, blocks = (round_to(outlier, e4m3, scale)[: 2 * BLOCK] for scale in SCALES[1:])
    assert not whole.all() and torch.allclose(blocks, outlier[: 2 * BLOCK], rtol=2**-4), "100 is in another block"


def test_errors_are_those_of_the_bits_and_gradients_need_a_scale():
    generator = torch.Generator().manual_seed(0)
    large, small = (torch.randn(64, 100, generator=generator) * scale for scale in (1, 1e-4))
    assert {(r.tensors, r.dtype, r.scale) for r in compare_formats({"a": [large.flatten()]})} == {
        ("a", "bfloat16", SCALES[0]),
        *(("a", dtype, scale) for dtype in ("float8_e5m2", "float8_e4m3fn") for scale in SCALES),
    }
    with raises(TypeError, '"gradients" needs tensors', "backward"):
        lab.show("formats", {"weights": large, "gradients": [None]})
    shown = lab.show("formats", {"weights": iter([large]), "gradients": [small[:32], small[32:]]})
    found = {row[:3]: row for row in shown.data}
    for scale in SCALES:
        errors = [found["weights", dtype, scale].error for dtype in ("float8_e5m2", "float8_e4m3fn")]
        assert errors == pytest.approx([0.053, 0.027], rel=0.1), "one bit of fraction is a factor of 2"
    assert found["weights", "bfloat16", SCALES[0]].error == pytest.approx(0.0017, rel=0.1)
    assert (
        found["gradients", "float8_e4m3fn", SCALES[0]].zeros
        == found["gradients", "float8_e4m3fn", SCALES[0]].error
        == 1
    )
    assert found["gradients", "float8_e4m3fn", SCALES[1]].error < 0.03
    assert {"weights", "gradients", "float8_e5m2", *SCALES} <= texts_of(shown.figure)
    assert "float8_e4m3fn" in repr(shown) and "100.0%" in repr(shown)

"""The formats of floating-point numbers that models are trained in: what each bit is for, and the range of numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

from .colors import BLUE, INK, ORANGE, SKY
from .style import Figure, bare, footnote, heading, legend, rows_only

HEIGHT = 3.3  # inches
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)


class Format(NamedTuple):
    """Bits of exponent and fraction, beside one of sign; the smallest positive number, and the largest."""

    name: str
    exponent: int
    fraction: int
    smallest: float
    largest: float


def formats() -> list[Format]:
    """Return the formats of DTYPES, from torch's own description of them."""
    found = []
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        fraction = round(-math.log2(info.eps))
        name = str(dtype).removeprefix("torch.")
        found.append(Format(name, info.bits - 1 - fraction, fraction, info.smallest_normal * info.eps, info.max))
    return found


def draw(figure: Figure, rows: list[Format]) -> None:
    """Fill `figure`: the bits of each format at the left, the numbers that it holds on a logarithmic axis."""
    bits, spans = figure.subplots(1, 2, width_ratios=(1.25, 1))
    figure.subplots_adjust(left=0.14, right=0.97, bottom=0.26, top=0.76, wspace=0.06)
    most = max(1 + row.exponent + row.fraction for row in rows)
    rows_only(bits, len(rows), [row.name for row in rows])
    bare(bits)
    bits.set(xlim=(-0.2, most + 0.2), xticks=[])
    rows_only(spans, len(rows), [])
    spans.set(xscale="log", xlim=(1e-48, 1e42), xlabel="positive numbers", xticks=[1e-40, 1e-20, 1, 1e20, 1e40])
    spans.xaxis.set_minor_locator(NullLocator())
    for y, row in enumerate(rows):
        colors = [INK, *[ORANGE] * row.exponent, *[BLUE] * row.fraction]
        for x, color in enumerate(colors):
            bits.add_patch(Rectangle((x + 0.06, y - 0.3), 0.88, 0.6, color=color, lw=0))
        spans.barh(y, row.largest - row.smallest, 0.5, row.smallest, color=SKY)
        spans.text(1, y, f"{row.smallest:.0e} to {row.largest:.3g}", fontsize=8, ha="center", va="center")
    heading(figure, "Formats of numbers", "More bits of exponent: a wider range. More bits of fraction: finer steps.")
    legend(figure, [(INK, "sign"), (ORANGE, "exponent"), (BLUE, "fraction")], 0.14, 0.81)
    footnote(
        figure, "In float16 gradients below 6e-8 become zero: loss scaling moves them up. bfloat16 has float32's range."
    )

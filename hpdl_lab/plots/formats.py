"""The formats of floating-point numbers that models are trained in: bits, ranges, and what rounding to 8 bits loses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor

from ..parallel.rounding import SCALES, Rounding
from .colors import BLUE, GREEN, INK, ORANGE, SKY, VERMILION
from .style import Figure, Look, bare, footnote, heading, legend, rows_only, x_label

HEIGHT = 3.3  # inches
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn)
MAGNITUDES = (1e-9, 1e6)  # of the axis that numbers and formats share
MARKERS: dict[str, Look] = dict(
    zip(
        SCALES,
        (
            {"marker": "o", "markersize": 9, "markerfacecolor": "none"},
            {"marker": "D", "markersize": 5},
            {"marker": "|", "markersize": 11, "markeredgewidth": 2},
        ),
        strict=True,
    )
)


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


def draw_rounding(figure: Figure, tensors: Mapping[str, Tensor], rows: Sequence[Rounding]) -> None:
    """Fill `figure`: at the left which numbers there are, and which a format has; at the right what rounding loses.

    Args:    tensors: {name: flat tensor}; rows: of parallel.rounding.compare_formats, for the same names.
    """
    names, kinds = list(tensors), list(dict.fromkeys(row.dtype for row in rows))
    spans = {row.name: row for row in formats()}
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    figure.subplots_adjust(left=0.14, right=0.97, bottom=0.26, top=0.76, wspace=0.06)
    rows_only(left, len(names) + len(kinds), [*names, *kinds])
    left.set(xscale="log", xlim=MAGNITUDES, xticks=[10.0**n for n in range(-9, 6, 3)])
    left.xaxis.set_minor_locator(NullLocator())
    x_label(left, "numbers, without their signs")
    colors = dict(zip(names, (BLUE, ORANGE, GREEN, VERMILION), strict=False))
    low, high = (math.log10(end) for end in MAGNITUDES)
    for y, (name, flat) in enumerate(tensors.items()):
        found = torch.histc(flat[flat != 0].abs().log10(), 60, low, high)
        at = 10 ** (torch.arange(60) + 0.5).mul((high - low) / 60).add(low)
        left.fill_between(at, y + 0.4 - 0.8 * found / found.max(), y + 0.4, color=colors[name], lw=0)
    for y, kind in enumerate(kinds, len(names)):
        left.barh(y, spans[kind].largest, 0.5, spans[kind].smallest, color=SKY)
    rows_only(right, len(names) + len(kinds), [])
    right.set(xscale="log", xlim=(1e-3, 1))
    right.xaxis.set_major_locator(FixedLocator([0.001, 0.01, 0.1, 1]))
    right.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}%"))
    right.xaxis.set_minor_locator(NullLocator())
    x_label(right, "rounding error, of the length of all numbers")
    for row in rows:
        y = len(names) + kinds.index(row.dtype) + 0.34 * (names.index(row.tensors) - (len(names) - 1) / 2)
        right.plot([row.error], [y], color=colors[row.tensors], lw=0, **MARKERS[row.scale])
    heading(figure, "Rounding to few bits", "A format has the numbers above its bar. Smaller ones become zero.")
    marks = [(Line2D([], [], color=INK, lw=0, **look), scale) for scale, look in MARKERS.items()]
    legend(figure, [*((color, name) for name, color in colors.items()), *marks], 0.14, 0.81)
    footnote(figure, "A scale moves the largest number of a tensor, or of a block, to the end of the format's range.")

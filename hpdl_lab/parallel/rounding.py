"""Rounding to 8 bits, with and without a scale, and what is lost.

    x  --  times s = largest of the format / largest of x  -->  8 bits  --  / s  -->  about x

A scale puts the numbers of x to the upper end of the format's range. There is one for each tensor, or one for each
BLOCK numbers, so that one large number does not push all others down to zero. Scales have 32 bits.
Ref: Micikevicius et al. 2022 (FP8), arXiv:2209.05433; DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128  # numbers with one scale, as DeepSeek-V3 has it
SCALES = "no scale", "a scale per tensor", f"a scale per {BLOCK} numbers"
DTYPES = torch.bfloat16, torch.float8_e5m2, torch.float8_e4m3fn


class Rounding(NamedTuple):
    """The error that rounding has made in some tensors.

    tensors: their name; dtype, scale: a name of each, one of DTYPES and SCALES.
    error: the length of the differences over the length of the numbers; zeros: the share of numbers that became zero.
    """

    tensors: str
    dtype: str
    scale: str
    error: float
    zeros: float


def round_to(x: Tensor, dtype: torch.dtype, scale: str = SCALES[0]) -> Tensor:
    """Return x, flat float32, rounded to `dtype` and back. scale: one of SCALES."""
    if scale == SCALES[0]:
        return x.to(dtype).float()
    rows = x[None] if scale == SCALES[1] else pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    factors = torch.finfo(dtype).max / rows.abs().amax(1, keepdim=True).clamp(min=1e-30)
    return ((rows * factors).to(dtype).float() / factors).flatten()[: len(x)]


def compare_formats(tensors: Mapping[str, Sequence[Tensor]]) -> list[Rounding]:
    """Return what each format and scale does to {name: flat float32 tensors}; bfloat16 has no need of a scale."""
    found = []
    for name, parts in tensors.items():
        whole = torch.cat([*parts])
        for dtype in DTYPES:
            for scale in SCALES[:1] if dtype == torch.bfloat16 else SCALES:
                after = torch.cat([round_to(x, dtype, scale) for x in parts])
                error = float((after - whole).norm() / whole.norm())
                zeros = float(((after == 0) & (whole != 0)).float().mean())
                found.append(Rounding(name, str(dtype).removeprefix("torch."), scale, error, zeros))
    return found

"""Sums of 16-bit floats: added in float32, rounded once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from ..comm.base import Comm
from ..comm.buffers import copy_into, is_tensor
from .chunks import chunk

if TYPE_CHECKING:
    from ..comm.buffers import Array

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def adds_in_float32(collective: FunctionT) -> FunctionT:
    """Decorate `collective(comm, x, ...)`, which adds into x: bfloat16 and float16 work on a float32 copy of x.

    A 16-bit float keeps 8 or 11 bits, so a sum that is rounded to it at every addition stops growing early. Here it is
    rounded once, at the end. The price: partial sums travel as float32, 4 bytes per element instead of 2.
    Other dtypes are not touched. The collective returns x or, as reduce_scatter does, chunk r of it.
    """

    @functools.wraps(collective)
    def widened(comm: Comm, x: Array, *args: object, **options: object) -> object:
        if not _is_16_bit_float(x):
            return collective(comm, x, *args, **options)
        wide = x.float() if is_tensor(x) else x.astype("float32")
        result = cast("Array", collective(comm, wide, *args, **options))
        copy_into(x, wide)  # rounds
        return x if len(result) == len(x) else chunk(x, comm.size, comm.rank)

    return cast(FunctionT, widened)


def _is_16_bit_float(x: object) -> bool:
    """Return True for a tensor or an array of bfloat16 or float16."""
    return str(getattr(x, "dtype", "")).removeprefix("torch.") in ("bfloat16", "float16")

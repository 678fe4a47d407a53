"""Data sets by name, each the same on every rank: `load`. Examples go to ranks in loading.py."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from numbers import Integral, Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .dataset import Dataset


DTYPES = ("float16", "bfloat16", "float32", "float64")
SETS = {  # name -> module, function and its arguments
    "digits": ("dataset", "digits", {}),
    "digit_images": ("dataset", "digits", {"images": True}),
    "text": ("text", "load", {}),
    "synthetic": ("synthetic", "teacher", {}),
    "copy": ("synthetic", "copy", {}),
}


def load(name: str, **options: tuple[int, ...] | float | str) -> Dataset:
    """Return the data set of this name.

        load("digits")                          8 x 8 pixels in rows of 64; load("digit_images") as (n, 1, 8, 8)
        load("text", block=128)                 1.2 million characters of Moby-Dick in windows
        load("synthetic", n=512, shape=(32,))   of any size, with a best loss that is known; load("copy") of tokens

    Args:    options: of the function that SETS names; dtype, "float32" or "float64", is ignored if x are tokens.
    Returns: dataset.Dataset: train_x, train_y, test_x, test_y.
    Raises:  LookupError for a name that is none; ValueError for options that the set does not have or cannot be;
             dataset.DataError, with one sentence that says what to do, if the set is missing or damaged.
    """
    if name not in SETS:
        raise LookupError(f"no data set is called {name!r}: {', '.join(SETS)}")
    module, function, fixed = SETS[name]
    make = getattr(importlib.import_module(f".{module}", __name__), function)  # here, because it takes torch along
    known = {o.name: o.default for o in inspect.signature(make).parameters.values() if o.name not in fixed}
    if "dtype" not in known:
        options.pop("dtype", None)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(f"{name} has no option {unknown[0]!r}: its options are {', '.join(known)}")
    for option, value in options.items():
        is_one, words = KINDS[type(known[option])]
        if not is_one(value):
            raise ValueError(f"{name} cannot have {option}={value!r}: {words} is needed, such as {known[option]!r}")
    return make(**fixed, **options)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


# Of an option, by the type of its default: a test of its values, and the words for what is needed.
KINDS: dict[type, tuple[Callable[[object], bool], str]] = {
    int: (_is_whole, "a whole number"),
    float: (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    tuple: (lambda value: isinstance(value, tuple | list) and all(map(_is_whole, value)), "a tuple of whole numbers"),
    str: (DTYPES.__contains__, f"one of {', '.join(DTYPES)}"),
}

"""Imports without garbage collections: torch and matplotlib make 350,000 objects, and all of them stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uncollected() -> Iterator[Any]:
    """Inside, nothing is collected; what is there at the end is never looked through again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if collecting:
            gc.enable()

"""Numbers as people write and read them, and the check of an argument that is a number."""

import math
import re

KIB, MIB, GIB = 2**10, 2**20, 2**30
SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": KIB, "mi": MIB, "gi": GIB, "ti": 2**40}


def parse_bytes(text: str | float, name: str = "a size") -> int:
    """Return the bytes of a number, or of a text such as "4", "64MiB", "1.5 GiB", "2 MB".

    Raises:  ValueError for anything else, and for less than one byte.
    """
    found = re.fullmatch(r"\s*(\d*\.?\d+)\s*([kmgt]?i?)b?\s*", str(text).lower())
    nbytes = int(float(found[1]) * SCALES.get(found[2], 0)) if found and not isinstance(text, bool) else 0
    if nbytes < 1:
        raise ValueError(f'{name} is a number of bytes such as 4, "64 KiB" or "1.5 GB", got {text!r}')
    return nbytes


def bytes_text(nbytes: float) -> str:
    """Write the exact number: 1024 -> "1 KiB", 1000 -> "1,000 B"."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{int(nbytes // scale):,} {unit}"
    return f"{nbytes:,.0f} B"


def amount_text(value: float, unit: str = "B") -> str:
    """Write three digits with the unit's decimal prefix: 1.5e9 -> "1.5 GB", 0.00231 with "s" -> "2.31 ms"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1), ("m", 1e-3), ("µ", 1e-6)):
        if float(f"{abs(value):.3g}") >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value * 1e9:.3g} n{unit}"


def counted(n: int, one: str, many: str = "") -> str:
    """Write a number with its noun: 2 -> "2 ranks", 1 -> "1 rank", 2000 -> "2,000 ranks"."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def require_int(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """Return `value`, a whole number (no bool) from `least` to `most`. Raises ValueError with the numbers."""
    if isinstance(value, int) and not isinstance(value, bool):
        if (least is None or value >= least) and (most is None or value <= most):
            return value
    raise ValueError(f"{name} must be a whole number{_range_text(least, most)}, got {value!r}")


def require_number(
    name: str, value: object, least: float | None = None, most: float | None = None, above: float | None = None
) -> float:
    """Return `value`, a finite number (no bool), at least `least`, more than `above`, at most `most`.

    Raises:  ValueError with the numbers.
    """
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        in_range = (least is None or value >= least) and (most is None or value <= most)
        if in_range and (above is None or value > above):
            return value
    more = f" above {above:,g}" if above is not None else _range_text(least, most)
    raise ValueError(f"{name} must be a number{more}, got {value!r}")


def _range_text(least: float | None, most: float | None) -> str:
    """Write the end of a sentence: (1, None) -> ", at least 1", (0, 3) -> " from 0 to 3"."""
    if least is not None and most is not None:
        return f" from {least:,g} to {most:,g}"
    return f", at least {least:,g}" if least is not None else f", at most {most:,g}" if most is not None else ""

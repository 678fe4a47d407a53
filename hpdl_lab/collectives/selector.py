"""Selections of an algorithm for each message size, in oneCCL's syntax: "recursive_doubling:0-8192;ring:8193-max".

It is written by hand, or chosen from times, measured or predicted.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from ..comm.base import Comm
from ..predict.messages import predict_rounds
from .table import algorithm_names, find_algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from ..comm.network import Network

NATIVE = "native"  # the communicator's own all_reduce, which is not in the table
EXAMPLE = "tree:0-8192;ring:8193-max"


class AlgorithmTime(TypedDict):
    """The time of an algorithm for one size: bytes, and us of the median and of the upper quartile."""

    name: str
    size: int
    time_us: float
    p75_us: float


class Range(NamedTuple):
    """`name` is for messages of `first` to `last` bytes, both included; last None: of any size from `first` on."""

    name: str
    first: int
    last: int | None

    def __str__(self) -> str:
        return f"{self.name}:{self.first}-{'max' if self.last is None else self.last}"


@dataclass(frozen=True)
class Selection:
    """An all-reduce, `selection(comm, x)`, that does what suits the size of x. It travels to engines, and into files.

    ranges: tuple of Range, which follow each other without a gap from 0 bytes to any number of them.
    """

    ranges: tuple[Range, ...]

    def __call__(self, comm: Comm, x: Tensor) -> Tensor:
        """Replace x by its sum over ranks by the algorithm for x.nbytes; returns x."""
        return function_of(self.name_for(x.nbytes))(comm, x)

    def __str__(self) -> str:
        return ";".join(str(part) for part in self.ranges)

    def __repr__(self) -> str:
        return f"Selection.parse({str(self)!r})"

    @property
    def __name__(self) -> str:
        return str(self)

    def name_for(self, nbytes: int) -> str:
        """Return the name of the algorithm for messages of this many bytes."""
        return next(part.name for part in self.ranges if part.last is None or nbytes <= part.last)

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Return the Selection that `text` describes; a name alone is for all sizes. Raises ValueError with the fault.

        Names are as in collectives.table, and "native" for the communicator's own. Ranges are in bytes, may come in
        any order, and must cover every size once.
        """
        parts = [part.strip() for part in text.split(";") if part.strip()]
        if not parts:
            raise ValueError(f"nothing is selected by {text!r}: write for example {EXAMPLE!r}")
        if len(parts) == 1 and ":" not in parts[0]:
            parts = [f"{parts[0]}:0-max"]
        return cls(_covering(sorted((_parse_range(part) for part in parts), key=lambda part: part.first)))

    def save(self, path: Path, remark: str = "") -> None:
        """Write the selection to a file, `remark` above it as a comment."""
        comment = "".join(f"# {line}\n" for line in remark.splitlines())
        Path(path).write_text(f"{comment}{self}\n")

    @classmethod
    def load(cls, path: Path) -> Selection:
        """Return the Selection in a file that `save` wrote. Raises OSError; ValueError that names file and fault."""
        lines = [line for line in Path(path).read_text().splitlines() if not line.lstrip().startswith("#")]
        try:
            return cls.parse(";".join(lines))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def function_of(name: str) -> Callable[[Comm, Tensor], Tensor]:
    """Return the all-reduce of this name. Raises LookupError that lists what there is."""
    return native if name == NATIVE else find_algorithm(name).function


def native(comm: Comm, x: Tensor) -> Tensor:
    """Call the communicator's own all_reduce."""
    return comm.all_reduce(x)


def _parse_range(text: str) -> Range:
    """Return "ring:0-8192" as a Range."""
    name, _, sizes = (piece.strip() for piece in text.partition(":"))
    if name != NATIVE and name not in algorithm_names():
        raise ValueError(f"{text!r}: no all-reduce is called {name!r}: {', '.join([*algorithm_names(), NATIVE])}")
    match = re.fullmatch(r"(\d+)\s*-\s*(\d+|max)", sizes)
    if not match:
        raise ValueError(f"{text!r}: a range is FIRST-LAST in bytes, such as 0-8192, or FIRST-max, got {sizes!r}")
    first, last = int(match[1]), None if match[2] == "max" else int(match[2])
    if last is not None and last < first:
        raise ValueError(f"{text!r}: the range ends, at {last:,} bytes, before it begins, at {first:,}")
    return Range(name, first, last)


def _covering(ranges: list[Range]) -> tuple[Range, ...]:
    """Return tuple(ranges), which are in rising order. Raises ValueError if a size is covered twice, or not at all."""
    expected: int | None = 0  # the first size that the ranges so far do not cover
    before: Range | None = None
    for part in ranges:
        if before is not None and (expected is None or part.first < expected):
            end = min((p.last for p in (before, part) if p.last is not None), default=None)
            both = f"{part.first:,} to {end:,} bytes" if end is not None else f"{part.first:,} bytes and more"
            raise ValueError(f"{str(before)!r} and {str(part)!r} overlap: both are for {both}")
        if expected is not None and part.first > expected:
            where = f"between {str(before)!r} and {str(part)!r}" if before else f"before {str(part)!r}"
            raise ValueError(f"nothing is selected for {expected:,} to {part.first - 1:,} bytes, {where}")
        expected, before = None if part.last is None else part.last + 1, part
    if expected is not None and before is not None:
        raise ValueError(
            f"nothing is selected for {expected:,} bytes and more: end with {before.name}:{before.first}-max"
        )
    return tuple(ranges)


# -- from times --------------------------------------------------------------------------------------------------------


def predict_times(
    names: Sequence[str], sizes: Iterable[int], p: int, network: Network, itemsize: int = 4
) -> Iterator[AlgorithmTime]:
    """Yield the rows that `fastest` needs for all-reduces on p simulated ranks, from their schedules: p may be 16,384.

    Args:    names: of the table; sizes: bytes, whole elements of `itemsize`; network: of comm.network.
    """
    for size in sizes:
        for name in names:
            seconds = predict_rounds(find_algorithm(name).steps(p, size // itemsize), p, itemsize, network).seconds
            yield {"name": name, "size": size, "time_us": seconds * 1e6, "p75_us": seconds * 1e6}


def fastest(rows: Iterable[AlgorithmTime]) -> Selection:
    """Return the Selection that takes at every measured size what was fastest there.

    Between two measured sizes with different winners the border is their geometric mean. A winner stays if the next
    one is better by less than it varies (its median is below the other's upper quartile): so noise makes no borders.

    Args:    rows: of sweep_sizes or predict_times, at least one: dicts with name, size, time_us and p75_us.
    """
    winners: list[tuple[int, str]] = []  # (size, name) in rising order
    for size, group in itertools.groupby(sorted(rows, key=lambda row: row["size"]), key=lambda row: row["size"]):
        times = {row["name"]: row for row in group}
        best = min(times.values(), key=lambda row: row["time_us"])
        before = times.get(winners[-1][1]) if winners else None
        if before is not None and before["time_us"] <= best["p75_us"]:
            best = before
        winners.append((size, best["name"]))
    if not winners:
        raise ValueError("nothing was measured, so nothing can be selected")
    ranges, first = [], 0
    for (size, name), (next_size, next_name) in itertools.pairwise(winners):
        if name != next_name:
            border = math.isqrt(size * next_size)
            ranges.append(Range(name, first, border))
            first = border + 1
    return Selection((*ranges, Range(winners[-1][1], first, None)))

"""Plans of a race: typed records, read from a table of a TOML file or from a dict."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

from ..parallel.grid.model import Prediction
from ..units import amount_text, counted

Entry = str | int | float | bool
Plan = TypeVar("Plan")


class Disqualified(ValueError):
    """The reason, in one sentence, why a plan cannot race."""


def plan_of(kind: type[Plan], entries: Mapping[str, Entry]) -> Plan:
    """Make a plan of this kind from its entries.

    Args:    kind: a dataclass; entries: {name of a field: value}, such as a table of a TOML file.
    Raises:  Disqualified for an entry that is unknown, missing, or of another type.
    """
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is no dataclass")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := [name for name in entries if name not in fields]:
        raise Disqualified(f"a plan has no {unknown[0]}: its entries are {', '.join(fields)}")
    missing = [name for name, field in fields.items() if name not in entries and field.default is dataclasses.MISSING]
    if missing:
        raise Disqualified(f"{counted(len(missing), 'entry is', 'entries are')} missing: {', '.join(missing)}")
    for name, value in entries.items():
        wanted = str(fields[name].type)
        if not isinstance(value, TYPES[wanted]) or isinstance(value, bool) != (wanted == "bool"):
            raise Disqualified(f"{name} = {value!r}: {NAMES[wanted]} is needed")
    return kind(**entries)


TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "str": str, "bool": bool}
NAMES = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}


def require_positive(**numbers: float) -> None:
    """Raise Disqualified unless all are above 0, and a training can have them."""
    for name, value in numbers.items():
        if not 1e-12 <= value <= 1e12:
            raise Disqualified(f"{name}: a number above 0 is needed, from 1e-12 to 1e12")


def require_one_of(name: str, value: Entry, known: Collection[Entry]) -> None:
    """Raise Disqualified unless the value is one of the known ones."""
    if value not in known:
        raise Disqualified(f"{name} = {value!r}: one of {', '.join(map(str, known))} is needed")


def read_plan(path: str | Path) -> dict[str, dict[str, Entry]]:
    """Read the tables of a plan's file: {league: entries}.

    Raises:  ValueError, with the line, for a file that is no TOML; OSError for one that cannot be read.
    """
    try:
        tables = tomllib.loads(Path(path).read_text())
    except ValueError as error:  # of TOML, and of a text that is no UTF-8
        raise ValueError(f"{path} is no TOML file: {error}") from None
    if not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError(f"{path} needs a table for each league, such as [simulated] above its entries")
    return tables


def require_memory(found: Prediction) -> None:
    """Raise Disqualified, with the largest part, if a rank would hold more than it can."""
    if not found.fits:
        name, most = max(found.memory._asdict().items(), key=lambda part: part[1])
        held, limit = amount_text(found.nbytes), amount_text(found.limit)
        raise Disqualified(
            f"out of memory: the fullest rank holds {held} of {limit}, and {amount_text(most)} are {name}"
        )


def score(seconds: float, expected_s: float) -> float:
    """Compute time x (1 + prediction error), the error as a share of the time."""
    return seconds * (1 + abs(expected_s - seconds) / seconds)

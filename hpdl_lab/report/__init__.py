"""The work of an attendee in the whole course: a record, collected from progress.jsonl; page.py shows it."""

from __future__ import annotations

import io
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from PIL import Image

from ..checks.exercises import EXERCISES
from ..checks.scripts.table import SCRIPTS
from ..plots.live import CURVES

FIELDS: dict[str, dict[str, type]] = {  # of a row of each kind, as far as the report reads them
    "check": {"exercise": str, "passed": bool},
    "hint": {"exercise": str},
    "solution": {"exercise": str},
    "guess": {"about": str},
    "truth": {"about": str},
    "race": {"league": str, "plan": dict, "valid": bool},
}
TIMES = ("expected_s", "seconds", "score", "reference_s")
Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Exercised:
    """An exercise. checks: until it passed, or so far; hints: different ones that were opened; solution: was seen."""

    id: str
    title: str
    passed: bool
    checks: int
    hints: int
    solution: bool

    @property
    def tried(self) -> bool:
        """True if the attendee has done anything about it."""
        return bool(self.checks or self.hints or self.solution)


@dataclass(frozen=True)
class Guess:
    """A number that was guessed. what: with its unit; truth: None as long as it has not been revealed."""

    what: str
    guess: float
    truth: float | None

    @property
    def factor(self) -> float | None:
        """Factor by which it is off, at least 1: a guess of 2 or of 0.5 for 1 is off by 2. None if there is none."""
        if self.truth is None or self.guess == self.truth:
            return None if self.truth is None else 1.0
        return max(self.guess / self.truth, self.truth / self.guess) if self.guess * self.truth > 0 else None


@dataclass(frozen=True)
class Attempt:
    """A row of the race. expected_s, seconds, score, reference_s (the reference's score): s, None if it has none."""

    league: str
    plan: dict[str, object]
    valid: bool
    why: str
    expected_s: float | None
    seconds: float | None
    score: float | None
    reference_s: float | None


@dataclass(frozen=True)
class Curve:
    """A figure that a verb finished. width: of the page, in CSS pixels; day: "2026-11-28"."""

    png: bytes
    alt: str
    width: int
    day: str


@dataclass(frozen=True)
class Record:
    """The work of an attendee. damaged: rows that were left out."""

    exercises: tuple[Exercised, ...]
    guesses: tuple[Guess, ...]
    curves: tuple[Curve, ...]
    attempts: tuple[Attempt, ...]
    damaged: int

    @property
    def median_factor(self) -> float | None:
        """Median over the guesses whose truth is known; None if there is none."""
        factors = [guess.factor for guess in self.guesses if guess.factor is not None]
        return statistics.median(factors) if factors else None

    @property
    def best(self) -> tuple[Attempt, ...]:
        """Valid attempt with the least score, of each league: their scores measure different machines."""
        least: dict[str, Attempt] = {}
        for a in sorted((a for a in self.attempts if a.valid and a.score is not None), key=lambda a: a.score or 0.0):
            least.setdefault(a.league, a)
        return tuple(least.values())


def read_curves(home: Path) -> list[Curve]:
    """Return the figures kept in `home`, in the order of time; files that are no PNG are left out."""
    found = []
    for path in (home / CURVES).glob("*.png"):
        try:
            when, data = path.stat().st_mtime, path.read_bytes() if path.is_file() else b""
            with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
                alt, day = image.info.get("Description", "a figure"), time.strftime("%Y-%m-%d", time.localtime(when))
                found.append((when, Curve(data, str(alt), image.width // 2, day)))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # of a broken PNG, by Pillow
            continue
    return [curve for _, curve in sorted(found, key=lambda pair: pair[0])]


def collect(rows: Iterable[object], curves: Iterable[Curve] = ()) -> Record:
    """Return the record of these rows, in the order in which they were written; rows of other kinds are passed over."""
    rows = list(rows)
    good = [row for row in rows if isinstance(row, dict) and _sound(row)]
    return Record(
        _exercises_of([row for row in good if "exercise" in row]),
        _guesses_of([row for row in good if row["kind"] in ("guess", "truth")]),
        tuple(curves),
        tuple(
            Attempt(
                row["league"],
                row["plan"],
                row["valid"],
                str(row.get("why") or ""),
                *map(_number_of, map(row.get, TIMES)),
            )
            for row in good
            if row["kind"] == "race"
        ),
        len(rows) - len(good),
    )


def _sound(row: Row) -> bool:
    """Return True if the row has all that the report reads of its kind."""
    kind = row.get("kind")
    if not isinstance(kind, str) or not all(isinstance(row.get(k), t) for k, t in FIELDS.get(kind, {}).items()):
        return False
    return kind not in ("guess", "truth") or bool(_parts(row.get("value")))


def _exercises_of(rows: Sequence[Row]) -> tuple[Exercised, ...]:
    """Return all exercises of the course, scripts included, in its order."""
    found = []
    for exercise in sorted((*EXERCISES, *SCRIPTS), key=lambda e: tuple(map(int, e.id.split(".")))):
        own = [row for row in rows if row["exercise"] == exercise.id]
        checks = [row["passed"] for row in own if row["kind"] == "check"]
        hints = {(str(row.get("failed")), str(row.get("level"))) for row in own if row["kind"] == "hint"}
        until = checks.index(True) + 1 if True in checks else len(checks)
        solution = any(row["kind"] == "solution" for row in own)
        found.append(Exercised(exercise.id, exercise.title, True in checks, until, len(hints), solution))
    return tuple(found)


def _guesses_of(rows: Sequence[Row]) -> tuple[Guess, ...]:
    """Return each guess with the truth that came after it: the last guess before the first truth counts."""
    guesses: dict[str, dict[str, float]] = {}
    truths: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["kind"] == "truth":
            truths.setdefault(row["about"], _parts(row["value"]))
        elif row["about"] not in truths:
            guesses[row["about"]] = _parts(row["value"])
    return tuple(
        Guess(f"{about}: {part}" if part else about, value, truths.get(about, {}).get(part))
        for about, values in guesses.items()
        for part, value in values.items()
    )


def _parts(value: object) -> dict[str, float]:
    """Return the numbers of a guess or a truth by name: 3 -> {"": 3.0}; other values are left out."""
    named = value if isinstance(value, dict) else {"": value}
    return {str(name): number for name, x in named.items() if (number := _number_of(x)) is not None}


def _number_of(x: object) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(x, int | float) and not isinstance(x, bool) and -1e300 < x < 1e300:
        return float(x)
    return None

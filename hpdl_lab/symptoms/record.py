"""The record of a symptom, and the search for the symptoms of a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..features import Missing

LONGEST_QUOTE = 160  # characters of a log's line


class Symptom(NamedTuple):
    """Something that is known to go wrong.

    look: raises features.Missing, with what is wrong and the fix, if this machine has it; None if only a log
          shows it. Harmless, and over within seconds.
    said: a regular expression of what a program then prints; "" if only a look shows it. fix: the line for that.
    """

    name: str
    look: Callable[[], object] | None = None
    said: str = ""
    fix: str = ""


class Diagnosis(NamedTuple):
    """A symptom that is here: its name, what is wrong in one sentence, and the line that mends it."""

    name: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.name} ({self.what}): {self.fix}"


def found(symptoms: Iterable[Symptom]) -> list[Diagnosis]:
    """Return the Findings of those `symptoms` that this machine has; if two find the same thing, the first."""
    findings: dict[str, Diagnosis] = {}
    for symptom in symptoms:
        if finding := _examine(symptom):
            findings.setdefault(finding.what, finding)
    return list(findings.values())


def _examine(symptom: Symptom) -> Diagnosis | None:
    """Return the Finding, or None; a look that itself breaks down is a Finding, too."""
    if symptom.look is None:
        return None
    try:
        symptom.look()
    except Missing as missing:
        return Diagnosis(symptom.name, missing.what, missing.fix)
    except Exception as error:  # a damaged environment may raise anything
        what = f"could not be looked for ({type(error).__name__}: {error})"
        return Diagnosis(symptom.name, what, "repair the environment: make install")
    return None


def found_in(symptoms: Iterable[Symptom], log: str) -> list[Diagnosis]:
    """Return the Findings of those `symptoms` that the text `log` shows, each with the line that does."""
    return [
        Diagnosis(symptom.name, f'a log says "{_quote(log, match)}"', symptom.fix)
        for symptom in symptoms
        if symptom.said and (match := re.search(symptom.said, log, re.MULTILINE))
    ]


def _quote(log: str, match: re.Match[str]) -> str:
    """Return the line of the log in which the match begins, or its beginning if it is long."""
    start = log.rfind("\n", 0, match.start()) + 1
    end = log.find("\n", match.start())
    line = log[start : end if end >= 0 else None].strip()
    return line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]} ..."

"""The record of a symptom, and the search for the symptoms of a table."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ..features import Missing

LONGEST_QUOTE = 160  # characters of a log's line


class Symptom(NamedTuple):
    """Something that is known to go wrong.

    look: raises features.Missing, with what is wrong and the fix, where this machine has it; None where only a log
          tells it. Harmless, and over within seconds.
    said: a regular expression of what a program then prints; "" where only a look tells it. fix: the line for that.
    """

    name: str
    look: Callable | None = None
    said: str = ""
    fix: str = ""


class Finding(NamedTuple):
    """A symptom that is here: its name, what is wrong in one sentence, and the line that mends it."""

    name: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.name} ({self.what}): {self.fix}"


def found(symptoms: list | tuple) -> list:
    """The Findings of those `symptoms` that this machine has; of two that find the same thing, the first."""
    findings = {}
    for symptom in symptoms:
        if finding := examine(symptom):
            findings.setdefault(finding.what, finding)
    return list(findings.values())


def examine(symptom: Any) -> Any:
    """The Finding, or None. A look that itself breaks down tells that, and the others go on."""
    if symptom.look is None:
        return None
    try:
        symptom.look()
    except Missing as missing:
        return Finding(symptom.name, missing.what, missing.fix)
    except Exception as error:  # what a damaged environment raises nobody can foresee
        what = f"could not be looked for ({type(error).__name__}: {error})"
        return Finding(symptom.name, what, "repair the environment: make install")
    return None


def found_in(symptoms: tuple, log: str) -> list:
    """The Findings of those `symptoms` of which the text `log` tells, each with the line that does."""
    return [
        Finding(symptom.name, f'a log says "{quote(log, match)}"', symptom.fix)
        for symptom in symptoms
        if symptom.said and (match := re.search(symptom.said, log, re.MULTILINE))
    ]


def quote(log: str, match: Any) -> str:
    """The line of the log in which the match begins, or its end where it is long."""
    start = log.rfind("\n", 0, match.start()) + 1
    end = log.find("\n", match.start())
    line = log[start : end if end >= 0 else None].strip()
    return line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]} ..."

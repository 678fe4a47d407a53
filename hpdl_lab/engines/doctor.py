"""The doctor: what this machine and build can do, and which known symptoms it has, each with the line that mends it.

It stands here because engines are among what it looks at. It changes nothing and leaves nothing behind.
"""

import shutil
import textwrap
from typing import NamedTuple

from .. import features
from ..symptoms import TABLE, Finding, found, told_by
from . import symptoms

KNOWN = (*TABLE, *symptoms.SYMPTOMS)
INDENT = " " * 4


class Examination(NamedTuple):
    """report: the table of features; findings: the symptoms that are here."""

    report: list
    findings: list[Finding]

    @property
    def ok(self):
        return self.report.ok and not self.findings

    def __str__(self):
        if not self.findings:
            return str(self.report)
        count = f"{len(self.findings)} known symptom{'s' * (len(self.findings) > 1)}"
        end = f"{'' if self.report.ok else self.report.end()} {count}: do what is said at Fix.".lstrip()
        return "\n\n".join([self.report.rows(), describe(self.findings), end])

    __repr__ = __str__


def doctor():
    """What this machine and build can do, and which known symptoms it has: an Examination, which prints itself."""
    report = features.doctor()
    return Examination(report, [*found(KNOWN), *told_by(KNOWN, symptoms.logs())])


def describe(findings):
    """A paragraph for each finding: its name, what is wrong, and the fix in one line, to be copied."""
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    within = {"initial_indent": INDENT, "subsequent_indent": INDENT, "break_long_words": False}
    return "\n".join(
        "\n".join(
            [
                f"Symptom: {finding.name}",
                textwrap.fill(finding.what, width, break_on_hyphens=False, **within),
                f"{INDENT}Fix: {finding.fix}",
            ]
        )
        for finding in findings
    )

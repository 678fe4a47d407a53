"""docs/coverage.md: the headings and exercises that it names exist, no topic is missing, and the marks are high."""

import re
from pathlib import Path
from statistics import mean

import pytest

from hpdl_lab.checks.exercises import find

ROOT = Path(__file__).resolve().parent.parent
LINES = [line.strip("|").split("|") for line in (ROOT / "docs/coverage.md").read_text().split("\n") if "|" in line]
ROWS = [[cell.strip() for cell in line] for line in LINES if len(line) == 7 and line[6].strip().isdigit()]


def headings(notebook):
    """The headings of a notebook, by its name, or by its number, which two notebooks may have."""
    paths = sorted((ROOT / "notebooks/source").glob(f"{notebook}_*.py")) or [ROOT / f"notebooks/source/{notebook}.py"]
    return [text for path in paths for text in re.findall(r"^# #+ (.+)$", path.read_text(), re.M)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}")
def test_what_a_line_names_exists(row):
    _, _, where, exercises, run, said, mark = row
    for place in where.split("; "):
        notebook, heading = place.split(": ", 1)
        assert any(text.startswith(heading) for text in headings(notebook)), f"{place}: {headings(notebook)}"
    for name in exercises.split(", ") if exercises != "-" else ():
        assert find(name).id == name
    assert run or said
    assert mark in "0123" and (run or mark != "3")


def test_no_topic_is_missing_and_the_mean_is_high():
    marks = [int(row[6]) for row in ROWS]
    assert len(ROWS) >= 100 and min(marks) > 0 and mean(marks) > 2.2

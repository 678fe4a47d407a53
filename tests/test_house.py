"""The figures of `make house` that only fall: types, docstrings, circles, names that rooms share."""

import pytest

from tests import house

AT_MOST = {  # the aims stand in docs/house.md
    "Any in annotations": 150,
    "Callable without its types": 10,
    "circles inside rooms": 0,
    "classes of one name in several rooms": 2,
    "functions of one name in several rooms": 38,
    "docstrings that begin What, Whether, Of, Those, One": 0,
    "docstrings: of which, that of": 0,
    "docstrings: where as if": 10,
    "private words as names": 0,
    "modules that only tests import": 0,
}

NOTEBOOKS = 20
LINES = {"hpdl_lab": (84_900, 2_000), "tests": (54_200, 800)}  # with NOTEBOOKS of them; what one more may add


@pytest.fixture(scope="module")
def counts():
    return house.counts()


def test_every_figure_is_bounded(counts):
    assert counts.keys() == AT_MOST.keys()


@pytest.mark.parametrize("what", AT_MOST)
def test_no_figure_grows(counts, what):
    assert counts[what] <= AT_MOST[what]


@pytest.mark.parametrize("folder", LINES)
def test_lines_grow_by_lessons_alone(folder):
    most, of_a_lesson = LINES[folder]
    new = len(house.tracked("notebooks/source/[0-9]*.py")) - NOTEBOOKS
    assert house.lines(house.tracked(f"{folder}/*.py")) <= most + new * of_a_lesson

"""The notebooks as text: their rhythm, their limits; and the exercise forms run up to their first stub."""

import ast
import re
from importlib import import_module
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
EXERCISE_FORMS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
BOTH_FORMS = [*EXERCISE_FORMS, *sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))]
HIDDEN = re.compile(r"### BEGIN HIDDEN TESTS\n.*?### END HIDDEN TESTS\n", re.DOTALL)
MOST_CODE_CELLS = 16  # besides exercises and their checks
MOST_LINES = 6


def cells_of(path, kind):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == kind]


def is_exercise(cell):
    return cell.metadata.get("nbgrader", {}).get("solution", False)


def named(path):
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", BOTH_FORMS, ids=named)
def test_cells_are_few_and_short(path):
    code = cells_of(path, "code")
    assert len([cell for cell in code if "nbgrader" not in cell.metadata]) <= MOST_CODE_CELLS
    for cell in code:
        if not is_exercise(cell):
            lines = HIDDEN.sub("", cell.source).strip().split("\n")
            assert len(lines) <= MOST_LINES, cell.source


@pytest.mark.parametrize("path", BOTH_FORMS, ids=named)
def test_notebooks_hold_no_plotting_no_pip_and_no_function_but_the_exercises(path):
    for cell in cells_of(path, "code"):
        assert not re.search(r"matplotlib|plt\.|plotly|pip install|%pip|conda", cell.source)
        source = re.sub(r"^%.*$", "pass", cell.source, flags=re.MULTILINE)
        kinds = [type(node) for node in ast.walk(ast.parse(source))]
        definitions = [kind for kind in kinds if kind in (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)]
        assert len(definitions) == (1 if is_exercise(cell) else 0), cell.source


@pytest.mark.parametrize("path", EXERCISE_FORMS, ids=named)
def test_what_a_notebook_points_at_exists(path):
    text = "\n".join(c.source for c in cells_of(path, "markdown"))
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (NOTEBOOKS / link).exists(), link
    for file in re.findall(r"`((?:hpdl_lab|csrc)/[^`]*)`", text):
        assert (NOTEBOOKS.parent / file).exists(), file


@pytest.mark.parametrize("path", BOTH_FORMS, ids=named)
def test_stars_and_numbers_of_the_headings_are_those_of_the_table(path):
    from hpdl_lab.checks.exercises import find

    text = "\n".join(c.source for c in cells_of(path, "markdown"))
    headings = re.findall(r"^## Exercise (\d+\.\d+) (★+) ", text, flags=re.MULTILINE)
    assert headings
    for number, stars in headings:
        assert find(number).stars == len(stars)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", EXERCISE_FORMS, ids=named)
def test_the_exercise_form_runs_up_to_its_first_stub_which_names_the_exercise(path, tmp_path, monkeypatch, cluster):
    """In this process, on engines that run already: kernels, and cells that start engines, are nbval's."""
    monkeypatch.setenv("HPDL_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(import_module("hpdl_lab.lab.cluster")._notebook, "_cluster", cluster)
    cells = cells_of(path, "code")
    first = next(i for i, cell in enumerate(cells) if cell.metadata.get("nbgrader", {}).get("grade"))
    number = cells[first].metadata["nbgrader"]["grade_id"].removeprefix("check-").replace("-", ".")
    attendees = {"__name__": "__main__"}
    for cell in cells[:first]:
        exec(compile(cell.source, cell.id, "exec"), attendees)
    with pytest.raises(NotImplementedError) as stopped:
        exec(compile(cells[first].source, cells[first].id, "exec"), attendees)
    assert re.fullmatch(rf"exercise {re.escape(number)}: write \w+", str(stopped.value))

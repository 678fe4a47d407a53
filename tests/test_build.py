"""Both forms of every notebook come from one source, reproducibly, and nobody's work is overwritten."""

import importlib.util
import inspect
import json
import re
import shutil
from pathlib import Path

import nbformat
import pytest
import torch

from hpdl_lab.checks.exercises import EXERCISES
from hpdl_lab.comm import sim
from tests.wording import raises

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
SOURCES = sorted((NOTEBOOKS / "source").glob("*.py"))


def imported(folder, name):
    """A script of `folder`, which is not a package, as a module."""
    spec = importlib.util.spec_from_file_location(f"notebooks_{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def load(monkeypatch):
    """Import a script of notebooks/."""
    monkeypatch.syspath_prepend(str(NOTEBOOKS))
    return lambda name: imported(NOTEBOOKS, name)


@pytest.fixture
def copy(tmp_path, monkeypatch, capsys):
    """A copy of notebooks/ that a test may change, and a function that runs its build.py: (exit code, what it said).

    Of the notebooks it has three.
    """
    folder = tmp_path / "notebooks"
    others = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "0[!024]_*", "1[0-9]_*")
    shutil.copytree(NOTEBOOKS, folder, ignore=others)
    (tmp_path / "docs").mkdir()
    shutil.copy(NOTEBOOKS.parent / "docs" / "glossary.md", tmp_path / "docs")
    monkeypatch.syspath_prepend(str(folder))
    script = imported(folder, "build")

    def build(*options):
        capsys.readouterr()
        return script.main(options), capsys.readouterr().out

    return folder, build


def home_of(exercise):
    """The name of the notebook that has this exercise."""
    heading = f"\n# ## Exercise {exercise.id} "
    return next(s.stem for s in SOURCES if heading in s.read_text())


def cell_with(path, grade_id):
    """The cell with this nbgrader id; a dot stands for the dash that nbgrader wants in its place."""
    grade_id = grade_id.replace(".", "-")
    notebook = nbformat.read(path, as_version=4)
    return next(c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id)


def test_the_committed_notebooks_are_up_to_date(load, capsys):
    """Byte for byte, whatever process has built them."""
    code = load("build").main(["--check"])
    assert (code, capsys.readouterr().out) == (0, "")


def test_every_exercise_is_in_one_notebook_with_its_check_right_behind_it():
    found = []
    for name in imported(NOTEBOOKS, "tracks").NOTEBOOKS:
        cells = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
        code = [c for c in cells if c.cell_type == "code"]
        for cell, after in zip(code, code[1:], strict=False):
            grade_id = cell.metadata.get("nbgrader", {}).get("grade_id", "")
            if grade_id.startswith("exercise-"):
                found.append(grade_id.removeprefix("exercise-").replace("-", "."))
                assert after.metadata["nbgrader"]["grade_id"] == grade_id.replace("exercise", "check")
    last = {"5.1", "6.6"}  # in appendices, behind the others of their notebooks
    in_order = [e.id for e in EXERCISES]
    assert sorted(found) == sorted(in_order)
    assert [number for number in found if number not in last] == [n for n in in_order if n not in last]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.id)
def test_the_two_forms_differ_only_in_the_solution(exercise):
    stem = home_of(exercise)
    stub = cell_with(NOTEBOOKS / f"{stem}.ipynb", f"exercise-{exercise.id}")
    solved = cell_with(NOTEBOOKS / "solutions" / f"{stem}.ipynb", f"exercise-{exercise.id}")
    if exercise.scaffold is not None:
        return the_scaffold_stands_in_the_place_of_the_solution(exercise, stub.source, solved.source)
    title = f'raise NotImplementedError("exercise {exercise.id}: write {exercise.name}")'
    before, _, rest = solved.source.partition("    ### BEGIN SOLUTION\n")
    body, _, after = rest.partition("    ### END SOLUTION")
    assert before and body.strip()
    assert stub.source == f"{before}    {title}{after}"
    assert stub.id == solved.id and stub.metadata == solved.metadata
    first = exercise.reference.__doc__.split("\n")[0]
    assert first in stub.source


def the_scaffold_stands_in_the_place_of_the_solution(exercise, stub, solved):
    head, _, body = solved.partition("    ### BEGIN SOLUTION\n")
    assert stub.startswith(head) and body
    broken = inspect.getsource(exercise.scaffold).rstrip("\n")
    assert broken.endswith(stub.removeprefix(head)) and stub.removeprefix(head) != body.partition("    ### END")[0]


def test_solutions_are_the_library_functions_with_their_imports():
    namespace = {}
    for grade_id in ("exercise-4.1", "exercise-4.2", "exercise-4.3"):
        cell = cell_with(NOTEBOOKS / "solutions" / "04_ring_all_reduce.ipynb", grade_id)
        assert "ring import" not in cell.source, "a stub must not import its own solution"
        exec(cell.source, namespace)
    assert all(torch.equal(x, torch.full((7,), 3.0)) for x in sim.run(3, namespace["all_reduce"], torch.ones(7)))


def test_metadata_is_nbgraders_schema_3():
    for exercise in EXERCISES:
        stem = home_of(exercise)
        for folder in (NOTEBOOKS, NOTEBOOKS / "solutions"):
            solution = cell_with(folder / f"{stem}.ipynb", f"exercise-{exercise.id}").metadata["nbgrader"]
            check = cell_with(folder / f"{stem}.ipynb", f"check-{exercise.id}").metadata["nbgrader"]
            assert all(re.fullmatch(r"[a-zA-Z0-9_-]+", m["grade_id"]) for m in (solution, check)), "nbgrader's rule"
            assert solution == {
                "grade": False,
                "grade_id": f"exercise-{exercise.id}".replace(".", "-"),
                "locked": False,
                "schema_version": 3,
                "solution": True,
                "task": False,
            }
            assert check == {
                "grade": True,
                "grade_id": f"check-{exercise.id}".replace(".", "-"),
                "locked": True,
                "points": exercise.stars,
                "schema_version": 3,
                "solution": False,
                "task": False,
            }


def test_only_the_solution_form_asserts_the_check():
    name = "04_ring_all_reduce.ipynb"
    assert cell_with(NOTEBOOKS / name, "check-4.1").source == "result = lab.check(reduce_scatter)\nresult"
    assert "assert result" in cell_with(NOTEBOOKS / "solutions" / name, "check-4.1").source


def test_a_scaffold_keeps_the_lines_outside_the_markers():
    stub = cell_with(NOTEBOOKS / "01_gradient_descent.ipynb", "exercise-1.3").source
    assert "curvature = x.T @ x / len(x)" in stub
    assert "eigvalsh(curvature)" not in stub
    assert stub.startswith("import numpy as np\n\n\ndef largest_stable_rate(x):")


def test_notebooks_carry_no_outputs_and_unique_ids():
    for path in [*NOTEBOOKS.glob("*.ipynb"), *(NOTEBOOKS / "solutions").glob("*.ipynb")]:
        cells = nbformat.read(path, as_version=4).cells
        assert all(c.outputs == [] and c.execution_count is None for c in cells if c.cell_type == "code")
        assert len({c.id for c in cells}) == len(cells)


def test_check_names_what_is_out_of_date_and_writes_nothing(copy):
    folder, build = copy
    source = folder / "source" / "00_engines.py"
    source.write_text(source.read_text().replace("## The idea", "## An idea"))
    before = (folder / "00_engines.ipynb").read_bytes()
    code, said = build("--check")
    assert code == 1
    assert "notebooks/00_engines.ipynb is out of date: run python notebooks/build.py" in said
    assert "notebooks/solutions/00_engines.ipynb is out of date" in said
    assert "04_ring" not in said
    assert (folder / "00_engines.ipynb").read_bytes() == before
    assert build()[0] == 0
    assert b"## An idea" in (folder / "00_engines.ipynb").read_bytes()
    assert build("--check") == (0, "")


@pytest.mark.parametrize("work", ["answer", "output"])
def test_a_notebook_that_somebody_worked_in_is_kept(copy, work):
    folder, build = copy
    path = folder / "04_ring_all_reduce.ipynb"
    notebook = json.loads(path.read_text())
    cell = next(c for c in notebook["cells"] if c.get("id") == "exercise-4-1")
    if work == "answer":
        cell["source"] = ["def reduce_scatter(comm, x):\n", "    return my_answer"]
    else:
        cell["execution_count"] = 3
    path.write_text(json.dumps(notebook))
    code, said = build()
    assert code == 0
    assert "notebooks/04_ring_all_reduce.ipynb has been worked in and is kept" in said
    assert json.loads(path.read_text()) == notebook


def test_a_missing_notebook_is_written(copy):
    folder, build = copy
    shutil.rmtree(folder / "solutions")
    (folder / "00_engines.ipynb").unlink()
    assert build()[0] == 0
    assert (folder / "00_engines.ipynb").read_bytes() == (NOTEBOOKS / "00_engines.ipynb").read_bytes()
    name = "solutions/02_parallel_gradient_descent.ipynb"
    assert (folder / name).read_bytes() == (NOTEBOOKS / name).read_bytes()


def test_imports_are_found_wherever_they_come_from(load, tmp_path, monkeypatch):
    (tmp_path / "sample_module.py").write_text(
        "import numpy as np\nimport os.path\nfrom collections import OrderedDict as Ordered, deque\n\n"
        "LIMIT = 3\n\n\ndef helper(a):\n    return a\n\n\n"
        'def task(comm, n=LIMIT):\n    """Do it."""\n    b = helper(np.zeros(n))\n'
        "    return Ordered(x=deque(b)), os.path.sep\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import sample_module

    stubs = load("stubs")
    assert stubs.import_lines(sample_module.task, set()) == [
        "import numpy as np",
        "import os.path",
        "from collections import OrderedDict as Ordered, deque",
        "from sample_module import LIMIT, helper",
    ]
    assert "from sample_module import LIMIT" in stubs.import_lines(sample_module.task, {"helper"})


def test_an_exercise_needs_a_docstring(load):
    def silent(comm):
        return comm

    with raises(ValueError):
        load("stubs").stub_source(silent, "exercise")

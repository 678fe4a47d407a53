"""nbgrader's own commands, unchanged, on our notebooks: points for what is right, a check's words for what is wrong."""

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from importlib.metadata import distribution, distributions
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement

from hpdl_lab.release import course, forms
from tests import installed

pytestmark = pytest.mark.slow  # nbgrader's own commands

ROOT = Path(__file__).resolve().parent.parent
NBGRADER = installed.NBGRADER
LESSON = "00_engines"
STUB = "    # YOUR CODE HERE\n    raise NotImplementedError()"
ANSWERS = {  # {student: {exercise: its body}}
    "ada": {
        "0-1": '    return f"hello from rank {comm.rank} of {comm.size}"',
        "0-2": "    x[:] = comm.rank\n    comm.barrier()\n    return 7, x",
    },
    "bob": {"0-1": "    import time\n\n    while True:\n        time.sleep(0.01)"},
}


@pytest.fixture(scope="module", autouse=True)
def there():
    installed.nbgrader()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A course as `hpdl release --nbgrader` writes it."""
    folder = tmp_path_factory.mktemp("course")
    course.write_course(folder)
    return folder


@pytest.fixture(scope="module")
def runtime():
    """Where the engines of submissions run: other tests may have engines of their own up."""
    path = tempfile.mkdtemp(prefix="hpdl-t-", dir="/tmp")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def graded(written, runtime):
    """The course after generate_assignment, two submissions, autograde and generate_feedback."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # nbgrader finds all but itself, such as alembic, in this environment.
    places = {"HOME": str(written), "XDG_RUNTIME_DIR": runtime, "PYTHONPATH": str(NBGRADER), "PATH": path}

    def nbgrader(*arguments):
        command = [sys.executable, "-m", "nbgrader", *arguments]
        done = subprocess.run(command, cwd=written, env=os.environ | places, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]

    nbgrader("generate_assignment", LESSON)
    for student, answers in ANSWERS.items():
        submit(written, student, answers)
    nbgrader("autograde", LESSON, "--create")
    nbgrader("generate_feedback", LESSON)
    return written


def submit(folder, student, answers):
    """The released notebook with these answers in it, as the student hands it in."""
    notebook = nbformat.read(released(folder), as_version=4)
    for cell in notebook.cells:
        number = cell.id.removeprefix("exercise-")
        if number in answers:
            assert STUB in cell.source
            cell.source = cell.source.replace(STUB, answers[number])
    place = folder / "submitted" / student / LESSON / f"{LESSON}.ipynb"
    place.parent.mkdir(parents=True)
    nbformat.write(notebook, place)


def released(folder):
    return folder / "release" / LESSON / f"{LESSON}.ipynb"


def test_nothing_that_nbgrader_needs_is_missing_or_of_another_version():
    there = {d.name.lower(): d for d in distributions(path=[str(NBGRADER)])}
    assert set(there) == {"nbgrader", "notebook", "rapidfuzz"}
    for package in there.values():
        for needed in map(Requirement, package.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                found = there.get(needed.name.lower()) or distribution(needed.name)
                assert needed.specifier.contains(found.version), f"{package.name} needs {needed}, not {found.version}"


def test_a_course_has_a_source_for_each_notebook_and_settings_that_are_never_written_over(written):
    stems = [path.stem for path in sorted((ROOT / "notebooks").glob(forms.NAMES))]
    assert [path.name for path in sorted((written / "source").iterdir())] == stems
    (written / course.CONFIG).write_text((written / course.CONFIG).read_text() + "# mine\n")
    assert course.write_course(written) == []
    assert (written / course.CONFIG).read_text().endswith("# mine\n")


def test_points_that_an_instructor_changed_stay_when_the_source_is_updated(tmp_path, monkeypatch):
    course.write_course(tmp_path)
    path = tmp_path / "source" / LESSON / f"{LESSON}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    next(cell for cell in notebook.cells if cell.id == "check-0-1").metadata.nbgrader.points = 5
    nbformat.write(notebook, path)
    newer = {
        name: text.replace(b"No cell hangs forever", b"No cell hangs here") for name, text in forms.solutions().items()
    }
    monkeypatch.setattr(forms, "solutions", lambda: newer)
    assert course.write_course(tmp_path) == [f"source/{LESSON}/{LESSON}.ipynb: updated, with all that you did in it"]
    assert "No cell hangs here" in path.read_text()
    cells = nbformat.read(path, as_version=4).cells
    assert next(cell for cell in cells if cell.id == "check-0-1").metadata.nbgrader.points == 5


def test_a_program_to_be_repaired_stays_below_nbgraders_stub_and_behind_the_solution(written):
    cells = nbformat.read(written / "source" / "03_messages" / "03_messages.ipynb", as_version=4).cells
    source = next(cell.source for cell in cells if cell.id == "exercise-3-6")
    stub = re.sub(r"    ### BEGIN SOLUTION\n.*### END SOLUTION", STUB, source, flags=re.DOTALL)
    assert stub.partition(STUB)[2].strip().startswith("total = 0.0\n    for number in range(comm.rank, 11, comm.size):")
    solution = source.partition("### BEGIN SOLUTION\n")[2].partition("### END SOLUTION")[0]
    assert solution.rstrip().endswith("\n    return")


def test_guesses_are_left_to_the_students(written):
    for path in sorted((written / "source").glob("*/*.ipynb")):
        code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        guesses = [cell.source for cell in code if "lab.guess(" in cell.source]
        assert guesses and all("..." in source for source in guesses)


def test_scripts_are_left_to_the_students_and_written_before_they_are_graded(written):
    for name, script in (("06_data_parallel", "train_ddp"), ("09_tensor_parallel", "train_tp")):
        cells = nbformat.read(written / "source" / name / f"{name}.ipynb", as_version=4).cells
        (cell,) = [cell for cell in cells if cell.source.startswith(f"%%writefile {script}.py")]
        assert "on one rank: python train_gpt.py" in cell.source and cell.metadata.tags == ["script"]


def test_students_get_neither_solutions_nor_hidden_tests(graded):
    text = released(graded).read_text()
    assert not re.search(r"SOLUTION|HIDDEN|assert result|hello from rank \{comm", text)
    notebook = nbformat.read(released(graded), as_version=4)
    shown = {cell.id: cell.source for cell in notebook.cells}
    assert shown["exercise-0-1"].endswith(STUB)
    assert shown["check-0-1"] == "result = lab.check(hello)\ndisplay(result)"


def scores(graded):
    """{(student, "check-0-1"): points} from nbgrader's own gradebook."""
    with sqlite3.connect(graded / "gradebook.db") as book:
        rows = book.execute(
            "select student.id, base_cell.name, grade.auto_score from grade "
            "join base_cell on base_cell.id = grade.cell_id "
            "join submitted_notebook on submitted_notebook.id = grade.notebook_id "
            "join submitted_assignment on submitted_assignment.id = submitted_notebook.assignment_id "
            "join student on student.id = submitted_assignment.student_id"
        ).fetchall()
    return {(student, cell): points for student, cell, points in rows if cell.startswith("check-")}


def test_right_answers_get_full_points_and_wrong_hanging_and_missing_ones_none(graded):
    assert scores(graded) == {
        ("ada", "check-0-1"): 1.0,
        ("ada", "check-0-2"): 0.0,  # wrong
        ("bob", "check-0-1"): 0.0,  # never ends
        ("bob", "check-0-2"): 0.0,  # not answered
    }


def feedback(graded, student):
    text = (graded / "feedback" / student / LESSON / f"{LESSON}.html").read_text()
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", text))


def test_feedback_says_what_the_checks_said(graded):
    ada, bob = feedback(graded, "ada"), feedback(graded, "bob")
    assert "0.1 hello: correct" in ada and "4 engines" in ada
    assert "0.2 fill_with_rank: not yet" in ada and "AssertionError" in ada
    assert "0.1 hello: not yet (timeout)" in bob and "Is there a loop that never ends?" in bob
    assert "NotImplementedError" in bob


def test_only_what_leads_to_a_grade_is_run(graded):
    place = graded / "autograded" / "ada" / LESSON / f"{LESSON}.ipynb"
    code = [cell for cell in json.loads(place.read_text())["cells"] if cell["cell_type"] == "code"]
    last = max(i for i, cell in enumerate(code) if "nbgrader" in cell["metadata"])
    assert all(cell["execution_count"] is None for cell in code[last + 1 :])
    assert code[0]["execution_count"] == 1 and "lab.start(4)" in "".join(code[0]["source"])


def test_no_engines_are_left(graded, traces, runtime):
    traces(runtime).wait_until_gone(seconds=60)


def test_what_was_written_by_hand_is_not_lost_when_a_course_is_updated(written):
    shutil.copy(written / "source" / LESSON / f"{LESSON}.ipynb", written / "source" / LESSON / "quiz.ipynb")
    assert course.write_course(written) == []
    assert (written / "source" / LESSON / "quiz.ipynb").exists()

"""A course of nbgrader: the sources from which it makes assignments, grades them and writes feedback, unchanged.

hpdl release --nbgrader COURSE; cd COURSE
nbgrader generate_assignment 04_ring_all_reduce     release/: what students get; then collect their submissions
nbgrader autograde 04_ring_all_reduce               starts engines, checks, gives points
nbgrader generate_feedback 04_ring_all_reduce       what each check said, for the student
"""

import os
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from . import forms, update

BEGIN, END = "    ### BEGIN SOLUTION\n", "    ### END SOLUTION"
SKIPPED = "skip-execution"  # the tag of nbclient, which nbgrader grades with; JupyterLab runs such cells as any other
CONFIG = "nbgrader_config.py"
SETTINGS = b"""\
# Written once by `hpdl release --nbgrader`; yours to change: it is never written over.
c = get_config()
c.CourseDirectory.course_id = "hpdl_lab"
# Seconds for one cell. The first cell starts engines; a check that finds who waits for whom takes up to 20 s.
c.Execute.timeout = 120
"""


def write_course(folder: str | os.PathLike[str]) -> list[str]:
    """Write the sources of all assignments into a course, or update them: as `update.write_notebooks` does."""
    folder, stubs = Path(os.path.abspath(folder)), forms.exercises()
    given: forms.Forms = {} if (folder / CONFIG).exists() else {CONFIG: SETTINGS}
    for name, solution in forms.solutions().items():
        stem = name.removesuffix(".ipynb")
        given[f"source/{stem}/{name}"] = _source_form(update.parsed(solution), update.parsed(stubs[name]))
    return update.update_forms(folder, given)


def _source_form(solution: NotebookNode, exercise: NotebookNode) -> bytes:
    """Make the solution form ready for nbgrader, as bytes.

    A check shows all that it has to say before it fails, for the feedback. If an exercise has a broken program to be
    repaired, that stands behind the solution, where it is never reached; a student finds it below nbgrader's stub.
    Guesses are left to the student, and scripts are still to be converted.
    Cells behind the first exercise that only show something are not run when answers are graded.
    """
    stubs, after_exercise = {cell.id: cell.source for cell in exercise.cells}, False
    for cell in solution.cells:
        role = cell.metadata.get("nbgrader", {})
        tags = cell.metadata.get("tags", [])
        if {"guess", "script"} & set(tags):
            cell.source = stubs[cell.id]
        if role.get("solution"):
            after_exercise, cell.source = True, _with_broken_program(cell.source, stubs[cell.id])
        elif role.get("grade"):
            check, *hidden, _ = cell.source.split("\n")
            cell.source = "\n".join([check, "display(result)", *hidden])
        elif after_exercise and cell.cell_type == "code" and "script" not in tags:
            cell.metadata.tags = [*tags, SKIPPED]
    solution.metadata.hpdl_lab |= {"form": "nbgrader", "digest": forms.digest(solution.cells)}
    return (nbformat.writes(solution) + "\n").encode()


def _with_broken_program(solution: str, stub: str) -> str:
    """Return the solution of an exercise; if its stub is a program to be repaired, with that behind it."""
    if "raise NotImplementedError(" in stub:
        return solution
    head = solution.partition(BEGIN)[0]
    return f"{solution.replace(END, f'    return{chr(10)}{END}')}\n{stub.removeprefix(head)}"

"""Stub, docstring, hints and solution of an exercise agree: nothing to transcribe, nothing unexplained."""

import ast
import inspect
import re
import textwrap
from pathlib import Path

import nbformat
import pytest

from hpdl_lab.checks.exercises import EXERCISES, check
from hpdl_lab.plain_source import plain_source
from tests import answers

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
BUDGET = re.compile(r"^ *(Steps|Bytes|Bytes per rank|Live micro-batches|Ref): .*?(?=^ *[A-Z][\w -]*: |\Z)", re.M | re.S)
LEAST = 3  # names and numbers of an expression that says more than p - 1


def named(exercise):
    return f"{exercise.id}-{exercise.name}"


def bare(text):
    """A formula without spaces, owners of attributes and arguments of calls: "1+max"."""
    text = re.sub(r"\s+", "", text.replace("·", "*"))
    for _ in range(3):
        text = re.sub(r"(\w)\([^()]*\)", r"\1", text)
    return re.sub(r"[\w\[\]()]+\.(?=[a-z])", "", text)


def formulas(function):
    """The index expressions and formulas in the body of a function, bare."""
    found = set()
    for node in ast.walk(ast.parse(plain_source(function))):
        leaves = [leaf for leaf in ast.walk(node) if isinstance(leaf, ast.Name | ast.Constant)]
        if isinstance(node, ast.BinOp | ast.Subscript) and len(leaves) >= LEAST:
            found.add(bare(ast.unparse(node)))
    return {formula for formula in found if re.search(r"[-+*/@\[]", formula)}


@pytest.mark.parametrize("exercise", EXERCISES, ids=named)
def test_a_docstring_holds_goal_picture_and_budget_and_no_formula_of_the_solution(exercise):
    said = bare(BUDGET.sub("", inspect.getdoc(exercise.reference)))
    held = [formula for formula in formulas(exercise.reference) if formula in said]
    assert not held, f"{exercise.id}: the docstring holds {held}"


@pytest.fixture(scope="module")
def stubs():
    """{exercise: (its cell in the exercise form, the text cell above it)}."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        for above, cell in zip(cells, cells[1:], strict=False):
            found[cell.id.removeprefix("exercise-").replace("-", ".")] = cell, above
    return found


@pytest.mark.parametrize("exercise", EXERCISES, ids=named)
def test_every_name_that_a_stub_imports_from_a_module_is_used_or_explained(exercise, stubs):
    cell, above = stubs[exercise.id]
    tree = ast.parse(cell.source)
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    text = f"{ast.get_docstring(function)}\n{above.source}"
    unexplained = {name for name in imported - used if not re.search(rf"\b{name}\b", text)}
    assert not unexplained, f"{exercise.id}: {unexplained}"


IN_WORDS = {"3.3", "3.4", "3.5", "3.6", "14.4"}  # exercises whose last hint holds no code: words, and repairs


def completed(hint, answers):
    """The code of a hint with the answers in the places of `...`, indented as these are."""
    first, *parts = hint.split("...")
    text = first
    for answer, part in zip(answers, parts, strict=True):
        indent = re.search(r"^ *(?=[^\n]*\Z)", text, re.M)[0]
        text += answer.replace("\n", f"\n{indent}") + part
    return text


@pytest.mark.parametrize("exercise", [e for e in EXERCISES if e.id not in IN_WORDS], ids=named)
def test_the_last_hint_completed_is_a_right_answer(exercise, stubs):
    """In the attendee's cell, with the imports that stand there, and with the answers of the exercises before."""
    body = completed(exercise.hints[""][-1], answers.COMPLETED.get(exercise.id, ()))
    stub = f'raise NotImplementedError("exercise {exercise.id}: write {exercise.name}")'
    cell = stubs[exercise.id][0].source
    assert stub in cell
    notebook = exercise.id.partition(".")[0]
    namespace = {e.name: e.reference for e in EXERCISES if e.id.partition(".")[0] == notebook and e is not exercise}
    exec(cell.replace(stub, textwrap.indent(body, "    ").lstrip()), namespace)
    result = check(exercise, namespace[exercise.name])
    assert result, result.message

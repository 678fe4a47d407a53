"""The notebooks as text: their rhythm, their limits; and the exercise forms run up to their first stub."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
import torch.distributed

from hpdl_lab import lab
from hpdl_lab.comm.base import Comm
from hpdl_lab.verbs.progress import progress
from tests.wording import raises

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
EXERCISE_FORMS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
BOTH_FORMS = [*EXERCISE_FORMS, *sorted((NOTEBOOKS / "solutions").glob("*.ipynb"))]
HIDDEN = re.compile(r"### BEGIN HIDDEN TESTS\n.*?### END HIDDEN TESTS\n", re.DOTALL)
MOST_CODE_CELLS = 16  # besides exercises, their checks, guesses, sliders, and what is taken home
MORE_CODE_CELLS = {"10_pipeline_parallel": 18, "14_platforms": 20, "15_open_issues": 17}  # each exercise is measured
MOST_LINES = 6
WITHOUT_EXERCISES = ("00_why", "15_race")
LINES_TO_TAKE_HOME = range(10, 31)


def cells_of(path, kind):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == kind]


def is_exercise(cell):
    return cell.metadata.get("nbgrader", {}).get("solution", False)


def is_guess(cell):
    return "guess" in cell.metadata.get("tags", [])


def is_script(cell):
    return "script" in cell.metadata.get("tags", [])


def goes_home(cell):
    """What is run beside the lab, in the real API: a file, its run, and an assert about what it has printed."""
    return "take-home" in cell.metadata.get("tags", [])


def is_played(cell):
    """A cell that is nothing but sliders."""
    return cell.source.startswith("lab.explore(")


def file_of(cell):
    """(name, text) of a cell that writes a file, else None."""
    first, _, text = cell.source.partition("\n")
    return (first.removeprefix("%%writefile "), text) if first.startswith("%%writefile ") else None


def named(path):
    return f"{path.parent.name}/{path.stem}"


def solution_of(path):
    return path.parent / "solutions" / path.name


def magic_free(cell):
    """The syntax tree of a cell without IPython's own lines."""
    return ast.parse(re.sub(r"^(%|\w+ = [!%]).*$", "pass", cell.source, flags=re.MULTILINE))


def words_of(verb, tree):
    """The first arguments of the calls of a verb, which are texts."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == f"lab.{verb}"]
    return [call.args[0].value for call in calls]


@pytest.mark.parametrize("path", BOTH_FORMS, ids=named)
def test_cells_are_few_and_short(path):
    code = cells_of(path, "code")
    apart = [cell for cell in code if is_guess(cell) or goes_home(cell) or is_played(cell) or is_script(cell)]
    others = [cell for cell in code if "nbgrader" not in cell.metadata and cell not in apart]
    assert len(others) <= MORE_CODE_CELLS.get(path.stem, MOST_CODE_CELLS)
    for cell in code:
        if not is_exercise(cell) and not is_script(cell) and not (goes_home(cell) and file_of(cell)):
            lines = HIDDEN.sub("", cell.source).strip().split("\n")
            assert len(lines) <= MOST_LINES, cell.source


@pytest.mark.parametrize("path", BOTH_FORMS, ids=named)
def test_notebooks_hold_no_plotting_no_pip_and_no_function_but_the_exercises(path):
    for cell in cells_of(path, "code"):
        if is_script(cell) or (goes_home(cell) and file_of(cell)):
            continue
        assert not re.search(r"matplotlib|plt\.|plotly|pip install|%pip|conda", cell.source)
        kinds = [type(node) for node in magic_free(cell).body]
        definitions = [kind for kind in kinds if kind in (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)]
        assert len(definitions) == (1 if is_exercise(cell) else 0), cell.source


@pytest.mark.parametrize("path", BOTH_FORMS, ids=named)
def test_a_notebook_ends_with_a_file_that_is_run_and_whose_numbers_are_asserted(path):
    cells = [cell for cell in cells_of(path, "code") if goes_home(cell)]
    files = dict(filter(None, map(file_of, cells)))
    assert files or path.stem in WITHOUT_EXERCISES
    for name, text in files.items():
        assert re.match(rf"take_home_{path.stem[:2]}\w*\.(py|sbatch|toml)$", name)
        assert len(text.strip().split("\n")) in LINES_TO_TAKE_HOME, name
        assert any(cell.source.startswith("out = !") and name in cell.source.split("\n")[0] for cell in cells), name
        if name.endswith(".py"):
            compile(text, name, "exec")
            assert ast.get_docstring(ast.parse(text)), name
    assert not cells or "assert " in cells[-1].source


def test_the_calls_in_the_table_of_03_exist_in_each_library():
    """NCCL is not installed here: of its names only the spelling is looked at."""
    text = "\n".join(c.source for c in cells_of(NOTEBOOKS / "03_messages.ipynb", "markdown"))
    rows = [line.strip("| ").split(" | ") for line in text.split("\n") if line.startswith("| `comm.")]
    mpi = Path(find_spec("mpi4py").origin).with_name("MPI.pyi").read_text()
    assert len(rows) > 10
    for here, mpi4py, of_torch, nccl in rows:
        assert callable(getattr(Comm, called(here), None)) or called(here) in ("rank", "size"), here
        assert f" def {called(mpi4py)}(" in mpi, mpi4py
        assert callable(getattr(torch.distributed, called(of_torch))), of_torch
        assert re.fullmatch(r"`nccl[A-Z]\w+`(, from 2\.\d+)?|in a group|-", nccl), nccl


def called(call):
    """ "send" of "`comm.send(x, dst)`"."""
    return re.match(r"`\w+\.(\w+)", call)[1]


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
    assert headings or path.stem in WITHOUT_EXERCISES
    for number, stars in headings:
        assert find(number).stars == len(stars)


@pytest.mark.parametrize("path", EXERCISE_FORMS, ids=named)
def test_guesses_are_left_to_the_attendee_and_refused_as_long_as_they_are(path, tmp_path, monkeypatch):
    """In no other cell stands a number that was guessed for them; the solution form has one for each."""
    monkeypatch.setenv("HPDL_HOME", str(tmp_path))
    progress.cache_clear()
    cells, solved = cells_of(path, "code"), {cell.id: cell for cell in cells_of(solution_of(path), "code")}
    assert any(map(is_guess, cells))
    for cell in cells:
        if cell.source.startswith("%%writefile"):
            continue
        assigned = [node for node in ast.walk(magic_free(cell)) if isinstance(node, ast.Assign)]
        mine = [node for node in assigned if ast.unparse(node.targets[0]).startswith("my_")]
        if not is_guess(cell):
            assert not any(isinstance(node.value, ast.Constant | ast.Dict) for node in mine), cell.source
            continue
        for node in mine:
            assert ast.unparse(node.value.func) == "lab.guess"
            given = node.value.args[1]
            values = given.values if isinstance(given, ast.Dict) else [given]
            assert {ast.unparse(value) for value in values} == {"..."}, cell.source
            with raises(ValueError, "guess in place of ..."):
                eval(ast.unparse(node.value), {"lab": lab})
        namespace = {"lab": lab}
        exec(solved[cell.id].source, namespace)
        kept = {row["about"]: row["value"] for row in progress().rows if row["kind"] == "guess"}
        assert [kept[node.value.args[0].value] for node in mine] == [namespace[node.targets[0].id] for node in mine]
    progress.cache_clear()


SAID = {  # guesses about what no later picture measures: most are revealed beside the answer
    "00_why": {"my_share", "my_factor"},
    "00_engines": {"my_guess_ms"},
    "02_parallel_gradient_descent": {"my_guess"},
    "04_ring_all_reduce": {"my_bytes"},
    "06_data_parallel": {"my_mistakes"},
    "08_memory": {"my_power", "my_traffic"},
    "09_tensor_parallel": {"my_all_reduces"},
    "10_pipeline_parallel": {"my_cut"},  # is drawn as a schedule of its own
    "11_hybrid_parallel": {"my_grid"},  # the picker is set to it
    "12_large_models": {"my_load", "my_used"},
    "13_inference": {"my_speed_up"},
    "14_performance": {"my_products", "my_mfu", "my_batch", "my_ranks", "my_graphs", "my_counters", "my_workers"},
    "15_open_issues": {"my_notice", "my_years", "my_goodput", "my_kills", "my_copy"},
    "15_other_ranks": {"my_moved", "my_left", "my_percent", "my_reward"},
    "15_race": {"my_GB", "my_plan", "my_hours", "my_steps", "my_seconds"},
    "14_platforms": {"my_server", "my_worker", "my_gbit", "my_ratio", "my_kwh", "my_price"},
}


@pytest.mark.parametrize("path", EXERCISE_FORMS, ids=named)
def test_every_guess_is_drawn_later_or_said(path):
    drawn, read, guessed, words, revealed = set(), set(), set(), {}, set()
    for cell in cells_of(path, "code"):
        if cell.source.startswith("%%writefile"):
            continue
        nodes = list(ast.walk(tree := magic_free(cell)))
        revealed |= set(words_of("reveal", tree))
        names = {node.id for node in nodes if isinstance(node, ast.Name) and node.id.startswith("my_")}
        if is_guess(cell):
            guessed |= names
            mine = [node for node in nodes if isinstance(node, ast.Assign)]
            words |= {node.targets[0].id: about for node in mine for about in words_of("guess", node)}
            continue
        given = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "prediction"]
        drawn |= {node.id for value in given for node in ast.walk(value) if isinstance(node, ast.Name)}
        read |= names
    read |= {name for name, about in words.items() if about in revealed}
    assert guessed <= read and guessed - drawn == SAID.get(path.stem, set())


def test_what_is_revealed_was_guessed_earlier_in_the_same_notebook_under_the_same_words():
    revealed = []
    for path in EXERCISE_FORMS:
        guessed = set()
        for cell in cells_of(path, "code"):
            if not cell.source.startswith("%%"):
                tree = magic_free(cell)
                guessed |= set(words_of("guess", tree))
                revealed += [(path.stem, words) for words in words_of("reveal", tree)]
                assert {words for stem, words in revealed if stem == path.stem} <= guessed, cell.source
    assert len(set(revealed)) == len(revealed) >= 45


@pytest.mark.parametrize("path", [path for path in EXERCISE_FORMS if path.stem not in WITHOUT_EXERCISES], ids=named)
def test_the_exercise_form_runs_up_to_its_first_stub_which_names_the_exercise(path, tmp_path, monkeypatch, cluster):
    """In this process, on engines that run already: kernels, and cells that start engines, are nbval's."""
    monkeypatch.setenv("HPDL_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpdl_lab.verbs.cluster._notebook._cluster", cluster)
    cells, solved = cells_of(path, "code"), {cell.id: cell for cell in cells_of(solution_of(path), "code")}
    first = next(i for i, cell in enumerate(cells) if cell.metadata.get("nbgrader", {}).get("grade"))
    number = cells[first].metadata["nbgrader"]["grade_id"].removeprefix("check-").replace("-", ".")
    attendees = {"__name__": "__main__"}
    for cell in cells[:first]:
        cell = solved[cell.id] if is_guess(cell) else cell
        exec(compile(cell.source, cell.id, "exec"), attendees)
    with pytest.raises(NotImplementedError) as stopped:
        exec(compile(cells[first].source, cells[first].id, "exec"), attendees)
    assert re.fullmatch(rf"exercise {re.escape(number)}: write \w+", str(stopped.value))

"""The verbs check, hint and solution, and the file that remembers what was done."""

import base64
import io
import json
import re
import subprocess
import sys
from types import ModuleType

import pytest
from PIL import Image

from hpdl_lab import lab
from hpdl_lab.checks.result import Note
from hpdl_lab.collectives import ring
from hpdl_lab.comm import sim
from hpdl_lab.engines.errors import EngineError, RunFailed
from hpdl_lab.verbs import exercises
from hpdl_lab.verbs.progress import Progress, progress
from tests import answers
from tests.wording import raises


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A fresh home for every test, and no engines."""
    monkeypatch.setenv("HPDL_HOME", str(tmp_path))
    monkeypatch.setattr(exercises, "running", lambda: None)
    progress.cache_clear()
    yield tmp_path
    progress.cache_clear()


def named(fn, name):
    """The same function under the name of an exercise."""

    def wrapper(*args):
        return fn(*args)

    wrapper.__name__ = name
    return wrapper


def rows(home):
    return [json.loads(line) for line in (home / "progress.jsonl").read_text().splitlines()]


def test_a_right_answer_is_said_to_be_right_with_a_picture_and_what_it_was_checked_on():
    result = exercises.check(ring.reduce_scatter)
    assert result and result.failed is None
    assert str(result).startswith("4.1 reduce_scatter: correct")
    assert "simulated ranks only, because no engines run: lab.start() starts four" in result.next_step
    assert "<img" in result._repr_html_() and "data:image/png" in result._repr_html_()


def test_the_ring_moves_once_it_is_whole():
    data = re.search(r"base64,([^\"]+)", exercises.check(ring.all_reduce)._repr_html_())[1]
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.n_frames == 7


def test_with_engines_the_check_goes_on_there(monkeypatch):
    monkeypatch.setattr(exercises, "running", lambda: object())
    monkeypatch.setattr(exercises, "run", lambda fn, *args, deadline: sim.run(4, fn, *args))
    result = exercises.check(ring.all_reduce)
    assert "engines: right on 4 MPI ranks" in result.facts
    assert "simulated ranks only" not in result.next_step


def test_an_exception_on_the_engines_is_the_answers_and_no_engines_is_not(monkeypatch):
    def failing(error):
        def run(fn, *args, deadline):
            raise error

        return run

    monkeypatch.setattr(exercises, "running", lambda: object())
    monkeypatch.setattr(exercises, "run", failing(RunFailed("ranks 0-3: KeyError: 'lost'")))
    assert "but on the engines: ranks 0-3: KeyError: 'lost'" in exercises.check(ring.all_reduce).message
    monkeypatch.setattr(exercises, "run", failing(EngineError("rank 2 is dead: call lab.restart()")))
    with raises(EngineError, "rank 2"):
        exercises.check(ring.all_reduce)


def test_too_many_bytes_are_shown_as_a_heat_map_and_a_row_of_waiting_ranks_as_a_timeline():
    whole = exercises.check(named(ring.all_reduce_naive, "all_reduce"))
    assert whole.failed == "bytes"
    assert "who sent how much to whom" in whole._repr_html_()
    serial = next(w.fn for w in answers.WRONG["4.1"] if "wait for each other in a row" in w.says)
    assert "who waited for whom" in exercises.check(named(serial, "reduce_scatter"))._repr_html_()


def test_three_hints_are_chosen_by_what_failed_and_opened_one_by_one(home):
    wrong = named(ring.all_reduce_naive, "reduce_scatter")  # returns all of x
    result = exercises.check(wrong)
    assert result.next_step == "For a first hint: lab.hint()"
    first, second = exercises.hint(), exercises.hint()
    assert "first hint on 'returns'" in first.title and "2 more: lab.hint()" in str(first)
    assert "second hint" in second.title and "1. " in str(second) and "2. " in str(second)
    assert exercises.check(wrong).next_step == "For a third hint: lab.hint()"
    assert "lab.solution(reduce_scatter) shows one answer" in str(exercises.hint())
    assert "no more hints" in exercises.hint().title
    assert all(f"{level}. " in str(exercises.hint()) for level in (1, 2, 3))  # which are shown again
    assert exercises.check(wrong).next_step == "All hints are open. lab.solution(reduce_scatter) shows one answer."
    assert [r["level"] for r in rows(home) if r["kind"] == "hint"] == [1, 2, 3]


def test_another_mistake_has_its_own_hints():
    exercises.check(named(lambda comm, x: 1 / 0, "all_gather"))
    assert "first hint on 'raises'" in exercises.hint().title
    exercises.check(named(lambda comm, x: None, "all_gather"))
    assert "first hint" in exercises.hint().title


def test_a_hint_can_be_asked_before_any_check():
    with raises(LookupError):
        exercises.hint()
    assert "4.2 all_gather: first hint" in exercises.hint(ring.all_gather).title
    assert "4.2 all_gather: second hint" in exercises.hint("all_gather").title


def test_a_solution_is_the_library_function_with_its_explanation(home):
    text = str(exercises.solution(ring.all_gather))
    assert "solution, from hpdl_lab/collectives/ring.py" in text
    assert "def all_gather(comm, x):" in text
    assert "A chunk is received into its place" in " ".join(text.split())
    assert "### " not in str(exercises.solution("assign_buckets"))
    assert rows(home)[-1]["kind"] == "solution"


def test_a_call_instead_of_a_function_is_explained():
    with raises(TypeError, "NoneType", "lab.check(reduce_scatter)"):
        exercises.check(None)


def test_a_function_named_as_a_script_is_sent_to_check_script():
    with raises(TypeError, 'lab.check_script("train_ddp.py")'):
        exercises.check(named(ring.all_reduce, "train_ddp"))


def test_an_unknown_function_lists_the_exercises():
    with raises(LookupError, "'my_ring'"):
        exercises.check(named(ring.all_reduce, "my_ring"))
    with raises(LookupError, "'partial'"):
        import functools

        exercises.check(functools.partial(ring.all_reduce))


def test_progress_is_appended_as_json_lines(home):
    exercises.check(ring.reduce_scatter)
    exercises.check(named(ring.all_reduce_naive, "all_reduce"))
    first, second = rows(home)
    assert (first["kind"], first["exercise"], first["name"], first["passed"]) == (
        "check",
        "4.1",
        "reduce_scatter",
        True,
    )
    assert (second["passed"], second["failed"]) == (False, "bytes")


def test_an_unwritable_home_is_said_once_and_nothing_else_changes(tmp_path, capsys):
    blocked = tmp_path / "a file"
    blocked.write_text("")
    memory = Progress(blocked / "progress.jsonl")
    memory.add("check", exercise="4.1", failed="sum")
    memory.add("hint", exercise="4.1", failed="sum")
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "Your progress is kept only until this kernel ends: cannot write" in said
    assert memory.hints_opened("4.1", "sum") == 1


def test_a_plain_script_can_check_without_engines(tmp_path):
    script = tmp_path / "answer.py"
    script.write_text(
        "import sys, hpdl_lab.checks.exercises\n"
        "print('imported:', [m for m in ('ipyparallel', 'matplotlib', 'mpi4py') if m in sys.modules])\n"
        "from hpdl_lab import lab\n"
        "def all_gather(comm, x):\n    comm.send(x, (comm.rank + 1) % comm.size)\n    return x\n\n\n"
        "print(lab.check(all_gather))\nprint(lab.hint())\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "imported: []\n" in done.stdout, "checks need neither engines nor plots"
    assert "4.2 all_gather: not yet (deadlock)" in done.stdout
    assert "answer.py:5" in done.stdout
    assert "first hint on 'deadlock'" in done.stdout


# -- lab.catch_up ------------------------------------------------------------------------------------------------------


@pytest.fixture
def notebook(monkeypatch):
    """The names of a notebook: those of a module that stands in for __main__."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return vars(module)


def test_who_is_late_gets_the_functions_of_a_notebook_or_those_up_to_an_exercise(notebook, home):
    said = str(lab.catch_up("4.2"))
    assert notebook["reduce_scatter"] is ring.reduce_scatter and notebook["all_gather"] is ring.all_gather
    assert "all_reduce" not in notebook
    assert "below the check of exercise 4.2" in said and "4.1  reduce_scatter: defined" in said
    lab.catch_up("04")
    assert {"all_reduce", "broadcast", "choose"} <= set(notebook)
    assert [row["exercise"] for row in rows(home)] == ["4.2", exercises.exercises_until(4, "")[-1].id]


def test_an_answer_that_passes_stays_and_one_that_fails_is_replaced(notebook):
    def unwritten(comm, x):
        raise NotImplementedError

    notebook["reduce_scatter"] = own = named(ring.reduce_scatter, "reduce_scatter")
    notebook["all_gather"] = lambda comm, x: x
    notebook["all_reduce"] = unwritten
    said = str(lab.catch_up("4.3"))
    assert notebook["reduce_scatter"] is own and notebook["all_gather"] is ring.all_gather
    assert notebook["all_reduce"] is ring.all_reduce
    assert "4.1  reduce_scatter: yours, which passes, stays" in said
    assert "4.2  all_gather: defined, in place of one that fails" in said
    assert said.endswith("4.3  all_reduce: defined")


@pytest.mark.parametrize("until", ["99", "4.9", "ring", ""])
def test_nobody_catches_up_to_what_there_is_not(notebook, until):
    with raises(LookupError, "00, 01, 02"):
        lab.catch_up(until)
    assert "reduce_scatter" not in notebook


def test_code_in_a_sentence_is_shown_as_code_in_a_notebook_and_escaped():
    note = Note("a hint", "Call `f(x < 1)` first, <b>then</b> wait.")
    assert "Call <code>f(x &lt; 1)</code> first, &lt;b&gt;then" in note._repr_html_()
    assert "Call `f(x < 1)` first" in str(note)

"""What a notebook shows of a mistake: one line from every verb, and of the attendee's own code the lines of that."""

import functools
import re
import signal

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from hpdl_lab import lab
from hpdl_lab.plots import collective, live
from hpdl_lab.trace import PACKAGE
from hpdl_lab.verbs.cluster import _notebook as engines_of_notebook

START = """
import numpy as np, torch
from hpdl_lab import lab
x, y = np.ones((20, 2)), np.ones(20)

def all_reduce(comm, x):
    raise NotImplementedError("exercise 4.3: write all_reduce")

def my_all_reduce(comm, x):
    return x

def unfinished(w, x, y, rate):
    raise NotImplementedError("exercise 1.2: write gradient_step")
"""

CLUMSY = {
    "batches": ("'many'", "32, 'lion'", "data='copy'", "prediction={'plain': 'much'}"),
    "explore": ("3", "'lion'", "'tensor', prediction=3"),
    "check_script": ("3", "'nowhere.py'"),
    "catch_up": ("99", "'ring'"),
    "check": ("my_all_reduce", "3"),
    "cluster": ("", "4"),
    "compare": ("3", "{'ring': 3}", "ranks='four'", "{'plain': lab.train}"),
    "designs": ("3",),
    "doctor": ("3",),
    "dualpipe": ("'many'", "schedule='1f1b'", "prediction='half'"),
    "gossip": ("3", "'lion'"),
    "grid": ("3", "'lion'", "limit='much'"),
    "guess": ("'ms', ...", "'ms', 'many'", "'ms'"),
    "hint": ("3", "'4.99'"),
    "inject": ("rank='two', delay=1", "link=3, bandwidth=1e8"),
    "memory": ("7", "ways=3", "batch=1", "limit='much'", "prediction={'ZeRO-4': 1}", "prediction=3"),
    "landscape": ("unfinished, x, y, [0.1]", "unfinished, 'x', y, 0.1", "3, x, y[:3], 0.1"),
    "measure": ("all_reduce, sizes='1XB'", "3", "'rings'", "lambda x: x", "all_reduce", "'ring', against=3"),
    "ping_pong": ("3", "prediction={None: 3}", "lambda x: x", "sizes='1MB'"),
    "pipeline": ("7", "'1f1b', ranks='4'", "'1f1b', prediction='half'"),
    "watch": ("'nowhere.py'", "'pyproject.toml', ranks=0"),
    "race": ("{}, 'moon'", "{}, seed=-1", "{}, rounds=0", "'no_such.toml'"),
    "replay": ("3", "'race.json'", "'race'", "'race_amd_epyc_2_cores', over=3", "over=3"),
    "restart": ("", "4"),
    "reveal": ("'ms', 'many'", "'ms', {}", "'ms'"),
    "roofline": ("3", "sizes='1XB'", "prediction=3"),
    "run": ("all_reduce", "3", ""),
    "running": ("4",),
    "scaling": ("3", "ranks='4'", "strategy='ring'"),
    "search": ("7", "ranks='4'"),
    "serve": ("'many'", "model=3", "model='lion'", "prediction='much'", "schedule=len", "slots=0"),
    "show": ("7", "'rings'", "'ring', ranks='4'", "'1f1b', micro_batches=None", "all_reduce, ranks=4"),
    "solution": ("3", ""),
    "staging": ("3", "nbytes='1XB'", "copy_GBps='much'", "prediction='half'"),
    "start": ("'four'", "4, 'here'", "4, size=3", "4, link='fast'"),
    "stop": ("4",),
    "tensor": ("7", "model=7"),
    "time_to_target": ("3", "target=2", "prediction=3"),
    "train": ("all_reduce=3", "'lion'", "step=3", "torch.nn.Linear(3, 3)", "steps='many'", "all_reduce=len"),
    "tune": ("3", "'x', 'y'"),
    "waterfall": ("3", "before=3", ""),
    "write_again": ("3", "prediction='much'"),
}


class Notebook(InteractiveShell):
    """IPython that keeps what it would show of an error."""

    shown = ""

    def _showtraceback(self, etype, evalue, stb):
        self.shown = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(stb))

    def error(self, source):
        """What is shown when a cell with `source` has raised, or ""."""
        self.shown = ""
        self.run_cell(source, store_history=True)
        return self.shown


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    monkeypatch.setenv("HPDL_HOME", str(tmp_path))
    monkeypatch.setattr(engines_of_notebook, "_cluster", None)  # which another test of this process may have started
    config = Config()
    config.HistoryManager.enabled = False
    shell = Notebook.instance(config=config)
    assert shell.error(START) == ""
    yield shell
    Notebook.clear_instance()


def test_every_verb_is_listed():
    assert sorted(CLUMSY) == sorted(lab.__all__)


@pytest.mark.parametrize("verb", CLUMSY)
def test_a_mistake_is_one_line(verb, notebook):
    for arguments in CLUMSY[verb]:
        shown = notebook.error(f"lab.{verb}({arguments})")
        assert re.fullmatch(r"\w+Error: .+", shown), (arguments, shown)
        assert "object at 0x" not in shown and "_Notebook" not in shown


def test_a_call_that_does_not_fit_names_the_verb(notebook):
    assert notebook.error("lab.run()") == "TypeError: lab.run: missing a required argument: 'fn'"
    assert notebook.error("lab.restart(4)") == "TypeError: lab.restart: too many positional arguments"


def test_a_name_that_is_nearly_that_of_an_exercise(notebook):
    assert notebook.error("lab.check(my_all_reduce)").endswith("did you mean all_reduce (4.3)?")
    assert notebook.error("lab.hint('reduce_scater')").endswith("did you mean reduce_scatter (4.1)?")


OWN = """
def all_reduce(comm, x):
    try:
        {}
    except KeyError as error:
        raise ValueError(nothing) from error
"""


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("return nothing(x)", "NameError"),
        ("assert comm is None", "AssertionError"),
        ("return {}[0]", "KeyError"),
        ("return torch.nn.Linear(3, 3)(x)", "RuntimeError"),  # torch's frames are the last ones here
        ("comm.send(x, 7)", "ValueError"),  # and ours here
        ("comm.Get_rank()", "AttributeError"),
        ("comm.gather(None)", "AttributeError"),
        ("comm.send(x, dest=1)", "TypeError"),
    ],
)
@pytest.mark.parametrize("verb", ["train(all_reduce=all_reduce, steps=2)", "show(all_reduce, ranks=4)"])
def test_the_attendees_own_mistake_shows_the_lines_of_the_cell_and_no_others(line, error, verb, notebook):
    notebook.error(OWN.format(line))
    shown = notebook.error(f"lab.{verb}")
    assert error in shown and f"----> 1 lab.{verb}" in shown
    assert re.search(rf"^----> 3 +{re.escape(line)}$", shown, re.M)
    assert PACKAGE not in shown and "site-packages" not in shown and "File " not in shown


def test_the_stop_button_is_one_line_where_only_our_code_runs_and_shows_the_line_of_a_loop(notebook, monkeypatch):
    monkeypatch.setattr(live, "in_notebook", lambda: True)
    monkeypatch.setattr(live, "publish", lambda *_: None)
    monkeypatch.setattr(live.Live, "rest", functools.partial(signal.raise_signal, signal.SIGINT))
    shown = notebook.error("lab.landscape(lambda w, x, y, rate: w, x, y, 0.1)")
    assert shown == "KeyboardInterrupt: lab.landscape was stopped"
    shown = notebook.error("def step(w, x, y, rate):\n    raise KeyboardInterrupt\nlab.landscape(step, x, y, 0.1)")
    assert "----> 2     raise KeyboardInterrupt" in shown and PACKAGE not in shown


def test_nobody_can_answer_a_checked_function(notebook, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda prompt="": "7")  # as the kernel's, which cells may go on to call
    notebook.error("def hello(comm):\n    return input('name? ')\nchecked = lab.check(hello)")
    checked = notebook.user_ns["checked"]
    assert checked.failed == "raises" and "EOFError" in checked.message and "cell:2" in checked.message
    assert notebook.error("assert input() == '7'") == ""


def test_a_cell_that_did_not_come_to_its_function_is_told(notebook):
    hello = "def hello(comm):\n    return {}"
    number = notebook.execution_count
    assert notebook.error(hello.format("'hello'")) == ""
    notebook.error("checked = lab.check(hello)")
    assert notebook.user_ns["checked"].outdated == "", "it is of the last cell that defines it"
    assert "SyntaxError" in notebook.error(hello.format("(comm.rank"))
    notebook.error("checked = lab.check(hello)")
    checked = notebook.user_ns["checked"]
    assert f"In[{number}]" in checked.outdated and f"In[{number + 2}]" in checked.outdated
    assert checked.outdated in str(checked).replace("\n  ", " ")
    notebook.error(hello.format("'hi'"))
    notebook.error("checked = lab.check(hello)")
    assert notebook.user_ns["checked"].outdated == ""


def test_a_bug_of_ours_keeps_its_traceback(notebook, monkeypatch):
    monkeypatch.setattr(collective, "height_of_eight", {}.__getitem__)  # raises KeyError in show.py
    shown = notebook.error("lab.show('collectives')")
    assert "KeyError" in shown and f"{PACKAGE}verbs/show.py" in shown

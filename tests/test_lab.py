"""`from hpdl_lab import lab`: every verb is there, and what it needs is imported when it is first used."""

import ast
import inspect
import json
import subprocess
import sys

import numpy as np
import pytest

from hpdl_lab import lab
from hpdl_lab.verbs.progress import progress


@pytest.mark.parametrize("use", ["lab", "lab.start, lab.run, lab.guess, lab.doctor, dir(lab)"])
def test_to_import_the_verbs_needs_neither_torch_nor_matplotlib(use):
    code = f"import sys; from hpdl_lab import lab; {use}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "hpdl_lab.lab" in loaded
    assert not loaded & {"torch", "matplotlib", "pandas", "ipyparallel", "IPython", "ipywidgets"}


def test_type_checkers_see_the_verbs_where_they_are():
    (block,) = (node for node in ast.parse(inspect.getsource(lab)).body if isinstance(node, ast.If))
    seen = {line.module: tuple(name.name for name in line.names) for line in block.body}
    assert seen == lab.VERBS


def test_every_verb_is_there_with_its_help_and_its_signature():
    assert dir(lab) == lab.__all__
    for name in lab.__all__:
        verb = getattr(lab, name)
        assert callable(verb) and verb.__name__ == name and inspect.getdoc(verb), name
        assert inspect.signature(verb).return_annotation is not inspect.Signature.empty, name
    assert lab.check is lab.check


def test_what_is_no_verb_is_an_attribute_error():
    with pytest.raises(AttributeError, match="chekc"):
        lab.chekc  # noqa: B018


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HPDL_HOME", str(tmp_path))
    progress.cache_clear()
    yield tmp_path
    progress.cache_clear()


def test_a_true_value_is_said_beside_the_last_guess_and_kept_under_its_words(home, capsys):
    lab.reveal("years", np.float32(5.75))
    lab.guess("years", 60)
    lab.guess("years", 6)
    lab.reveal("years", np.int64(16_384))
    lab.guess("faster", {2: 1.9, 1024: 500})
    assert lab.reveal("faster", {2: 1.954, 1024: 0.0625}) is None
    said = ["years: 5.75", "years: 16,384; you guessed 6"]
    said += ["faster (2): 1.95; you guessed 1.9", "faster (1024): 0.0625; you guessed 500"]
    assert capsys.readouterr().out.splitlines() == said
    kept = [json.loads(line) for line in (home / "progress.jsonl").read_text().splitlines()]
    assert [row["value"] for row in kept if (row["kind"], row["about"]) == ("truth", "years")] == [5.75, 16_384]
    assert kept[-1]["value"] == {"2": 1.954, "1024": 0.0625}


def test_a_guess_of_an_earlier_session_is_found_in_the_file(home, capsys):
    lab.guess("faster", {2: 1.9, 4: 3.5})
    progress.cache_clear()  # as in a new kernel
    with open(home / "progress.jsonl", "a") as file:
        file.write('[1]\n{"kind": "guess", "about": "fas')  # cut off
    lab.reveal("faster", {2: 2, 4: 4})
    assert capsys.readouterr().out.splitlines() == [
        f"faster ({p}): {p}; you guessed {g}" for p, g in ((2, 1.9), (4, 3.5))
    ]


@pytest.mark.parametrize("value", [{"ring": 1}, {"ring": 1, "star": 2, "tree": 3}, {}, 3, {"ring": 1, "star": "2"}])
def test_a_true_value_of_other_names_than_the_guess_is_refused_and_not_kept(value, home):
    lab.guess("apart", {"ring": 1, "star": 2})
    with pytest.raises(ValueError, match="apart"):
        lab.reveal("apart", value)
    assert [row["kind"] for row in progress().rows] == ["guess"]

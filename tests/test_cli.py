"""The command `hpdl`: what it prints, its exit codes, and one sentence for each mistake."""

import contextlib
import os
import re
import subprocess
import sys

import pytest

from hpdl_lab import __version__, cli, features, lab
from hpdl_lab.bench import collectives
from hpdl_lab.bench.report import Report
from hpdl_lab.collectives.selector import Selection
from hpdl_lab.comm.base import Results
from hpdl_lab.engines import doctor
from hpdl_lab.features import table


def hpdl(*arguments):
    command = [sys.executable, "-m", "hpdl_lab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_doctor_prints_the_table_and_finds_nothing(monkeypatch, capsys):
    """As a process of its own: tests/test_symptoms.py."""
    monkeypatch.setenv("PATH", f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}")  # own tools first
    code, said = cli.main(["doctor"]), capsys.readouterr().out
    symptoms = re.findall("^Symptom: (.*)", said, re.MULTILINE)
    assert set(symptoms) <= {"stale cluster"}, said  # of another test, which may have killed a supervisor just now
    assert code == bool(symptoms), said
    assert said.startswith(f"hpdl_lab {__version__}\n")
    assert "MPI library" in said and said.endswith("Fix.\n" if symptoms else "Ready.\n")


def test_doctor_fails_when_something_needed_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(
        features, "feature_table", lambda: table.FeatureTable([table.Feature("MPI library", False, "none: do this")])
    )
    monkeypatch.setattr(doctor, "KNOWN", ())  # symptoms are looked for in the test above
    assert cli.main(["doctor"]) == 1
    assert "MPI library      NO   none: do this" in capsys.readouterr().out


def test_help_and_version_are_quick_and_need_nothing():
    code = "import sys, hpdl_lab.cli; print([m for m in ('numpy', 'torch', 'ipyparallel') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
    assert hpdl("--version").stdout == f"hpdl_lab {__version__}\n"
    assert "doctor" in hpdl("--help").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["bench"], "the following arguments are required: BENCH"),
        (["bench", "all_reduce", "--ranks", "0"], "0 is not a number from 1 on"),
        (["bench", "all_reduce", "--ranks", "two"], "two is not a number from 1 on"),
        (["bench", "all_reduce", "--sizes", "4,none"], "a message size is a number of bytes"),
        (["bench", "run", "--json", "/proc/none/x.json"], "/proc/none/x.json cannot be written"),
        (["release", ""], '"" is no folder; "." is the one where you are'),
    ],
)
def test_wrong_usage_is_code_2_with_one_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_what_cannot_be_done_is_one_sentence_and_code_1(monkeypatch, capsys):
    def missing():
        raise features.Missing("no mpiexec: pip install mpich")

    monkeypatch.setattr(features, "feature_table", missing)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "hpdl: no mpiexec: pip install mpich\n"


def test_ctrl_c_is_code_130(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(features, "feature_table", interrupted)
    assert cli.main(["doctor"]) == 130


def test_bench_all_reduce_passes_what_was_asked_and_fails_for_wrong_elements(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(
        collectives, "race_all_reduces", lambda *given: asked.append(given) or [{"wrong": 1024 * len(asked)}]
    )
    line = ["bench", "all_reduce", "--ranks", "3", "--sizes", "4,1KiB,2MiB", "--against", "mpi"]
    assert cli.main(line) == 1 and "1,024 wrong elements" in capsys.readouterr().err
    assert asked == [(3, [4, 1024, 2 << 20], ("mpi",), Report(" ".join(["hpdl", *line])))]


def test_bench_run_measures_real_engines_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # set back afterwards
    code = cli.main(["bench", "run", "--ranks", "1", "--repeats", "5", "--json", str(tmp_path / "run.json")])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "empty lab.run, median" in said.out
    assert '"ranks": 1' in (tmp_path / "run.json").read_text()


def test_bench_scaling_writes_the_medians_of_each_place_and_the_figure(monkeypatch, tmp_path):
    asked, drawn = [], []
    versions = {"machine": "m", "instructions": "i", "system": "s", "mpi": "MPI", "versions": {}, "date": "today"}

    class Scaled:
        def __init__(self, rate):
            self.agreement = lambda: {(kind, p): rate + p / 10 for kind in ("strong", "weak") for p in (1, 2, 4)}
            self.save = drawn.append

    def scaling(strategy, **how):
        asked.append((repr(strategy), how))
        return Scaled((1.0, 3.0, 2.0)[len(asked) % 3])

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(lab, "start", lambda n, **how: contextlib.nullcontext())
    monkeypatch.setattr(lab, "run", lambda fn: Results(rows=[{"about": versions}]))
    monkeypatch.setattr(lab, "scaling", scaling)
    file = tmp_path / "scaling.md"
    assert cli.main(["bench", "scaling", "--markdown", str(file), "--png", "figure.png"]) == 0
    rows = [line for line in file.read_text().splitlines() if line.startswith(("| engines", "| emulated hosts"))]
    assert len(rows) == 8 and len({strategy for strategy, _ in asked}) == 4
    assert rows[0].replace(" ", "") == "|engines|flat,Python|2.10|2.20|2.40|2.10|2.20|2.40|"
    assert drawn == ["figure.png"] and len(asked) == 8 * 3 + 1


def test_tune_starts_engines_where_asked_and_keeps_the_choice(monkeypatch, tmp_path, capsys):
    chosen, asked = Selection.parse("tree:0-99;ring:100-max"), []
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # set back afterwards
    monkeypatch.setattr(lab, "start", lambda *args, **kwargs: asked.append((args, kwargs)) or contextlib.nullcontext())
    monkeypatch.setattr(lab, "tune", lambda sizes, deadline: asked.append(sizes) or chosen)
    file = tmp_path / "chosen.txt"
    assert cli.main(["tune", "--ranks", "3", "--sizes", "4,1KiB", "--save", str(file)]) == 0
    assert asked == [((3,), {"where": "local"}), [4, 1024]] and f"{chosen}\n" in capsys.readouterr().out
    assert Selection.load(file) == chosen and "# hpdl tune --ranks 3 --sizes 4,1KiB --save" in file.read_text()
    assert cli.main(["tune", "--where", "emulated", "--link", "10gbit", "--save", str(file)]) == 0
    assert asked[2] == ((4,), {"where": "emulated", "link": "10gbit"}) and "--link 10gbit" in file.read_text()
    assert cli.main(["tune", "--sizes", "5"]) == 1 and len(asked) == 4
    assert "5 bytes are not a whole number of float32" in capsys.readouterr().err

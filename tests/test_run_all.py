"""`make test` itself: forks of the warm process are like new ones, results are read as they come, leftovers found."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import left_behind, run_all, warm

SCRIPT = """
import os, sys, torch
print(__name__, sys.argv, input(), os.getcwd(), os.environ["ASKED"], torch.ones(2).sum().item(), flush=True)
os.write(int(sys.argv[2]), b"by an inherited file")
sys.exit(3)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with warm.Server(tmp_path_factory.mktemp("warm") / "w") as server:
        yield server


def test_a_fork_has_the_arguments_files_environment_and_exit_status_of_a_new_process(server, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    reading, writing = os.pipe()
    environment = server.among(os.environ | {"ASKED": "for"})
    ran = [
        subprocess.run(
            [python, "script.py", "x", str(writing)], cwd=tmp_path, env=environment, pass_fds=[writing],
            input="typed\n", capture_output=True, text=True,
        )
        for python in (sys.executable, server.programs / "python")
    ]  # fmt: skip
    new, forked = ran
    assert (forked.stdout, forked.stderr, forked.returncode) == (new.stdout, new.stderr, new.returncode)
    assert forked.returncode == 3 and f"typed {tmp_path} for 2.0" in forked.stdout
    assert os.read(reading, 100) == 2 * b"by an inherited file"
    os.close(reading)
    os.close(writing)


def test_signals_reach_a_fork_which_ends_with_whoever_started_it(server, eventually):
    for number in (signal.SIGTERM, signal.SIGKILL):
        command = [server.programs / "python", "-c", "import time; print('here', flush=True); time.sleep(600)"]
        process = subprocess.Popen(command, env=server.among(dict(os.environ)), stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "here\n"
        process.send_signal(number)
        assert process.wait() == -number
        process.stdout.close()
        eventually(lambda: not psutil.Process(server.process.pid).children(recursive=True))


def test_results_are_read_while_a_step_runs_and_the_worst_rank_counts(tmp_path):
    running = run_all.Running(run_all.Step("s", [], "", ranks=2), tmp_path)
    for rank, outcome in enumerate(("passed", "failed")):
        Path(f"{running.results}-{rank}").write_text(
            '{"total": 1}\n'
            f'{{"test": "t", "outcome": "{outcome}", "seconds": 4.0, "text": "why"}}\n'
            '{"test": "half a li'
        )
    assert running.read() == ["t"] and running.read() == []
    assert (running.outcomes, running.texts, running.total, running.times["t"]) == ({"t": "failed"}, {"t": "why"}, 1, 4)


def test_what_is_left_behind_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv(left_behind.MARK, "")  # is set back
    monkeypatch.setattr(left_behind, "SECONDS", 0.5)
    monkeypatch.setattr(left_behind, "SHARED", (str(tmp_path),))
    (tmp_path / "hpdl-before").mkdir()
    snapshot = left_behind.Snapshot()
    for name in ("hpdl-store-1", "somebody-elses", "own"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "any name").touch()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        found = snapshot.left(tmp_path / "own")
    finally:
        process.kill()
        process.wait()
    assert found[0].startswith(f"process {process.pid}: ")
    assert found[1:] == [f"{tmp_path}/hpdl-store-1", f"{tmp_path}/own/any name"]


def test_the_end_of_a_run_says_why_each_test_has_failed(tmp_path, capsys):
    running = run_all.Running(run_all.pytest("unit tests", "python", "tests"), tmp_path)
    text = "    def test_it():\n>       assert one == 2\nE       assert 1 == 2\n\ntests/test_it.py:3: AssertionError\n"
    running.take({"test": "tests/test_it.py::test_it", "outcome": "failed", "seconds": 1.0, "text": text})
    assert run_all.conclude([running], [], 1.0) == 1
    said = capsys.readouterr().out
    assert "    python -m pytest 'tests/test_it.py::test_it'\n        E       assert 1 == 2\n" in said

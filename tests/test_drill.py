"""The rehearsal on a real hub with its real proxy: who does everything, who fails at what, and that nothing is left."""

import os
import pwd
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hpdl_lab import cli
from hpdl_lab.classroom import attendee, costs, drill, hub
from hpdl_lab.classroom.drill import Census, Process
from hpdl_lab.classroom.plan import STEPS, ClassPlan
from hpdl_lab.cli import plan as command

NAMES = [f"{name}{os.getpid()}" for name in ("ada", "bob", "eve")]  # no other hub of this machine has them
ADA, BOB, EVE = NAMES
ENGINES = 2
CELLS = [
    ("print(sum(lab.run(lambda comm: comm.rank)))", False),
    ("1 / 0", True),  # meant to fail
    ("assert lab.run(lambda comm: comm.size) == [2, 2]", False),
]


@pytest.fixture(scope="module")
def rehearsed():
    """A drill in which bob loses an engine before the notebook and eve's server cannot start: (Drill, state folder)."""
    with hub.private(NAMES, engines=ENGINES, idle=0) as running:
        folder = running.settings.state
        Path(folder, "homes", EVE, "server.log").mkdir()  # where her server's output should go
        attendees = [attendee.Attendee(running.url, name, f"{name}-password") for name in NAMES]
        done = drill.Drill(running, attendees, CELLS, ENGINES)
        for step in ("login", "server", "kernel", "engines"):
            done.do(step)
        assert [failure.name for failure in done.failures] == [EVE], done.failures
        engine = done.steps["engines"].after.of(BOB, "engine")[0]
        os.kill(engine.pid, signal.SIGKILL)
        done.do("notebook")
        for one in attendees:
            one.leave()
    done.look_for_leftovers(folder)
    return done, folder


def failures(done, name):
    return [failure for failure in done.failures if failure.name == name]


@pytest.mark.slow
def test_who_can_do_everything_does(rehearsed):
    done, _ = rehearsed
    assert failures(done, ADA) == []
    for step in ("login", "server", "kernel", "engines", "notebook"):
        assert done.steps[step].seconds[ADA] > 0
    look = done.steps["notebook"].after.of(ADA)
    assert [len(look.of(ADA, kind)) for kind in ("engine", "shell", "mpiexec")] == [ENGINES, ENGINES, 1]
    assert look.of(ADA, "engine").total("own_MB") > 10 and look.shm_MB > 0


@pytest.mark.slow
def test_a_server_that_cannot_start_is_named_with_user_and_step(rehearsed):
    done, _ = rehearsed
    (failure,) = failures(done, EVE)
    assert failure.step == "server" and str(failure).startswith(f"{EVE} failed at server: ")
    assert "server.log" in str(failure), failure
    assert EVE not in done.steps["kernel"].seconds


@pytest.mark.slow
def test_an_engine_that_is_killed_is_named_with_user_step_and_cell(rehearsed):
    done, _ = rehearsed
    (failure,) = failures(done, BOB)
    assert failure.step == "notebook"
    assert re.search(r"code cell 1 of 3 \(print\(sum\(lab\.run.*(RankFailed|EngineError): rank \d", str(failure))


@pytest.mark.slow
def test_nothing_is_left_behind(rehearsed):
    done, folder = rehearsed
    assert failures(done, "the hub") == []
    assert len([trace for trace in done.seen if isinstance(trace, tuple)]) > 12
    assert not any(map(drill.still_there, done.seen)) and not os.path.exists(folder)


@pytest.mark.slow
def test_the_command_prints_and_writes_the_tables_and_fails_where_somebody_failed(
    rehearsed, monkeypatch, tmp_path, capsys
):
    done, _ = rehearsed
    monkeypatch.setenv("HPDL_HOME", str(tmp_path))
    monkeypatch.setattr(drill, "run_drill", lambda n, notebook, say: done)
    file = tmp_path / "classroom.md"
    assert cli.main(["drill", "--users", "3", "--markdown", str(file)]) == 1
    printed, written = capsys.readouterr().out, file.read_text()
    for failure in done.failures:
        assert str(failure) in printed and str(failure) in written
    assert "2 failures of 3 attendees." in printed
    assert printed.endswith(f"{written.partition('## ')[2].partition('<!-- end')[0].strip()}\n")
    assert "`hpdl drill --users 3 --markdown" in written and "Python 3" in written
    monkeypatch.setattr(done, "failures", [])
    assert cli.main(["drill", "--users", "3", "--markdown", str(file)]) == 0
    assert "3 attendees, no failure, nothing left behind." in file.read_text()
    assert file.read_text().count("made by hpdl bench: drill") == 1


@pytest.mark.slow
def test_the_error_of_the_plan_is_predicted_over_measured_where_everybody_was_there(rehearsed):
    done, _ = rehearsed
    plan = ClassPlan(costs.read_costs(costs.SHIPPED), 3, 2, 24 * 10**9, 0, ENGINES)
    rows = {row[0]: row[1:] for row in command.steps(done, plan)}
    assert all(rows[step][0] == "2" and rows[step][3] == rows[step][4] == "" for step in ("kernel", "engines"))
    measured = max(done.steps["login"].seconds.values())
    error = f"{plan.seconds('login') / measured - 1:+.0%}"
    assert rows["login"][2:5] == [f"{measured:.1f}", f"{plan.seconds('login'):.1f}", error]


def test_an_attendee_on_whom_the_drill_itself_fails_is_a_failure_too(monkeypatch):
    """Nobody is forgotten, whatever the reply was."""
    monkeypatch.setattr(drill, "census", lambda pids: Census())
    running = SimpleNamespace(pids=(1,), settings=SimpleNamespace(state="/nowhere"))
    strange = SimpleNamespace(name="ada", log_in=lambda: {}["kernel"])
    done = drill.Drill(running, [strange], [])
    done.do("login")
    assert [str(failure) for failure in done.failures] == ["ada failed at login: KeyError: 'kernel'"]
    assert done.present == []


def rehearsal(notebook="00"):
    """A Drill of one attendee: each step 2 s, with two engines, of which each has taken 1 s more of processor time."""
    steps, before = {}, Census()
    for number, step in enumerate(STEPS, 1):
        engines = [Process(i, "engine", "ada", 1000.0, 300.0, 1.0 * number, 5, frozenset(), 0.0) for i in (1, 2)]
        hub = Process(3, "hub", "", 100.0, 50.0, 0.5 * number, 3, frozenset(), 0.0)
        shell = Process(4, "shell", "ada", 1.0, 0.0, 0.0, 1, frozenset({("/dev/shm/a", 4 * 10**6)}), 0.0)
        after = Census([*engines, hub, shell])
        steps[step], before = drill.DrillStep({"ada": 2.0}, before, after), after
    one = SimpleNamespace(name="ada")
    return SimpleNamespace(attendees=[one], notebook=notebook, engines=2, failures=[], steps=steps)


@pytest.mark.parametrize(("notebook", "planned"), [("00", True), ("04", False)])
def test_the_plan_is_held_against_the_notebook_that_its_constants_know(notebook, planned):
    known = costs.read_costs(costs.SHIPPED)
    rows = {row[0]: row[1:] for row in command.steps(rehearsal(notebook), ClassPlan(known, 1, 2, 24 * 10**9))}
    assert all((rows["notebook"][i] != "") == planned for i in (3, 4, 6, 7, 9, 10))
    assert rows["torch"][:3] == ["1", "2.0", "2.0"]
    assert (
        rows["torch"][5:7] == ["2.50", f"{known['torch_cpu_s'] + 4 * known['torch_engine_cpu_s']:.2f}"]
        and rows["torch"][8] == "2.75"
    )


def test_constants_are_what_one_attendee_took_and_of_that_each_engine():
    found = drill.values(rehearsal())
    assert set(found) == set(costs.COSTS)
    assert (found["torch_s"], found["server_hub_cpu_s"], found["torch_hub_cpu_s"]) == (2.0, 0.5, 0)
    assert (found["torch_cpu_s"], found["torch_engine_cpu_s"]) == (0.5, 1.0)
    assert (found["notebook_MB"], found["notebook_engine_MB"]) == (0.0, 1000.5)
    assert (found["notebook_threads"], found["notebook_engine_threads"]) == (0, 5.5)
    assert (found["hub_MB"], found["files_MB"], found["shm_MB"]) == (100, 650, 2)


def test_what_is_left_is_found_and_said(tmp_path):
    """A drill whose process, file and folder stay says so."""
    done = object.__new__(drill.Drill)
    done.failures, done.seen = [], {str(tmp_path / "segment")}
    (tmp_path / "segment").write_text("")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drill, "GONE_SECONDS", 0)
        done.look_for_leftovers(str(tmp_path))
    assert not drill.still_there((os.getpid(), 0.0))  # a process that has taken over the number
    (failure,) = done.failures
    assert str(failure).startswith("the hub failed at its end: 2 things are left, such as ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--users", "2", "--notebook", "99"], "no notebook '99': 00, 01, 02"),
        (["--users", "1000"], "GB free: rehearse with "),
        (["--users", "1000000"], "attendees is a number from 1 to 10,000, got 1,000,000"),
    ],
)
def test_a_clumsy_command_is_one_sentence(arguments, sentence, capsys):
    assert cli.main(["drill", *arguments]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_a_drill_that_is_ended_leaves_nothing(tmp_path):
    """SIGTERM while the hub is up: accounts, folder and processes go."""
    command = [sys.executable, "-u", "-m", "hpdl_lab", "drill", "--users", "1"]
    environment = {**os.environ, "HPDL_HOME": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        folder = next(line.split()[-1] for line in run.stdout if " in /tmp/" in line)
        next(line for line in run.stdout if line.startswith("login"))
        run.terminate()
        assert run.wait(400) == 130, run.stderr.read()
    assert not os.path.exists(folder)
    assert not any(entry.pw_dir.startswith(folder) for entry in pwd.getpwall())
    assert not [p for p in psutil.process_iter(["cmdline"]) if folder in " ".join(p.info["cmdline"] or ())]


def test_cells_that_are_meant_to_fail_are_known():
    cells = drill.solution_cells("00")
    assert [raises for _, raises in cells].count(True) == 1 and "deadline=1.5" in dict((r, c) for c, r in cells)[True]

"""lab.check_script rejects every wrong script for the reason meant for it, within its time, and accepts right ones."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import torch

from hpdl_lab import cli, lab, models
from hpdl_lab.checks.exercises import find
from hpdl_lab.checks.scripts import launch as launching
from hpdl_lab.checks.scripts.table import ALONE, SCRIPTS, check_script, script_of
from hpdl_lab.models.transformer import separate_qkv
from hpdl_lab.verbs.exercises import exercises_until
from hpdl_lab.verbs.progress import progress
from hpdl_lab.watch import launch as watching
from tests import script_answers
from tests.wording import raises

WRONG = [*script_answers.wrong_scripts()]
QUICK = ("same data", "raises", "deadlock")  # of 6.7: judged by what a model reads, an exception, who waits
RIGHT = [(exercise, name, edits) for exercise in SCRIPTS for name, edits in script_answers.RIGHT[exercise.id].items()]


@pytest.fixture(scope="module")
def launcher():
    with launching.ScriptLauncher() as launcher:
        yield launcher


def checked(exercise, text, folder, launcher=None):
    path = folder / exercise.file
    path.write_text(text)
    return check_script(exercise, path, launcher)


def rows():
    """The first script for each of QUICK is launched by `make test`, the others by `make test-all`."""
    first = {(exercise.id, failed): says for exercise, failed, says, _ in reversed(WRONG) if failed in QUICK}
    for exercise, failed, says, text in WRONG:
        marks = () if exercise.id == "6.7" and first.get(("6.7", failed)) == says else (pytest.mark.slow,)
        yield pytest.param(exercise, failed, says, text, marks=marks, id=f"{exercise.id}-{failed}-{says[:30]}")


@pytest.mark.parametrize(("exercise", "failed", "says", "text"), [*rows()])
def test_a_wrong_script_is_rejected_with_its_message_in_time(exercise, failed, says, text, tmp_path, launcher):
    began = time.monotonic()
    result = checked(exercise, text, tmp_path, launcher)
    assert (result.failed, says.lower() in result.message.lower()) == (failed, True), str(result)
    assert time.monotonic() - began < launching.LIMIT


@pytest.mark.parametrize("exercise", SCRIPTS, ids=lambda e: e.id)
def test_the_solution_passes(exercise, launcher):
    result = check_script(exercise, script_of(exercise.file), launcher)
    assert result, str(result)
    assert "as on one rank, to 1e-12" in str(result)


@pytest.mark.slow
@pytest.mark.parametrize(("exercise", "name", "edits"), RIGHT, ids=[f"{e.id}-{name}" for e, name, _ in RIGHT])
def test_another_right_script_passes(exercise, name, edits, tmp_path, launcher):
    result = checked(exercise, script_answers.edited(exercise.solution, edits), tmp_path, launcher)
    assert result, str(result)


@pytest.mark.slow
def test_torchrun_itself_prints_what_one_rank_prints(tmp_path):
    """The check forks its ranks from one process that has imported torch; torchrun starts each of them anew."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script_of("train_ddp.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    one, two = (
        subprocess.run([sys.executable, *more], cwd=tmp_path, env=environment, capture_output=True, text=True).stdout
        for more in ([script_of(ALONE)], command)
    )
    assert one == two and one.count(" loss ") == 7


def test_a_script_that_python_cannot_read_is_not_launched(tmp_path):
    result = checked(SCRIPTS[0], "import torch\nfor x in range(3)\n    pass\n", tmp_path)
    assert (result.failed, "line 2, `for x in range(3)`" in result.message) == ("syntax", True), result


def test_the_verb_finds_the_exercise_by_the_name_of_the_file_and_has_hints(tmp_path, monkeypatch):
    monkeypatch.setenv("HPDL_HOME", str(tmp_path))
    progress.cache_clear()
    monkeypatch.chdir(tmp_path)
    with raises(LookupError, "train_ddp.py, train_fsdp.py, train_tp.py, train_hybrid.py"):
        lab.check_script("my_script.py")
    with raises(LookupError, "train_ddp is none", "train_ddp.py"):
        lab.check_script("train_ddp")
    with raises(TypeError, "train_ddp.py", "function"):
        lab.check_script(lab.train)
    with pytest.raises(FileNotFoundError, match="run the cell that writes it"):
        lab.check_script("train_ddp.py")
    (tmp_path / "train_ddp.py").write_text(script_of(ALONE).read_text())
    result = lab.check_script("train_ddp.py")
    assert result.failed == "init" and "lab.hint()" in str(result)
    assert progress().last_check()["exercise"] == "6.7"
    assert "first hint" in str(lab.hint()) and "DistributedSampler(train)" in str(lab.solution("train_ddp"))
    progress.cache_clear()


@pytest.mark.parametrize("exercise", SCRIPTS, ids=lambda e: e.id)
def test_a_record_is_complete(exercise):
    assert find(exercise.id) is find(exercise.name) is exercise
    assert exercise.explanation and "" in exercise.hints
    assert all(len(levels) == len(set(levels)) == 3 for levels in exercise.hints.values())
    rejected = {failed for of, failed, _, _ in WRONG if of is exercise}
    assert set(exercise.hints) - {""} <= rejected and len(rejected) >= 4


def test_catching_up_to_a_script_takes_the_exercises_before_it():
    assert [e.id for e in exercises_until(9, "5")] == ["9.1", "9.2", "9.3", "9.4"]
    assert len(exercises_until(9, "")) == 5 and not exercises_until(9, "7")


def test_three_layers_compute_what_one_did():
    model = models.build("gpt", heads=4, dtype="float64")
    tokens = torch.randint(0, 80, (2, 64))
    whole = model(tokens)
    assert torch.allclose(separate_qkv(model)(tokens), whole, rtol=0, atol=1e-12)
    assert {name.split(".")[3] for name, _ in model.named_parameters() if "attention" in name} == set("qkv") | {"out"}


STOPS = {
    "a rank ends early": ("raise SystemExit(0)", "deadlock", "rank 1 has ended"),
    "a rank is killed": ("os._exit(3)", "launch", "Rank 1 ended"),
    "a rank is killed while others compute": (
        "print('so far', flush=True), os._exit(3)\nimport time; time.sleep(60)",
        "launch",
        "Rank 1 ended with exit code 3",
    ),
    "a rank fails": ("raise ValueError(3)", "raises", "Rank 1 raised ValueError in line 3, `if dist.get_rank() == 1: "),
    "a loop goes on": ("[0 for _ in iter(int, 1)]", "time", "a loop that never ends"),
}


@pytest.mark.parametrize(("does", "failed", "says"), STOPS.values(), ids=list(STOPS))
def test_a_rank_that_does_not_come_is_waited_for_in_vain_but_not_for_long(
    does, failed, says, tmp_path, monkeypatch, launcher, eventually
):
    """recv waits for rank 1; nothing of it is left when the check returns."""
    if failed == "time":
        monkeypatch.setattr(launching, "LIMIT", 15.0)
    lines = ["import os, torch, torch.distributed as dist", 'dist.init_process_group("gloo")']
    lines += [f"if dist.get_rank() == 1: {does}", "dist.recv(torch.zeros(3), 1)"]
    result = checked(SCRIPTS[0], "\n".join(lines), tmp_path, launcher)
    assert (result.failed, says in result.message) == (failed, True), str(result)
    assert "checks/scripts" not in result.detail
    eventually(lambda: not psutil.Process(launcher._process.pid).children(recursive=True))


@pytest.mark.slow
def test_ranks_that_never_met_are_launched_a_second_time(tmp_path, monkeypatch, launcher):
    monkeypatch.setattr(watching, "MEETING_PATIENCE", 1.0)
    launches, launch = [], launcher._launch
    monkeypatch.setattr(launcher, "_launch", lambda *call: launches.append(call) or launch(*call))
    meet = 'dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=3)'
    result = checked(SCRIPTS[0], f"import os, torch.distributed as dist\n{meet}\n", tmp_path, launcher)
    assert (result.failed, len(launches)) == ("deadlock", 2), str(result)


def test_the_command_prints_what_is_wrong_and_fails(tmp_path, capsys):
    path = tmp_path / "train_ddp.py"
    path.write_text("for x in range(3)\n")
    assert cli.main(["check", str(path)]) == 1
    assert "6.7 train_ddp.py: not yet (syntax)" in capsys.readouterr().out
    assert cli.main(["check", "train_gpt.py"]) == 1
    assert "none of the scripts to convert" in capsys.readouterr().err

"""Engines in a job of PBS or LSF, both played by tests/fakes/batch.py: start, refusals, the queue, ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from hpdl_lab import lab
from hpdl_lab.engines.errors import EngineError

pytestmark = pytest.mark.slow
FAKE = Path(__file__).with_name("fakes") / "batch.py"
COMMANDS = {"pbs": ("qsub", "qdel", "qstat"), "lsf": ("bsub", "bkill", "bjobs")}
SYSTEMS = pytest.mark.parametrize("where", COMMANDS)
NAME = {"pbs": "PBS", "lsf": "LSF"}


class Batch:
    """The folder of the batch system."""

    def __init__(self, folder):
        self.folder = folder

    def calls(self, command):
        calls = (self.folder / "calls").read_text().splitlines()
        return [line for line in calls if line.split()[0] == command]

    def call(self, command, where):
        subprocess.run([self.folder / COMMANDS[where][command], "100"], check=True)

    def options(self):
        """What the newest job has asked for."""
        return json.loads(max(self.folder.glob("*.options")).read_text())

    def jobs(self):
        """Files of jobs that wait or run."""
        return [*self.folder.glob("*.waits"), *self.folder.glob("*.runs")]


@pytest.fixture
def batch(tmp_path, no_engines_yet, monkeypatch, eventually):
    """Both systems' commands are first on PATH; at the end no job, and no folder of a session, is left."""
    for name in ("home", "bin", "shared"):
        (tmp_path / name).mkdir()
    found = Batch(tmp_path / "bin")
    for name in sum(COMMANDS.values(), ()):
        (found.folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} {found.folder} {name} "$@"\n')
        (found.folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{found.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HPDL_SHARED", str(tmp_path / "shared"))
    with subprocess.Popen([sys.executable, FAKE, found.folder, "serve"]) as daemon:
        yield found
        lab.stop()
        eventually(lambda: not found.jobs())
        daemon.kill()
    assert not list((tmp_path / "shared").iterdir())


def sum_of_ranks(comm):
    x = np.ones(3) * comm.rank
    comm.all_reduce(x)
    return x[0], os.environ.get("HOME"), os.getcwd()


@SYSTEMS
def test_engines_come_work_and_leave(where, batch, capsys):
    lab.start(4, where=where, nodes=2, time="0:30:00", queue="x", account="y", gpus=1, device="cpu")
    number, command = "100", COMMANDS[where]
    assert f"engines 0-3 ({NAME[where]} job {number})" in capsys.readouterr().out
    assert lab.run(sum_of_ranks) == [(6.0, os.environ["HOME"], os.getcwd())] * 4
    lab.restart()
    assert lab.run(sum_of_ranks)[0][0] == 6.0
    assert len(batch.calls(command[0])) == 1 and not batch.calls(command[1])
    pbs = {"-l": "select=2:ncpus=2:mpiprocs=2:ngpus=2 place=scatter walltime=00:30:00", "-q": "x", "-A": "y"}
    lsf = {"-n": "4", "-R": "span[ptile=2]", "-W": "30", "-gpu": "num=1/task", "-q": "x", "-P": "y"}
    assert {"pbs": pbs, "lsf": lsf}[where].items() <= batch.options().items()
    lab.stop()
    assert batch.calls(command[1]) == [f"{command[1]} {number}"] and not batch.jobs()


@SYSTEMS
def test_what_is_refused_is_one_sentence(where, batch):
    complaint = {"pbs": "qsub says: qsub: Unknown queue", "lsf": r"bsub says: z: No such queue\. Job not submitted"}
    with pytest.raises(EngineError, match=rf"^{complaint[where]}[^\n]*$"):
        lab.start(2, where=where, queue="z")
    assert not lab.running()


@SYSTEMS
def test_a_job_that_waits_too_long_is_given_up(where, batch, capsys):
    (batch.folder / "hold").touch()
    with pytest.raises(EngineError, match=r"^0 of 2 engines of ipyparallel have come after 1 s: wait=2 waits longer$"):
        lab.start(2, where=where, wait=1)
    assert f"0 of 2 engines of ipyparallel have come ({NAME[where]} job 100). Ctrl-C" in capsys.readouterr().out
    assert batch.calls(COMMANDS[where][1])


@SYSTEMS
def test_a_job_that_ends_in_the_queue(where, batch, capsys):
    (batch.folder / "hold").touch()
    waiting = threading.Timer(2.0, lambda: batch.call(1, where))
    waiting.start()
    with pytest.raises(
        EngineError, match=rf"^{NAME[where]} job 100 has ended; its engines said: nothing; [^\n]*HPDL_SHARED"
    ):
        lab.start(2, where=where)
    waiting.join()


@SYSTEMS
def test_a_job_that_is_killed(where, batch, eventually):
    lab.start(2, where=where)
    batch.call(1, where)
    with pytest.raises(EngineError, match=r"^(PBS|LSF) job 100 has ended: call lab\.restart\(\) for 2 engines"):
        lab.run(sum_of_ranks)
    lab.restart()
    assert lab.run(sum_of_ranks)[1][0] == 1.0 and len(batch.calls(COMMANDS[where][0])) == 2


NOTEBOOK = "from hpdl_lab import lab; lab.start(2, where={!r}); print('up', flush=True); input()"


@SYSTEMS
def test_the_job_ends_with_a_notebook_that_is_killed(where, batch, tmp_path, eventually):
    command = [sys.executable, "-c", NOTEBOOK.format(where)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as notebook:
        assert "up\n" in iter(notebook.stdout.readline, "")
        assert batch.jobs()
        notebook.send_signal(signal.SIGKILL)
    eventually(lambda: not batch.jobs() and not list((tmp_path / "shared").iterdir()))
    assert batch.calls(COMMANDS[where][1])


@SYSTEMS
def test_a_second_signal_does_not_keep_the_job_from_ending(where, batch, eventually):
    lab.start(2, where=where)
    holds = ["hpdl_lab.engines.ipyparallel_job", lab.cluster().path]
    (job,) = (p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-2:] == holds)
    for _ in range(2):
        job.terminate()
        time.sleep(0.03)
    eventually(lambda: batch.calls(COMMANDS[where][1]) and not batch.jobs())


@SYSTEMS
def test_no_batch_system(where, batch):
    (batch.folder / COMMANDS[where][0]).unlink()
    with pytest.raises(EngineError, match=rf"^there is no command {COMMANDS[where][0]} here: [^\n]*lab\.start\(2\)$"):
        lab.start(2, where=where)


def hpdl(*arguments):
    return subprocess.run([sys.executable, "-m", "hpdl_lab", "cluster", *arguments], capture_output=True, text=True)


def test_the_command(batch):
    done = hpdl("start", "--where", "pbs", "--engines", "2", "--queue", "x", "--time", "10")
    assert done.returncode == 0 and "(PBS job 100)" in done.stdout and "lab.start(2)" in done.stdout, done
    assert batch.options()["-l"].endswith("walltime=00:10:00")
    assert hpdl("stop").stdout == "2 engines in a PBS job: ended.\n" and batch.calls("qdel")
    done = hpdl("start", "--where", "lsf", "--partition", "x")
    told = "hpdl: partition= belongs to where='slurm': lab.start("
    assert (done.returncode, done.stderr[: len(told)], done.stderr.count("\n")) == (1, told, 1)


def test_ctrl_c_ends_the_wait_and_the_job(batch):
    (batch.folder / "hold").touch()
    command = [sys.executable, "-m", "hpdl_lab", "cluster", "start", "--where", "pbs"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        line = next(line for line in waiting.stdout if "(PBS job 100)" in line)
        assert line == "0 of 4 engines of ipyparallel have come (PBS job 100). Ctrl-C ends the wait, and the job.\n"
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(120) == 130
    assert batch.calls("qdel") == ["qdel 100"] and not batch.jobs()

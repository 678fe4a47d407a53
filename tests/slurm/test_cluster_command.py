"""`hpdl cluster` with engines in a Slurm job: notebooks attach, the wait is told, Ctrl-C ends it, stop cancels."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from hpdl_lab import lab
from hpdl_lab.engines.errors import EngineError

HPDL = [sys.executable, "-m", "hpdl_lab", "cluster"]


@pytest.fixture(autouse=True)
def shared(tmp_path, no_engines_yet, monkeypatch):
    """Nothing of this user's own is touched; the nodes see this folder."""
    monkeypatch.setenv("HPDL_SHARED", str(tmp_path))


def hpdl(*arguments):
    return subprocess.run([*HPDL, *arguments], capture_output=True, text=True)


def test_engines_in_a_job_stay_for_notebooks(slurm):
    done = hpdl("start", "--engines", "2", "--nodes", "2", "--partition", "class", "--time", "10")
    assert done.returncode == 0 and "lab.start(2)" in done.stdout, done
    where = ["n1", "n2"] if slurm.network else [os.uname().nodename.partition(".")[0]] * 2
    cluster = lab.start(2)
    try:
        assert cluster.attached and lab.run(lambda comm: socket.gethostname()) == where
    finally:
        cluster.detach()
    told = hpdl("status")
    assert told.returncode == 0 and "2 engines in a Slurm job, used by no process now." in told.stdout, told
    assert f"Slurm job {slurm.jobs()[0]} runs on n1, n2." in told.stdout
    assert hpdl("stop").stdout == "2 engines in a Slurm job: ended.\n"


def test_the_wait_is_told_and_ended_by_ctrl_c_or_in_one_sentence(slurm):
    busy = slurm.ask(
        "sbatch", "--parsable", "--ntasks=16", "--output=/dev/null", "--wrap=exec sleep 1000"
    ).stdout.strip()
    try:
        command = [*HPDL, "start", "--engines", "2", "--nodes", "2"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
            for line in waiting.stdout:
                if "are in use (Resources)" in line:
                    break
            assert "waits in partition class" in line and line.endswith("Ctrl-C ends the wait, and the job.\n")
            told = hpdl("status")
            assert (told.returncode, "waits in partition class" in told.stdout) == (1, True), told
            waiting.send_signal(signal.SIGINT)
            assert waiting.wait(120) == 130
        assert slurm.jobs() == [busy]
        waited = r"waits in partition class: [^\n]* It was cancelled after 1 s in the queue: wait=2 waits longer"
        with pytest.raises(EngineError, match=rf"^Slurm job \d+ {waited}[^\n]*$"):
            lab.start(1, where="slurm", wait=1)
        assert slurm.jobs() == [busy]
    finally:
        slurm.ask("scancel", busy)


def test_what_slurm_refuses_is_one_sentence(slurm):
    done = hpdl("start", "--partition", "gpu")
    told = "hpdl: Slurm refused the job: it has no such partition; there are: class, short, closed\n"
    assert (done.returncode, done.stderr) == (1, told)

"""`hpdl cluster start`, `status`, `stop`: engines that outlive the command, and end with another one."""

import os
import re
import signal
import subprocess
import sys

import pytest

from hpdl_lab.engines.cluster import Cluster

USE = "from hpdl_lab import lab; lab.start(2); print('ranks', lab.run(lambda comm: comm.rank))"


def hpdl(*arguments):
    command = [sys.executable, "-m", "hpdl_lab", "cluster", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def up(no_engines_yet, traces):
    """Two engines that `hpdl cluster start` has left up."""
    done = hpdl("start", "--engines", "2")
    assert done.returncode == 0, done.stderr
    assert "hpdl cluster stop" in done.stdout and "lab.start(2)" in done.stdout
    yield traces(no_engines_yet)
    hpdl("stop")


def test_engines_stay_for_notebooks_until_they_are_stopped(up):
    used = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True)
    assert "Using the engines" in used.stdout and used.stdout.endswith("ranks [0, 1]\n"), used
    second = Cluster.start(2)  # the first notebook's end has not ended them
    assert second.attached and second.run(lambda comm: comm.rank) == [0, 1]
    second.detach()
    told = hpdl("status")
    while "used by processes" in told.stdout:  # it has not been seen yet that they have gone
        told = hpdl("status")
    assert told.returncode == 0 and told.stdout.startswith("2 engines, used by no process now.\nrank"), told
    again = hpdl("start", "--engines", "3")
    assert again.returncode == 1
    assert again.stderr == "hpdl: 2 engines are up already: use them, or end them first: hpdl cluster stop\n"
    assert hpdl("stop").stdout == "2 engines: ended.\n"
    up.wait_until_gone()
    told = hpdl("status")
    assert (told.returncode, told.stdout[:23]) == (1, "No engines of yours are")
    assert hpdl("stop").returncode == 0


def test_status_says_what_is_wrong_and_nothing_is_left_when_their_last_user_is_killed(up):
    table = hpdl("status").stdout.splitlines()
    os.kill(int(next(row for row in table if row.startswith("1 ")).split()[-1]), signal.SIGKILL)
    told = hpdl("status")
    while told.returncode == 0:  # the engine is about to die
        told = hpdl("status")
    assert re.search(r"(rank|engine) 1 .*call lab.restart\(\)", told.stdout), told
    user = next(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if holds(pid, up.path))
    os.kill(user, signal.SIGKILL)
    up.wait_until_gone(seconds=60)


def holds(pid, path):
    return "hpdl_lab.engines.supervisor_client" in command(pid) and path in command(pid)


def command(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""

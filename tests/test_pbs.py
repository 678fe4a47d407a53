"""The PBS scripts, run with the variables and the node file that PBS gives a job, on this machine alone."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from jupyter_client import BlockingKernelClient

ROOT = Path(__file__).resolve().parent.parent
PBS = ROOT / "cluster" / "pbs"
SCRIPTS = sorted(PBS.glob("*.pbs"))

# Options of qsub that a script may carry, and the form of what follows them (qsub(1B) of OpenPBS).
DIRECTIVES = {
    "-N": r"[A-Za-z][\w-]{0,229}",
    "-l": r"(select=\d+(:(ncpus|mpiprocs|ngpus|mem)=\d+(gb|mb)?)+|walltime=\d{2}:\d{2}:\d{2})",
    "-j": r"oe|eo|n",
    "-k": r"[oe]{1,2}d?",
    "-q": r"\w+",
    "-A": r"\w+",
}

RANKS = """
import numpy as np
from hpdl_lab import comm
world = comm.world()
total = world.all_reduce(np.ones(3, dtype=np.float32))
with open(f"rank{world.rank}", "w") as file:
    print(world.size, int(total[0]), file=file)
"""
ENGINES = """
from hpdl_lab.engines.cluster import Cluster
cluster = Cluster.start(4)
print(cluster.run(lambda comm: (comm.rank, comm.size)))
"""


def directives(script):
    """[("-N", "hpdl-lab"), ...]; PBS reads them up to the first command."""
    lines = []
    for line in script.splitlines():
        if line.startswith("#PBS "):
            lines.append(tuple(line.split(None, 2)[1:]))
        elif line and not line.startswith("#"):
            break
    return lines


def wrong(found):
    return [f"{option} {value}" for option, value in found if not re.fullmatch(DIRECTIVES.get(option, "(?!)"), value)]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_directives_are_of_qsubs_form(path):
    found = directives(path.read_text())
    assert {"-N", "-l", "-j"} <= dict(found).keys() and wrong(found) == []
    assert path.read_text().count("\n#PBS ") == len(found), "a directive below the first command, where PBS reads none"


@pytest.fixture
def job(tmp_path, no_engines_yet):
    """`job("ranks.pbs", SCRIPT="x.py")` starts the script as PBS starts it: in the home, told where qsub was called."""
    clone, home, nodes = tmp_path / "clone", tmp_path / "home", tmp_path / "nodes"
    for folder in (clone, home):
        folder.mkdir()
    (clone / ".venv").symlink_to(sys.prefix)
    (clone / "cluster").symlink_to(ROOT / "cluster")
    nodes.write_text("localhost\n" * 4)  # a line for each of select=2:mpiprocs=2
    said = {
        "PBS_O_WORKDIR": str(clone),
        "PBS_NODEFILE": str(nodes),
        "PBS_JOBID": "1234.pbs",
        "PBS_JOBNAME": "hpdl",
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_O_HOST": "login1",
        "PBS_O_LOGNAME": "ada",
        "PBS_NODENUM": "0",
        "NCPUS": "4",
        "HOME": str(home),
    }
    started = []

    def start(name, **variables):
        environment = {**os.environ, **said, **variables}
        spool = tmp_path / "1234.pbs.SC"  # PBS runs a copy
        spool.write_text((PBS / name).read_text())
        process = subprocess.Popen(
            ["bash", spool],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        process.clone = clone
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.slow
def test_a_rank_for_each_line_of_the_node_file(job, tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    start = job("ranks.pbs", SCRIPT=str(script))
    said, _ = start.communicate()
    assert start.returncode == 0, said
    assert "4 ranks on localhost" in said
    assert [(start.clone / f"rank{rank}").read_text() for rank in range(4)] == ["4 4\n"] * 4


def test_a_job_without_a_script_says_how_to_name_it(job):
    start = job("ranks.pbs")
    said, _ = start.communicate()
    assert start.returncode and "name it: qsub -v SCRIPT=train.py" in said


@pytest.mark.slow
def test_four_engines_in_a_notebook_of_the_job_and_qdel_ends_them(job, tmp_path, until_ended):
    start = job("lab.pbs")
    lines = []
    for line in start.stdout:
        lines.append(line)
        if found := re.search(r"(http://127\.0\.0\.1:\d+)/lab/tree/00_why\.ipynb\?token=(\w+)", line):
            break
    assert f"ssh -N -J ada@login1 -L 8888:127.0.0.1:8888 ada@{socket.gethostname()}" in "".join(lines)
    base, token = found.groups()
    post = urllib.request.Request(f"{base}/api/kernels", b"{}", {"Authorization": f"token {token}"})
    with urllib.request.urlopen(post, timeout=300) as answer:
        kernel = json.load(answer)["id"]
    client = BlockingKernelClient()
    arguments = [argument for process in processes_of(tmp_path / "home") for argument in process.cmdline()]
    client.load_connection_file(next(argument for argument in arguments if argument.endswith(f"{kernel}.json")))
    client.start_channels(hb=False)
    client.wait_for_ready(timeout=300)
    said = []
    reply = client.execute_interactive(
        ENGINES, timeout=300, output_hook=lambda message: said.append(message["content"])
    )
    client.stop_channels()
    assert reply["content"]["status"] == "ok", reply["content"]
    assert "[(0, 4), (1, 4), (2, 4), (3, 4)]" in "".join(content.get("text", "") for content in said)
    started = processes_of(tmp_path / "home")
    assert len(started) >= 6  # server, kernel, four engines
    start.send_signal(signal.SIGTERM)  # what qdel and the time limit send first
    start.wait(60)
    until_ended(started)


def processes_of(home):
    """Every process that was started with this home."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                found.append(process)
    return found

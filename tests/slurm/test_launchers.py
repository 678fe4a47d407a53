"""Plain ipyparallel on Slurm nodes by our launchers, with nothing configured."""

import json
import os
import signal
import subprocess
import sys
import time

import ipyparallel
import psutil
import pytest
from ipyparallel.cluster.launcher import LauncherError

from hpdl_lab.engines import slurm_step
from hpdl_lab.engines.slurm_launchers import ending_with_children
from tests.slurm.controller import environment_of

pytestmark = pytest.mark.timeout(300)

HEARTBEATS = "c = get_config(); c.HeartMonitor.period, c.HeartMonitor.max_heartmonitor_misses = 300, 100"  # ms
IPCLUSTER = [sys.executable, "-m", "ipyparallel.cluster"]


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    """Profiles of this test's own, in a folder that the nodes see. An engine counts after two heartbeats.

    They come often, so that one is lost only after many.
    """
    profile = tmp_path / "ipython" / "profile_default"
    profile.mkdir(parents=True)
    (profile / "ipcontroller_config.py").write_text(HEARTBEATS)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("HPDL_SHARED", str(tmp_path / "shared"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    ours = f"IPYTHONDIR={profile.parent}"
    give_up = time.monotonic() + 60
    while left := [process for process in psutil.process_iter() if ours in environment_of(process)]:
        if time.monotonic() > give_up:
            told = [f"{process}: {' '.join(process.cmdline())}" for process in left]
            for process in left:
                process.kill()
            pytest.fail(f"left behind: {told}")
        time.sleep(0.1)


@ipyparallel.interactive  # or engines would import this file for it
def who():
    import os
    import socket

    from mpi4py import MPI

    total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank)
    return MPI.COMM_WORLD.rank, total, socket.gethostname(), os.environ.get("CUDA_VISIBLE_DEVICES")


def test_a_cluster_on_two_nodes(slurm, private):
    cluster = ipyparallel.Cluster(engines="hpdl-slurm", n=4, log_level=30)
    cluster.config.SlurmEngineSetLauncher.update(nodes=2, gpus=1, partition="class")
    with cluster as client:
        client.wait_for_engines(4, timeout=240)
        told = client[:].apply_sync(who)
        with open(cluster.controller.connection_files["engine"]) as file:
            told_to_engines = json.load(file)
    nodes = ["n1", "n1", "n2", "n2"] if slurm.network else [os.uname().nodename.partition(".")[0]] * 4
    assert [(rank, total) for rank, total, _, _ in told] == [(rank, 6) for rank in range(4)]  # id = rank, one MPI job
    assert [host for _, _, host, _ in told] == nodes
    assert [gpu for _, _, _, gpu in told] == ["0", "1", "0", "1"]
    assert "//127." not in told_to_engines["interface"] or not slurm.network
    assert told_to_engines["curve_serverkey"]
    assert os.listdir(private / "shared") == []


def test_what_slurm_refuses_is_said(slurm):
    cluster = ipyparallel.Cluster(engines="hpdl-slurm", n=2, log_level=50)
    cluster.config.SlurmEngineSetLauncher.partition = "gpu"
    with pytest.raises(LauncherError, match="it has no such partition; there are: class, short, closed"):
        cluster.start_cluster_sync()
    cluster.stop_cluster_sync()


def test_from_a_shell(slurm):
    """`ipcluster start --engines=hpdl-slurm`, and `ipcluster stop`, which cancels the job."""
    start = [*IPCLUSTER, "start", "--engines=hpdl-slurm", "-n", "1", "--daemonize", "--SlurmEngineSetLauncher.time=7"]
    assert subprocess.run(start, timeout=120).returncode == 0
    with ipyparallel.Client(timeout=240, cluster_id="") as client:
        client.wait_for_engines(1, timeout=240)
        assert [rank for rank, _, _, _ in client[:].apply_sync(who)] == [0]
    (job,) = slurm.jobs()
    assert "TimeLimit=00:07:00" in slurm.ask("scontrol", "show", "job", job).stdout
    assert subprocess.run([*IPCLUSTER, "stop"], timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("devices", "size", "shares"),
    [
        ("0,1,2,3", 4, ["0", "1", "2", "3"]),
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("4,7", 3, ["4", "7", "4"]),
        ("", 2, ["", ""]),
    ],
)
def test_each_rank_of_a_node_has_its_share_of_the_gpus(devices, size, shares):
    assert [slurm_step.share(devices, rank, size) for rank in range(size)] == shares


FORKING = """
import os, time
much = b"1" * (100 << 20)  # which makes each fork long
print(flush=True)
for _ in range(300):
    if os.fork() == 0:
        break
time.sleep(100)
"""


def test_a_controller_that_is_starting_processes_is_ended_with_all_of_them():
    """The fixture above finds what would be left."""
    process = subprocess.Popen([sys.executable, "-c", FORKING], stdout=subprocess.PIPE)
    process.stdout.readline()
    with process.stdout, ending_with_children(process.pid):
        process.wait(60)
    assert process.returncode == -signal.SIGTERM

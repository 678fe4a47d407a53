"""Engines of ipyparallel in pods of Kubernetes, played by machines of their own; the controller is a service outside.

A pod has an address, a name, processes and /dev/shm of its own, knows no other by name, and shares no folder with the
notebook: what its engine is told of the controller comes in its environment, as from a Secret.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import ipyparallel
import numpy as np
import pytest

from hpdl_lab import lab
from hpdl_lab.classroom import settings
from hpdl_lab.comm.errors import CommTimeout, RankFailed
from hpdl_lab.engines.errors import EngineError
from tests.slurm.controller import walls
from tests.slurm.nodes import Network, Refused, end

PODS = 2


class Pods:
    """A controller, and a pod for each engine."""

    def __init__(self, network, folder, hidden, eventually):
        self.network, self.folder, self.hidden = network, folder, hidden
        self.log = open(folder / "said", "ab")
        options = [f"--ip={network.address}", f"--profile-dir={folder}", "--IPController.enable_curve=True"]
        self.controller = self.open([sys.executable, "-m", "ipyparallel.controller", *options])
        self.file = folder / "security" / "ipcontroller-client.json"
        eventually(self.file.exists)
        self.pods = [self.add(number) for number in range(1, PODS + 1)]

    def open(self, command):
        return subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True)

    def add(self, number):
        """Start a pod with one engine."""
        secret = (self.folder / "security" / "ipcontroller-engine.json").read_text()
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "HPDL_TEST_RUN") if name in os.environ}
        environment |= {"IPP_CONNECTION_INFO": secret, "IPYTHONDIR": "/dev/shm/ipython"}
        engine = [sys.executable, "-m", "ipyparallel.engine"]
        opened = walls(sys.prefix, sys.base_prefix, settings.PACKAGE)
        return self.network.add(number, engine, environment, self.log, self.hidden, opened)

    def client(self):
        return ipyparallel.Client(str(self.file))

    def close(self):
        for pod in self.pods:
            end(pod)
        os.killpg(self.controller.pid, signal.SIGTERM)
        self.controller.wait()
        self.log.close()


@pytest.fixture(scope="module")
def pods(eventually):
    with tempfile.TemporaryDirectory(prefix="hpdl-t-", dir="/tmp") as root, pytest.MonkeyPatch.context() as patch:
        for name in ("run", "ipp"):
            (Path(root) / name).mkdir(mode=0o700)
        patch.setenv("XDG_RUNTIME_DIR", f"{root}/run")
        try:
            network = Network()
        except Refused as refused:
            pytest.skip(f"this system allows no machines: {refused}")
        pods = Pods(network, Path(root) / "ipp", [root], eventually)
        yield pods
        lab.stop()
        pods.close()
        network.close()


@pytest.fixture
def client(pods):
    with pods.client() as client:
        client.wait_for_engines(PODS)
        lab.start(client=client, wait=20)
        yield client


def reduced(comm):
    large = np.full(300_000, comm.rank + 1.0)
    comm.all_reduce(large)
    return socket.gethostname(), float(large[-1]), os.getpid()


def test_ranks_in_pods_meet_over_tcp(client, capsys):
    assert [each[:2] for each in lab.run(reduced)] == [("n1", 3.0), ("n2", 3.0)]
    lab.cluster().show()
    said = capsys.readouterr().out
    assert (
        "ranks on n1, n2, where ipyparallel has started its engines 0, 1; MPI's messages between hosts go by TCP"
        in said
    )


def test_a_deadlock_is_told_with_its_line(client):
    def part(comm):
        if comm.rank:
            comm.barrier()

    with pytest.raises(CommTimeout, match=r"(?s)1 +waiting +barrier .*likely: rank 0 never called barrier"):
        lab.run(part, deadline=100)


def test_a_rank_that_is_killed(client):
    def die(comm):
        if comm.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    before = client[:].apply_sync(os.getpid)
    with pytest.raises(RankFailed, match="rank 1"):
        lab.run(die, deadline=100)
    lab.restart()
    assert lab.run(reduced)[1][:2] == ("n2", 3.0) and client[:].apply_sync(os.getpid) == before


def test_a_pod_that_vanishes(pods, client):
    end(pods.pods.pop())
    with pytest.raises((EngineError, RankFailed), match="rank 1 vanished with node n2"):
        lab.run(reduced)
    with pytest.raises(EngineError, match=rf"^1 of {PODS} engines of ipyparallel have come after 20 s: lab\.start\(1"):
        lab.restart()
    lab.start(1, client=client)
    assert [each[:2] for each in lab.run(reduced)] == [("n1", 1.0)]
    pods.pods.append(pods.add(3))
    lab.start(2, client=client, wait=60)
    assert [each[:2] for each in lab.run(reduced)] == [("n1", 3.0), ("n3", 3.0)]

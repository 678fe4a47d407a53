"""Engines of ipyparallel in pods of Kubernetes, played by machines of their own; the controller is a service outside.

A pod has an address, a name, processes, /tmp and /dev/shm of its own, and knows no other by name: what its engine is
told of the controller comes in its environment, as from a Secret.
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
from hpdl_lab.classroom.settings import PACKAGE
from hpdl_lab.comm.errors import CommTimeout, RankFailed
from hpdl_lab.engines.errors import EngineError
from tests.slurm.controller import walls
from tests.slurm.nodes import Network, Refused, end


class Pods:
    """The pods of a network, each with an engine, and the folder of their controller."""

    def __init__(self, network, root):
        self.network, self.root, self.log, self.running = network, root, open(root / "said", "ab"), []
        options = [f"--ip={network.address}", f"--profile-dir={root}/ipp", "--IPController.enable_curve=True"]
        command = [sys.executable, "-m", "ipyparallel.controller", *options]
        self.controller = subprocess.Popen(command, stdout=self.log, stderr=self.log, start_new_session=True)

    def file(self, role):
        return self.root / "ipp" / "security" / f"ipcontroller-{role}.json"

    def add(self, number):
        """Start one more."""
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "HPDL_TEST_RUN") if name in os.environ}
        environment |= {"IPP_CONNECTION_INFO": self.file("engine").read_text(), "IPYTHONDIR": "/dev/shm/ipython"}
        engine, opened = [sys.executable, "-m", "ipyparallel.engine"], walls(sys.prefix, sys.base_prefix, PACKAGE)
        self.running.append(self.network.add(number, engine, environment, self.log, ["/tmp"], opened))

    def close(self):
        for pod in self.running:
            end(pod)
        os.killpg(self.controller.pid, signal.SIGTERM)
        self.controller.wait()
        self.network.close()
        self.log.close()


@pytest.fixture(scope="module")
def pods(eventually):
    with tempfile.TemporaryDirectory(prefix="hpdl-t-", dir="/tmp") as root, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", root)
        try:
            pods = Pods(Network(), Path(root))
        except Refused as refused:
            pytest.skip(f"this system allows no machines: {refused}")
        try:
            eventually(lambda: (file := pods.file("engine")).exists() and file.read_text().rstrip().endswith("}"))
            for number in (1, 2):  # the first to come is engine 0
                pods.add(number)
                with ipyparallel.Client(str(pods.file("client"))) as client:
                    client.wait_for_engines(number, interactive=False)
            yield pods
        finally:
            lab.stop()
            pods.close()


@pytest.fixture
def client(pods):
    with ipyparallel.Client(str(pods.file("client"))) as client:
        client.wait_for_engines(2, interactive=False)
        lab.start(client=client, wait=20)
        yield client


def reduced(comm):
    comm.all_reduce(large := np.full(300_000, comm.rank + 1.0))
    return socket.gethostname(), float(large[-1]), os.getpid()


def test_ranks_in_pods_meet_over_tcp(client, capsys):
    assert [each[:2] for each in lab.run(reduced)] == [("n1", 3.0), ("n2", 3.0)]
    lab.cluster().show()
    said = "ranks on n1, n2, where ipyparallel has started its engines 0, 1; MPI's messages between hosts go by TCP"
    assert said in capsys.readouterr().out


def test_a_deadlock_is_told(client):
    with pytest.raises(CommTimeout, match=r"(?s)1 +waiting +barrier .*likely: rank 0 never called barrier"):
        lab.run(lambda comm: comm.rank and comm.barrier(), deadline=100)


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
    end(pods.running.pop())
    with pytest.raises((EngineError, RankFailed), match="rank 1 vanished with node n2"):
        lab.run(reduced)
    with pytest.raises(EngineError, match=r"^1 of 2 engines of ipyparallel have come after 20 s: lab\.start\(1"):
        lab.restart()
    lab.start(1, client=client)
    assert [each[:2] for each in lab.run(reduced)] == [("n1", 1.0)]
    pods.add(3)
    lab.start(2, client=client, wait=60)
    assert [each[:2] for each in lab.run(reduced)] == [("n1", 3.0), ("n3", 3.0)]

"""Engines on emulated hosts: who is where, and what goes wrong.

test_emulated_end.py: how they end; test_times_on_engines.py: whether they add up, and as fast as the links are.
"""

import os
import re
import signal
import socket
import time

import numpy as np
import pytest

from hpdl_lab.comm.errors import CommTimeout, RankFailed
from hpdl_lab.engines import launch, layout
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError
from tests.wording import raises

pytestmark = pytest.mark.slow  # links of emulated hosts


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A runtime directory of this file's own; skips where this system allows no emulated hosts, with its reason."""
    try:
        launch.check_layout(layout.wanted(4, where="emulated"))
    except EngineError as refused:
        pytest.skip(str(refused))
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("h")
        patch.setenv("XDG_RUNTIME_DIR", str(path))
        yield path


@pytest.fixture(scope="module")
def three(place):
    with Cluster.start(3, where="emulated", link="1gbit") as cluster:
        yield cluster


@pytest.fixture
def hosts(three):
    """Three engines, all well, each on an emulated host of its own."""
    if three.fault() or three.layout[:3] != (3, "emulated", 3):
        three.restart(3, hosts=3)
    return three


# -- who is where -----------------------------------------------------------------------------------------------------


def test_every_engine_is_on_a_host_of_its_own(hosts, capsys):
    def who(comm):
        addresses = [socket.gethostbyname(f"host{rank}") for rank in range(3)]
        return socket.gethostname(), comm.node_rank, comm.node_size, comm.oversubscribed, addresses

    oversubscribed = len(os.sched_getaffinity(0)) < 3
    addresses = ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert hosts.run(who) == [(f"host{rank}", 0, 1, oversubscribed, addresses) for rank in range(3)]
    assert (hosts.where, hosts.link, hosts.n) == ("emulated", "1gbit", 3)
    assert repr(hosts).startswith("<3 engines on 3 emulated hosts at 1gbit in ")
    hosts.show()
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines()[1:4]] == ["host0", "host1", "host2"]
    assert "messages between hosts take their time on links of 1gbit each way" in out
    assert ("take turns on" in out) == oversubscribed


def test_px_works_there_too(hosts):
    view = hosts.client[:]
    assert view.apply_sync(socket.gethostname) == ["host0", "host1", "host2"]
    assert view.apply_sync(os.getcwd) == [os.getcwd()] * 3


def test_the_links_are_shaped_at_both_ends_and_nothing_has_a_name_in_the_file_system(hosts, place):
    def shape(comm):
        import subprocess

        command = f"{launch.hosts_argv('-', hosts_layout)[-1]} qdisc show dev net0"
        return subprocess.run(command.split(), capture_output=True, text=True).stdout

    hosts_layout = hosts.layout
    assert all(" tbf " in said and "rate 1Gbit" in said for said in hosts.run(shape))
    assert not os.path.isdir("/run/netns") or not os.listdir("/run/netns")
    with open("/proc/self/mountinfo") as mounts:
        assert "nsfs" not in mounts.read()


# -- what goes wrong, as on one host ----------------------------------------------------------------------------------


def test_a_deadlock_is_told(hosts):
    def first_receive(comm):
        comm.sendrecv(np.ones(1 << 16), (comm.rank + 1) % 3, np.empty(1 << 16), (comm.rank - 1) % 3)
        comm.recv(np.empty(1 << 16), (comm.rank + 1) % 3)

    for deadline in (0.5, 2, 8):  # a rank that gets no core is not yet where the others wait for it
        with pytest.raises(CommTimeout) as caught:
            hosts.run(first_receive, deadline=deadline)
        if "ranks 0-2 all receive first" in str(caught.value):
            break
    assert re.search(r"rank \d waits in recv from rank \d", str(caught.value))
    assert [wait.state for wait in caught.value.waits] == ["waiting"] * 3
    assert "ranks 0-2 all receive first" in str(caught.value)
    assert hosts.run(lambda comm: comm.rank) == [0, 1, 2]


def test_many_messages_that_nobody_has_received_yet_keep_no_barrier_waiting(hosts):
    def many(comm):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for count in (10, 10_000):
            works = [comm.isend(np.full(count, float(i)), right) for i in range(200)]
            comm.barrier()
            got = [comm.recv(np.empty(count), left)[0] for _ in range(200)]
            for work in works:
                work.wait()
        return got == list(range(200))

    assert hosts.run(many) == [True] * 3


def test_ranks_that_have_heard_of_a_death_send_nothing_to_the_dead(hosts, capsys):
    """They end by themselves, whoever of them would have sent; MPICH would try to connect to it for ever."""

    def killed(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while not comm.waiting.status.is_unreachable(1):
            time.sleep(0.01)
        comm.send(np.ones(4), 1)

    with raises(RankFailed, "rank 1", "signal 9") as caught:
        hosts.run(killed, deadline=60)
    assert [wait.state for wait in caught.value.waits] == ["failed", "dead", "failed"]
    assert "react" not in capsys.readouterr().out
    hosts.restart()
    assert hosts.run(lambda comm: comm.rank) == [0, 1, 2]


def test_a_killed_rank_is_named_and_the_new_engines_may_share_hosts_and_their_memory(hosts, monkeypatch):
    """Who sends the dead one something before hearing of it is stuck in MPICH, until it is given up."""
    monkeypatch.setattr("hpdl_lab.engines.run.STUCK_AFTER_DEATH", 1.0)

    def killed(comm):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    def who(comm):
        part = comm.split(socket.gethostname())
        x = part.all_reduce(np.full(3, comm.rank))
        return socket.gethostname(), comm.node_rank, comm.node_size, bool(part.shared("allocate")), int(x[0])

    with raises(RankFailed, "rank 1", "signal 9"):
        hosts.run(killed, deadline=10)
    hosts.restart(hosts=2)
    assert hosts.run(who) == [("host0", 0, 2, True, 1), ("host0", 1, 2, True, 1), ("host1", 0, 1, True, 2)]
    assert hosts.run(lambda comm: comm.all_reduce(np.full(100_000, 1.0))[-1]) == [3.0] * 3

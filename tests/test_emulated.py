"""Engines on emulated hosts: who is where, what messages cost, what goes wrong. test_emulated_end.py: how they end."""

import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from hpdl_lab.comm.errors import CommTimeout, RankFailed
from hpdl_lab.engines import launch, layout
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError, RunStopped

pytestmark = pytest.mark.timeout(120)

LINK = 1e9 / 8  # bytes per second
NBYTES = 8 << 20


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A runtime directory of this file's own; skips where this system allows no emulated hosts, with its reason."""
    try:
        launch.check(layout.wanted(4, where="emulated"))
    except EngineError as refused:
        pytest.skip(str(refused))
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("h")
        patch.setenv("XDG_RUNTIME_DIR", str(path))
        yield path


@pytest.fixture(scope="module")
def four(place):
    cluster = Cluster.start(4, where="emulated", link="1gbit")
    cluster.run(import_torch)
    yield cluster
    cluster.stop()


@pytest.fixture
def hosts(four):
    """Four engines, all well, each on an emulated host of its own."""
    if four.ailment() or four.n != 4:
        four.restart(4, hosts=4)
        four.run(import_torch)
    return four


def import_torch(comm):
    import torch  # noqa: F401


# -- who is where -----------------------------------------------------------------------------------------------------


def test_every_engine_is_on_a_host_of_its_own(hosts, capsys):
    def who(comm):
        addresses = [socket.gethostbyname(f"host{rank}") for rank in range(4)]
        return socket.gethostname(), comm.node_rank, comm.node_size, comm.crowded, addresses

    crowded = len(os.sched_getaffinity(0)) < 4
    addresses = ["10.77.0.1", "10.77.0.2", "10.77.0.3", "10.77.0.4"]
    assert hosts.run(who) == [(f"host{rank}", 0, 1, crowded, addresses) for rank in range(4)]
    assert (hosts.where, hosts.link, hosts.n) == ("emulated", "1gbit", 4)
    assert repr(hosts).startswith("<4 engines on 4 emulated hosts at 1gbit in ")
    hosts.show()
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines()[1:5]] == ["host0", "host1", "host2", "host3"]
    assert "messages between hosts take their time on links of 1gbit each way" in out
    assert ("take turns on" in out) == crowded


def test_px_works_there_too(hosts):
    view = hosts.client[:]
    assert view.apply_sync(socket.gethostname) == ["host0", "host1", "host2", "host3"]
    assert view.apply_sync(os.getcwd) == [os.getcwd()] * 4


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


# -- right, and as fast as the link -----------------------------------------------------------------------------------


def every_all_reduce(comm):
    """{name: what f(x) does} of all the ways to add up."""
    from hpdl_lab.collectives import ring
    from hpdl_lab.collectives.native import gloo_group
    from hpdl_lab.collectives.table import find

    gloo = gloo_group(comm)
    return {
        "ring": lambda x: ring.all_reduce(comm, x),
        "compiled": comm.ring_all_reduce,
        "default": comm.all_reduce,
        "MPI": comm.mpi_all_reduce,
        "gloo": lambda x: gloo.allreduce([x]).wait(),
        "parameter server": lambda x: find("parameter_server").function(comm, x),
    }


def test_every_way_to_add_up_is_right(hosts):
    def wrong(comm):
        import torch

        found = {}
        for name, add in every_all_reduce(comm).items():
            for count in (1, 3, 1001, 70_000):
                x = torch.arange(count, dtype=torch.float32) % 61 + comm.rank
                add(x)
                expected = comm.size * (torch.arange(count) % 61) + comm.size * (comm.size - 1) // 2
                if int((x != expected).sum()):
                    found[name, count] = x
        return found

    assert hosts.run(wrong) == [{}] * 4


def fastest(comm, names):
    """{name: s} of the slowest rank, the fastest of three calls: a busy machine can only be late."""
    import torch

    ways = every_all_reduce(comm)
    x, times = torch.zeros(NBYTES // 4), {name: [] for name in names}
    for _ in range(3):
        for name in names:
            comm.barrier()
            began = time.perf_counter()
            ways[name](x)
            took = np.array([time.perf_counter() - began])
            times[name].append(float(np.max(comm.all_gather(took))))
    return {name: min(each) for name, each in times.items()}


def race(cluster, names, good_enough, seconds=40):
    """{name: s}, measured until `good_enough` of them, or for `seconds`: other work may take the cores."""
    best, give_up = dict.fromkeys(names, float("inf")), time.monotonic() + seconds
    while True:
        found = cluster.run(fastest, names, deadline=30)[0]
        best = {name: min(best[name], found[name]) for name in names}
        if good_enough(best) or time.monotonic() > give_up:
            return best


@pytest.mark.quiet
def test_the_ring_reaches_93_percent_of_its_bound(hosts):
    bound = 2 * 3 / 4 * NBYTES / LINK  # 101 ms; headers are not counted in its favor

    def good(best):
        return best["ring"] <= bound / 0.93 and best["ring"] < best["MPI"] * 1.03

    best = race(hosts, ("ring", "MPI"), good)
    assert 0.99 * bound < best["ring"] <= bound / 0.93, best
    assert best["ring"] < best["MPI"] * 1.03, "four is a power of two: MPICH's own reaches the bound as well"
    server = race(hosts, ("parameter server",), bool)
    assert best["ring"] < server["parameter server"] / 3.5, "which moves 6 vectors over one link; a ring moves 1.5"


# -- what goes wrong, as on one host ----------------------------------------------------------------------------------


def test_a_deadlock_is_told(hosts):
    def first_receive(comm):
        comm.sendrecv(np.ones(1 << 16), (comm.rank + 1) % 4, np.empty(1 << 16), (comm.rank - 1) % 4)
        comm.recv(np.empty(1 << 16), (comm.rank + 1) % 4)

    with pytest.raises(CommTimeout, match=r"rank \d waits in recv from rank \d") as caught:
        hosts.run(first_receive, deadline=1)
    assert [wait.state for wait in caught.value.waits] == ["waiting"] * 4
    assert "ranks 0-3 all receive first" in str(caught.value)
    assert hosts.run(lambda comm: comm.rank) == [0, 1, 2, 3]


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

    assert hosts.run(many) == [True] * 4


def test_the_stop_button(hosts, within):
    def waits(comm):
        comm.report()
        comm.recv(np.ones(4), (comm.rank + 1) % comm.size)

    began = []

    def stop_soon(row):
        began.append(time.monotonic())
        if len(began) == 4:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(RunStopped, match="waiting") as caught:
        hosts.run(waits, deadline=60, on_row=stop_soon)
    assert time.monotonic() - began[-1] < within(4)
    assert len(caught.value.waits) == 4
    assert hosts.run(lambda comm: comm.rank) == [0, 1, 2, 3]


def test_a_killed_rank_is_named_and_replaced(hosts):
    def killed(comm):
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    with pytest.raises(RankFailed, match="rank 2 was killed by signal 9"):
        hosts.run(killed, deadline=10)
    if hosts.ailment():  # else the others did not react, and all have been replaced
        hosts.restart()
    assert hosts.run(lambda comm: (comm.rank, socket.gethostname())) == [(rank, f"host{rank}") for rank in range(4)]


# -- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.quiet
def test_the_ring_beats_mpi_where_the_number_of_hosts_is_no_power_of_two(four):
    four.restart(3, hosts=3)
    best = race(four, ("ring", "MPI"), lambda best: best["ring"] < 0.6 * best["MPI"])
    assert best["ring"] < 0.6 * best["MPI"], best


def test_several_engines_share_a_host_and_its_memory(four):
    four.restart(5, hosts=2)

    def who(comm):
        part = comm.split(socket.gethostname())
        x = part.allocate(3)
        x += comm.rank
        part.all_reduce(x)
        return socket.gethostname(), comm.node_rank, comm.node_size, bool(part.shared("allocate")), int(x[0])

    assert four.run(who) == [
        ("host0", 0, 3, True, 3),
        ("host0", 1, 3, True, 3),
        ("host0", 2, 3, True, 3),
        ("host1", 0, 2, True, 7),
        ("host1", 1, 2, True, 7),
    ]
    assert four.run(lambda comm: comm.all_reduce(np.full(100_000, 1.0))[-1]) == [5.0] * 5


def test_the_verb_takes_what_runs_replaces_it_and_says_so(place, monkeypatch, tmp_path_factory, capsys):
    from hpdl_lab import lab

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("v")))
    with lab.start(2) as cluster:
        lab.start(2, where="emulated", link="100mbit")
        assert "2 engines were running: replacing them by 2 engines on 2 emulated hosts at 100mbit." in (
            capsys.readouterr().out
        )
        pids = lab.run(lambda comm: os.getpid())
        for how in ({}, {"where": "emulated"}, {"link": "100mbit"}, {"hosts": 2}):
            assert lab.start(2, **how) is cluster and lab.run(lambda comm: os.getpid()) == pids
        other = Cluster.start(2)
        assert other.attached and (other.where, other.link) == ("emulated", "100mbit")
        with pytest.raises(EngineError, match=r"1 other notebook\(s\) use what is running, 2 engines on 2 emulated"):
            lab.start(2, where="local")
        other.detach()
        lab.start(2, where="local")
        assert lab.run(lambda comm: comm.node_size) == [2, 2] and cluster.link == ""

"""Clusters that ipyparallel has started by its launchers here, used as the laboratory; tests/slurm has that of Slurm.

The tests of this file go on with one cluster of each kind, in order; the last two end engines of ipyparallel itself.
"""

import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import nbformat
import numpy as np
import psutil
import pytest
from nbclient import NotebookClient

from hpdl_lab import lab
from hpdl_lab.comm.errors import CommTimeout, RankFailed
from hpdl_lab.engines.errors import EngineError, RunStopped
from tests.ipyparallel_kinds import marked, sshd, started

pytestmark = pytest.mark.slow
KINDS = ("local", "mpi", "ssh")
NOTEBOOKS = ("00_engines", "04", "06")
MARK = secrets.token_hex(8)


@pytest.fixture(scope="module")
def by_ssh():
    with sshd() as folder:
        yield folder


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


def environment(patch, root):
    """Of notebooks whose cluster is that of profile "site" below the folder `root`."""
    own = {"IPYTHONDIR": f"{root}/ipython", "HPDL_PROFILE": "site", "HPDL_MARK": MARK}
    for name, value in own.items():
        patch.setenv(name, value)
    patch.setenv("PATH", os.path.join(sys.prefix, "bin"), prepend=":")


@pytest.fixture(scope="module")
def begun(kind, request):
    """Four engines of ipyparallel: (ipyparallel.Cluster, its Client)."""
    with tempfile.TemporaryDirectory(prefix="hpdl-t-", dir="/tmp") as root, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", root)
        if kind == "ssh":
            patch.setenv("PATH", request.getfixturevalue("by_ssh"), prepend=":")
        environment(patch, root)
        with started(kind, 4, f"{root}/ipython/profile_site") as begun:
            yield begun


@pytest.fixture
def client(begun):
    """The client of ipyparallel, whose cluster is the laboratory: four ranks, all well."""
    lab.start(client=begun[1], wait=3)
    yield begun[1]


@pytest.fixture(scope="module", autouse=True)
def ended(kind, eventually):
    yield
    lab.stop()
    eventually(lambda: marked(MARK) == [])


def pid(comm=None):
    return os.getpid()


def test_ranks_meet_beside_ipyparallels_engines(client, kind):
    def meet(comm):
        mine = np.full(3, comm.rank + 1.0)
        gathered = comm.all_gather(mine)
        comm.send(mine, (comm.rank + 1) % comm.size)
        left = comm.recv(np.empty(3), (comm.rank - 1) % comm.size)
        first = comm.broadcast(mine.copy(), root=1)
        large = comm.all_reduce(np.full(300_000, comm.rank + 1.0, "float32"))
        return float(large[-1]), np.ravel(gathered)[::3].tolist(), float(left[0]), float(first[0])

    each = [(10.0, [1.0, 2.0, 3.0, 4.0], float((rank - 1) % 4 + 1), 2.0) for rank in range(4)]
    assert lab.run(meet) == each
    assert not {*lab.run(pid)} & {*client[:].apply_sync(pid)}
    hosts = client[:].apply_sync(socket.gethostname)
    assert sorted(info["host"] for info in lab.cluster().infos) == sorted(hosts)


def test_a_process_group_of_torch_meets(client):
    def reduce(comm):
        import torch

        torch.distributed.init_process_group("gloo")
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        return value.item(), os.environ["RANK"]

    assert lab.run(reduce, deadline=100) == [(4.0, str(rank)) for rank in range(4)]


def circle(comm):
    comm.report(begun=True)
    comm.recv(np.zeros(1000), (comm.rank + 1) % comm.size)


def test_deadlocks_and_deadlines_are_told_with_rank_and_line(client):
    def part(comm):
        if comm.rank != 2:
            comm.barrier()

    line = rf"{os.path.basename(__file__)}:{part.__code__.co_firstlineno + 2}\n"
    with pytest.raises(
        CommTimeout, match=rf"(?s)0 +waiting +barrier [^\n]+{line}.*likely: rank 2 never called barrier"
    ):
        lab.run(part, deadline=100)
    begin = time.monotonic()
    with pytest.raises(CommTimeout, match=r"(?s)^no answer within 1 s: .*cycle: 0 -> 1 -> 2 -> 3 -> 0"):
        lab.run(circle, deadline=1)
    assert time.monotonic() - begin < 60
    assert lab.run(lambda comm: comm.rank) == [0, 1, 2, 3]


def test_the_stop_button_ends_a_wait(client):
    seen = []

    def press(row):
        seen.append(row)
        if len(seen) == 4:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    before = lab.run(pid)
    with pytest.raises(RunStopped, match="cycle: 0 -> 1 -> 2 -> 3 -> 0"):
        lab.run(circle, deadline=200, on_row=press)
    assert lab.run(pid) == before


def test_px_runs_beside_on_the_ranks(client):
    theirs = client[:].apply_sync(pid)
    assert lab.cluster().client[:].apply_sync(pid) == lab.run(pid)
    client[:].push({"kept": 7}, block=True)
    assert client[:].apply_sync(pid) == theirs


def test_a_rank_that_is_killed_is_named_and_a_restart_leaves_ipyparallels_engines(client):
    def die(comm):
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    theirs, ranks = client[:].apply_sync(pid), lab.run(pid)
    with pytest.raises(RankFailed, match=r"^rank 2 was killed by signal 9 \(SIGKILL"):
        lab.run(die)
    lab.restart()
    assert not {*lab.run(pid)} & {*ranks}
    assert client[:].apply_sync(pid) == theirs


def test_fewer_ranks_than_engines_are_taken_and_more_are_refused_in_a_sentence(client, capsys):
    assert len(lab.start(2, client=client, wait=3).infos) == 2 == len(lab.run(pid))
    said = r"4 of 9 engines of ipyparallel have come after 1 s: lab.start\(4, ...\) takes what is there; wait=2 "
    with pytest.raises(EngineError, match=f"^{said}waits longer$"):
        lab.start(9, client=client, wait=1)


def test_a_stop_leaves_nothing_but_ipyparallels_engines(client, eventually):
    theirs = client[:].apply_sync(pid)
    assert marked(MARK)
    lab.stop()
    for engine in client:
        eventually(lambda engine=engine: engine.apply_sync(marked, MARK) == [])
    eventually(lambda: marked(MARK) == [])
    assert client[:].apply_sync(pid) == theirs


def test_notebooks_run_as_they_are_on_the_cluster_of_a_profile(kind, begun, tmp_path):
    lab.stop()
    for name in NOTEBOOKS if kind in ("ssh", "slurm") else NOTEBOOKS[:1]:
        (file,) = Path("notebooks/solutions").glob(f"{name}*.ipynb")
        notebook = nbformat.read(file, as_version=4)
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
        assert "where ipyparallel has started its engines 0-3 (profile site)" in str(notebook.cells), name


def test_an_engine_of_ipyparallel_that_dies_takes_its_host_and_a_restart_says_how_many_are_left(
    begun, client, eventually
):
    client[0].apply_async(os.kill, client[0].apply_sync(pid), signal.SIGKILL)
    eventually(lambda: lab.cluster().fault())
    again = r"call lab.restart\(\) for 4 engines, or lab\.start\(client=.*\) if the cluster was started again; .* stay"
    with pytest.raises(EngineError, match=rf"^engine 0 of ipyparallel on \S+ has ended: {again}$"):
        lab.run(pid)
    with pytest.raises(EngineError, match=r"^\d of 4 engines of ipyparallel have come after 3 s"):
        lab.restart()
    with pytest.raises(
        EngineError, match=r"^\d of 4 engines of ipyparallel have come after 3 s: call lab.restart\(\)$"
    ):
        lab.run(pid)
    if not client.ids:  # mpiexec ends all when one dies
        begun[0].start_engines_sync(4)
        client.wait_for_engines(4, interactive=False)
    assert len(lab.start(client=client).infos) == len(client.ids) == len(lab.run(pid))


def test_a_controller_that_dies_is_a_sentence(begun, eventually):
    controller = psutil.Process(begun[0].controller.pid)
    forks = controller.children(recursive=True)
    controller.kill()
    eventually(lambda: lab.cluster().fault())
    with pytest.raises(EngineError, match=r"^the controller of ipyparallel at [\d.]+ has ended: call lab.restart\(\)"):
        lab.run(pid)
    with pytest.raises(EngineError, match=r"^the controller of ipyparallel at [\d.]+ does not answer"):
        lab.restart()
    for fork in forks:  # they know nothing of its end
        fork.kill()

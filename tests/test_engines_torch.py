"""torch.distributed as scripts use it, in `lab.run` and in %px; files and keywords that `lab.run` takes."""

import functools
import os
import re
import socket
import sys
import threading
import time
from datetime import timedelta

import pytest

from hpdl_lab.comm.base import PerRank
from hpdl_lab.comm.errors import CommTimeout
from hpdl_lab.engines import launch, layout
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError, RunFailed, RunStopped
from hpdl_lab.verbs import cluster as verbs
from tests.onlooker import StopButton, waiting

torch = pytest.importorskip("torch")
dist = torch.distributed
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def trained(comm, backend, destroy):
    """The parameters of a small net after three steps of DDP on this rank's share of 12 rows; of one rank, plainly."""
    torch.manual_seed(0)
    net, rows = torch.nn.Linear(8, 4).double(), torch.arange(96, dtype=torch.float64).reshape(12, 8) / 96
    if backend:
        dist.init_process_group(backend)
    model = torch.nn.parallel.DistributedDataParallel(net) if backend else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(rows.chunk(comm.size)[comm.rank]).square().mean().backward()
        optimizer.step()
    if destroy:
        dist.destroy_process_group()
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def environment(comm):
    return [os.environ.get(name) for name in (*NAMES, "GLOO_SOCKET_IFNAME")], dist.is_initialized()


def line_in(function, text):
    """ "test_engines_torch.py:12", the first line of `function` in which `text` is."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return f"{os.path.basename(__file__)}:{first + next(i for i, line in enumerate(lines) if text in line)}"


# -- process groups ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gloo", "hpdl"])
@pytest.mark.parametrize("ranks", [[0, 1, 2], [3, 1]], ids=len)
def test_plain_ddp_equals_one_rank_and_a_group_that_was_forgotten_is_gone_in_the_next_run(cluster, backend, ranks):
    (want,) = cluster.run(trained, None, False, ranks=[0], limit=60)
    for destroy in (False, True, False):
        for found in cluster.run(trained, backend, destroy, ranks=ranks, limit=60):
            assert torch.allclose(found, want, rtol=1e-12, atol=1e-12)
        assert not any(initialized for _, initialized in cluster.run(environment))


def test_several_groups_one_after_the_other_and_a_store_of_ones_own(cluster):
    def several(comm):
        sums = []
        for backend in ("gloo", "hpdl", "gloo"):
            dist.init_process_group(backend)
            x = torch.full((3,), float(comm.rank))
            dist.all_reduce(x)
            sums.append(x[0].item())
            dist.destroy_process_group()
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(*address, comm.size, comm.rank == 0, timedelta(seconds=30))
        store.set(str(comm.rank), "here")
        store.wait([str(rank) for rank in range(comm.size)])
        comm.barrier()
        return sums

    for _ in range(2):
        assert cluster.run(several) == [[6.0] * 3] * 4


def test_the_environment_is_that_of_torchrun_and_is_taken_back(cluster):
    def outside(comm):
        """Between two runs, as far as the engine's own thread sees it."""
        (server,) = (t._target.__self__ for t in threading.enumerate() if t.name == "tasks")
        server.submit(lambda: setattr(sys, "size_between", os.environ.get("WORLD_SIZE")))

    found = [values for values, _ in cluster.run(environment, ranks=[2, 3])]
    assert [values[:5] for values in found] == [[str(r), "2", str(r), "2", "127.0.0.1"] for r in range(2)]
    assert found[0][5:] == found[1][5:] and int(found[0][5]) > 0 and found[0][6] == socket.if_nameindex()[0][1]
    cluster.run(outside)
    between = {*cluster.run(lambda comm: sys.size_between)}
    assert between <= {None, "4"}  # "4" if cells of %px have been told of all engines


def test_a_group_is_gone_after_an_error_and_the_error_is_what_is_told(cluster):
    def one_raises(comm):
        dist.init_process_group("gloo")
        if comm.rank == 2:
            raise LookupError("no data")
        dist.all_reduce(torch.ones(3))

    with pytest.raises(RunFailed) as caught:
        cluster.run(one_raises)
    assert list(caught.value.errors) == [2] and "rank 2 raised LookupError" in caught.value.reason
    others = {(w.state, w.op) for w in caught.value.waits if w.rank != 2}
    # A rank that the busy machine has held back may still be in its init_process_group when rank 2 leaves.
    assert others <= {("waiting", "all_reduce"), ("waiting", "init_process_group")} and others
    assert len(cluster.run(trained, "gloo", False)) == 4


# -- waits that never end ---------------------------------------------------------------------------------------------


def never_comes(comm):
    if comm.rank != 2:
        dist.init_process_group("gloo")
    else:
        time.sleep(60)


def sums(comm, how):
    dist.init_process_group("gloo")
    x, work = torch.ones(3), None
    if comm.rank == 2:
        time.sleep(60)
    if how == "wait":
        work = dist.all_reduce(x, async_op=True)
        work.wait()
    elif how == "recv":
        dist.recv(x, 2)
    elif how == "all_reduce":
        dist.all_reduce(x)
    else:
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))(x[:2]).sum().backward()


def test_a_rank_that_never_comes_is_named_with_the_line_of_those_that_wait(cluster, within):
    began = time.monotonic()
    with pytest.raises(CommTimeout, match=r"within 1 s: rank \d waits in init_process_group with rank 2") as told:
        cluster.run(never_comes, deadline=1)
    assert time.monotonic() - began < within(4)
    line = line_in(never_comes, "init_process_group")
    assert [(w.state, w.line) for w in told.value.waits if w.rank != 2] == [("waiting", line)] * 3
    assert len(cluster.run(trained, "gloo", False)) == 4


@pytest.mark.parametrize(
    ("how", "op", "text"),
    [
        ("all_reduce", "all_reduce", "        dist.all_reduce(x)"),
        ("wait", "wait", "work.wait()"),
        ("recv", "recv", "dist.recv"),
        ("ddp", "DistributedDataParallel", "torch.nn.parallel"),
    ],
)
@pytest.mark.parametrize("end", [{"deadline": 1}, {"limit": 2, "deadline": 60}], ids=["deadline", "limit"])
def test_a_wait_in_gloo_is_told_and_ends(cluster, how, op, text, end, within, capsys):
    pids, began = cluster.run(lambda comm: os.getpid()), time.monotonic()
    with pytest.raises(CommTimeout) as caught:
        cluster.run(sums, how, **end)
    assert time.monotonic() - began < within(2 + 3)
    by_rank = {w.rank: w for w in caught.value.waits}
    assert by_rank[2].state == "running" and by_rank[2].line == line_in(sums, "sleep")
    for rank in (0, 1, 3):
        assert (by_rank[rank].state, by_rank[rank].op, by_rank[rank].line) == ("waiting", op, line_in(sums, text))
        assert 2 in by_rank[rank].peers  # of who came just before it may not have heard yet
    assert "react" not in capsys.readouterr().out
    assert cluster.run(lambda comm: os.getpid()) == pids
    assert not any(initialized for _, initialized in cluster.run(environment))


def receive_in_a_circle(comm):
    dist.init_process_group("gloo")
    dist.recv(torch.ones(3), (comm.rank + 1) % comm.size)


def test_the_stop_button_ends_waits_in_gloo_though_no_rank_runs_python(cluster, within):
    pids = cluster.run(lambda comm: os.getpid())
    with StopButton(cluster, waiting("recv")) as button, pytest.raises(RunStopped) as caught:
        cluster.run(receive_in_a_circle, deadline=60)
    assert button.seconds < within(2) and "cycle: 0 -> 1 -> 2 -> 3 -> 0" in str(caught.value)
    assert cluster.run(lambda comm: os.getpid()) == pids
    assert len(cluster.run(trained, "gloo", False)) == 4


def test_many_short_collectives_are_no_long_wait(cluster):
    def many(comm):
        dist.init_process_group("gloo")
        end, x = time.monotonic() + 3, torch.ones(1)
        while x[0] > 0:
            x[0] = time.monotonic() < end
            dist.all_reduce(x, dist.ReduceOp.MIN)

    assert cluster.run(many, deadline=1) == [None] * 4


# -- %px --------------------------------------------------------------------------------------------------------------


def test_cells_of_px_share_a_group_which_runs_leave_alone(no_engines_yet):
    with Cluster.start(2) as pair:
        run_cells(pair, "x = torch.ones(1); dist.init_process_group('gloo')", "dist.all_reduce(x)")
        assert [initialized for _, initialized in pair.run(environment)] == [True] * 2
        run_cells(pair, "dist.all_reduce(x); dist.destroy_process_group()")
        cell = pair.client[:].execute("if mpi_rank: dist.init_process_group('gloo')", block=False)
        time.sleep(1)
        with pytest.raises(CommTimeout):
            pair.run(environment, limit=0.5)  # which ends the cell that is in its way
        with pytest.raises(Exception, match="KeyboardInterrupt"):
            cell.get(timeout=60)
        for backend in ("hpdl", "gloo"):
            run_cells(pair, f"dist.init_process_group('{backend}'); dist.all_reduce(x); dist.destroy_process_group()")
        assert pair.client[:].pull("x.item()", block=True) == [16.0] * 2


def run_cells(cluster, *cells):
    for cell in ("import torch, torch.distributed as dist", *cells):
        cluster.client[:].execute(cell, block=False).get(timeout=60)


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_file_runs_as_main_with_arguments_and_the_modules_beside_it(cluster, tmp_path, capsys):
    (tmp_path / "beside.py").write_text("VALUE = 1\n")
    file = tmp_path / "train.py"
    file.write_text(
        "import os, sys\nfrom beside import VALUE\nassert 'left' not in globals()\nleft = 1\n"
        "if __name__ == '__main__':\n    print(sys.argv[1:], VALUE, os.path.basename(__file__))\n"
    )
    for value in (1, 22):
        (tmp_path / "beside.py").write_text(f"VALUE = {value}\n")
        assert cluster.run(file if value == 1 else str(file), "--epochs", 2, PerRank("aaaa")) == [None] * 4
        assert capsys.readouterr().out == f"ranks 0-3 say ['--epochs', '2', 'a'] {value} train.py\n"
    main = cluster.run(lambda comm: (sys.modules["__main__"].__name__, sys.argv[0], str(tmp_path) in sys.path))
    assert all(name == "__main__" and "train.py" not in argv and not found for name, argv, found in main)
    file.write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.barrier()\n")
    assert cluster.run(file) == [None] * 4
    file.write_text("import torch\ntorch.set_default_dtype(torch.float64)\ntorch.set_default_device('meta')\n")
    assert cluster.run(file) == [None] * 4
    assert cluster.run(lambda comm: str(torch.zeros(1))) == ["tensor([0.])"] * 4


def test_how_a_file_ends(cluster, tmp_path):
    file = tmp_path / "ends.py"
    file.write_text("import os, sys\nr = int(os.environ['RANK'])\nsys.exit([0, None, 3, 'no data'][r])\n")
    with pytest.raises(RunFailed) as caught:
        cluster.run(file)
    assert str(caught.value).splitlines()[:2] == [
        "rank 2: ends.py ended with exit status 3",
        "rank 3: ends.py ended and said: no data",
    ]
    assert cluster.run(file, ranks=[0, 1]) == [None, None]
    file.write_text("x = 1\nx.no\n")
    with pytest.raises(RunFailed, match=r"ranks 0-3: AttributeError: .*\n    ends.py:2.*:  x.no"):
        cluster.run(file)
    with pytest.raises(FileNotFoundError, match=r"^there is no file .*/missing.py"):
        cluster.run("missing.py")
    with pytest.raises(TypeError, match=r"^ends.py is a file, which takes no epochs="):
        cluster.run(file, epochs=2)


# -- keywords ---------------------------------------------------------------------------------------------------------


def test_keywords_reach_the_function_and_a_clash_is_a_sentence(cluster, monkeypatch):
    def f(comm, x, y=0, limit=None):
        return x, y, limit

    monkeypatch.setattr(verbs._notebook, "_cluster", cluster)
    assert verbs.run(f, 1, y=PerRank("abcd")) == [(1, each, None) for each in "abcd"]
    assert verbs.run(f, y=2, x=1) == verbs.run(f, 1, 2, deadline=20) == [(1, 2, None)] * 4
    with pytest.raises(TypeError, match=r"^limit= is taken by lab.run itself, .*functools.partial\(f, limit="):
        verbs.run(f, 1, limit=60)
    with pytest.raises(TypeError, match=r"^deadline= is taken by lab.run itself"):
        verbs.run(lambda comm, deadline: deadline, deadline=10.0)
    assert verbs.run(functools.partial(f, limit=3), 1, limit=60) == [(1, 0, 3)] * 4
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'z'"):
        verbs.run(f, 1, z=3)
    with pytest.raises(TypeError, match=r"^argument y, a lock, cannot travel"):
        verbs.run(f, 1, y=threading.Lock())


# -- emulated hosts ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_on_emulated_hosts(no_engines_yet):
    try:
        launch.check_layout(layout.wanted(4, where="emulated"))
    except EngineError as refused:
        pytest.skip(str(refused))
    with Cluster.start(4, where="emulated", hosts=2) as hosts:
        (want,) = hosts.run(trained, None, False, ranks=[0])
        for backend in ("gloo", "hpdl"):
            assert all(torch.allclose(w, want, rtol=1e-12, atol=1e-12) for w in hosts.run(trained, backend, False))
        found = [values for values, _ in hosts.run(environment)]
        assert [values[:5] for values in found] == [[str(r), "4", str(r % 2), "2", "10.77.0.1"] for r in range(4)]
        with pytest.raises(CommTimeout) as caught:
            hosts.run(sums, "all_reduce", deadline=1)
        assert re.search(r"rank \d waits in all_reduce with", str(caught.value)) and "cycle" not in str(caught.value)
        run_cells(hosts, "x = torch.ones(1); dist.init_process_group('gloo')", "dist.all_reduce(x)")
        assert hosts.client[:].pull("x.item()", block=True) == [4.0] * 4

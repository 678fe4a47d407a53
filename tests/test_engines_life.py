"""From the first start to the last trace: attach, resize, stop, die; nothing is left behind, nobody else looks in."""

import contextlib
import itertools
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError

# A notebook's kernel, as far as engines are concerned: it starts some and then does what the test has asked for.
KERNEL = """
import os, signal, sys, time
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.supervisor import mapped_shared_memory
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where tests run under nohup
cluster = Cluster.start({engines})
pids = cluster.run(lambda comm: os.getpid())
print("READY", cluster._supervisor.pid, *pids, *mapped_shared_memory(pids), flush=True)
{then}
"""
WAIT = "time.sleep(600)"
COMPUTE = "cluster.run(lambda comm: time.sleep(600))"
BARRIER = "cluster.run(lambda comm: comm.barrier() if comm.rank else time.sleep(600), deadline=600)"


class Kernel:
    """A process that has started engines in the runtime directory `root`, and does `then`."""

    def __init__(self, root, then, engines=1):
        environment = os.environ | {"XDG_RUNTIME_DIR": str(root)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", KERNEL.format(then=then, engines=engines)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for line in self.process.stdout:
            if line.startswith("READY"):
                break
        else:
            raise AssertionError(self.process.communicate()[1])
        _, self.supervisor, *rest = [int(word) if word.isdigit() else word for word in line.split()]
        self.engines, self.shared = rest[:engines], rest[engines:]  # what MPICH shares: a killed engine leaves it

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def root():
    """A runtime directory of this test's own, with a short path."""
    with tempfile.TemporaryDirectory(prefix="hpdl-l-", dir="/tmp") as path:
        yield path


@pytest.fixture
def own_session(root, traces, monkeypatch):
    """Engines started in this process go to a session of this test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", root)
    yield traces(root)
    traces(root).wait_until_gone()


# -- nothing left behind ----------------------------------------------------------------------------------------------

ENDS = {
    "stop": ("cluster.stop()", None),
    "end of the script": ("cluster.client", None),  # %px: with a controller, and connections to it
    "exception": ("1 / 0", None),
    "detach": ("cluster.detach(); time.sleep(600)", None),
    "kill -9": (WAIT, lambda k: k.process.kill()),
    "kill -9 amid a run": (COMPUTE, lambda k: k.process.kill()),
    "kill -9 amid a barrier": (BARRIER, lambda k: k.process.kill()),
    "SIGTERM": (WAIT, lambda k: k.process.terminate()),
    "Ctrl-C": (WAIT, lambda k: k.process.send_signal(signal.SIGINT)),
    "Ctrl-C amid a run": (COMPUTE, lambda k: k.process.send_signal(signal.SIGINT)),
    "SIGHUP": (WAIT, lambda k: k.process.send_signal(signal.SIGHUP)),
    "engines killed, then stop": ("[os.kill(p, signal.SIGKILL) for p in pids]; cluster.stop()", None),
    "an engine killed, then kill -9": (WAIT, lambda k: (os.kill(k.engines[1], signal.SIGKILL), k.process.kill())),
    "supervisor told to end": (WAIT, lambda k: os.kill(k.supervisor, signal.SIGTERM)),
    "restart, then stop": ("cluster.restart(); cluster.stop()", None),
    "restart, then kill -9": ("cluster.restart(); os.kill(os.getpid(), signal.SIGKILL)", None),
    "a daemon of the attendee's": (
        "cluster.run(lambda comm: os.posix_spawn('/bin/sleep', ['sleep', '600'], os.environ, setsid=True)); "
        "cluster.stop()",
        None,
    ),
    "a forked child that lives on": ("os.fork() or time.sleep(600); os._exit(0)", None),
    "shared memory of the attendee's": (
        "cluster.run(lambda comm: exec('from multiprocessing import shared_memory as s; import builtins;'"
        "'builtins.keep = s.SharedMemory(create=True, size=4096)')); cluster.stop()",
        None,
    ),
    "a deadlock, then the end": ("cluster.run(lambda comm: comm.barrier() if comm.rank else 0, deadline=1)", None),
}


IN_PAIRS = ("kill -9 amid a barrier", "engines killed, then stop", "an engine killed, then kill -9",
            "a deadlock, then the end")  # fmt: skip


def test_twenty_ways_to_end_are_tried():
    assert len(ENDS) == 20


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_behind(root, traces, end):
    then, act = ENDS[end]
    kernel = Kernel(root, then, engines := 1 + (end in IN_PAIRS))
    try:
        assert kernel.shared
        if act is not None:
            assert len(traces(root).processes()) >= 2 + 2 * engines  # supervisor, mpiexec; shells and engines
            act(kernel)
        if end == "a forked child that lives on":  # it holds every connection of the kernel that it was forked from
            kernel.process.kill()
        traces(root).wait_until_gone()
        assert not [path for path in kernel.shared if os.path.exists(path)]
        assert not os.listdir(root)
    finally:
        kernel.end()


def test_a_killed_supervisor_takes_everything_with_it_and_the_next_start_sweeps_up(root, traces, monkeypatch):
    kernel = Kernel(root, WAIT)
    try:
        os.kill(kernel.supervisor, signal.SIGKILL)
        traces(root).wait_until_gone(files=False)
        monkeypatch.setenv("XDG_RUNTIME_DIR", root)
        with Cluster.start(1) as cluster:
            assert not cluster.attached
            assert cluster.run(lambda comm: comm.size) == [1]
    finally:
        kernel.end()
    traces(root).wait_until_gone()


# -- privacy ----------------------------------------------------------------------------------------------------------


def test_a_directory_that_others_could_enter_is_closed_and_with_stops_what_it_has_started(own_session):
    os.mkdir(own_session.path)
    os.chmod(own_session.path, 0o777)
    with Cluster.start(1) as cluster:
        assert stat.S_IMODE(os.stat(own_session.path).st_mode) == 0o700
        assert cluster.run(lambda comm: comm.size) == [1]
        assert len(own_session.processes()) >= 4  # supervisor, mpiexec, shell, engine
    with pytest.raises(EngineError, match=r"has ended: call lab.start\(\)"):
        cluster.run(lambda comm: comm.size)


# -- start, attach, resize --------------------------------------------------------------------------------------------


def test_a_second_notebook_attaches_and_leaves_the_engines_to_the_first(own_session):
    with Cluster.start(1) as first:
        pids, numbers = first.run(lambda comm: os.getpid()), []
        with Cluster.start(1) as second:
            assert second.attached and second.run(lambda comm: os.getpid()) == pids
            for pool in itertools.islice(itertools.cycle((first._pool, second._pool)), 6):
                with pool._lock.held() as number:
                    numbers.append(number)
        assert numbers == list(range(numbers[0], numbers[0] + 6)), "numbers of runs are never used twice"
        assert first.run(lambda comm: os.getpid()) == pids


def test_a_notebook_learns_that_another_has_restarted_or_stopped_the_engines(own_session):
    first, second = Cluster.start(1), Cluster.start(1)
    second.restart(2)
    assert all(engine.is_replaced() for engine in first._pool.engines), "nobody waits for how those ended"
    assert first.run(lambda comm: comm.size) == [2, 2]
    second.stop()
    with pytest.raises(EngineError, match="stopped in another notebook"):
        first.run(lambda comm: comm.size)
    with pytest.raises(EngineError, match=r"call lab.start\(\)"):
        first.restart()
    first.detach()


def test_two_notebooks_that_start_at_once_share_one_cluster(root, traces):
    kernels = [
        subprocess.Popen(
            [sys.executable, "-c", KERNEL.format(then="sys.stdin.read()", engines=1)],
            env=os.environ | {"XDG_RUNTIME_DIR": root},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [next(line for line in kernel.stdout if line.startswith("READY")) for kernel in kernels]
    for kernel in kernels:  # not before both have said it: the engines end with the last
        kernel.communicate()
    assert said[0] == said[1]
    traces(root).wait_until_gone()


def test_the_verbs(own_session, capsys, eventually):
    from hpdl_lab import lab

    with pytest.raises(EngineError, match=r"no engine cluster is running: call lab.start\(4\)"):
        lab.run(lambda comm: comm.rank)
    with pytest.raises(EngineError, match=r"call lab.start\(4\)"):
        lab.cluster()
    cluster = lab.start(2)
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["rank", "host", "cores", "GPU", "pid"]
    pids = lab.run(lambda comm: os.getpid())
    for rank, pid in enumerate(pids):
        row = out.splitlines()[1 + rank].split()
        assert row[0] == str(rank) and row[1] == socket.gethostname() and row[-1] == str(pid)
    assert sum(line.startswith(("lab.", "%%px", "stop button")) for line in out.splitlines()) == 5
    assert lab.start(2) is cluster and lab.cluster() is cluster and lab.run(lambda comm: os.getpid()) == pids
    capsys.readouterr()
    with pytest.raises(EngineError, match="^10,000 engines need"):
        lab.start(10_000)
    assert capsys.readouterr().out == "" and lab.run(lambda comm: os.getpid()) == pids  # which goes on
    lab.start(1)
    assert capsys.readouterr().out.startswith("2 engines were running: replacing them by 1 engine.\n")
    assert lab.run(lambda comm: comm.size) == [1]
    other = Cluster.start(1)
    with pytest.raises(EngineError, match=r"^1 other notebook\(s\) use what is running, 1 engine: take it as it is"):
        lab.start(2)
    other.detach()
    os.kill(lab.run(lambda comm: os.getpid())[0], signal.SIGKILL)
    eventually(lab.cluster().fault)
    lab.start(1)
    assert "rank 0 was killed by signal 9" in capsys.readouterr().out
    assert lab.run(lambda comm: comm.size) == [1]
    lab.restart()
    assert lab.run(lambda comm: comm.size) == [1]
    lab.stop()
    lab.stop()
    with pytest.raises(EngineError, match=r"call lab.start\(4\)"):
        lab.run(lambda comm: comm.rank)


def test_the_verbs_after_another_notebook_has_stopped_the_engines(own_session, capsys):
    from hpdl_lab import lab

    lab.start(1)
    Cluster.find().stop()
    lab.restart()
    assert lab.run(lambda comm: comm.size) == [1]
    Cluster.find().stop()
    other = Cluster.start(2)
    with pytest.raises(EngineError, match=r"^1 other notebook\(s\) use .*, 2 engines: .*, lab.start\(2\)"):
        lab.restart()
    lab.start()
    assert lab.run(lambda comm: comm.size) == [2, 2]
    capsys.readouterr()
    lab.stop()
    assert capsys.readouterr().out.startswith("1 other notebook(s) used these engines, too")
    other.detach()
    assert lab.start().n == 4
    capsys.readouterr()
    lab.stop()
    assert capsys.readouterr().out == ""


def test_a_kernel_is_called_by_its_notebook_where_jupyter_says_which_that_is(eventually):
    from hpdl_lab.verbs.cluster import notebook_of

    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep, env=os.environ | {"JPY_SESSION_NAME": "work/03_messages.ipynb"}) as kernel:
        name = eventually(lambda: notebook_of(kernel.pid))  # the system may still be setting the process up
        kernel.kill()
    assert name == "03_messages.ipynb" and notebook_of(kernel.pid) == ""


def test_the_stop_button_during_a_restart(own_session):
    with Cluster.start(1) as cluster:
        for seconds in (0.05, 0.3, 0.6):
            timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
            with contextlib.suppress(KeyboardInterrupt):
                timer.start()  # on a busy machine it may end before anything else begins
                cluster.restart()
                timer.join()
                time.sleep(1)
            cluster.restart()
            assert cluster.run(lambda comm: comm.size) == [1]

"""However emulated hosts end, nothing is left of them: no process, no file, no namespace, no link."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from hpdl_lab import lab
from hpdl_lab.engines import hosts, launch, layout
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError
from tests.wording import raises

pytestmark = pytest.mark.slow  # links of emulated hosts

NOTEBOOK = """
import os, signal, sys, time
from hpdl_lab.engines.cluster import Cluster

cluster = Cluster.start(1, where="emulated")
assert cluster.run(lambda comm: os.uname().nodename) == ["host0"]
print("READY", cluster._supervisor.pid, flush=True)
sys.stdin.readline()
{then}
"""
COMMAND = [sys.executable, "-m", "hpdl_lab", "cluster", "emulate", "--link", "100mbit", "--hosts"]


@pytest.fixture
def root():
    """A runtime directory of this test's own, with a short path; skips where hosts cannot be emulated."""
    try:
        launch.check_layout(layout.wanted(2, where="emulated"))
    except EngineError as refused:
        pytest.skip(str(refused))
    with tempfile.TemporaryDirectory(prefix="hpdl-e-", dir="/tmp") as path:
        yield path


class Started:
    """A process that has started emulated hosts in `root` when it prints a line that begins with `ready`."""

    def __init__(self, root, traces, command, ready):
        self.traces = traces(root)
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"XDG_RUNTIME_DIR": root},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.said = []
        for line in self.process.stdout:
            self.said.append(line)
            if line.startswith(ready):
                break
        else:
            raise AssertionError(self.process.communicate()[1])
        with open(hosts.namespaces_file(self.traces.path)) as file:
            self.hosts = json.load(file)
        self.namespaces = Namespaces(self.hosts)
        assert self.namespaces.held()

    def pid(self, words):
        """The process of the session whose command line holds `words`."""
        for pid in self.traces.processes():
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
                if words in file.read().replace("\0", " "):
                    return pid
        raise AssertionError(f"no process {words}")

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def wait_until_gone(self, files=True):
        self.traces.wait_until_gone(files)
        give_up = time.monotonic() + 30
        while left := self.namespaces.held():
            assert time.monotonic() < give_up, f"left behind: namespaces {left}"
            time.sleep(0.05)
        self.namespaces.close()

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


class Namespaces:
    """The namespaces of `hosts`, as hosts.json lists them: a network and a name of each, one for mounts.

    They are kept open, or the kernel would give their numbers to those of Chromium, say, as soon as they are gone.
    """

    def __init__(self, hosts):
        self.kept = {path: os.open(path, os.O_RDONLY) for path in {p for host in hosts for p in host if "/fd/" in p}}
        self.numbers = {os.fstat(handle).st_ino for handle in self.kept.values()}
        assert len(self.numbers) == 2 * len(hosts) + 1

    def held(self):
        """Numbers of those that a process is in, or holds open."""
        found, mine = set(), {f"/proc/{os.getpid()}/fd/{handle}" for handle in self.kept.values()}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for folder in ("ns", "fd"):
                with contextlib.suppress(OSError):
                    for path in {f"/proc/{pid}/{folder}/{name}" for name in os.listdir(f"/proc/{pid}/{folder}")} - mine:
                        with contextlib.suppress(OSError):
                            kind, _, number = os.readlink(path).partition(":[")
                            if kind in ("net", "uts", "mnt"):
                                found.add(int(number.rstrip("]")))
        return self.numbers & found

    def close(self):
        while self.kept:
            os.close(self.kept.popitem()[1])
        self.numbers = set()


def notebook(then=""):
    """The command of a notebook on an emulated host that does `then` when told to go, and what it says before."""
    return [sys.executable, "-c", NOTEBOOK.format(then=then)], "READY"


def hosts_and_notebook_killed(started):
    os.kill(started.pid("hpdl_lab.engines.hosts /"), signal.SIGKILL)
    time.sleep(0.1)
    started.process.kill()


ENDS = {
    "stop": (*notebook("cluster.stop(); time.sleep(600)"), Started.go),
    "notebook killed": (*notebook(), lambda started: started.process.kill()),
    "hosts and notebook killed": (*notebook(), hosts_and_notebook_killed),
    "command killed": ([*COMMAND, "1"], "Ctrl-C", lambda started: started.process.kill()),
}


@pytest.fixture
def start(root, traces):
    """`start(command, ready)`: a Started that is ended when the test is over."""
    every = []

    def start(command, ready):
        every.append(Started(root, traces, command, ready))
        return every[-1]

    yield start
    for started in every:
        started.end()
        started.wait_until_gone(files=False)  # before `root` is removed: the supervisor still moves its files there


@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_of_the_hosts(root, start, end):
    command, ready, act = ENDS[end]
    started = start(command, ready)
    act(started)
    started.wait_until_gone()
    assert not os.listdir(root)


def test_a_killed_supervisor_takes_the_hosts_with_it(start):
    started = start(*notebook())
    os.kill(int(started.said[-1].split()[1]), signal.SIGKILL)
    started.wait_until_gone(files=False)  # nobody is left who could remove them: the next start does


def test_the_verb_takes_what_runs_replaces_it_and_says_so(root, monkeypatch, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", root)
    with lab.start(2) as cluster:
        lab.start(2, where="emulated", link="100mbit")
        assert "2 engines were running: replacing them by 2 engines on 2 emulated hosts at 100mbit." in (
            capsys.readouterr().out
        )
        with open(hosts.namespaces_file(cluster.path)) as file:
            namespaces = Namespaces(json.load(file))
        assert namespaces.held()
        pids = lab.run(lambda comm: os.getpid())
        for how in ({}, {"where": "emulated"}, {"link": "100mbit"}, {"hosts": 2}):
            assert lab.start(2, **how) is cluster and lab.run(lambda comm: os.getpid()) == pids
        other = Cluster.start(2)
        assert other.attached and (other.where, other.link) == ("emulated", "100mbit")
        with raises(EngineError, "1", "2 engines", "2 emulated"):
            lab.start(2, where="local")
        other.detach()
        lab.start(2, where="local")
        assert lab.run(lambda comm: comm.node_size) == [2, 2] and cluster.link == ""
        assert not namespaces.held()
        namespaces.close()


def test_the_command_keeps_the_hosts_up_for_others_until_ctrl_c(root, start, monkeypatch):
    started = start([*COMMAND, "2"], "Ctrl-C")
    assert "".join(started.said).count("host1") >= 2 and "lab.start(2)" in "".join(started.said)
    monkeypatch.setenv("XDG_RUNTIME_DIR", root)
    with Cluster.start(2) as used:
        assert used.attached and used.link == "100mbit"
        assert used.run(lambda comm: (comm.barrier(), comm.rank)[1]) == [0, 1]
    shell = [*COMMAND[:4], "shell", "host1"]
    commands = "hostname; cat /etc/hosts; pwd\n"
    in_shell = {"env": os.environ | {"SHELL": "/bin/sh"}, "capture_output": True, "text": True, "timeout": 300}
    said = subprocess.run(shell, input=commands, **in_shell)
    assert said.stdout == f"host1\n127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n{os.getcwd()}\n", said.stderr
    none = subprocess.run([*COMMAND[:4], "shell", "host2"], **in_shell)
    assert none.returncode == 1 and none.stderr.startswith("hpdl: no emulated host host2 is up: hpdl cluster emulate")
    again = subprocess.run([*COMMAND, "2"], **in_shell)
    assert again.returncode == 1 and "2 engines on 2 emulated hosts at 100mbit are up already" in again.stderr
    started.process.send_signal(signal.SIGINT)
    out, _ = started.process.communicate()
    assert out.endswith("Ended.\n") and started.process.returncode == 0
    started.wait_until_gone()


def test_without_the_rights_of_root(root, start):
    """In a user namespace. As root this gives up every right but that to be root there, which others have anyway."""
    command, ready = notebook()
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        allowed = [setpriv, "--inh-caps=-all", "--bounding-set=-all,+setfcap"]
        if not setpriv or subprocess.run([*allowed, "unshare", "-Urn", "true"], capture_output=True).returncode:
            pytest.skip("this system has no setpriv, or allows user namespaces to nobody but root")
        command = [*allowed, *command]
    started = start(command, ready)
    assert len({path for path in started.hosts[0] if path.endswith("/ns/user")}) == 1
    started.process.kill()
    started.wait_until_gone()
    assert not os.listdir(root)

"""`lab.start(n, where="ssh", hosts=[...])`: ipyparallel starts its engines by ssh, as the user's configuration says."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading

import numpy as np
import psutil
import pytest

from hpdl_lab import lab
from hpdl_lab.engines import slurm
from hpdl_lab.engines.errors import EngineError
from tests.ipyparallel_kinds import sshd

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts():
    """Names that the ssh first on PATH knows, for tests that share what they start."""
    with sshd() as folder, tempfile.TemporaryDirectory(prefix="hpdl-t-", dir="/tmp") as root:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", folder, prepend=":")
            for name in ("XDG_RUNTIME_DIR", "HPDL_SHARED"):
                patch.setenv(name, f"{root}/{name[:3]}")
                os.mkdir(f"{root}/{name[:3]}", 0o700)
            yield ["n1", "n2"]
            with slurm.shared_folder():  # which first removes those of who was killed
                pass
            assert os.listdir(f"{root}/HPD") == []


def processes():
    """What tests have started and that runs: ipyparallel's engines, which have a clean environment, by their folder."""
    found, folder = [], os.environ["HPDL_SHARED"]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            said = {**process.environ(), "": " ".join(process.cmdline())}
            if process.pid != os.getpid() and any(folder in value for value in said.values()):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def pid(comm):
    return os.getpid()


def test_engines_start_by_ssh_and_a_restart_starts_ranks_only(hosts, eventually):
    def add(comm):
        return float(comm.all_reduce(np.full(3, comm.rank + 1.0))[0])

    with lab.start(4, where="ssh", hosts=hosts) as cluster:
        assert lab.run(add) == [10.0] * 4
        job, ranks = cluster.supervisor.ask("status")["running"]["job"], lab.run(pid)
        lab.restart()
        assert not {*lab.run(pid)} & {*ranks}
        assert cluster.supervisor.ask("status")["running"]["job"] == job
    eventually(lambda: processes() == [])


def test_a_host_that_ssh_does_not_know_is_a_sentence(hosts, eventually):
    with pytest.raises(EngineError, match="^ssh says: .*nowhere[^\\n]*$"):
        lab.start(2, where="ssh", hosts=["nowhere.invalid"])
    eventually(lambda: processes() == [])


def test_the_stop_button_ends_a_start(hosts, eventually):
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        lab.start(4, where="ssh", hosts=hosts)
    eventually(lambda: processes() == [])


def test_engines_on_hosts_end_when_all_here_is_killed(hosts, eventually):
    script = "from hpdl_lab import lab; lab.start(1, where='ssh', hosts=['n1']); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as notebook:
        while b"ready" not in (line := notebook.stdout.readline()):
            assert line, "no engine has started"
        session = re.compile("supervisor|relay|ipyparallel_job|hpdl_lab.engines.remote")
        here = [process for process in processes() if session.search(" ".join(process.cmdline()))]
        assert len(here) >= 4
        for process in here:
            process.suspend()  # so that none has time to act on the end of another
        notebook.kill()
        for process in here:
            process.kill()
    eventually(lambda: processes() == [])

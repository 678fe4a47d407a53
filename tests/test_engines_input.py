"""Bad input and bad machines: one clear sentence with the numbers and the remedy each."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from hpdl_lab import features
from hpdl_lab.engines import errors, launch, session_dir
from hpdl_lab.engines.cluster import Cluster, table_html, table_text
from hpdl_lab.engines.errors import EngineError
from hpdl_lab.engines.layout import Layout
from hpdl_lab.engines.run import Collapser

START = """
from hpdl_lab.engines.cluster import Cluster
with Cluster.start(2) as cluster:
    cluster.show()
    print(cluster.run(lambda comm: comm.rank))
"""


# -- counts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, -1])
def test_no_engines(n):
    with pytest.raises(ValueError, match=rf"engines .* at least 1, got {n}"):
        Cluster.start(n)


@pytest.mark.parametrize("n", [2.5, "4", None, True])
def test_a_count_that_is_none(n):
    with pytest.raises(ValueError, match=rf"a whole number, at least 1, got {n!r}"):
        Cluster.start(n)


def test_ten_thousand_engines():
    expected = (
        r"^10,000 engines need 3,000 GB of memory, this machine has [\d,.]+ GB free and \d+ cores: start [\d,]+ at"
    )
    with pytest.raises(EngineError, match=expected + r" most, or simulate: sim.run\(10000, fn\)$"):
        Cluster.start(10_000)


def test_as_many_as_the_message_allows_are_allowed(monkeypatch):
    monkeypatch.setattr(launch, "memory_available", lambda: 10 * launch.ENGINE_NBYTES + 1)
    launch.check_layout(Layout(10))
    with pytest.raises(EngineError, match="start 10 at most"):
        launch.check_layout(Layout(11))


def test_a_start_that_takes_long_is_announced_with_the_numbers(monkeypatch, capsys):
    monkeypatch.setattr(features, "cores", lambda: 2)
    assert "64 engines on 2 cores" in launch.announcement(Layout(64)) and "16 s" in launch.announcement(Layout(64))
    assert launch.announcement(Layout(8)) == launch.announcement(Layout(64, "slurm")) == ""
    monkeypatch.setattr("hpdl_lab.engines.cluster.Launching", Mock(side_effect=EngineError("not in this test")))
    with pytest.raises(EngineError, match="not in this test"):
        Cluster("/nowhere", Mock())._launch(Layout(64))
    assert capsys.readouterr().out == launch.announcement(Layout(64)) + "\n"


# -- places -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def short():
    """A directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="hpdl-i-", dir="/tmp") as path:
        yield path


def test_an_unwritable_home_is_not_needed(short):
    environment = os.environ | {"HOME": "/proc/1/nowhere", "XDG_RUNTIME_DIR": short}
    done = subprocess.run([sys.executable, "-c", START], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("[0, 1]\n") and done.stderr == ""
    assert not os.listdir(short)


def test_a_runtime_directory_that_is_not_there_is_passed_over_with_the_reason(monkeypatch, short):
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{short}/missing")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: short)
    path, reasons = session_dir.find_session_dir()
    assert os.path.dirname(path) == short
    assert reasons == [f"XDG_RUNTIME_DIR {short}/missing does not exist"]
    assert f"Note: {reasons[0]}." in table_text([info(0)], reasons)
    assert reasons[0] in table_html([info(0)], reasons)


def test_a_runtime_directory_with_a_long_path_is_passed_over_with_the_numbers(monkeypatch, short):
    deep = os.path.join(short, "d" * 90)
    os.mkdir(deep)
    monkeypatch.setenv("XDG_RUNTIME_DIR", deep)
    reasons = session_dir.find_session_dir()[1]
    assert len(reasons) == 1 and f"is {len(deep)} bytes long, and a socket's path allows" in reasons[0]


NO_LOCKS = """
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>
extern "C" int flock(int fd, int operation) {
    char path[4096] = {};
    readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), path, sizeof path - 1);
    if (strstr(path, getenv("NO_LOCKS_IN"))) return errno = ENOLCK, -1;
    return syscall(SYS_flock, fd, operation);
}
"""
USE_GLOO = """
import torch
from hpdl_lab import lab
from hpdl_lab.collectives.native import gloo_all_reduce
from hpdl_lab.comm.torch.group import process_group

def both(comm):
    x = gloo_all_reduce(comm, torch.ones(3))
    with process_group(comm):
        torch.distributed.all_reduce(x)
    return x.tolist()

with lab.start(2):
    print(lab.run(both))
"""


@pytest.mark.parametrize("locks", [True, False])
def test_a_site_may_set_tmpdir_to_a_long_path_with_spaces_on_a_file_system_without_locks(short, locks):
    """As /scratch on NFS; XDG_RUNTIME_DIR is in the same place. Nothing is left there, nor in memory."""
    deep = os.path.join(short, "scratch of users", "d" * 100, "tmp of job 17")
    os.makedirs(deep)
    environment = os.environ | {"TMPDIR": deep, "XDG_RUNTIME_DIR": f"{short}/scratch of users"}
    if not locks:
        library = os.path.join(short, "no_locks.so")
        source = os.path.join(short, "no_locks.cpp")
        Path(source).write_text(NO_LOCKS)
        subprocess.run(["c++", "-std=c++20", "-shared", "-fPIC", "-o", library, source], check=True)
        environment |= {"LD_PRELOAD": library, "NO_LOCKS_IN": f"{short}/scratch of users"}
    before = set(os.listdir("/dev/shm"))
    done = subprocess.run([sys.executable, "-c", USE_GLOO], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("[[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]\n"), done.stdout + done.stderr
    assert not os.listdir(deep) and not [n for n in set(os.listdir("/dev/shm")) - before if n.startswith("hpdl-")]


def test_sockets_of_kernels_have_short_paths_where_the_home_has_a_long_one(monkeypatch, short):
    monkeypatch.setenv("XDG_RUNTIME_DIR", short)
    with session_dir.of_kernels(short) as usual:
        assert usual == short
    with session_dir.of_kernels(os.path.join(short, "d" * 40)) as instead:
        assert os.path.dirname(instead) == short and os.stat(instead).st_mode & 0o777 == 0o700
    assert not os.listdir(short)


def test_a_directory_of_someone_else_is_never_used(monkeypatch, short):
    monkeypatch.setenv("XDG_RUNTIME_DIR", short)
    path = session_dir.find_session_dir()[0]
    os.symlink("/etc", path)
    elsewhere, reasons = session_dir.find_session_dir()
    assert elsewhere != path and reasons == [f"{path} belongs to someone else"]
    os.unlink(path)
    os.mkdir(path)
    if os.getuid() == 0:
        os.chown(path, 65534, 65534)
        assert session_dir.find_session_dir()[1] == [f"{path} belongs to someone else"]


def test_no_place_at_all(monkeypatch, short):
    monkeypatch.setattr(session_dir, "_candidates", lambda: [("XDG_RUNTIME_DIR", f"{short}/missing")])
    with pytest.raises(EngineError, match="no place for the sockets .* does not exist. Set XDG_RUNTIME_DIR to a short"):
        Cluster.start(1)


# -- network, MPI, processes ------------------------------------------------------------------------------------------


def test_no_network_is_needed(short):
    unshare = shutil.which("unshare")
    if not unshare or subprocess.run([unshare, "-rn", "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no network namespace in which there is no network")
    done = subprocess.run(
        [unshare, "-rn", sys.executable, "-c", START],
        env=os.environ | {"XDG_RUNTIME_DIR": short},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.endswith("[0, 1]\n") and done.stderr == ""
    assert not os.listdir(short)


def test_no_mpi(monkeypatch, short):
    def missing():
        raise features.Missing("no mpiexec in /x nor on PATH: pip install mpich")

    monkeypatch.setenv("XDG_RUNTIME_DIR", short)
    monkeypatch.setattr(features, "mpiexec", missing)
    with pytest.raises(EngineError, match="no mpiexec in /x nor on PATH: pip install mpich"):
        Cluster.start(1)


def test_engines_that_end_at_once_are_explained_by_what_they_said(monkeypatch, short):
    monkeypatch.setenv("XDG_RUNTIME_DIR", short)
    monkeypatch.setattr(
        launch, "engines_argv", lambda path, layout: ["/bin/sh", "-c", "echo cannot open libmpi.so.12 >&2; exit 1"]
    )
    with pytest.raises(
        EngineError, match=r"^the engines ended at the start: cannot open libmpi.so.12. .* lab.start\(2\)"
    ):
        Cluster.start(2)


def test_one_engine_that_ends_at_once_is_named_without_waiting_for_the_others(monkeypatch, short, within):
    script = "import os, sys, time\nif os.environ['PMI_RANK'] == '1': sys.exit('no numpy here')\ntime.sleep(600)"
    argv = launch.engines_argv(short, Layout(2))
    monkeypatch.setenv("XDG_RUNTIME_DIR", short)
    monkeypatch.setattr(launch, "engines_argv", lambda path, layout: [*argv[:-2], "-c", script])
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"ended at the start: no numpy here\."):
        Cluster.start(2)
    assert time.monotonic() - began < within(10)


def test_a_program_that_cannot_be_started_is_named(monkeypatch, short):
    monkeypatch.setenv("XDG_RUNTIME_DIR", short)
    monkeypatch.setattr(launch, "engines_argv", lambda path, layout: ["/no/such/mpiexec"])
    with pytest.raises(EngineError, match="^cannot start /no/such/mpiexec: No such file or directory"):
        Cluster.start(2)


def test_engines_that_do_not_answer_are_counted(monkeypatch, short):
    monkeypatch.setenv("XDG_RUNTIME_DIR", short)
    monkeypatch.setattr("hpdl_lab.engines.launch.START_SECONDS", 0.5)
    monkeypatch.setattr(launch, "engines_argv", lambda path, layout: ["/bin/sleep", "600"])
    with pytest.raises(EngineError, match=r"^0 of 2 engines answered within 0.5 s. The machine may be overloaded"):
        Cluster.start(2)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ("0\n", "ended with exit status 0"),
        ("3\n", "ended with exit status 3"),
        ("137\n", "was killed by signal 9 (SIGKILL: kill -9, or the machine ran out of memory)"),
        ("139\n", "was killed by signal 11 (SIGSEGV: a crash in compiled code)"),
        (f"{128 + signal.SIGTERM}\n", "was killed by signal 15 (SIGTERM)"),
        ("", "ended"),
        ("255\n", "ended with exit status 255"),
    ],
)
def test_how_an_engine_ended(status, text):
    assert errors.ending(status) == text


def test_variables_of_an_outer_mpi_job_do_not_mislead_the_ranks(monkeypatch):
    for name in ("PMI_RANK", "PMIX_RANK", "HYDRA_HOST_FILE", "OMPI_COMM_WORLD_RANK", "JPY_PARENT_PID"):
        monkeypatch.setenv(name, "7")
    environment = launch.engine_environment("/session", Layout(2), 1)
    assert "7" not in {environment.get(n) for n in ("PMI_RANK", "PMIX_RANK", "HYDRA_HOST_FILE", "JPY_PARENT_PID")}


def test_the_attendees_own_number_of_threads_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    environment = launch.engine_environment("/session", Layout(10_000), 1)
    assert (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("3", "1")


# -- what is shown ----------------------------------------------------------------------------------------------------


def info(rank, cores=(0, 1), gpu="none"):
    return {"rank": rank, "pid": 100 + rank, "host": "here", "machine": "this", "cores": list(cores), "gpu": gpu}


def test_the_table():
    lines = table_text([info(0), info(1, cores=(0, 2, 3), gpu="cuda:1"), info(2)]).splitlines()
    assert [line.split("  ") for line in lines[:4]][2:3] != []
    assert lines[2].split() == ["1", "here", "0,", "2,", "3", "cuda:1", "101"]
    assert "3 engines take turns" not in table_text([info(0), info(1)])
    assert "3 engines take turns on 2 cores" in table_text([info(r) for r in range(3)])
    assert "<td>cuda:1</td>" in table_html([info(1, gpu="cuda:1")])
    assert "&lt;here&gt;" in table_html([info(0) | {"host": "<here>"}])


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_lines_wait_for_the_other_ranks_but_not_for_ever(capsys):
    clock = Clock()
    output = Collapser([0, 1, 2], clock)
    output.add(0, "stdout", "a\nb\n")
    output.add(1, "stdout", "a\n")
    output.flush()
    assert capsys.readouterr().out == ""
    clock.now = 0.4
    output.flush()
    assert capsys.readouterr().out == "ranks 0, 1 say a\nrank 0 says b\n"
    output.finish(2)
    output.add(0, "stdout", "c\n")
    output.add(1, "stdout", "c\n")
    output.flush()
    assert capsys.readouterr().out == "ranks 0, 1 say c\n"


def test_lines_that_the_same_ranks_share_stay_together(capsys):
    output = Collapser([0, 1, 2])
    for rank in range(3):
        output.add(rank, "stdout", "title\n1 2\n3 4\n" if rank < 2 else "title\n5 6\n7 8\n")
        output.add(rank, "stderr", "careful\n")
    output.flush(everything=True)
    out, err = capsys.readouterr()
    assert out == "ranks 0-2 say title\nranks 0, 1 say:\n    1 2\n    3 4\nrank 2 says:\n    5 6\n    7 8\n"
    assert err == "ranks 0-2 say careful\n"

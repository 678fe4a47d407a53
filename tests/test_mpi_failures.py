"""Programs on real ranks that get stuck, fail or are killed: every one of them ends, soon, and says why."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hpdl_lab import features

BEGIN = """
import os, signal, sys, threading, time
import numpy as np
from hpdl_lab.comm.mpi.session import Session

session = Session()
rank, size = session.rank, session.size
after, before = (rank + 1) % size, (rank - 1) % size
x, y = np.full(10, rank, np.float32), np.zeros(10, np.float32)

said = open(f"said-{rank}", "w")  # files, because launchers mix the lines of ranks

def say(*words):
    print(*words, file=said, flush=True)

def until(condition):
    while not condition():
        time.sleep(0.01)

def write(name):
    open(f"{name}-{rank}", "w").close()

def wrote(name, ranks):
    return all(os.path.exists(f"{name}-{r}") for r in ranks)

def once(condition, act):  # while this rank waits
    threading.Thread(target=lambda: (until(condition), act()), daemon=True).start()

def waits_in(op, ranks):
    slots = [session.status.slot(r) for r in ranks]
    return all((slot.state, slot.op) == ("waiting", op) for slot in slots)
"""


@pytest.fixture
def start(tmp_path, mpich_cleaned_up):
    """start(script): the script on 3 ranks, as a process whose ranks are ended with the test."""
    started = []

    def make(script, launcher=()):
        path = tmp_path / "script.py"
        path.write_text(BEGIN + script)
        environment = {**os.environ, **features.launch_environment(), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
        command = [*(launcher or (features.mpiexec(), "-n", "3")), sys.executable, str(path)]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=2))
        return started[-1]

    yield make
    for process in started:
        family = [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
        for member in family:
            member.kill()
        process.wait()


@pytest.fixture
def said(tmp_path):
    """said(rank): what it has said so far."""
    return lambda rank: (tmp_path / f"said-{rank}").read_text() if (tmp_path / f"said-{rank}").exists() else ""


def until(condition, limit=60):
    """Wait until `condition()`."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)


def test_interrupts_and_a_deadlock_end_waits_at_once_and_the_next_runs_work(start, said):
    """On one start of ranks, of which one leaves early: the program ends well."""
    process = start("""
comm = session.comm(1, deadline=30)
once(lambda: waits_in("recv", [rank]), lambda: say("pid", os.getpid()))
try:
    comm.recv(y, after)
except KeyboardInterrupt as error:
    say("interrupted at", time.time())
    say(*error.waits)
comm.close()
with session.comm(2) as comm:
    comm.sendrecv(x, after, y, before)
    say("next", y[0] == before)

comm = session.comm(3)  # everybody receives
once(lambda: waits_in("recv", range(size)), lambda: setattr(comm.waiting, "deadline", 0.1))
try:
    comm.recv(y, after)
except Exception as error:
    say("deadlock", type(error).__name__, error)
write("done")
until(lambda: wrote("done", range(size)))
comm.close()

if rank != 2:  # ranks 0 and 1 wait for rank 2 to come to run 4, are interrupted, and meet it in run 5
    once(lambda: waits_in("start", [rank]), lambda: os.kill(os.getpid(), signal.SIGINT))
    try:
        session.comm(4)
        say("no interrupt")
    except KeyboardInterrupt:
        say("interrupted while they gather")
    write("interrupted")
until(lambda: wrote("interrupted", (0, 1)))
with session.comm(5) as comm:
    comm.all_reduce(x)
    say("next", x[0])

comm = session.comm(6)
if rank != 1:
    time.sleep(1.5)
say("bye")
""")
    until(lambda: all("pid" in said(rank) for rank in range(3)))
    pids = [int(said(rank).split()[1]) for rank in range(3)]
    sent = time.time()
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    process.wait(60)
    for rank in range(3):
        text = said(rank)
        stopped = float(re.search(r"interrupted at ([0-9.]+)", text)[1])
        assert stopped - sent < 15, "long before the deadline; on a quiet machine at once"
        waits = f"rank {rank} waits in recv of 40 bytes from rank {(rank + 1) % 3} since"
        assert re.search(rf"{waits} .* \(script.py:", text.partition("next True\n")[0])
        told = f"\nnext True\ndeadlock CommTimeout no answer within 0.1 s: rank {rank} waits in recv from rank"
        assert told in text and "cycle: 0 -> 1 -> 2 -> 0" in text
        assert text.endswith("interrupted while they gather\nnext 3.0\nbye\n" if rank < 2 else "\nnext 3.0\nbye\n")
        assert ("interrupted while" in text) == (rank < 2) and "no interrupt" not in text
    assert process.returncode == 0


WAITS = ["comm.recv(y, (rank + 1) % 3)", "comm.background(lambda comm: comm.barrier()).wait()"]


def test_a_killed_rank_is_noticed_within_2_seconds(start, said, within):
    """A launcher ends all ranks when one is killed, before they can say anything: a shell hides the news from it.

    In every collective: test_faults.py. Ranks 0 and 1 wait for one after the other of the others, which are killed.
    """
    launcher = features.mpiexec() + ".gforker"
    if not os.path.exists(launcher):
        pytest.skip("this MPI has no mpiexec.gforker")
    process = start(
        f"""
x = np.zeros(1_000_000, np.float32)
for number, wait in enumerate({WAITS}):
    victim = number + 2
    if rank not in (0, 1, victim):
        continue
    comm = session.comm(number + 1, ranks=(0, 1, victim), deadline=30)
    comm.barrier()
    if rank == victim:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        eval(wait)
        comm.recv(y, 2)
    except Exception as error:
        say("after", time.monotonic() - begin, wait, type(error).__name__, error)
        comm.close(error)
write("done")
until(lambda: wrote("done", (0, 1)))  # or the other rank may see the end of this one first
say("done")
os._exit(0)
""",
        [launcher, "-n", str(2 + len(WAITS)), "sh", "-c", 'trap : INT; "$0" "$@"; true'],
    )
    process.wait(60)
    for rank in (0, 1):
        assert said(rank).endswith("done\n"), said(rank)
        reports = said(rank).split("after ")[1:]
        for wait, report in zip(WAITS, reports, strict=True):
            assert f"{wait} RankFailed rank 2 died: rank {rank} waits in " in report
            assert re.search(r"^  2 +dead", report, re.M), report
            assert float(report.split()[0]) < within(2.2)


def test_an_uncaught_error_on_one_rank_ends_the_others(start):
    """As plain mpiexec programs are: nobody catches anything."""
    process = start("""
from hpdl_lab.comm import world
session.leave = lambda: None
comm = session.comm(1, deadline=100)
if rank == 1:
    raise ZeroDivisionError("as a test")
comm.recv(y, 1)
""")
    process.wait(60)
    assert process.returncode != 0


def test_nothing_is_left(start, said, tmp_path):
    before = set(os.listdir("/dev/shm"))
    process = start("""
from hpdl_lab.comm.shm import share
comm = session.comm(1)
memory = share(comm, 4096 * size, "allocate")  # as comm.allocate, which makes a tensor of it
comm.all_reduce(x)
say(os.getpid())
time.sleep(30)
""")
    until(lambda: all("\n" in said(rank) for rank in range(3)))
    for rank in range(3):
        os.kill(int(said(rank)), signal.SIGKILL)
    process.wait(60)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "hpdl" in name]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("hpdl")] == []


def test_one_rank_without_a_launcher(said, tmp_path):
    script = (
        BEGIN
        + """
from hpdl_lab.comm.shm import share
with session.comm(1) as comm:
    memory = share(comm, 4096, "allocate")  # as comm.allocate, which makes a tensor of it
    say(comm.size, comm.all_reduce(x)[0], memory.array(0, 4096).sum())
"""
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert said(0) == "1 0.0 0\n", done.stderr
    assert done.returncode == 0

"""Ranks that are stopped or killed in the middle of every collective: an error or a right result, and nothing left.

All is done by one start of many ranks. First, pairs of them do different collectives at the same time, and one of each
pair is stopped; then ranks 0 and 1 meet one victim after the other, which is killed.
"""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hpdl_lab import features

# Each does one collective of (n,) ones and returns whether this rank's result is right. n is large on purpose: the
# victim is then most likely inside. "split" is the last one: where a rank dies while MPI agrees on the number of a new
# communicator, MPICH never makes another one in the processes that were in it.
RANKS = """
import itertools, os, sys, time, types
import numpy as np
from hpdl_lab.collectives import table
from hpdl_lab.comm.mpi.session import session_of_this_process

session = session_of_this_process()
rank = session.rank
n = 120_000

def ones(comm): return np.ones(n)
def rows(comm): return np.ones((comm.size, n))
def is_all(x, value): return bool((x == value).all())
def at_root(comm, x, value): return x is None if comm.rank else is_all(x, value)

# A tensor is only how shared memory is handed out: torch itself, which takes seconds to import, does nothing for it.
torch = types.SimpleNamespace(from_numpy=np.asarray, float32=np.float32)

def allocated(comm):
    sys.modules["torch"] = torch
    try:
        return comm.allocate((1000,))
    finally:
        del sys.modules["torch"]

OPERATIONS = {
    "barrier": lambda c: c.barrier() is None,
    "all_reduce of little": lambda c: is_all(c.all_reduce(np.ones(3)), c.size),
    "all_reduce": lambda c: is_all(c.all_reduce(ones(c)), c.size),
    "ring_all_reduce": lambda c: is_all(c.ring_all_reduce(ones(c)), c.size),
    "broadcast": lambda c: is_all(c.broadcast(np.full(n, c.rank)), 0),
    "all_gather": lambda c: is_all(c.all_gather(ones(c)), 1),
    "reduce_scatter": lambda c: is_all(c.reduce_scatter(rows(c)), c.size),
    "reduce": lambda c: at_root(c, c.reduce(ones(c)), c.size),
    "gather": lambda c: at_root(c, c.gather(ones(c)), 1),
    "scatter": lambda c: is_all(c.scatter(rows(c) if c.rank == 0 else None, np.zeros(n)), 1),
    "all_to_all": lambda c: is_all(c.all_to_all(rows(c)), 1),
    "allocate": lambda c: is_all(allocated(c), 0),
    "messages": lambda c: is_all(c.sendrecv(ones(c), (c.rank + 1) % c.size, np.zeros(n), (c.rank - 1) % c.size), 1),
    "halving_doubling": lambda c: is_all(table.find_algorithm("halving_doubling").function(c, ones(c)), c.size),
    "split": lambda c: c.split(c.rank % 2).size >= 1,
}
said = open(f"said-{rank}", "w")

def say(*words):
    print(*words, file=said, flush=True)

say("pid", os.getpid())
for number in itertools.count():
    while not os.path.exists(f"task-{number}"):
        time.sleep(0.02)
    exec(open(f"task-{number}").read())
"""
NAMES = re.findall(r'^    "([a-z_ ]+)":', RANKS, re.M)


@pytest.fixture(scope="module")
def job(tmp_path_factory, mpich_cleaned_up):
    """Ranks, two more than collectives, whose launcher does not hear of a killed one; they end with the tests."""
    launcher = features.mpiexec() + ".gforker"
    if not os.path.exists(launcher):
        pytest.skip("this MPI has no mpiexec.gforker")
    folder, before = tmp_path_factory.mktemp("faults"), set(os.listdir("/dev/shm"))
    (folder / "script.py").write_text(RANKS)
    environment = {**os.environ, **features.launch_environment(), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    shell = ["sh", "-c", 'trap : INT; "$0" "$@"; true']
    command = [launcher, "-n", str(len(NAMES) + 2), *shell, sys.executable, "script.py"]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=2)
    yield Job(process, folder)
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for member in [*family, process]:
        member.kill()
    process.wait()
    # Tests beside these have files there, too, for a while.
    until(lambda: not [name for name in set(os.listdir("/dev/shm")) - before if "hpdl" in name], 120)


class Job:
    """Ranks that do one task after the other."""

    def __init__(self, process, folder):
        self.process, self.folder, self.tasks = process, folder, 0

    def do(self, task):
        """Let all ranks execute the text `task`."""
        (self.folder / "new").write_text(task)
        (self.folder / "new").rename(self.folder / f"task-{self.tasks}")
        self.tasks += 1

    def said(self, rank):
        """What the rank has said so far."""
        path = self.folder / f"said-{rank}"
        return path.read_text() if path.exists() else ""


def until(condition, limit, process=None, told=str):
    """Wait for the condition; told: a function that says what to read where it never comes."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"it never happened: {told()}"
        assert process is None or process.poll() is None, "the ranks have ended"
        time.sleep(0.02)


def victim_of(said, rank):
    return int(re.search(r"pid (\d+)", said(rank))[1])


PAIRS = -(-len(NAMES) // 2)  # one half of the collectives at a time


def test_a_rank_stopped_inside_each_collective(job, within):
    """Within a deadline of 60 s nothing is wrong or lost; within one of 1 s everybody is told."""
    said = job.said
    job.do(
        f"""
pair = (rank - rank % 2, rank - rank % 2 + 1)
for turn, deadline in enumerate((60, 60, 1, 1)):
    names = list(OPERATIONS)[turn % 2 * {PAIRS} :][:{PAIRS}]
    if rank // 2 >= len(names):
        continue
    operation = OPERATIONS[names[rank // 2]]
    try:
        with session.comm(turn, ranks=pair, deadline=deadline) as comm:
            assert operation(comm)
            say("ready", turn)
            while not os.path.exists(f"go-{{turn}}"):
                time.sleep(0.01)
            comm.barrier()
            say("begin", turn)
            while True:
                assert operation(comm), "a wrong result"
                if comm.broadcast(np.array([os.path.exists(f"over-{{turn}}")], np.uint8))[0]:
                    break
            say("right", turn)
    except Exception as error:
        say("error", turn, type(error).__name__, str(error).splitlines()[0])
    session.comm(1000 + turn, ranks=pair, deadline=100).close()
"""
    )

    def wait_for(words, turn, ranks):
        wanted = re.compile(f"({words}) {turn}[ \n]")
        until(lambda: all(wanted.search(said(rank)) for rank in ranks), within(40), job.process)

    for turn in range(4):  # on a machine with much else to do those with 1 s may end before the stop
        names = NAMES[turn % 2 * PAIRS :][:PAIRS]
        ranks, victims = range(2 * len(names)), range(1, 2 * len(names), 2)
        wait_for("ready|error", turn, ranks)
        (job.folder / f"go-{turn}").touch()
        wait_for("begin|error", turn, ranks)
        for rank in victims:
            os.kill(victim_of(said, rank), signal.SIGSTOP)
        if turn < 2:
            time.sleep(1.2)  # longer than ranks wait for what one that has ended sent before
        else:
            wait_for("error", turn, set(ranks) - set(victims))
        for rank in victims:
            os.kill(victim_of(said, rank), signal.SIGCONT)
        (job.folder / f"over-{turn}").touch()
        wait_for("right" if turn < 2 else "error", turn, ranks)
        for rank in ranks:
            assert "a wrong result" not in said(rank), names[rank // 2]
            # The memory of a rank that has given up is gone when the other, late, wants to open it.
            memory = r"MemoryError allocate of 8,192 bytes for 2 ranks: rank \d cannot open"
            told = f"right {turn}\n" if turn < 2 else f"error {turn} (CommTimeout|RankFailed|{memory}) "
            assert re.search(told, said(rank)), (names[rank // 2], said(rank))


def test_a_rank_killed_inside_each_collective(job, within):
    """The last test: it leaves no rank."""
    process, said = job.process, job.said
    job.do("""
for number, (name, operation) in enumerate(OPERATIONS.items()):
    victim = number + 2
    if rank not in (0, 1, victim):
        continue
    if rank == victim:
        while not os.path.exists(f"turn-{victim}"):  # a dozen ranks that wait for theirs in MPI take a fifth of a core
            time.sleep(0.02)
    open(f"turn-{victim}", "w").close()
    comm = session.comm(2000 + number, ranks=(0, 1, victim), deadline=200)
    operation(comm)
    say("begin", name)
    try:
        while operation(comm):
            pass
        say("wrong", name)
    except Exception as error:
        say("end", name, "|", type(error).__name__, "|", str(error).splitlines()[0])
        comm.close(error)
open(f"done-{rank}", "w").close()
while not all(os.path.exists(f"done-{r}") for r in (0, 1)):  # or the other may see the end of this one first
    time.sleep(0.01)
say("done")
os._exit(0)
""")
    for number, name in enumerate(NAMES):
        told = lambda: [said(rank)[-300:] for rank in (0, 1, number + 2)]  # noqa: B023, E731
        until(lambda n=name: all(f"begin {n}\n" in said(rank) for rank in (0, 1)), within(30), process, told)
        time.sleep(0.05)
        os.kill(victim_of(said, number + 2), signal.SIGKILL)
        killed = time.monotonic()
        until(lambda n=name: all(f"end {n} |" in said(rank) for rank in (0, 1)), within(15), process)
        assert time.monotonic() - killed < within(5), name
    until(lambda: all("done" in said(rank) for rank in (0, 1)), within(10))
    process.wait(60)  # it reaps a rank a second
    for rank in (0, 1):
        assert "wrong" not in said(rank)
        for name in NAMES:
            end = re.search(rf"end {name} \| (.*)", said(rank))[1]
            assert end.startswith("RankFailed | rank 2 died: "), (name, end)

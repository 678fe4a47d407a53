"""Stuck ranks of several hosts: each host has a status table of its own, and the report is made of what ranks send.

Four ranks play two hosts of two ranks: an environment variable gives them different host names, so that they share
neither memory nor a status table.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpdl_lab import features
from hpdl_lab.comm.errors import Wait, wait_cycle
from hpdl_lab.comm.status.remote import RemoteStatus
from hpdl_lab.comm.status.table import Slot, StatusTable

BEGIN = """
import os, sys, threading, time
import numpy as np
from hpdl_lab.comm.mpi.session import session_of_this_process

session = session_of_this_process()
rank, size = session.rank, session.size
x, y = np.full(10, rank, np.float32), np.zeros(10, np.float32)
assert type(session.status).__name__ == "RemoteStatus"
programs = []

def write(name, text=""):
    with open(f"{name}-{number}-{rank}.tmp", "w") as file:
        file.write(text)
    os.rename(f"{name}-{number}-{rank}.tmp", f"{name}-{number}-{rank}")

def wait_for(name, ranks):
    while not all(os.path.exists(f"{name}-{number}-{r}") for r in ranks):
        time.sleep(0.01)

def in_a_thread(function):
    threading.Thread(target=function, daemon=True).start()

def see(op, whom):
    # Until this rank, which waits meanwhile, has heard of all ranks, and that those of `whom` wait so {rank: for whom}.
    def seen():
        slots = [session.status.slot(r) for r in range(size)]
        heard = all(slot.run == number + 1 for slot in slots)
        return heard and all(slots[r][2:5] == ("waiting", op, peers) for r, peers in whom.items())

    while not seen():
        time.sleep(0.01)
    write("seen")

def see_and_give_up(comm, op, whom, who):
    see(op, whom)
    wait_for("seen", who)
    comm.waiting.deadline = 0.1
"""

PROGRAM = """
def program(comm):
    BODY
programs.append(program)
"""

END = """
for number, program in enumerate(programs):
    comm, error, said = session.comm(number + 1, deadline=20), None, ""
    try:
        program(comm)
    except Exception as raised:
        error, said = raised, f"{type(raised).__name__} {raised}"
    comm.close(error, "cell:4")
    write("said", said)
    wait_for("said", range(size))  # or they would see the next run

with session.comm(99) as comm:
    here = comm.split(session.hosts[rank])
    assert here.size == comm.node_size == 2
    assert comm.all_reduce(np.ones(3, np.float32))[0] == 4
write("ended")
"""

# (name, the program, ranks that speak, what their tables hold, their reason)
CASES = [
    (
        "a circle over both hosts",
        "in_a_thread(lambda: see_and_give_up(comm, 'recv', {0: (1,), 1: (2,), 2: (3,), 3: (0,)}, range(4)))\n"
        "    comm.recv(y, (rank + 1) % size)",
        (0, 1, 2, 3),
        [r"0 +waiting +recv +from rank 1 +40 ", r"3 +waiting +recv +from rank 0 ", "cycle: 0 -> 1 -> 2 -> 3 -> 0"],
        "likely: ranks 0-3 all receive first",
    ),
    (
        "a rank that has finished on the other host",
        "if rank == 3:\n        wait_for('seen', range(3))\n    else:\n"
        "        in_a_thread(lambda: see('barrier', dict.fromkeys(range(3), (3,))))\n        comm.barrier()",
        (0, 1, 2),
        [r"0 +waiting +barrier", r"2 +waiting +barrier", r"3 +finished"],
        r"likely: rank 3 never called barrier: it finished",
    ),
    (
        "one step less on the other host",
        "for _ in range(3 - (rank == 3)):\n        comm.sendrecv(x, (rank + 1) % size, y, (rank - 1) % size)",
        (0,),
        [r"3 +finished +after send"],
        r"likely: rank 3 left the loop one step early: it came to script.py:\d+ two times, rank 0 three times",
    ),
    (
        "a rank that raised on the other host",
        "if rank == 2:\n        raise KeyError(7)\n    comm.barrier()",
        (0, 1, 3),
        [r"2 +failed +KeyError +cell:4"],
        "likely: rank 2 raised KeyError at line 4 and never arrived",
    ),
    (
        "another root on the other host",
        "comm.broadcast(np.zeros(100_000), 2 if rank == 2 else 0)",
        (0, 1, 2, 3),
        [r"Mismatch"],
        "rank 2 calls broadcast with root 2, ranks 0, 1, 3 with root 0",
    ),
    (
        "a rank that works on the other host",
        "if rank == 3:\n        wait_for('said', (0, 1))\n        return\n    if rank < 2:\n"
        "        in_a_thread(lambda: see_and_give_up(comm, 'barrier', dict.fromkeys(range(3), (3,)), range(2)))\n"
        "    comm.barrier()",
        (0, 1),
        [r"0 +waiting +barrier", r"2 +waiting +barrier", r"3 +running"],
        r"likely: rank 3 is still computing: not a deadlock, a deadline",
    ),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """said(name, rank): what `rank` said when the program `name` had ended."""
    folder = tmp_path_factory.mktemp("hosts")
    path = folder / "script.py"
    programs = [PROGRAM.replace("BODY", body) for _, body, *_ in CASES]
    path.write_text("".join([BEGIN, *programs, END]))
    environment = {**os.environ, **features.launch_environment(), "OMP_NUM_THREADS": "1"}
    play = 'HPDL_HOST_ID=host$((${PMI_RANK:-$OMPI_COMM_WORLD_RANK} / 2)) exec "$0" "$@"'
    command = [features.mpiexec(), "-n", "4", "sh", "-c", play, sys.executable, str(path)]
    # Not its exit status: ranks whose collectives were broken off leave without MPI_Finalize, which mpiexec minds.
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    names = [case[0] for case in CASES]
    assert all((folder / f"ended-{len(names) - 1}-{rank}").exists() for rank in range(4)), done.stderr
    return lambda name, rank: (folder / f"said-{names.index(name)}-{rank}").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "body", "speakers", "table", "reason"), CASES, ids=[case[0] for case in CASES])
def test_the_table_and_the_reason_cross_hosts(said, name, body, speakers, table, reason):
    for rank in speakers:
        text = said(name, rank)
        for pattern in table:
            assert re.search(rf"^ *{pattern}", text, re.M), text
        assert re.search(reason, text), text


def test_ranks_of_one_barrier_are_no_cycle_although_each_has_heard_of_the_others_too_late():
    waits = [Wait(rank, "waiting", "barrier", (1 - rank, 2), nth=4) for rank in (0, 1)]
    assert wait_cycle([*waits, Wait(2, "running")]) == ()
    assert wait_cycle([waits[0], replace(waits[1], nth=5)]) == (0, 1)


class Messages:
    """mpi4py's communicator of rank 0, on host A; rank 1 is on host B."""

    rank = 0

    def __init__(self):
        self.sent, self.arrived = [], []

    def Isend(self, buffer, to, tag):
        self.sent.append((to, json.loads(buffer[0])))
        return SimpleNamespace(Test=lambda: True)

    def Improbe(self, source, tag, status):
        if not self.arrived:
            return None
        raw = json.dumps(self.arrived.pop(0)).encode()
        status.Get_count = lambda kind: len(raw)
        return SimpleNamespace(Recv=lambda buffer: buffer[0].__setitem__(slice(None), raw))


@pytest.fixture
def remote(tmp_path):
    StatusTable.create(tmp_path / "table", 2).close()
    MPI = SimpleNamespace(BYTE=0, ANY_SOURCE=-1, Status=SimpleNamespace)
    remote = RemoteStatus(tmp_path / "table", MPI, Messages(), ["A", "B"])
    yield remote
    remote.close()


def news(run, state, then=1, **more):
    return [1, then, Slot(7, run, state, "", (0,), 0, then, 0, "", {})._replace(**more)]


def test_news_of_an_earlier_run_that_come_late_are_no_news(remote):
    remote.begin_run(5)
    remote._comm.arrived = [news(4, "finished")]
    remote.exchange([0, 1])
    assert remote.slot(1).state == "silent" and remote.waits([0, 1], 5)[-1].state == "silent"


def test_news_of_this_run_are_kept_beside_those_of_the_next(remote):
    remote.begin_run(5)
    remote._comm.arrived = [news(5, "failed", 10), news(6, "waiting", 20), news(5, "waiting", 5)]
    remote.exchange([0, 1])
    assert (remote.slot(1).run, remote.slot(1).state) == (5, "failed")
    remote.begin_run(6)
    assert (remote.slot(1).run, remote.slot(1).state) == (6, "waiting")


def test_times_of_another_host_are_found_in_this_clock(remote):
    remote.begin_run(5)
    remote._comm.arrived = [news(5, "waiting", then=3_000_000_000, since_ns=1_000_000_000, op="recv")]
    remote.exchange([0, 1])
    (wait,) = remote.waits([1], 5)
    assert 2.0 <= wait.seconds < 60


def test_what_this_host_does_is_found_in_a_rank_that_waits_and_only_when_it_has_changed(remote):
    remote.begin_run(5)
    remote.publish(0, "running", 5)
    remote.exchange([0, 1])
    assert remote._comm.sent == []
    remote.publish(0, "waiting", 5, "recv", (1,))
    for _ in range(3):
        remote.exchange([0, 1])
    assert [(to, told[0], told[2][2]) for to, told in remote._comm.sent] == [(1, 0, "waiting")]
    remote.leave([0, 1])
    assert len(remote._comm.sent) == 2 and remote.flush()


def test_of_a_death_elsewhere_others_tell_and_nothing_is_sent_to_the_dead(remote):
    remote.begin_run(5)
    remote.publish(0, "waiting", 5, "recv", (1,))
    assert not remote.is_unreachable(1)
    remote.mark_dead(0)  # on this host, where its process can be seen
    remote.mark_dead(1)
    remote.exchange([0, 1])
    assert remote._comm.sent == [] and remote.is_unreachable(1) and not remote.is_unreachable(0)
    assert remote.died(1) and not remote.died(0)
    assert [wait.state for wait in remote.waits([0, 1], 5)] == ["waiting", "dead"]


KILLED = """
import os, re, signal, sys, time
import numpy as np
from hpdl_lab.comm.mpi.session import session_of_this_process

session = session_of_this_process()
rank = session.rank
comm = session.comm(1, deadline=30)
comm.barrier()
if rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    comm.recv(np.zeros(1), 3)
except Exception as error:
    with open(f"said-{rank}", "w") as file:
        print(type(error).__name__, time.monotonic() - begin < 25, error, file=file)
while not all(os.path.exists(f"said-{r}") for r in range(3)):  # or they may see the end of this one first
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_rank_that_was_killed_is_known_on_the_other_host(tmp_path):
    launcher = features.mpiexec() + ".gforker"  # ends the others only when told, and a shell hides the news from it
    if not os.path.exists(launcher):
        pytest.skip("this MPI has no mpiexec.gforker")
    (tmp_path / "script.py").write_text(KILLED)
    play = f'trap : INT; HPDL_HOST_ID=host$(($PMI_RANK / 2)) "{sys.executable}" script.py; true'
    environment = {**os.environ, **features.launch_environment(), "OMP_NUM_THREADS": "1"}
    command = [launcher, "-n", "4", "sh", "-c", play]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    for rank in range(3):
        text = (tmp_path / f"said-{rank}").read_text()
        assert text.startswith(f"RankFailed True rank 3 died: rank {rank} waits in recv"), text
        assert re.search(r"^  3 +dead", text, re.M) and "likely: rank 3 died and never arrived" in text

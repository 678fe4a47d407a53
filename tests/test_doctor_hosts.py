"""Stuck ranks of several hosts: each host has a board of its own, and the table is assembled from what ranks tell.

Four ranks play two hosts of two ranks: an environment variable gives them different host names, so that they share
neither memory nor a board.
"""

import os
import re
import subprocess
import sys

import pytest

from hpdl_lab import features

BEGIN = """
import os, sys, time
import numpy as np
from hpdl_lab.comm.mpi import session_of_this_process

session = session_of_this_process()
rank, size = session.rank, session.size
x, y = np.full(10, rank, np.float32), np.zeros(10, np.float32)
assert type(session.board).__name__ == "Bulletin"
programs = []
"""

PROGRAM = """
def program(comm):
    BODY
programs.append(program)
"""

END = """
def write(name, text):
    with open(name + ".tmp", "w") as file:
        file.write(text)
    os.rename(name + ".tmp", name)

for number, program in enumerate(programs):
    comm, error, said = session.comm(number + 1, deadline=0.8), None, ""
    try:
        program(comm)
    except Exception as raised:
        error, said = raised, f"{type(raised).__name__} {raised}"
    comm.close(error, "cell:4")
    write(f"said-{number}-{rank}", said)
    while not all(os.path.exists(f"said-{number}-{r}") for r in range(size)):  # or they would see the next run
        time.sleep(0.01)

with session.comm(99) as comm:
    here = comm.split(session.hosts[rank])
    assert here.size == comm.node_size == 2
    assert comm.all_reduce(np.ones(3, np.float32))[0] == 4
write(f"ended-{rank}", "")
"""

# (name, the program, ranks that speak, what their tables hold, their reason)
CASES = [
    (
        "a circle over both hosts",
        "comm.recv(y, (rank + 1) % size)",
        (0, 1, 2, 3),
        [r"0 +waiting +recv +from rank 1 +40 ", r"3 +waiting +recv +from rank 0 ", "cycle: 0 -> 1 -> 2 -> 3 -> 0"],
        "likely: ranks 0-3 all receive first",
    ),
    (
        "a rank that has finished on the other host",
        "rank == 3 or comm.barrier()",
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
        "if rank == 3:\n        time.sleep(1.5)\n    comm.barrier()",
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
    done = subprocess.run(command, cwd=folder, env=environment, timeout=50, capture_output=True, text=True)
    assert all((folder / f"ended-{rank}").exists() for rank in range(4)), done.stderr
    assert done.returncode == 0, done.stderr
    names = [case[0] for case in CASES]
    return lambda name, rank: (folder / f"said-{names.index(name)}-{rank}").read_text()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "body", "speakers", "table", "reason"), CASES, ids=[case[0] for case in CASES])
def test_the_table_and_the_reason_cross_hosts(said, name, body, speakers, table, reason):
    for rank in speakers:
        text = said(name, rank)
        for pattern in table:
            assert re.search(rf"^ *{pattern}", text, re.M), text
        assert re.search(reason, text), text


KILLED = """
import os, re, signal, sys, time
import numpy as np
from hpdl_lab.comm.mpi import session_of_this_process

session = session_of_this_process()
rank = session.rank
comm = session.comm(1, deadline=30)
comm.barrier()
if rank == 3:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    comm.recv(np.zeros(1), 3)
except Exception as error:
    with open(f"said-{rank}", "w") as file:
        print(type(error).__name__, time.monotonic() - begin < 4, error, file=file)
time.sleep(2)  # or the other ranks may see the end of this one first
"""


@pytest.mark.timeout(60)
def test_a_rank_that_was_killed_is_known_on_the_other_host(tmp_path):
    launcher = features.mpiexec() + ".gforker"  # ends the others only when told, and a shell hides the news from it
    if not os.path.exists(launcher):
        pytest.skip("this MPI has no mpiexec.gforker")
    (tmp_path / "script.py").write_text(KILLED)
    play = f'trap : INT; HPDL_HOST_ID=host$(($PMI_RANK / 2)) "{sys.executable}" script.py; true'
    environment = {**os.environ, **features.launch_environment(), "OMP_NUM_THREADS": "1"}
    command = [launcher, "-n", "4", "sh", "-c", play]
    subprocess.run(command, cwd=tmp_path, env=environment, timeout=40, capture_output=True)
    for rank in range(3):
        text = (tmp_path / f"said-{rank}").read_text()
        assert text.startswith(f"RankFailed True rank 3 died: rank {rank} waits in recv"), text
        assert re.search(r"^  3 +dead", text, re.M) and "likely: rank 3 died and never arrived" in text

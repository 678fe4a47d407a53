"""Ranks of torchrun: what runs on MPI ranks runs there, wrong programs end, and `comm.world()` knows who started it."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from hpdl_lab import comm
from hpdl_lab.comm.launcher import started_by
from hpdl_lab.comm.torch.transport import from_process_group
from tests.wording import raises

MPI = os.path.join(os.path.dirname(__file__), "mpi")
WANTED = [os.path.join(MPI, name) for name in ("test_messages.py", "test_torch_backend.py", "test_zero.py")]
SOME = "not (posting_is_interrupted or gloo_adds)"  # the one patches MPI's own, the other is of gloo alone
# All of it on one start of three ranks: torch is imported by each of them, and by torchrun.
SCRIPT = """
import gc
gc.disable()  # or the import of torch takes twice as long
import os, sys, threading, time, torch
import pytest
import torch.distributed as dist
from hpdl_lab import comm
from hpdl_lab.collectives import ring
from hpdl_lab.comm.errors import CommTimeout, RankFailed
from hpdl_lab.comm.torch.transport import from_process_group

if status := pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:nbval", *sys.argv[1:]]):
    sys.exit(int(status))

def say(line):  # in one piece, as all ranks write to the same place
    os.write(1, f"{line}\\n".encode())

with comm.world(deadline=20.0) as world:
    x = torch.full((1001,), float(world.rank))
    say(f"{type(world).__name__} {world.size} {ring.all_reduce(world, x)[0].item()}")
for _ in range(2):  # every world is a fresh one, while the group that carried it is whole
    world = comm.world(deadline=20.0)
    world.barrier()
    world.close()
pair = dist.new_group([0, 1])
world = comm.world()

def lose_patience():
    while any(world.waiting.status.slot(rank).op != "recv" for rank in range(3)):
        time.sleep(0.01)
    world.waiting.deadline = 0.1

threading.Thread(target=lose_patience, daemon=True).start()
try:
    world.recv(torch.zeros(3), (world.rank + 1) % 3)
except CommTimeout as error:
    say(f"ended {error.reason}")
open(f"ended-{world.rank}", "w").close()
while not all(os.path.exists(f"ended-{rank}") for rank in range(3)):  # who has left waits for nobody any more
    time.sleep(0.01)
world.close()
if dist.get_rank() < 2:
    world = from_process_group(pair, deadline=20.0)
    world.barrier()
    if world.rank == 1:
        os._exit(0)
    try:
        world.recv(torch.zeros(3), 1)
    except RankFailed as error:
        say(str(error).splitlines()[0])
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the ranks of `torchrun --nproc-per-node 3 script.py` have said."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "script.py").write_text(SCRIPT)
    torchrun = "import gc; gc.disable(); from torch.distributed.run import main; gc.freeze(); main()"
    command = [sys.executable, "-c", torchrun, "--nproc-per-node", "3", "script.py", "-k", SOME]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *WANTED], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_tests_of_mpi_ranks_pass_there(said):
    """Messages, on which all collectives stand, and the backend "hpdl"."""
    assert int(said.rpartition(" passed")[0].split()[-1]) > 50


def test_a_script_of_its_own(said):
    assert said.count("RealComm 3 3.0") == 3
    assert said.count("ended ranks 0-2 all receive first") == 3
    assert "rank 1 died: rank 0 waits in recv from rank 1" in said


TORCHRUNS = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "who"),
    [
        ({}, ""),
        (TORCHRUNS, "torchrun"),
        ({**TORCHRUNS, "PMI_RANK": "0"}, "mpi"),  # set by hand, under mpiexec
        ({**TORCHRUNS, "PMI_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, "torchrun"),  # torchrun under srun
        ({"PMI_RANK": "0"}, "mpi"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "mpi"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ""),
    ],
)
def test_who_has_started_this_rank(environment, who):
    assert started_by(environment) == who


def test_worlds_that_torchrun_does_not_have(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with raises(ValueError, "device='cuda'", '"cpu"'):
        comm.world(device="cuda")


def test_groups_that_carry_no_messages_of_tensors_on_the_cpu():
    with raises(RuntimeError, 'dist.init_process_group("gloo")'):
        from_process_group()
    with raises(RuntimeError):
        from_process_group(dist.GroupMember.NON_GROUP_MEMBER)
    with raises(ValueError, "CPU", "GPUs"):
        from_process_group(dist.ProcessGroup(0, 1))

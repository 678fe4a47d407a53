"""Ranks of torchrun: what runs on MPI ranks runs there, wrong programs end, and `comm.world()` knows who started it."""

import os
import subprocess
import sys

import pytest
import torch.distributed as dist

from hpdl_lab import comm
from hpdl_lab.comm.launcher import started_by
from hpdl_lab.comm.torch import from_process_group

# Not what patches MPI's own.
SOME = "not posting_is_interrupted and not executed"
WANTED = ("test_messages.py", "test_torch_backend.py")


def torchrun(ranks, *arguments, seconds):
    """The completed process of `torchrun --nproc-per-node ranks ...`, stopped after `seconds`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)


@pytest.mark.timeout(160)
def test_the_tests_of_mpi_ranks_pass_there():
    """Messages, on which all collectives stand, and the backend "hpdl"."""
    files = [os.path.join(os.path.dirname(__file__), "mpi", name) for name in WANTED]
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:nbval", "-k", SOME)
    done = torchrun(3, "-m", "pytest", *options, *files, seconds=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.rpartition(" passed")[0].split()[-1]) > 100


SCRIPT = """
import os, time, torch
from hpdl_lab import comm
from hpdl_lab.collectives import ring
from hpdl_lab.comm.errors import CommTimeout

def say(line):  # in one piece, as both ranks write to the same place
    os.write(1, f"{line}\\n".encode())

with comm.world(deadline=1.0) as world:
    x = torch.full((1001,), float(world.rank))
    say(f"{type(world).__name__} {world.size} {ring.all_reduce(world, x)[0].item()}")
for _ in range(2):  # every world is a fresh one, while the group that carried it is whole
    world = comm.world(deadline=1.0)
    world.barrier()
    world.close()
world = comm.world(deadline=1.0)
begin = time.monotonic()
try:
    world.recv(torch.zeros(3), 1 - world.rank)
except CommTimeout as error:
    say(f"{'ended' if time.monotonic() - begin < 8 else 'late'} {error.reason}")
world.close()
"""
DEATH = """
import os, torch
from hpdl_lab import comm
from hpdl_lab.comm.errors import RankFailed

world = comm.world(deadline=20.0)
world.barrier()
if world.rank == 1:
    os._exit(0)
try:
    world.recv(torch.zeros(3), 1)
except RankFailed as error:
    print(str(error).splitlines()[0])
"""


@pytest.mark.timeout(220)
def test_a_script_of_its_own(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = torchrun(2, path, seconds=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("TorchComm 2 1.0") == 2
    assert done.stdout.count("ended ranks 0 and 1 both receive first and nobody has sent") == 2
    path.write_text(DEATH)
    done = torchrun(2, path, seconds=100)
    assert "rank 1 died: rank 0 waits in recv from rank 1" in done.stdout, done.stdout + done.stderr


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
    with pytest.raises(ValueError, match="device='cuda' under torchrun, which has \"cpu\" only"):
        comm.world(device="cuda")


def test_groups_that_carry_no_messages_of_tensors_on_the_cpu():
    with pytest.raises(RuntimeError, match=r"no process group yet: dist.init_process_group\(\"gloo\"\)"):
        from_process_group()
    with pytest.raises(RuntimeError, match="this rank is in no such process group"):
        from_process_group(dist.GroupMember.NON_GROUP_MEMBER)
    with pytest.raises(ValueError, match="moves neither tensors of the CPU nor of GPUs"):
        from_process_group(dist.ProcessGroup(0, 1))

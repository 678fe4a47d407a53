"""2 x 2 x 2 on eight MPI ranks, four to a core, and pairs of axes on four engines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpdl_lab import features, models
from tests.wording import raises

EIGHT = Path(__file__).parent / "mpi" / "test_hybrid.py"
START = """
import gc, runpy, sys
from hpdl_lab.comm.mpi.session import session_of_this_process
from hpdl_lab.features.torch_compiler import put_off_torch_compiler
put_off_torch_compiler()  # as engines do
gc.disable()  # or the import of torch takes twice as long
session_of_this_process()  # before that: who waits in MPI's start takes a core from those who still import
runpy.run_path(sys.argv[1], run_name="__main__")
gc.freeze()  # or Python's end looks through all that has been imported
"""


@pytest.mark.timeout(260)
def test_two_by_two_by_two_on_eight_ranks():
    environment = {**os.environ, **features.launch_environment(), "OMP_NUM_THREADS": "1"}
    command = [features.mpiexec(), "-n", "8", sys.executable, "-c", START, str(EIGHT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 ranks: mlp, cnn, gpt, vit are right" in done.stdout


def train(comm, sizes, x, y, options):
    """(losses of two steps, the whole model's state) of a gpt on a mesh of engines."""
    from hpdl_lab.mesh import DeviceMesh
    from hpdl_lab.parallel.hybrid.model import HybridParallel

    model = models.build("gpt", vocabulary=12, block=6, layers=2, heads=2, width=8, dtype="float64")
    hybrid = HybridParallel(model, DeviceMesh(comm, **sizes), x, micro_batches=2, **options)
    optimizer = torch.optim.SGD(hybrid.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(2):
        losses.append(hybrid.step(x, y))
        optimizer.step()
    return losses, hybrid.state_dict()


def run_out(comm, sizes, x, y):
    """A step in which the last rank has no memory left."""
    from hpdl_lab.mesh import DeviceMesh
    from hpdl_lab.parallel.hybrid.model import HybridParallel

    def refuse(*_):
        raise MemoryError("no room")

    model = models.build("gpt", vocabulary=12, block=6, layers=2, heads=2, width=8, dtype="float64")
    hybrid = HybridParallel(model, DeviceMesh(comm, **sizes), x, micro_batches=2)
    if comm.rank == comm.size - 1:
        for stage in hybrid.stages.values():
            stage.module.register_forward_pre_hook(refuse)
    hybrid.step(x, y)


@pytest.mark.timeout(120)
def test_engines_train_on_every_pair_of_axes_and_survive_a_rank_without_memory(cluster):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 12, (2, 8, 6), generator=draw).unbind()
    wanted = None
    for sizes, options in (
        ({"dp": 4}, {}),
        ({"dp": 2, "tp": 2}, {"sequence": True}),
        ({"pp": 2, "tp": 2}, {"schedule": "zero_bubble_h1", "recompute": True}),
    ):
        results = cluster.run(train, sizes, x, y, options)
        wanted = wanted or results[0]
        for losses, state in results:
            assert losses == pytest.approx(wanted[0], abs=1e-10)
            for name, tensor in state.items():
                torch.testing.assert_close(tensor, wanted[1][name], rtol=0, atol=1e-10)
    with raises(Exception, "rank 3", "0", "stage 1") as error:
        cluster.run(run_out, {"dp": 2, "pp": 2}, x, y)
    assert "no room" in str(error.value)
    assert cluster.run(train, {"dp": 4}, x, y, {})[0][0] == wanted[0]  # usable afterwards

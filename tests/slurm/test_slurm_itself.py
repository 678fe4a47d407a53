"""The Slurm that the other tests use: two nodes that differ, and nothing left of them."""

import contextlib
import os
import time

import psutil
import pytest

from tests.slurm.controller import Slurm


def test_nodes_are_machines_of_their_own(slurm, private_runtime_dir):
    if not slurm.network:
        pytest.skip("this system allows no namespaces: both nodes share this machine")
    where = f"hostname; ls /proc | grep -cx {os.getpid()}; ls {private_runtime_dir} | wc -l; ls /dev/shm | wc -l"
    open(os.path.join(private_runtime_dir, "here"), "w").close()
    done = slurm.ask("srun", "--nodes=2", "--ntasks=2", "--label", "sh", "-c", where)
    told = sorted(done.stdout.splitlines())
    assert told == ["0: 0", "0: 0", "0: 0", "0: n1", "1: 0", "1: 0", "1: 0", "1: n2"], done


@pytest.mark.parametrize("alone", [True, False], ids=["machines of their own", "one machine"])
def test_nothing_is_left(alone):
    with Slurm(alone=alone) as another:
        assert another.states() == {"n1": "idle", "n2": "idle"}
        began = another.ask("sbatch", "--nodes=2", "--output=/dev/null", "--wrap=srun sleep 1000 & exec sleep 1000")
        assert began.returncode == 0, began
        while (
            len(started_with(str(another.folder))) < 9
        ):  # daemons, and on each node what watches over a job, and the job
            time.sleep(0.05)
        folder = str(another.folder)
    assert not os.path.exists(folder)
    assert started_with(folder) == []


def started_with(folder):
    """The processes with `folder` in their commands or environments. Those that have ended have neither."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if folder in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(process)
    return found

"""The Slurm that the other tests use: two nodes that differ, and nothing left of them."""

import contextlib
import os
import re
import time

import psutil
import pytest

from tests.slurm.controller import Slurm


def test_nodes_are_machines_of_their_own(slurm, private_runtime_dir):
    if not slurm.network:
        pytest.skip("this system allows no namespaces: both nodes share this machine")
    name = f"here-{os.getpid()}"
    files = [os.path.join(folder, name) for folder in (private_runtime_dir, "/dev/shm")]
    for file in files:
        open(file, "w").close()
    try:
        look = f"hostname; ls -d {' '.join(files)} /proc/{os.getpid()} 2>/dev/null; ip -oneline -4 address show net0"
        done = slurm.ask("srun", "--nodes=2", "--ntasks=2", "--label", "sh", "-c", look)
    finally:
        for file in files:
            os.unlink(file)
    first, second = (f"{slurm.network.node_address(number)}/24" for number in (1, 2))
    told = [
        re.findall(r"n[12]$|[0-9.]+/24", line) for line in sorted(done.stdout.splitlines(), key=lambda line: line[0])
    ]
    assert told == [["n1"], [first], ["n2"], [second]], done


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

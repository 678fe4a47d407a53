"""An engine that is killed in the middle of a collective: the others are told, and new engines go on."""

import os
import signal
import threading
import time

import pytest


def everything(comm, seconds):
    """All collectives, again and again."""
    import numpy as np

    comm.report()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        x, rows = np.ones(50_000), np.ones((comm.size, 5_000))
        comm.all_reduce(x), comm.ring_all_reduce(x), comm.broadcast(x), comm.barrier(), comm.gather(x)
        comm.reduce_scatter(rows), comm.all_to_all(rows), comm.all_gather(x), comm.reduce(x)
        comm.scatter(rows if comm.rank == 0 else None, np.zeros(5_000))


def mpi_alone(comm, seconds):
    """MPI's own all-reduce, which blocks where nothing reaches it."""
    import numpy as np

    comm.report()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        comm.mpi_all_reduce(np.ones(300_000))


def right(comm):
    import numpy as np

    return float(comm.all_reduce(np.ones(3))[0])


@pytest.mark.parametrize("work", [everything, mpi_alone], ids=lambda work: work.__name__)
def test_an_engine_killed_inside(cluster, work, within):
    before = set(os.listdir("/dev/shm"))
    pids = cluster.run(lambda comm: os.getpid())
    begun = []

    def on_row(row):
        begun.append(time.monotonic())
        if len(begun) == 4:
            threading.Timer(0.3, os.kill, (pids[2], signal.SIGKILL)).start()

    with pytest.raises(Exception, match=r"(?s)rank 2\b.*(died|killed)") as caught:
        cluster.run(work, 60, deadline=20, on_row=on_row)
    assert type(caught.value).__module__.startswith("hpdl_lab."), repr(caught.value)
    assert time.monotonic() - begun[3] < 0.3 + within(5)  # in MPI's own, three ranks spin until they are given up
    cluster.restart(4)
    assert cluster.run(right) == [4.0] * 4
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "hpdl" in name]

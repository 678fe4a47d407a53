"""comm.background on engines: stop, deadline, kill -9, disagreement, forgotten work: all of them end, and say why."""

import os
import re
import signal
import threading
import time

import numpy as np
import pytest

from hpdl_lab.collectives.native import shm_all_reduce
from hpdl_lab.comm.errors import CommTimeout, RankFailed
from hpdl_lab.engines import run
from hpdl_lab.engines.errors import RunFailed, RunStopped
from tests.onlooker import Onlooker, StopButton, computing, waiting

HERE = os.path.basename(__file__)


def pid_of(comm):
    return os.getpid()


def receive_in_a_circle(comm):
    comm.recv(np.zeros(1000, "float32"), (comm.rank + 1) % comm.size)


def compute_for_ever(comm):
    while True:
        pass


def sum_of_ranks(comm):
    """What has to work afterwards, on the same engines, which have no threads of earlier runs."""
    names = [thread.name for thread in threading.enumerate()]
    x = comm.background(shm_all_reduce, np.full(1000, float(comm.rank))).wait()
    return float(x[0]), names.count("hpdl-background")


def all_well(cluster, pids):
    return cluster.run(sum_of_ranks) == [(6.0, 0)] * 4 and cluster.run(pid_of) == pids


def line(function, offset):
    return f"{HERE}:{function.__code__.co_firstlineno + offset}"


@pytest.mark.parametrize(
    ("function", "seen", "state", "op", "offset"),
    [
        (receive_in_a_circle, waiting("recv"), "waiting", "recv", 1),
        (compute_for_ever, computing(0, 1, 2, 3), "running", "", None),
    ],
)
def test_the_stop_button_ends_what_runs_in_the_background(
    cluster, within, monkeypatch, function, seen, state, op, offset
):
    def wait_for(comm):
        comm.report()
        comm.background(function).wait()

    pids = cluster.run(pid_of)
    monkeypatch.setattr(run, "ANSWER", 40.0)  # of a rank that does not answer nobody knows what it waits for
    with StopButton(cluster, seen) as button, pytest.raises(RunStopped) as caught:
        cluster.run(wait_for, on_row=button.on_row, deadline=40)
    assert button.seconds < within(3)
    where = line(function, offset) if offset else line(wait_for, 2)
    assert {(w.state, w.op, w.line) for w in caught.value.waits} == {(state, op, where)}
    if op:
        assert "cycle: 0 -> 1 -> 2 -> 3 -> 0" in str(caught.value)
    assert all_well(cluster, pids)


@pytest.mark.parametrize("opened", [True, False])
def test_a_rank_that_never_begins_it_is_named_by_the_deadline(cluster, opened):
    def three_of_four(comm, opened):
        for step in range(3 - (comm.rank == 2)):
            if opened or step == 2:
                comm.background(shm_all_reduce, np.ones(100)).wait()

    pids = cluster.run(pid_of)
    with pytest.raises(CommTimeout) as caught:
        cluster.run(three_of_four, opened, deadline=2.5)
    waits = caught.value.waits
    assert {(w.state, w.line) for w in waits if w.rank != 2} == {("waiting", line(three_of_four, 3))}
    assert waits[2].state == "finished"
    if opened:
        text = rf"rank 2 left the loop one step early: it came to {HERE}:\d+ two times, rank 0 three times"
        assert re.search(text, str(caught.value)), str(caught.value)
    assert all_well(cluster, pids)


def test_a_rank_killed_while_the_others_wait_in_the_background(cluster, within):
    """In a function: tests/test_mpi_failures.py."""

    def die(comm):
        comm.background(shm_all_reduce, np.ones(3)).wait()
        if comm.rank == 2:
            time.sleep(600)
        comm.background(shm_all_reduce, np.ones(100_000)).wait()

    def kill():
        killed.append(time.monotonic())
        os.kill(victim, signal.SIGKILL)

    victim, killed = cluster.run(pid_of)[2], []
    all_wait = waiting("all_reduce", line(die, 4))
    with (
        Onlooker(cluster.path, (0, 1, 3), all_wait, kill),
        pytest.raises(RankFailed, match=r"rank 2 was killed by signal 9") as caught,
    ):
        cluster.run(die, deadline=40)
    assert time.monotonic() - killed[0] < within(6)
    assert {(w.state, w.op, w.line) for w in caught.value.waits if w.rank != 2} == {
        ("waiting", "all_reduce", line(die, 4))
    }
    cluster.restart()
    assert cluster.run(sum_of_ranks) == [(6.0, 0)] * 4


def test_what_is_wrong_in_the_background_fails_the_run(cluster):
    def disagree(comm):
        comm.background(shm_all_reduce, np.ones(10 + (comm.rank == 3))).wait()

    def forget(comm):
        comm.background(shm_all_reduce, np.ones(10))

    def divide(comm):
        def inner(comm):
            return 1 // (comm.rank - 1)

        comm.background(inner).wait()

    pids = cluster.run(pid_of)
    with pytest.raises(RunFailed, match="Mismatch: counts differ: ranks 0-2 call all_reduce of 10 .*rank 3 of 11"):
        cluster.run(disagree)
    with pytest.raises(RunFailed, match=rf"never waited for \w+ in the background \({line(forget, 1)}\): call wait"):
        cluster.run(forget)
    with pytest.raises(RunFailed, match=rf"rank 1: ZeroDivisionError[\s\S]*{line(divide, 2)} in inner"):
        cluster.run(divide)
    assert all_well(cluster, pids)


def test_events_of_the_background_come_with_the_results(cluster):
    events = cluster.run(sum_of_ranks).events
    assert {e.rank for e in events if (e.op, e.lane) == ("all_reduce", "background")} == {0, 1, 2, 3}
    assert {e.rank for e in events if (e.op, e.lane) == ("wait", "")} == {0, 1, 2, 3}


def test_a_function_that_never_talks_has_the_deadline_of_a_wait(cluster):
    def sleeps(comm):
        time.sleep(5)  # which no interrupt ends: the engine is free all the same

    def wait_for(comm, function):
        comm.background(function).wait()

    def computes_and_talks(comm):
        def pauses(comm):
            for _ in range(6):
                time.sleep(0.6)
                comm.barrier()
            return comm.rank

        return comm.background(pauses).wait()

    pids = cluster.run(pid_of)
    for function in (sleeps, compute_for_ever):
        with pytest.raises(CommTimeout, match=f"waits for {function.__name__} in the background, which has neither"):
            cluster.run(wait_for, function, deadline=0.5)
    assert cluster.run(computes_and_talks, deadline=3) == [0, 1, 2, 3]
    assert cluster.run(pid_of) == pids

"""The deadline of simulated ranks in real time: a machine that is busy, or stands still, does not make it shorter."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpdl_lab.comm import CommTimeout, sim
from hpdl_lab.comm.sim import scheduler as real_time
from tests.wording import raises

BUSY = 4  # processes that never rest, on the core that this one may use
COUNTED = Path("/proc/self/schedstat").exists()


@pytest.fixture
def one_busy_core():
    """This thread, and what it starts, may use one core only, of which others take the most."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    others = []
    try:
        for _ in range(BUSY):
            command = [sys.executable, "-SE", "-c", "print(flush=True)\nwhile True: pass"]
            others.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        for other in others:
            other.stdout.readline()  # it is there
        yield
    finally:
        for other in others:
            other.kill()
            other.communicate()
        os.sched_setaffinity(0, before)


def spin(comm):
    while True:
        pass


def rest(comm):
    while True:
        time.sleep(0.01)


@pytest.mark.skipif(not COUNTED, reason="this system does not count how long a thread waits for a core")
@pytest.mark.parametrize("threads", [False, True])
def test_what_waits_for_a_core_is_not_at_its_deadline(threads, one_busy_core):
    begin, used = time.monotonic(), time.process_time()
    with raises(CommTimeout, "0.1 s", "test_real_time.py"):
        sim.run(2, spin, deadline=0.1, threads=threads)
    used, passed = time.process_time() - used, time.monotonic() - begin
    assert used > 0.05, f"{used:.2f} s of a core in {passed:.2f} s, of which all others had four fifths"


@pytest.mark.parametrize("threads", [False, True])
def test_what_rests_is_at_its_deadline_without_using_a_core(threads):
    used = time.process_time()
    with raises(CommTimeout, "0.3 s", "test_real_time.py"):
        sim.run(2, rest, deadline=0.3, threads=threads)
    assert time.process_time() - used < 0.25  # of 0.02 on a quiet machine


def test_where_the_system_does_not_count_all_time_is_its_own(monkeypatch):
    monkeypatch.setattr(real_time, "seconds_waited", lambda thread: 0.0)
    before, own, after = time.monotonic(), real_time.OwnTime(list), time.monotonic()
    time.sleep(0.1)
    least = time.monotonic() - after
    assert least <= own.seconds() <= time.monotonic() - before


def test_two_that_wait_at_once_do_not_make_time_run_backward(monkeypatch):
    """All its waits together are longer than the time that has passed: then the time on cores is its own."""
    monkeypatch.setattr(real_time, "seconds_waited", lambda thread: 1000.0)
    own = real_time.OwnTime(lambda: [1, 2])
    used = time.process_time()
    while time.process_time() - used < 0.1:
        pass
    assert own.seconds() >= 0.1


@pytest.mark.parametrize("threads", [False, True])
def test_a_process_that_was_stopped_is_not_at_its_deadline(threads, monkeypatch):
    """As a virtual machine is, or a laptop that sleeps: suddenly it is later, and nothing has been done."""
    stopped = []
    clocks = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(stopped), process_time=time.process_time)
    monkeypatch.setattr(real_time, "time", clocks)

    def right(comm):
        stopped.append(5.0)
        time.sleep(0.3)  # the deadline is looked at meanwhile
        return comm.rank

    assert sim.run(2, right, deadline=2, threads=threads) == [0, 1]

"""pytest on every rank of `mpiexec -n 3 python -m pytest tests/mpi`: the same tests in the same order, in step.

Every test gets a communicator of its own, so that one that fails on one rank does not put the others out of step for
the rest. Rank 0 speaks; the others say something only when a test fails there. `python -m pytest tests/mpi/test_x.py`
starts the ranks by itself. The same tests run on the ranks of torchrun (tests/test_torchrun.py), except those that look
at the MPI job.
"""

import functools
import os
import sys
import threading
import time
from datetime import timedelta

import pytest

from hpdl_lab import features
from hpdl_lab.comm.launcher import started_by
from hpdl_lab.comm.mpi.session import session_of_this_process
from tests import installed

BY_TORCHRUN = started_by() == "torchrun"


def my_rank():
    return int(os.environ["RANK"]) if BY_TORCHRUN else session_of_this_process().rank


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if not started_by():  # by hand: `python -m pytest tests/mpi/test_x.py`
        installed.start_pytest_again(config, features.mpiexec(), "-n", "3", sys.executable)
    config.failures = []
    if my_rank() != 0:
        config.pluginmanager.unregister(config.pluginmanager.get_plugin("terminalreporter"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        item.config.failures.append(report)
    return report


def pytest_sessionfinish(session):
    rank = my_rank()
    if rank != 0:
        for report in session.config.failures:
            print(f"\n== rank {rank}: {report.nodeid} failed\n{report.longreprtext}", flush=True)


@pytest.fixture(scope="session")
def ranks():
    """The Session of this process."""
    if BY_TORCHRUN:
        pytest.skip("looks at the MPI job")
    return session_of_this_process()


@pytest.fixture
def meet(request):
    """meet(): wait until all ranks have come, in a way that no status table shows: what it says stays to be read."""
    return meet_on_torchrun if BY_TORCHRUN else functools.partial(meet_on_mpi, request.getfixturevalue("ranks"))


@pytest.fixture(autouse=True)
def in_step(meet):
    """Each test begins on all ranks: one that was late by more than a deadline would stay so, and all tests fail."""
    meet(seconds=600)


def meet_on_mpi(ranks, seconds=30):
    meeting = ranks.MPI.COMM_WORLD.Ibarrier()
    wait_until(meeting.Test, seconds)


def meet_on_torchrun(seconds=30):
    store, _, size = rendezvous()
    last = -(-store.add("meeting", 1) // size) * size
    wait_until(lambda: store.add("meeting", 0) >= last, seconds)


def wait_until(condition, seconds=30):
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"not so after {seconds} s: have the ranks not met?"
        time.sleep(0.005)


@pytest.fixture
def once():
    """once(condition, act): act() as soon as condition() is true, in a thread, while this rank waits for something.

    So a wait ends when all is as a test wants it, however late a rank that got no core may come.
    """
    threads = []

    def once(condition, act):
        threads.append(threading.Thread(target=lambda: (wait_until(condition), act())))
        threads[-1].start()

    yield once
    for thread in threads:
        thread.join()


@pytest.fixture
def run(request):
    """run(deadline=..., members=...): a fresh communicator, closed when the test ends."""
    opened = []
    make = on_torchrun if BY_TORCHRUN else on_mpi(request.getfixturevalue("ranks"), opened)

    def run(deadline=20.0, members=None, **options):
        opened.append(make(deadline, members, **options))
        return opened[-1]

    yield run
    for comm in opened:
        comm.close()


def on_mpi(ranks, opened):
    ranks.worlds += 1  # counts the tests, so that ranks that do different things in one agree again in the next
    return lambda *args, **options: ranks.comm(10_000 * ranks.worlds + len(opened), *args[::-1], **options)


def on_torchrun(deadline, members, **options):
    """In a process group of its own: what a test leaves under way breaks the group."""
    from hpdl_lab.comm.torch.group import gloo_on
    from hpdl_lab.comm.torch.transport import from_process_group

    if members is not None:
        pytest.skip("some of the ranks: dist.new_group makes such groups")
    return from_process_group(gloo_on(*rendezvous(), timedelta(minutes=2)), deadline, **options)


@functools.cache
def rendezvous():
    """torchrun's store, this rank and the number of ranks."""
    import torch.distributed as dist

    return next(dist.rendezvous("env://"))


@pytest.fixture
def comm(run):
    """A fresh communicator of all ranks."""
    return run()

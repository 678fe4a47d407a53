"""pytest on every rank of `mpiexec -n 3 python -m pytest tests/mpi`: the same tests in the same order, in step.

Every test gets a communicator of its own, so that one that fails on one rank does not put the others out of step for
the rest. Rank 0 speaks; the others say something only when a test fails there.
"""

import pytest

from hpdl_lab.comm.mpi import session_of_this_process


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    config.failures = []
    if session_of_this_process().rank != 0:
        config.pluginmanager.unregister(config.pluginmanager.get_plugin("terminalreporter"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        item.config.failures.append(report)
    return report


def pytest_sessionfinish(session):
    rank = session_of_this_process().rank
    if rank != 0:
        for report in session.config.failures:
            print(f"\n== rank {rank}: {report.nodeid} failed\n{report.longreprtext}", flush=True)


@pytest.fixture(scope="session")
def ranks():
    """The Session of this process."""
    return session_of_this_process()


@pytest.fixture
def run(ranks):
    """run(deadline=..., members=...): a fresh communicator, closed when the test ends."""
    ranks.worlds += 1  # counts the tests, so that ranks that do different things in one agree again in the next
    opened = []

    def make(deadline=20.0, members=None, **options):
        number = 10_000 * ranks.worlds + len(opened)
        opened.append(ranks.comm(number, members, deadline, **options))
        return opened[-1]

    yield make
    for comm in opened:
        comm.close()


@pytest.fixture
def comm(run):
    """A fresh communicator of all ranks."""
    return run()

"""`pytest -p tests.held_engines`: four engines run, with torch imported, for as long as the session lasts.

Notebooks find them running, as in the second notebook that an attendee opens: starting engines for each would take as
long as all else that some of them do. What notebooks start by themselves, and replace, is looked at without this.
"""

import pytest

held = pytest.StashKey()


def pytest_sessionstart(session):
    from hpdl_lab.engines.cluster import Cluster

    session.stash[held] = Cluster.start(4)
    session.stash[held].run(import_torch, deadline=60)


def pytest_sessionfinish(session):
    session.stash[held].stop()


def import_torch(comm):
    from hpdl_lab.features.freed_memory import uncollected

    with uncollected():  # as engines do that import it before they are asked to
        import torch  # noqa: F401

"""`pytest -p tests.held_engines`: four engines run, with torch's optimizers imported, for as long as the session lasts.

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
    import torch

    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first imports torch._dynamo, for seconds where cores are busy

"""What tests share: a place of their own for the engines' sockets, and four engines for those that need them."""

import os
import shutil
import tempfile

import pytest


@pytest.fixture(scope="session", autouse=True)
def private_runtime_dir():
    """Tests never attach to, or stop, the engines of whoever runs them. Short: a socket's path allows 104 bytes."""
    path = tempfile.mkdtemp(prefix="hpdl-t-", dir="/tmp")
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = path
    yield path
    if before is None:
        del os.environ["XDG_RUNTIME_DIR"]
    else:
        os.environ["XDG_RUNTIME_DIR"] = before
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def engine_cluster(private_runtime_dir):
    """Four engines for the whole session; a test asks for `cluster`, which repairs what an earlier one has broken."""
    from hpdl_lab.engines.cluster import Cluster

    cluster = Cluster.start(4)
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(engine_cluster):
    """Four engines, all well."""
    if engine_cluster.ailment():
        engine_cluster.restart(4)
    return engine_cluster

"""The tests of tests/test_ipyparallel_clusters.py, with engines that ipyparallel has started in a job on two nodes."""

import shutil
import socket
import tempfile
import time

import pytest

from tests.ipyparallel_kinds import started
from tests.test_ipyparallel_clusters import *  # noqa: F403
from tests.test_ipyparallel_clusters import ended, environment  # noqa: F401

pytestmark = []


@pytest.fixture(scope="module")
def kind():
    return "slurm"


@pytest.fixture(scope="module")
def begun(one_slurm):
    """Two engines on each of two hosts, which see the folder of ipyparallel."""
    root = tempfile.mkdtemp(prefix="hpdl-t-", dir="/tmp")
    address = one_slurm.network.address if one_slurm.network else "127.0.0.1"
    with pytest.MonkeyPatch.context() as patch:
        environment(patch, root)
        where = {"controller_ip": address, "controller_location": address}
        with started("slurm", 4, f"{root}/ipython/profile_site", **where) as begun:
            hosts = {*begun[1][:].apply_sync(socket.gethostname)}
            assert hosts == {"n1", "n2"} or not one_slurm.network
            yield begun
    shutil.rmtree(root)
    while one_slurm.jobs():  # the next module finds none
        time.sleep(0.05)

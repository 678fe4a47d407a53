"""Nobody else reads the files of engines that run, and they listen on no network."""

import os
import stat
import tempfile

import psutil
import pytest

from hpdl_lab.engines import session_dir
from hpdl_lab.engines.cluster import Cluster


@pytest.fixture(scope="module")
def with_px():
    """An engine on which nothing has run yet, and ipyparallel's controller."""
    with tempfile.TemporaryDirectory(prefix="hpdl-t-", dir="/tmp") as root, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", root)
        with Cluster.start(1) as started:
            assert started.client.ids == [0]
            yield started


def test_only_the_user_can_read_the_files(with_px):
    assert stat.S_IMODE(os.stat(with_px.path).st_mode) == 0o700
    assert os.stat(with_px.path).st_uid == os.getuid()
    for entry in os.scandir(with_px.path):
        assert stat.S_IMODE(entry.stat().st_mode) & 0o077 == 0, entry.path
    for kind in ("client", "engine"):
        assert stat.S_IMODE(os.stat(session_dir.connection_file(with_px.path, kind)).st_mode) == 0o600


def test_nothing_listens_on_a_network(with_px, traces):
    processes = [psutil.Process(pid) for pid in traces(os.path.dirname(with_px.path)).processes()]
    assert len(processes) >= 5
    assert [c for process in processes for c in process.net_connections("inet")] == []

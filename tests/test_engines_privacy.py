"""Nobody else reads the files of engines that run, and they listen on no network."""

import os
import stat

import psutil
import pytest

from hpdl_lab.engines import session_dir


@pytest.fixture
def with_px(cluster):
    """Four engines, and ipyparallel's controller."""
    assert cluster.client.ids == [0, 1, 2, 3]
    return cluster


def test_only_the_user_can_read_the_files(with_px):
    assert stat.S_IMODE(os.stat(with_px.path).st_mode) == 0o700
    assert os.stat(with_px.path).st_uid == os.getuid()
    for entry in os.scandir(with_px.path):
        assert stat.S_IMODE(entry.stat().st_mode) & 0o077 == 0, entry.path
    for kind in ("client", "engine"):
        assert stat.S_IMODE(os.stat(session_dir.connection_file(with_px.path, kind)).st_mode) == 0o600


def test_nothing_listens_on_a_network(with_px, private_runtime_dir, traces):
    processes = [psutil.Process(pid) for pid in traces(private_runtime_dir).processes()]
    assert len(processes) >= 6
    assert [c for process in processes for c in process.net_connections("inet")] == []

"""Nobody else reads the files of engines that run, and they listen on no network."""

import os
import stat

import psutil

from hpdl_lab.engines import session_dir


def test_only_the_user_can_read_the_files(cluster):
    assert stat.S_IMODE(os.stat(cluster.path).st_mode) == 0o700
    assert os.stat(cluster.path).st_uid == os.getuid()
    for entry in os.scandir(cluster.path):
        assert stat.S_IMODE(entry.stat().st_mode) & 0o077 == 0, entry.path
    for kind in ("client", "engine"):
        assert stat.S_IMODE(os.stat(session_dir.connection_file(cluster.path, kind)).st_mode) == 0o600


def test_nothing_listens_on_a_network(cluster, private_runtime_dir, traces):
    processes = [psutil.Process(pid) for pid in traces(private_runtime_dir).processes()]
    assert len(processes) >= 5
    assert [c for process in processes for c in process.net_connections("inet")] == []

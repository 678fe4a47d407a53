"""Nobody else reads the files of engines that run, and they listen on no network."""

import os
import socket
import stat
import tempfile
from types import SimpleNamespace

import psutil
import pytest

from hpdl_lab.engines import remote, session_dir, supervisor_client
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError
from hpdl_lab.engines.layout import Layout


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


def test_keys_of_a_cluster_of_ipyparallel_are_in_no_command_line_and_only_the_user_can_read_them(tmp_path):
    layout = Layout(2, "ipyparallel", job={"connection": {"key": "a secret"}})
    (tmp_path / "job.json").write_text('{"state": "running"}')
    started = []
    launching = SimpleNamespace(
        path=str(tmp_path),
        layout=layout,
        supervisor=SimpleNamespace(ask=lambda what: {"running": {}}),
        spawn=lambda name, argv, grace: started.append(argv),
    )
    remote.wait_for_job(launching)
    request = session_dir.job_request(str(tmp_path))
    assert "a secret" in open(request).read() and stat.S_IMODE(os.stat(request).st_mode) == 0o600
    assert "a secret" not in str(started) and len(started) == 1


def test_nothing_listens_on_a_network(with_px, traces):
    processes = [psutil.Process(pid) for pid in traces(os.path.dirname(with_px.path)).processes()]
    assert len(processes) >= 5
    assert [c for process in processes for c in process.net_connections("inet")] == []


# -- another account puts something in the place of the session directory, after it was looked at ----------------------


@pytest.fixture
def place(monkeypatch):
    """Where the session directory will be, and a precious folder of this user."""
    with tempfile.TemporaryDirectory(prefix="hpdl-t-", dir="/tmp") as root:
        os.mkdir(f"{root}/run")
        os.chmod(f"{root}/run", 0o1777)  # as the temporary directory
        monkeypatch.setenv("XDG_RUNTIME_DIR", f"{root}/run")
        os.mkdir(f"{root}/precious", 0o755)
        with open(f"{root}/precious/file", "w") as file:
            file.write("precious")
        yield session_dir.find_session_dir()[0], f"{root}/precious"


def plant_after_the_look(monkeypatch, plant):
    look = session_dir.find_session_dir

    def find():
        found = look()
        plant()
        return found

    monkeypatch.setattr(session_dir, "find_session_dir", find)


def untouched(folder):
    return os.listdir(folder) == ["file"] and stat.S_IMODE(os.stat(folder).st_mode) == 0o755


def test_a_link_in_place_of_the_session_directory_is_not_followed(place, monkeypatch):
    path, precious = place
    plant_after_the_look(monkeypatch, lambda: os.symlink(precious, path))
    with pytest.raises(EngineError, match="is no directory of yours"):
        Cluster.start(1).stop()
    assert untouched(precious)


def test_a_link_that_replaces_the_directory_while_it_is_locked_leads_nowhere(place):
    path, precious = place
    with session_dir.locked(path):
        os.rename(path, f"{path}.moved")
        os.symlink(precious, path)
        with pytest.raises(OSError, match=path):
            session_dir.empty(path)
    assert untouched(precious)


def test_links_in_the_session_directory_are_removed_and_not_what_they_name(place):
    path, precious = place
    os.mkdir(path, 0o700)
    os.symlink(precious, f"{path}/link")
    os.mkdir(f"{path}/ipp")
    os.symlink(precious, f"{path}/ipp/link")
    with session_dir.locked(path):
        session_dir.empty(path)
    assert untouched(precious) and os.listdir(path) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root plays several accounts")
def test_a_directory_of_another_account_is_neither_used_nor_asked_for_a_supervisor(place, monkeypatch):
    path, _ = place

    def plant():
        os.mkdir(path, 0o755)
        os.chown(path, 65534, 65534)

    plant_after_the_look(monkeypatch, plant)
    with pytest.raises(EngineError, match="it belongs to someone else"):
        Cluster.start(1).stop()
    assert os.listdir(path) == [] and stat.S_IMODE(os.stat(path).st_mode) == 0o755
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(session_dir.supervisor_socket(path))
        listener.listen()
        listener.settimeout(0)
        assert supervisor_client.attach(path) is None
        with pytest.raises(BlockingIOError):
            listener.accept()  # nobody has connected


def test_a_place_where_others_could_replace_the_directory_is_passed_over(place):
    path, _ = place
    root = os.path.dirname(path)
    os.chmod(root, 0o777)
    elsewhere, reasons = session_dir.find_session_dir()
    assert os.path.dirname(elsewhere) != root and "chmod +t" in reasons[0]

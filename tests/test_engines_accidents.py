"""Accidents around the engines: a start broken off, a directory that goes, a supervisor that fails or is mute."""

import os
import signal
import stat

import pytest

from hpdl_lab import lab
from hpdl_lab.engines import client, session_dir, supervisor, supervisor_client
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError, EngineMute


@pytest.fixture
def own_session(no_engines_yet, traces):
    """Engines started in this process go to a session of this test's own."""
    yield traces(no_engines_yet)
    traces(no_engines_yet).wait_until_gone()


@pytest.mark.parametrize("written", [None, ""])
def test_a_kernel_that_died_while_it_started_engines_is_no_trouble_for_the_next(own_session, written):
    with session_dir.locked(own_session.path):
        dying = supervisor_client.start(own_session.path)
        if written is not None:
            with open(session_dir.session_file(own_session.path), "w") as file:
                file.write(written)
    cluster = Cluster.start(1)
    dying.close()
    try:
        assert "call lab.restart()" in cluster.fault()
        cluster.restart()
        assert cluster.fault() is None and cluster.run(lambda comm: comm.size) == [1]
    finally:
        cluster.stop()


def test_a_directory_that_the_supervisor_moves_away_while_it_is_entered_is_made_anew(tmp_path, monkeypatch):
    path = str(tmp_path / "session")
    os.mkdir(path)
    mkdir, calls = os.mkdir, []

    def is_moved_away_meanwhile(*args):
        calls.append(args)
        try:
            mkdir(*args)
        finally:
            if len(calls) == 1:
                os.rename(path, f"{path}.ended")

    monkeypatch.setattr(os, "mkdir", is_moved_away_meanwhile)
    with session_dir.locked(path):
        assert len(calls) == 2 and stat.S_IMODE(os.stat(path).st_mode) == 0o700


# -- the supervisor ---------------------------------------------------------------------------------------------------


@pytest.fixture
def to_supervisor(own_session):
    """A connection to the supervisor of a session in which one process runs."""
    with session_dir.locked(own_session.path):
        connection = supervisor_client.start(own_session.path)
    spawn(connection, own_session.path)
    yield connection
    connection.close()


def spawn(connection, path, log="sleep.log"):
    env = {"HPDL_SESSION": path}
    connection.ask("spawn", name="sleep", argv=["/bin/sleep", "600"], env=env, cwd="/", log=f"{path}/{log}")


def test_a_supervisor_that_fails_leaves_nothing_behind(own_session, to_supervisor):
    assert len(own_session.processes()) == 2
    to_supervisor._connection.sendall(b"this is no request\n")
    own_session.wait_until_gone()


@pytest.mark.parametrize("begin", ["stop", "signal"])
def test_more_signals_while_the_supervisor_ends_change_nothing(own_session, to_supervisor, begin):
    if begin == "stop":
        to_supervisor._connection.sendall(b'{"id": 99, "do": "stop"}\n')
    while supervisor.alive(to_supervisor.pid):
        os.kill(to_supervisor.pid, signal.SIGTERM)
    own_session.wait_until_gone(seconds=0.1)


def test_a_log_that_cannot_be_written_is_named_and_the_session_goes_on(own_session, to_supervisor):
    with pytest.raises(EngineError, match=r"^cannot start /bin/sleep: No such file or directory \(.*/no/such.log\)$"):
        spawn(to_supervisor, own_session.path, "no/such.log")
    assert list(to_supervisor.ask("status")["running"]) == ["sleep"]


def test_a_supervisor_that_does_not_answer_is_named_each_time_and_heard_again(to_supervisor, monkeypatch):
    monkeypatch.setattr(supervisor_client, "PATIENCE", 0.2)
    to_supervisor._connection.settimeout(0.2)
    os.kill(to_supervisor.pid, signal.SIGSTOP)
    try:
        for _ in range(2):
            with pytest.raises(
                EngineError, match=rf"process {to_supervisor.pid}, does not answer within 0.2 s: .* kill -9"
            ):
                to_supervisor.ask("status")
    finally:
        os.kill(to_supervisor.pid, signal.SIGCONT)
    to_supervisor._connection.settimeout(10)
    assert list(to_supervisor.ask("status")["running"]) == ["sleep"]


# -- an engine that is mute -------------------------------------------------------------------------------------------


def impatient(patch):
    """Give up on engine 1 soon, and not on the other, which has to answer meanwhile."""
    connect = client.EngineConnection

    def connection(path, rank):
        patch.setattr(client, "HELLO_SECONDS", 0.5 if rank == 1 else 60)
        return connect(path, rank)

    patch.setattr(client, "EngineConnection", connection)


def test_an_engine_that_does_not_answer_is_named_and_left_alone_until_a_restart(own_session, monkeypatch):
    mute = r"^engine 1 of 2 lives and does not answer within 0.5 s.* lab.restart\(\) for new engines$"
    with Cluster.start(2) as other:
        pids = other.run(lambda comm: os.getpid())
        os.kill(pids[1], signal.SIGSTOP)
        with monkeypatch.context() as patch:
            impatient(patch)
            for _ in range(2):
                with pytest.raises(EngineMute, match=mute):
                    lab.start(2)
        os.kill(pids[1], signal.SIGCONT)
        lab.start(2)
        assert lab.run(lambda comm: os.getpid()) == pids
        lab.cluster().detach()
        os.kill(pids[1], signal.SIGSTOP)
        with monkeypatch.context() as patch, pytest.raises(EngineMute, match=mute):
            impatient(patch)
            lab.start(2)
        lab.restart()
        assert not set(lab.run(lambda comm: os.getpid())) & set(pids)
        lab.stop()

"""Accidents on the way to the engines: a start broken off, a directory that goes, a keeper or an engine that is mute."""

import os
import stat

import pytest

from hpdl_lab.engines import keeper_client, session_dir
from hpdl_lab.engines.cluster import Cluster

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def own_session(no_engines_yet, traces):
    """Engines started in this process go to a session of this test's own."""
    yield traces(no_engines_yet)
    traces(no_engines_yet).wait_until_gone()


@pytest.mark.parametrize("written", [None, ""])
def test_a_kernel_that_died_while_it_started_engines_is_no_trouble_for_the_next(own_session, written):
    with session_dir.locked(own_session.path):
        dying = keeper_client.start(own_session.path)
        if written is not None:
            with open(session_dir.session_file(own_session.path), "w") as file:
                file.write(written)
    cluster = Cluster.start(2)
    dying.close()
    try:
        assert "call lab.restart()" in cluster.ailment()
        cluster.restart()
        assert cluster.ailment() is None and cluster.run(lambda comm: comm.size) == [2, 2]
    finally:
        cluster.stop()


def test_a_directory_that_the_keeper_moves_away_while_it_is_entered_is_made_anew(tmp_path, monkeypatch):
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

"""A cluster of ipyparallel that cannot be the laboratory's, or is so already: one sentence, and nothing is left."""

import getpass
import os
import subprocess
import sys
import tempfile

import ipyparallel
import pytest

from hpdl_lab import lab
from hpdl_lab.engines.errors import EngineError
from tests.ipyparallel_kinds import started

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def begun():
    """Two engines here: (the file by which clients find them, a Client)."""
    with tempfile.TemporaryDirectory(prefix="hpdl-t-", dir="/tmp") as root, pytest.MonkeyPatch.context() as patch:
        for name in ("first", "second"):
            os.mkdir(f"{root}/{name}", 0o700)
        patch.setenv("XDG_RUNTIME_DIR", f"{root}/first")
        patch.setenv("IPYTHONDIR", f"{root}/ipython")
        with started("local", 2, f"{root}/profile") as (_, client):
            yield f"{root}/profile/security/ipcontroller-client.json", client
            lab.stop()


@pytest.fixture
def client(begun):
    lab.stop()
    return begun[1]


SECOND = """
import sys, ipyparallel
from hpdl_lab import lab
try:
    lab.start(client=ipyparallel.Client(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_another_notebook_is_told_whose_laboratory_it_is(begun, client):
    """Of another user, or on another machine: its session is in another folder."""
    first = lab.start(client=client)
    ranks = lab.run(lambda comm: os.getpid())
    elsewhere = os.environ | {"XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"].replace("first", "second")}
    done = subprocess.run([sys.executable, "-c", SECOND, begun[0]], env=elsewhere, capture_output=True, text=True)
    last = done.stdout.splitlines()[-1]
    assert (
        last.startswith("EngineError the engines on")
        and f"are the laboratory of {getpass.getuser()} on {os.uname().nodename}" in last
    )
    assert first.path in last and "lab.stop()" in last and not done.stderr, done
    assert lab.run(lambda comm: os.getpid()) == ranks
    lab.stop()
    done = subprocess.run([sys.executable, "-c", SECOND, begun[0]], env=elsewhere, capture_output=True, text=True)
    assert "where ipyparallel has started its engines 0, 1" in done.stdout and "EngineError" not in done.stdout, done


def test_a_busy_engine(client):
    busy = client[0].apply_async(eval, "__import__('time').sleep(40)")
    with pytest.raises(
        EngineError, match=r"^engine 0 of ipyparallel does not answer within 30 s: it may be busy [^\n]*$"
    ):
        lab.start(client=client)
    assert lab.running() is None
    busy.get()
    assert lab.start(client=client).run(lambda comm: comm.rank) == [0, 1]


def test_a_closed_client_and_one_without_engines(begun, client, monkeypatch):
    closed = ipyparallel.Client(begun[0])
    closed.close()
    with pytest.raises(EngineError, match=r"^this client of ipyparallel is closed: [^\n]*$"):
        lab.start(client=closed)
    with pytest.raises(ValueError, match=r"^one of client=, cluster= and profile= [^\n]*$"):
        lab.start(client=client, profile="site")
    monkeypatch.setattr(client, "_ids", [])
    with pytest.raises(EngineError, match=r"^the cluster of ipyparallel has no engines: [^\n]*$"):
        lab.start(client=client)


def test_a_profile_is_started_once_and_ends_with_the_ranks(client, capsys, eventually):
    folder = f"{os.environ['IPYTHONDIR']}/profile_site"
    os.makedirs(folder)
    lab.start(2, profile="site")
    ranks, said = lab.run(lambda comm: os.getpid()), capsys.readouterr().out
    assert "ipyparallel starts the cluster of profile site" in said and "(profile site)" in said
    lab.start(2, profile="site")
    lab.start()
    assert lab.run(lambda comm: os.getpid()) == ranks and "replacing" not in capsys.readouterr().out
    lab.stop()
    eventually(lambda: not os.path.exists(f"{folder}/security/ipcontroller-client.json"))
    lab.start(client=client)
    lab.start(2, profile="site")
    assert "(profile site)" in capsys.readouterr().out and len(lab.run(lambda comm: comm.rank)) == 2

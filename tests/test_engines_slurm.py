"""The parts of engines in a Slurm job that need no Slurm; with a real one: tests/slurm/test_engines.py."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time

import pytest
import zmq.asyncio

from hpdl_lab.engines import client, launch, layout, node_agent, relay, slurm, streams, supervisor_client
from hpdl_lab.features import Missing
from hpdl_lab.trace import Event

SECOND = 10**9


def test_a_layout_on_slurm_keeps_what_was_asked_for():
    first = layout.wanted(4, where="slurm", partition="gpu", nodes=2, time=30)
    assert first == layout.Layout(4, "slurm", job={"partition": "gpu", "nodes": 2, "time": "30"})
    assert layout.wanted(4, running=first) == first
    assert layout.wanted(8, running=first).job == first.job
    assert layout.wanted(**first.asked()) == first
    assert layout.Layout(**json.loads(json.dumps(first._asdict()))) == first, "the session file is JSON"
    assert layout.wanted(4, where="local", running=first) == layout.Layout(4)
    assert layout.wanted(4, partition="gpu").where == "slurm", "only Slurm has partitions"
    assert layout.wanted(4, gpus=1).device == "cuda"
    assert str(first) == "4 engines in a Slurm job"


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"where": "local", "partition": "gpu"}, ValueError, "partition= belongs to where='slurm'"),
        ({"where": "slurm", "link": "1gbit"}, ValueError, "belong to emulated hosts"),
        ({"where": "slurm", "nodes": 9}, ValueError, "nodes for 4 engines must be a whole number from 1 to 4, got 9"),
        ({"where": "slurm", "partitions": "gpu"}, TypeError, "unknown: partitions="),
    ],
)
def test_what_slurm_cannot_be_asked_is_one_sentence(asked, error, text):
    with pytest.raises(error, match=text):
        layout.wanted(4, **asked)


def test_engines_of_a_job_inherit_neither_another_job_nor_the_keys_of_a_hub(monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "PMI_RANK", "JUPYTERHUB_API_TOKEN", "JPY_API_TOKEN"):
        monkeypatch.setenv(name, "1")
    env = launch.engine_environment("/nowhere", layout.Layout(4, "slurm", job={}), 1)
    assert env["SLURM_CONF"] == "/etc/slurm/slurm.conf"
    assert not [n for n in env if n.startswith(("SLURM_J", "SLURM_N", "PMI_", "JUPYTERHUB_", "JPY_"))]
    assert "UCX_TLS" not in env, "loopback is for engines of this machine"


def test_without_slurm_one_sentence_says_what_there_is(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Exception, match=r"no command sbatch here.*lab.start\(4\)"):
        slurm.require_slurm()


class TestReach:
    def test_addresses_are_those_from_which_packets_to_the_nodes_leave(self, monkeypatch):
        monkeypatch.setattr(
            slurm, "node_addresses", lambda partition: ["127.0.0.1", "127.0.0.2", "no.such.node.invalid"]
        )
        assert slurm.addresses() == ["127.0.0.1"]
        monkeypatch.setattr(slurm, "node_addresses", lambda partition: ["no.such.node.invalid"])
        with pytest.raises(Missing, match="no.such.node.invalid.*set HPDL_ADDRESS"):
            slurm.addresses()
        monkeypatch.setenv("HPDL_ADDRESS", "10.1.0.5, 10.2.0.5")
        assert slurm.addresses() == ["10.1.0.5", "10.2.0.5"]

    def test_a_port_is_taken_from_those_that_are_open_for_srun(self, monkeypatch):
        monkeypatch.setattr(slurm, "ask_slurm", lambda argv: "SrunEpilog = x\nSrunPortRange           = 60001-60005\n")
        assert slurm.ports() == (60001, 60005)
        monkeypatch.setattr(slurm, "ask_slurm", lambda argv: "SrunPortRange           = 0-0\n")
        assert slurm.ports() is None
        monkeypatch.setenv("HPDL_PORTS", "60001")
        with pytest.raises(Missing, match="'60001' is no range of ports"):
            slurm.ports()

    def test_addresses_share_one_free_port_of_the_range(self):
        async def listen(hosts, within=None):
            context = zmq.asyncio.Context()
            router, port, authenticator = relay.listen(context, streams.new_keys(), hosts, within)
            with pytest.raises(Missing, match=f"no port from {port} to {port} can be had on 127.0.0.2.*HPDL_PORTS"):
                relay.listen(zmq.asyncio.Context(), streams.new_keys(), ["127.0.0.2"], (port, port))
            for host in hosts:
                socket.create_connection((host, port)).close()
            authenticator.stop()
            context.destroy(linger=0)

        asyncio.run(listen(["127.0.0.1", "127.0.0.2"]))


class TestSharedFolder:
    @pytest.fixture(autouse=True)
    def place(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HPDL_SHARED", str(tmp_path / "shared"))
        return tmp_path / "shared"

    def test_only_its_user_enters_it_and_it_goes(self, place):
        with slurm.shared_folder() as path:
            assert os.path.dirname(path) == str(place)
            assert stat.S_IMODE(os.stat(path).st_mode) == stat.S_IMODE(os.stat(place).st_mode) == 0o700
        assert os.listdir(place) == []

    def test_what_a_killed_relay_has_left_goes_at_the_next_start(self, place):
        done = subprocess.Popen(["true"])
        done.wait()
        place.mkdir()
        left, others = place / f"{socket.gethostname()}-{done.pid}-x", place / f"elsewhere-{done.pid}-x"
        left.mkdir(), others.mkdir()
        with slurm.shared_folder() as path:
            assert sorted(os.listdir(place)) == sorted([os.path.basename(path), others.name])

    def test_a_place_that_cannot_be_is_one_sentence(self, monkeypatch):
        monkeypatch.setenv("HPDL_SHARED", "/proc/nothing")
        with pytest.raises(Missing, match="there is no folder /proc/nothing .*: set HPDL_SHARED to a folder"):
            slurm.shared_root()


class TestClocks:
    def test_a_clock_that_may_be_ours_is_left_alone(self):
        offset = client.Offset()
        offset.take([(100, 150, 200)])
        assert offset.ns == 0 and not offset.stale
        outcome = {"t0_ns": 1, "t1_ns": 2, "events": []}
        assert offset.moved(outcome) is outcome

    def test_another_clock_is_read_by_the_fastest_answer(self):
        offset = client.Offset()
        there = 500 * SECOND  # what their clock is ahead of ours
        offset.take([(0, there + 900, 1000), (2000, there + 2050, 2100), (3000, there + 3010, 3900)])
        assert offset.ns == -there
        event = Event(1, 0, "send", there + 10, there + 20, 0, 8, "cell:1", "")
        moved = offset.moved({"t0_ns": there + 5, "t1_ns": there + 25, "events": [tuple(event)], "rank": 1})
        assert (moved["t0_ns"], moved["t1_ns"], moved["rank"]) == (5, 25, 1)
        assert Event._make(moved["events"][0]) == event._replace(t0_ns=10, t1_ns=20)


def test_a_relay_that_does_not_answer_is_one_sentence_for_the_job_to_end_with(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    known = {"addresses": ["127.0.0.1"], "port": port, "keys": streams.new_keys()}

    async def connect():
        async with node_agent.connected(known, role="job"):
            pass

    with pytest.raises(node_agent.Unreached, match=f"^node n7 cannot reach the relay .* at port {port} .*HPDL_"):
        asyncio.run(connect())


LEAVE_A_LETTER = """
import signal, sys, time
def end(*_):
    open(sys.argv[1], "a").write("grace")
    sys.exit()
signal.signal(signal.SIGTERM, end)
open(sys.argv[1], "w").close()
while True:
    time.sleep(60)
"""


@pytest.fixture
def supervisor(tmp_path, no_engines_yet):
    path = os.path.join(no_engines_yet, "session")
    os.mkdir(path, 0o700)
    connection = supervisor_client.start(path)
    yield connection
    connection.close()


def spawn(supervisor, name, letter, **how):
    """A process that writes a word into the file `letter` when it is asked to end; returns when it is ready to."""
    argv = [sys.executable, "-I", "-S", "-c", LEAVE_A_LETTER, str(letter)]
    pid = supervisor.ask("spawn", name=name, argv=argv, env={}, cwd="/", log="/dev/null", **how)["pid"]
    give_up = time.monotonic() + 60
    while not letter.exists():
        assert time.monotonic() < give_up
        time.sleep(0.01)
    return pid


def test_the_supervisor_asks_those_first_that_have_to_undo_something_and_keeps_those_that_go_on(supervisor, tmp_path):
    asked, killed, kept = tmp_path / "asked", tmp_path / "killed", tmp_path / "kept"
    spawn(supervisor, "asked", asked, grace=60.0)
    spawn(supervisor, "killed", killed)
    pid = spawn(supervisor, "kept", kept, grace=60.0)
    supervisor.ask("kill", keep=["kept"])
    assert (asked.read_text(), killed.read_text(), kept.read_text()) == ("grace", "", "")
    assert supervisor.ask("status")["running"] == {"kept": pid}
    supervisor.ask("kill")
    assert supervisor.ask("status")["running"] == {} and kept.read_text() == "grace"


def test_the_grace_does_not_last_for_ever(supervisor, tmp_path):
    pid = spawn(supervisor, "suspended", tmp_path / "letter", grace=0.2)
    os.kill(pid, signal.SIGSTOP)
    supervisor.ask("kill")
    assert supervisor.ask("status")["running"] == {}

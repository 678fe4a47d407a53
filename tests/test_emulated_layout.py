"""What may be asked for: links, hosts, places; one sentence for each mistake, and where hosts cannot be emulated."""

import os
import shutil
import subprocess
import sys

import pytest

from hpdl_lab import features
from hpdl_lab.engines import launch, layout
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError
from hpdl_lab.engines.layout import Layout, wanted
from tests.wording import raises

HOSTS = Layout(4, "emulated", 4, "1gbit")


@pytest.mark.parametrize(
    ("text", "bits", "shown"),
    [
        ("1gbit", 10**9, "1gbit"),
        ("100mbit", 10**8, "100mbit"),
        ("10GBIT", 10**10, "10gbit"),
        (" 2.5gbit ", 2_500_000_000, "2.5gbit"),
        ("1000mbit", 10**9, "1gbit"),
        ("1500kbit", 1_500_000, "1.5mbit"),
        ("100gbit", 10**11, "100gbit"),
    ],
)
def test_a_link_is_spelled_as_tc_spells_it(text, bits, shown):
    found = layout.parse_link(text)
    assert (found.bits, found.bandwidth, str(found)) == (bits, bits / 8, shown)
    assert layout.parse_link(shown) == found


@pytest.mark.parametrize(
    "text", ["", "fast", "1", "1g", "gbit", "-1gbit", "1 gbit", "1gbps", "1e3mbit", 10**9, None, "1gbit;reboot"]
)
def test_what_is_no_link(text):
    with raises(ValueError, '"100mbit"', '"1gbit"') as caught:
        layout.parse_link(text)
    assert f"link={text!r}" in str(caught.value)


@pytest.mark.parametrize("text", ["0gbit", "1kbit", "999kbit", "101gbit", "999999999999gbit"])
def test_a_link_that_is_too_slow_or_too_fast(text):
    with raises(ValueError, f"link='{text}'", "1mbit", "100gbit"):
        layout.parse_link(text)


@pytest.mark.parametrize("text", ["1mbit", "100mbit", "1gbit", "10gbit", "100gbit"])
def test_a_packet_fits_into_the_bucket_and_the_windows_of_all_hosts_into_the_queue(text):
    found = layout.parse_link(text)
    assert found.packet < found.burst < 2 * max(found.packet, found.bandwidth * layout.LATE_S)
    window = int(found.windows()["ipv4/tcp_rmem"].split()[-1])
    assert window >= found.bandwidth * 1e-3 and 2 * window < layout.QUEUE_NBYTES


@pytest.mark.parametrize(
    ("asked", "running", "found"),
    [
        ({}, None, Layout(4)),
        ({"where": "emulated"}, None, HOSTS),
        ({"link": "1000mbit"}, None, HOSTS),
        ({"hosts": 2}, None, HOSTS._replace(hosts=2)),
        ({"device": "cuda"}, None, Layout(4, device="cuda")),
        ({}, HOSTS, HOSTS),
        ({}, Layout(4, device="cuda"), Layout(4, device="cuda")),
        ({}, HOSTS._replace(hosts=2, link="10gbit"), HOSTS._replace(hosts=2, link="10gbit")),
        ({}, Layout(8, "emulated", 2, "10gbit"), HOSTS._replace(link="10gbit")),
        ({"link": "10gbit"}, HOSTS, HOSTS._replace(link="10gbit")),
        ({"where": "local"}, HOSTS, Layout(4)),
        ({"where": "emulated"}, Layout(4), HOSTS),
    ],
)
def test_what_is_not_said_stays_as_it_runs(asked, running, found):
    assert wanted(4, **asked, running=running) == found
    assert wanted(running=running, **found.asked()) == found


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"where": "cloud"}, ("where='cloud'", "'local'", "'emulated'", "'slurm'")),
        ({"device": "tpu"}, ("device='tpu'", "'cpu'", "'cuda'")),
        ({"hosts": 5}, ("4 engines", "1 to 4", "5")),
        ({"hosts": 0}, ("4 engines", "1 to 4", "0")),
        ({"hosts": 2.0}, ("hosts=2.0", "emulate", "ssh", '["n1"]')),
        ({"where": "local", "link": "1gbit"}, ("link=", "hosts=")),
        ({"where": "local", "hosts": 4}, ("link=", "hosts=")),
        ({"where": "emulated", "link": "fast"}, ("link='fast'",)),
    ],
)
def test_what_makes_no_sense_is_one_sentence(asked, sentence):
    with raises(ValueError, *sentence):
        Cluster.start(4, **asked)


def test_missing_commands_are_named_with_their_package(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None if name == "tc" else f"/bin/{name}")
    with raises(EngineError, "iproute2"):
        launch.check_layout(HOSTS)


def test_another_mpi_is_refused(monkeypatch):
    monkeypatch.setattr(features, "mpiexec", lambda: "/opt/openmpi/bin/mpiexec")
    with raises(EngineError, "MPICH", "/opt/openmpi/bin/mpiexec", "MPI"):
        launch.check_layout(HOSTS)


def test_what_ip_says_is_passed_on(monkeypatch, tmp_path):
    ip = tmp_path / "ip"
    ip.write_text("#!/bin/sh\necho 'Error: Unknown device type.' >&2\nexit 1\n")
    ip.chmod(0o755)
    monkeypatch.setattr(features, "network_commands", lambda: [str(ip), "/bin/true"])
    with pytest.raises(EngineError, match=r"cannot be made: ip says: Error: Unknown device type|need root, or network"):
        launch.check_layout(HOSTS)


def test_what_enters_namespaces_starts_no_threads():
    """A process with more than one thread can enter no user namespace; NumPy starts one for each core."""
    modules = "hpdl_lab.engines.hosts"
    code = f"import sys, {modules}; print({{'numpy', 'torch', 'zmq'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


STAYS = """
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError
with Cluster.start(1) as cluster:
    pid = cluster.infos[0]["pid"]
    try:
        cluster.restart(where="emulated")
    except EngineError as error:
        print("REFUSED", error)
    print(cluster.run(lambda comm: __import__("os").getpid()) == [pid], cluster.where)
"""


def test_refused_the_engines_that_run_stay(no_engines_yet):
    """Without any capability, not even a user namespace with a root of its own can be made."""
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or not setpriv:
        pytest.skip("only root can give up what it is allowed, with setpriv")
    command = [setpriv, "--inh-caps=-all", "--bounding-set=-all", sys.executable, "-c", STAYS]
    done = subprocess.run(command, capture_output=True, text=True)
    refused, last = done.stdout.splitlines()[-2:]
    assert refused.startswith("REFUSED emulated hosts need root, or network namespaces for every user, which this")
    assert "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" in refused and last == "True local"

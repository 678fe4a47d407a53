"""What docs/security.md claims of a hub itself: what listens where, what is encrypted, who may ask, who may read.

What attendees can do to each other is tried from their notebooks in tests/browser/test_hub.py.
"""

import contextlib
import os
import shutil
import socket
import ssl
import stat
import subprocess
from pathlib import Path

import psutil
import pytest
import requests

from hpdl_lab import cli
from hpdl_lab.classroom import hub
from hpdl_lab.classroom.attendee import Attendee, Trouble

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="accounts for attendees need root")

ADA, BOB = (f"{name}{os.getpid()}" for name in ("sada", "sbob"))
PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(chain, key): a certificate for 127.0.0.1, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    chain, key = folder / "chain.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", chain]
    subprocess.run([*command, *subject], check=True, capture_output=True, timeout=60)
    return str(chain), str(key)


@pytest.fixture(scope="module")
def running(certificate):
    """A hub with TLS, nobody's server started."""
    chain, key = certificate
    with hub.private([ADA, BOB], certificate=chain, key=key, idle=0) as running:
        yield running


@pytest.fixture
def attendee(running, certificate):
    """`attendee(name, password)`: somebody with a browser that trusts the certificate."""
    came = []

    def come(name, password):
        came.append(Attendee(running.url, name, password))
        came[-1].http.verify = certificate[0]
        return came[-1]

    yield come
    for one in came:
        one.leave()


def listeners(pid):
    """{(address, port)} on which a process and its children listen for TCP or receive UDP."""
    found = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                    found.add(tuple(connection.laddr[:2]))
    return found


@pytest.mark.timeout(180)
def test_browsers_reach_one_port_and_the_inner_ones_are_loopback_that_only_root_may_take(running):
    given = running.settings
    inner = {("127.0.0.1", given.hub_port), ("127.0.0.1", given.proxy_port)}
    assert listeners(running.pid) == {(given.address, given.port), *inner}
    assert all(port < 1024 for _, port in inner)


@pytest.mark.timeout(180)
def test_what_browsers_send_is_encrypted(running, certificate):
    assert running.url.startswith("https://")
    context = ssl.create_default_context(cafile=certificate[0])
    with socket.create_connection(("127.0.0.1", running.settings.port), timeout=20) as plain:
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as channel:
            assert channel.version() in ("TLSv1.2", "TLSv1.3")
    with pytest.raises(requests.ConnectionError):
        requests.get(running.url.replace("https", "http") + "/hub/login", timeout=20)


@pytest.mark.timeout(180)
def test_the_inner_interfaces_answer_nobody_without_a_token(running):
    given = running.settings
    for url in (f"http://127.0.0.1:{given.hub_port}/hub/api/users", f"http://127.0.0.1:{given.proxy_port}/api/routes"):
        for headers in ({}, {"Authorization": "token 0123456789abcdef"}):
            assert requests.get(url, headers=headers, timeout=20).status_code == 403


@pytest.mark.timeout(180)
def test_who_is_not_on_the_list_or_has_another_password_stays_outside(attendee):
    attendee(ADA, PASSWORD).log_in()  # the first login: this is her password now
    for name, password in [(ADA, PASSWORD + "?"), ("mallory", PASSWORD), ("root", PASSWORD), (BOB, "short")]:
        with pytest.raises(Trouble, match="does not accept this name and password"):
            attendee(name, password).log_in()
    attendee(ADA, PASSWORD).log_in()


@pytest.mark.timeout(180)
def test_only_root_reads_the_hubs_own_files(running):
    given = running.settings
    for folder, mode in {given.state: 0o711, given.private: 0o700, f"{given.state}/homes": 0o711}.items():
        assert stat.S_IMODE(os.stat(folder).st_mode) == mode, folder
    for name in (ADA, BOB):
        home = os.stat(f"{given.state}/homes/{name}")
        assert stat.S_IMODE(home.st_mode) == 0o700 and home.st_uid not in (0, os.getuid())
    kept = {entry.name: entry for entry in os.scandir(given.private) if entry.is_file()}
    assert {"settings.json", "cookie_secret", "jupyterhub.sqlite", "hub.log"} <= set(kept)
    assert {name for name, entry in kept.items() if entry.stat().st_uid != 0} == set()
    assert PASSWORD not in "".join(Path(entry).read_bytes().decode("latin-1") for entry in kept.values())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--address", "0.0.0.0"], "without TLS passwords are readable on the network"),
        (["--address", "0.0.0.0", "--no-tls", "--dummy"], "lets anybody in as anybody: on 127.0.0.1 only"),
        (["--certificate", "/dev/null"], "TLS needs both, --certificate and --key"),
        (["--certificate", "/dev/null", "--key", "/dev/null"], "no certificate chain and its key, in PEM and without"),
    ],
)
def test_a_hub_that_would_be_open_does_not_start(options, why, tmp_path, capsys):
    assert cli.main(["hub", "--users", "1", "--state", str(tmp_path / "hub"), *options]) == 1
    assert why in capsys.readouterr().err
    assert not (tmp_path / "hub" / "homes").exists()


def test_a_state_folder_of_somebody_else_is_refused(tmp_path, capsys):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    assert cli.main(["hub", "--users", "1", "--state", str(theirs)]) == 1
    said = capsys.readouterr().err
    assert str(theirs) in said and os.listdir(theirs) == []
    shutil.rmtree(theirs)

"""What docs/security.md claims of a hub itself: what listens where, what is encrypted, who may ask, who may read.

What attendees can do to each other is tried in tests/test_hub_attacks.py and tests/browser/test_hub.py.
"""

import contextlib
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
from pathlib import Path

import psutil
import pytest
import requests
from cryptography import x509

from hpdl_lab import cli
from hpdl_lab.classroom import hub
from hpdl_lab.classroom.attendee import Attendee

pytestmark = [
    pytest.mark.slow,  # a hub
    pytest.mark.skipif(os.geteuid() != 0, reason="user ids for attendees need root"),
    pytest.mark.filterwarnings("ignore:Unverified HTTPS request"),
]

ADA, BOB = (f"{name}{os.getpid()}" for name in ("sada", "sbob"))
PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(chain, key): a certificate for 127.0.0.1, signed by itself."""
    folder = tmp_path_factory.mktemp("tls")
    chain, key = folder / "chain.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", chain]
    subprocess.run([*command, *subject], check=True, capture_output=True)
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


def listeners(pids):
    """{(address, port)} on which these processes and their children listen for TCP or receive UDP."""
    found = set()
    for process in [each for pid in pids for each in (psutil.Process(pid), *psutil.Process(pid).children(True))]:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM:
                    found.add(tuple(connection.laddr[:2]))
    return found


def test_browsers_reach_one_port_and_the_inner_ones_are_loopback_and_never_free(running):
    given = running.settings
    inner = {("127.0.0.1", given.hub_port), ("127.0.0.1", given.proxy_port)}
    assert listeners(running.pids) == {(given.address, given.port), *inner}
    os.kill(running.proxy.pid, signal.SIGKILL)
    running.proxy.wait()
    for port in (given.port, given.hub_port, given.proxy_port):
        for address in ("127.0.0.1", "::1", ""):
            with socket.socket(socket.AF_INET6 if address == "::1" else socket.AF_INET) as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="in use"):
                    other.bind((address, port))
    running._start()


def test_what_browsers_send_is_encrypted(running, certificate):
    assert running.url.startswith("https://")
    context = ssl.create_default_context(cafile=certificate[0])
    with socket.create_connection(("127.0.0.1", running.settings.port), timeout=300) as plain:
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as channel:
            assert channel.version() in ("TLSv1.2", "TLSv1.3")
    with pytest.raises(requests.ConnectionError):
        requests.get(running.url.replace("https", "http") + "/hub/login", timeout=300)


def test_the_inner_interfaces_answer_nobody_without_a_certificate_of_the_hub(running):
    given = running.settings
    for url in (f"https://127.0.0.1:{given.hub_port}/hub/api", f"https://127.0.0.1:{given.proxy_port}/api/routes"):
        with pytest.raises(requests.exceptions.ConnectionError):  # it breaks off
            requests.get(url, timeout=300, verify=False)
        with pytest.raises(requests.exceptions.ConnectionError):
            requests.get(url.replace("https", "http"), timeout=300)


def test_the_servers_address_and_certificate_are_of_one_attendee(running, attendee, certificate):
    """Nobody else's certificate is good there, and without one nobody is answered."""
    someone = attendee(ADA, PASSWORD)
    someone.log_in()
    someone.start_server(150)
    (own,) = [cookie for cookie in someone.http.cookies if "hpdl-own" in cookie.name]  # lets in to her server only
    assert own.name.startswith("__Host-") and own.secure and own.path == "/"  # by no page of another port
    assert requests.get(f"{running.url}/user/{ADA}/lab", timeout=300, verify=certificate[0]).url.startswith(
        f"{running.url}/hub/login"
    )
    account = running.state.account(ADA)
    (at,) = {at for at in listeners(running.pids) if at[0] == account.ip}
    own = Path(account.given, "certfile").read_bytes()
    names = x509.load_pem_x509_certificate(own).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == [account.ip]
    assert names.get_values_for_type(x509.DNSName) == []
    for scheme in ("https", "http"):
        with pytest.raises(requests.exceptions.ConnectionError):
            requests.get(f"{scheme}://{at[0]}:{at[1]}/user/{ADA}/api", timeout=300, verify=False)
    key = Path(account.given, "keyfile").stat()
    assert (stat.S_IMODE(key.st_mode), key.st_uid) == (0o400, account.uid)
    someone._ask("DELETE", someone.api, xsrf="/hub/")


def test_only_root_reads_the_hubs_own_files(running):
    given = running.settings
    modes = {"": 0o711, "hub": 0o700, "homes": 0o711, "attendees": 0o711, "notebooks": 0o755}
    for folder, mode in modes.items():
        found = os.stat(f"{given.state}/{folder}")
        assert (stat.S_IMODE(found.st_mode), found.st_uid) == (mode, 0), folder
    for name in (ADA, BOB):
        home = os.stat(f"{given.state}/homes/{name}")
        assert (stat.S_IMODE(home.st_mode), home.st_uid) == (0o700, running.state.account(name).uid)
    kept = {entry.name: entry for entry in os.scandir(given.private) if entry.is_file()}
    assert {"settings.json", "cookie_secret", "jupyterhub.sqlite", "hub.log", "passwords.json"} <= set(kept)
    assert {name for name, entry in kept.items() if entry.stat().st_uid != 0} == set()
    assert PASSWORD not in "".join(Path(entry).read_bytes().decode("latin-1") for entry in kept.values())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--address", "0.0.0.0"], "without TLS passwords are readable on the network"),
        (["--address", "0.0.0.0", "--no-tls", "--dummy"], "lets anybody in as anybody: on 127.0.0.1 only"),
        (["--subdomain-host", "hub.example.org"], "a name is wanted, as in https://hub.example.org"),
        (["--subdomain-host", "https://127.0.0.1:8000"], "a name is wanted, as in https://hub.example.org"),
        (["--subdomain-host", "https://hub.example.org"], "https wants --certificate and --key"),
        (["--subdomain-host", "http://hub.example.org", "--no-tls"], "http wants neither"),
        (["--certificate", "/dev/null"], "TLS needs both, --certificate and --key"),
        (["--certificate", "EMPTY", "--key", "EMPTY"], "no certificate chain and its key, in PEM and without"),
        (["--certificate", "/dev/null", "--key", "/dev/null"], "other accounts can read /dev/null"),
    ],
)
def test_a_hub_that_would_be_open_does_not_start(options, why, tmp_path, capsys):
    empty = tmp_path / "empty.pem"
    empty.touch(mode=0o600)
    options = [str(empty) if option == "EMPTY" else option for option in options]
    assert cli.main(["hub", "--users", "1", "--state", str(tmp_path / "hub"), *options]) == 1
    assert why in capsys.readouterr().err
    assert not (tmp_path / "hub").exists()


def test_a_state_folder_of_somebody_else_is_refused(tmp_path, capsys):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    assert cli.main(["hub", "--users", "1", "--state", str(theirs)]) == 1
    said = capsys.readouterr().err
    assert str(theirs) in said and os.listdir(theirs) == []
    shutil.rmtree(theirs)

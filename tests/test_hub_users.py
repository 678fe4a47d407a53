"""Who may log in on a hub, what a hub is asked for, which ports it holds, and that its end is not cut short."""

import argparse
import asyncio
import itertools
import json
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from tornado.web import HTTPError

from hpdl_lab import cli
from hpdl_lab.classroom import authenticator, hub, sandbox, server, settings, sockets
from hpdl_lab.classroom.state import NAME, HubState
from hpdl_lab.cli import hub as command


@pytest.mark.parametrize(
    ("n", "last"), [(1, "attendee01"), (12, "attendee12"), (99, "attendee99"), (100, "attendee100")]
)
def test_numbered_names_are_sorted_and_good_names(n, last):
    names = authenticator.numbered(n)
    assert names[-1] == last and names == sorted(names) and len(set(names)) == n
    assert all(NAME.fullmatch(name) for name in names)


def test_no_class_has_a_million_attendees():
    with pytest.raises(ValueError, match="10,000 attendees at most, not 1,000,000"):
        authenticator.numbered(1_000_000)


@pytest.fixture
def users_file(tmp_path):
    """`users_file(text)`: the path of a file that only this user reads."""
    path = tmp_path / "users.txt"
    path.touch(mode=0o600)

    def write(text):
        path.write_text(text)
        return path

    return write


def test_a_users_file_has_names_with_and_without_passwords(users_file):
    path = users_file("\ufeff# the class of May\nada  sesame street\n\n  bob # chooses one\neve\tlong#enough #1\n")
    assert authenticator.read_users(path) == {"ada": "sesame street", "bob": None, "eve": "long#enough"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Ada\n", "line 1: 'Ada'"),
        ("ada\n../bob\n", "line 2: '../bob'"),
        ("root;reboot\n", "'root;reboot' is no name"),
        ("a" * 25, "is no name"),
        ("bjørn\n", "'bjørn' is no name"),
        ("ada\nbob\nada\n", "line 3: 'ada' is in the file"),
        ("ada short\n", "line 1: 'ada' has a password that has 5 characters: 8"),
        ("ada " + "x" * 257, "has 257 bytes: 256"),
        ("# nobody\n\n", "no names"),
    ],
)
def test_a_bad_users_file_is_refused_with_its_lines(users_file, text, words):
    path = users_file(text)
    with pytest.raises(ValueError) as caught:
        authenticator.read_users(path)
    assert words in str(caught.value) and str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


# -- passwords ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def given(tmp_path):
    """Settings whose state folder has a private part."""
    made = settings.Settings(users=("ada", "bob"), state=str(tmp_path))
    made.private.mkdir()
    return made


def test_passwords_are_stored_as_salted_hashes_and_what_an_attendee_has_stays(given):
    path = given.passwords
    assert authenticator.store(path, {"ada": "sesame street", "bob": None}, keep=True) == {"ada": True}
    assert authenticator.store(path, {"ada": "another one!", "bob": "sesame street"}, keep=True) == {
        "ada": False,
        "bob": True,
    }
    assert path.stat().st_mode & 0o777 == 0o600 and "sesame" not in path.read_text()
    stored = authenticator.load_passwords(path)
    assert stored["ada"] != stored["bob"]  # the same password
    for name in ("ada", "bob"):
        assert authenticator.check_password(path, name, "sesame street") is None
        assert authenticator.check_password(path, name, "another one!") == ""


def test_the_first_password_becomes_that_of_its_attendee(given):
    path = given.passwords
    assert "8 at least" in authenticator.check_password(path, "ada", "short")
    assert authenticator.load_passwords(path) == {}
    assert authenticator.check_password(path, "ada", "sesame street") is None
    assert authenticator.check_password(path, "ada", "another one!") == ""


def test_a_forgotten_password_is_replaced_by_a_new_one(given):
    with pytest.raises(ValueError, match="ada has no password"):
        authenticator.renew(given, "ada")
    authenticator.store(given.passwords, {"ada": "sesame street"}, keep=True)
    first, second = (authenticator.renew(given, "ada") for _ in range(2))
    assert first != second and not authenticator.weakness(first)
    found = [authenticator.check_password(given.passwords, "ada", each) for each in ("sesame street", first, second)]
    assert found == ["", "", None]


@pytest.fixture
def log_in(given, monkeypatch):
    """`await log_in(name, password, address)`: the name; None, or the HTTP status, if it is refused."""
    made = authenticator.AttendeeAuthenticator(passwords=str(given.passwords), allowed_users=set(given.users))
    authenticator.store(given.passwords, {"ada": "sesame street"}, keep=True)

    async def log_in(name, password, address="10.0.0.1"):
        request = SimpleNamespace(headers={"X-Forwarded-For": address}, get_ssl_certificate=lambda: None)
        handler = SimpleNamespace(request=request)
        try:
            return await made.authenticate(handler, {"username": name, "password": password})
        except HTTPError as error:
            return error.status_code

    return log_in


def test_who_guesses_waits_and_nobody_else(log_in, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(authenticator, "time", SimpleNamespace(monotonic=lambda: now))

    async def guess():
        nonlocal now
        tried = []
        while len(tried) < 9:
            if await log_in("ada", "wrong guess") is None:
                tried.append(now)
            now += 0.5
        others = [await log_in("ada", "sesame street", "10.0.0.2"), await log_in("bob", "bob's secret")]
        assert [await log_in("ada", "sesame street"), *others] == [429, "ada", "bob"]
        now += 30
        assert [await log_in("ada", word) for word in ("sesame street", "wrong guess")] == ["ada", None]
        now += 0.5  # after the right password it begins anew
        assert await log_in("ada", "wrong guess") is None
        return [after - before for before, after in itertools.pairwise(tried)]

    assert asyncio.run(guess()) == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_who_is_not_on_the_list_or_has_too_weak_a_password_stays_outside(log_in):
    found = [
        asyncio.run(log_in(*who)) for who in (("eve", "sesame street"), ("bob", "short"), ("ada", "sesame street"))
    ]
    assert found == [None, 403, "ada"]


def test_a_class_that_logs_in_at_once_is_served_and_a_flood_is_turned_away(log_in, monkeypatch):
    running, most = 0, 0

    def check(*args):
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.005)
        running -= 1

    monkeypatch.setattr(authenticator, "check_password", check)

    async def come():
        for count in (100, 150):
            yield await asyncio.gather(*(log_in("ada", "sesame street", f"10.0.1.{i}") for i in range(count)))

    async def both():
        return [answers async for answers in come()]

    served, flood = asyncio.run(both())
    assert served == ["ada"] * 100 and flood.count(429) == 50
    assert most == 2


# -- what a hub is asked for -------------------------------------------------------------------------------------------


def test_settings_are_read_as_they_were_saved_and_only_by_the_hub(given, monkeypatch):
    monkeypatch.delenv(settings.VARIABLE, raising=False)  # a configuration that this process has read leaves it
    made = given.replace(engines=2, groups=("/x", "/y"), idle=0.5, sandbox=True)
    made.save()
    assert settings.read_settings(given.state) == made
    assert (given.private / "settings.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((given.private / "settings.json").read_text())["engines"] == 2
    assert settings.read_settings() is None  # a site that starts JupyterHub itself


@pytest.mark.parametrize(
    ("address", "certificate", "url", "loopback"),
    [
        ("127.0.0.1", "", "http://127.0.0.1:8000", True),
        ("::1", "", "http://[::1]:8000", True),
        ("10.0.0.7", "c.pem", "https://10.0.0.7:8000", False),
    ],
)
def test_addresses(address, certificate, url, loopback):
    given = settings.Settings(address=address, certificate=certificate)
    assert given.url == given.bind_url == given.local_url == url
    assert given.loopback is loopback


@pytest.mark.parametrize(("every", "here"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]")])
def test_all_addresses_are_reached_here_by_the_loopback_one(every, here):
    given = settings.Settings(address=every)
    assert given.local_url == f"http://{here}:8000"
    assert not given.loopback and every not in given.url


@pytest.mark.parametrize(
    ("read", "text"),
    [(command.CORES, "0.01"), (command.CORES, "-1"), (command.MINUTES, "1e7")]
    + [(read, wrong) for read in (command.CORES, command.MINUTES) for wrong in ("nan", "two", "")],
)
def test_what_is_no_number_of_cores_or_minutes_is_said(read, text):
    assert (command.CORES("0.5"), command.CORES("0"), command.MINUTES("0")) == (0.5, 0, 0)
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of"):
        read(text)


def test_the_sites_profile_reaches_an_attendee_without_its_keys_and_again_at_each_start(tmp_path, monkeypatch):
    theirs, account = tmp_path / "profile_site", sandbox.UnixAccount("ada", 7, "/home/ada", str(tmp_path), "127.77.0.1")
    (theirs / "security").mkdir(parents=True)
    (theirs / "security" / "ipcontroller-client.json").write_text("a key")
    given = settings.Settings(profile=str(theirs))
    environment = sandbox.attendee_environment(given, account)
    assert environment["HPDL_PROFILE"] == "site"
    inside = sandbox.attendee_environment(given.replace(sandbox=True), account)["HPDL_PROFILE_FILES"]
    assert inside == f"{sandbox.GIVEN}/own/profile"
    assert "HPDL_PROFILE" not in sandbox.attendee_environment(settings.Settings(), account)
    for name in ("HPDL_PROFILE", "HPDL_PROFILE_FILES"):
        monkeypatch.setenv(name, environment[name])
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    for text in ("c.Cluster.n = 4", "c.Cluster.n = 8"):
        (theirs / "ipcluster_config.py").write_text(text)
        sandbox.write_profile(given, account)
        server.copy_profile()
        copied = list((tmp_path / "ipython" / "profile_site").rglob("*"))
        assert [(path.name, path.read_text()) for path in copied] == [("ipcluster_config.py", text)]
        assert copied[0].stat().st_mode & 0o044 == 0o044


def test_a_profile_that_is_not_there_is_said_and_nothing_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    assert cli.main(["hub", "--profile", "site", "--state", str(tmp_path / "state")]) == 1
    assert capsys.readouterr().err.startswith("hpdl: there is no profile 'site' of IPython: ipython profile create")
    assert not (tmp_path / "state").exists()


def test_one_task_at_a_time(capsys):
    with pytest.raises(SystemExit):
        cli.main(["hub", "--forget-password", "ada", "--remove", "--state", "/proc/none"])
    assert "not allowed with argument" in capsys.readouterr().err


# -- ports -------------------------------------------------------------------------------------------------------------


def answers(address, port):
    """Whether somebody listens there."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as caller:
        return caller.connect_ex((address, port)) == 0


@pytest.mark.parametrize(
    ("address", "heard", "silent"),
    [
        ("127.0.0.1", ["127.0.0.1"], ["::1"]),
        ("localhost", ["127.0.0.1"], ["::1"]),
        ("::1", ["::1"], ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1", "::1"], []),
    ],
)
def test_a_port_is_held_in_both_address_families(address, heard, silent):
    held = sockets.ReservedPort(address, 0)
    try:
        assert all(answers(each, held.port) for each in heard)
        assert not any(answers(each, held.port) for each in silent)
        for each in heard + silent:
            with pytest.raises(RuntimeError, match=f"port {held.port} of {each} cannot be used"):
                sockets.ReservedPort(each, held.port)
    finally:
        held.close()
    sockets.ReservedPort(address, held.port).close()


def test_an_inner_port_stays_unless_something_else_has_it():
    first = sockets.inner(0)
    second = sockets.inner(first.port)
    assert second.port != first.port
    first.close()
    third = sockets.inner(first.port)
    assert third.port == first.port
    second.close()
    third.close()


def test_no_port_and_no_address_are_refused_in_one_sentence():
    with pytest.raises(RuntimeError, match="70000 is no port: a number from 1 to 65535"):
        sockets.ReservedPort("127.0.0.1", 70000)
    for address in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(RuntimeError, match=f"'{address}' is no address of this machine .*--address 0.0.0.0"):
            sockets.ReservedPort(address, 8000)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_second_ctrl_c_leaves_no_half_of_a_hub(given, monkeypatch):
    ended = []
    monkeypatch.setattr(hub, "clear", lambda *args: signal.raise_signal(signal.SIGINT) or ended.append("servers"))
    state = SimpleNamespace(manifest=SimpleNamespace(names=[]), close=lambda: ended.append("lock"))
    hub.Hub(given, state).stop()
    assert ended == ["servers", "lock"]
    with pytest.raises(KeyboardInterrupt):  # afterwards it is heeded
        signal.raise_signal(signal.SIGINT)


def test_a_process_that_ends_while_user_ids_are_chosen_does_no_harm(tmp_path, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        ended = psutil.Process(child.pid)
    monkeypatch.setattr(sandbox, "processes", lambda: [ended, psutil.Process()])
    folder = tmp_path / "state"
    HubState.make(str(folder)).remove()
    assert not folder.exists()

"""Who may log in on a hub, what a hub is asked for, which ports it takes, and that its end is not cut short."""

import argparse
import json
import signal
import socket

import bcrypt
import pytest

from hpdl_lab import cli
from hpdl_lab.classroom import hub, leftovers, ports, preparation, settings, users
from hpdl_lab.cli import hub as command


@pytest.mark.parametrize(
    ("n", "last"), [(1, "attendee01"), (12, "attendee12"), (99, "attendee99"), (100, "attendee100")]
)
def test_numbered_names_are_sorted_and_good_names(n, last):
    names = users.numbered(n)
    assert names[-1] == last and names == sorted(names) and len(set(names)) == n
    assert all(users.NAME.fullmatch(name) for name in names)


def test_no_class_has_a_million_attendees():
    with pytest.raises(ValueError, match="a hub has 10,000 attendees at most, not 1,000,000"):
        users.numbered(1_000_000)


def test_a_users_file_has_names_with_and_without_passwords(tmp_path):
    file = tmp_path / "users.txt"
    file.write_text("\ufeff# the class of May\nada  sesame street\n\n  bob # chooses one\neve\tlong#enough #1\n")
    assert users.read(file) == {"ada": "sesame street", "bob": None, "eve": "long#enough"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Ada\n", "line 1: 'Ada' is no name: a lower-case letter, then at most 23 of a-z 0-9 _ -"),
        ("ada\n../bob\n", "line 2: '../bob' is no name"),
        ("root;reboot\n", "'root;reboot' is no name"),
        ("a" * 25, "is no name"),
        ("bjørn\n", "'bjørn' is no name"),
        ("ada\nbob\nada\n", "line 3: ada is in line 1 already"),
        ("ada short\n", "line 1: the password of ada has 5 characters: 8 at least"),
        ("ada " + "x" * 73, "has 73 bytes: 72 at most"),
        ("A\nB\nC\nD\nE\n", "(and 2 more)"),
        ("# nobody\n\n", "no names in it"),
    ],
)
def test_a_bad_users_file_is_refused_with_its_lines(tmp_path, text, sentence):
    file = tmp_path / "users.txt"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        users.read(file)
    assert sentence in str(caught.value) and str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


@pytest.fixture
def given(tmp_path):
    """Settings whose state folder has a private part."""
    made = settings.Settings(users=("ada", "bob"), state=str(tmp_path), port=ports.free())
    made.private.mkdir()
    return made


def test_passwords_are_stored_as_hashes_and_what_an_attendee_changed_stays(given):
    users.hand_out(given, {"ada": "sesame street", "bob": None})
    assert b"sesame" not in b"".join(path.read_bytes() for path in given.private.iterdir())
    users.hand_out(given, {"ada": "another one!", "bob": "bob's secret"})
    with users.dbm.open(users.passwords_file(given)) as stored:
        assert bcrypt.checkpw(b"sesame street", stored[b"ada"])
        assert bcrypt.checkpw(b"bob's secret", stored[b"bob"])


def test_a_forgotten_password_is_forgotten_once(given):
    with pytest.raises(ValueError, match="ada has no password on this hub, so there is none to forget"):
        users.forget_password(given, "ada")
    users.hand_out(given, {"ada": "sesame street"})
    users.forget_password(given, "ada")
    with pytest.raises(ValueError, match="none to forget"):
        users.forget_password(given, "ada")


def test_settings_are_read_as_they_were_saved_and_only_by_the_hub(given, monkeypatch):
    monkeypatch.delenv(settings.VARIABLE, raising=False)  # a configuration that this process has read leaves it
    made = given._replace(engines=2, groups=(1, {"memory": "/x"}), idle=0.5)
    made.save()
    assert settings.read(given.state) == made
    assert (given.private / "settings.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((given.private / "settings.json").read_text())["engines"] == 2
    assert settings.read() is None  # a site that starts JupyterHub itself


def test_a_free_port_is_one_that_the_system_gives_to_nobody_else():
    first, last = map(int, ports.GIVEN.read_text().split())
    assert all(1024 <= ports.free(address) not in range(first, last + 1) for address in ("127.0.0.1", "", "::1"))


def test_the_inner_ports_stay_over_restarts_unless_something_else_has_them(given):
    first = ports.inner(given)
    assert first.hub_port != first.proxy_port and first.hub_port and first.proxy_port
    first.save()
    assert ports.inner(given) == first
    with socket.socket() as other:
        other.bind(("127.0.0.1", first.hub_port))
        again = ports.inner(given)
    assert again.hub_port != first.hub_port and again.proxy_port == first.proxy_port


def test_a_port_in_use_and_no_port_are_refused_in_one_sentence(given):
    with socket.socket() as other:
        other.bind(("127.0.0.1", given.port))
        other.listen()
        with pytest.raises(RuntimeError, match=rf"port {given.port} of 127.0.0.1 cannot be used .*--port 8001"):
            ports.check(given)
    ports.check(given)
    with pytest.raises(RuntimeError, match="70000 is no port: a number from 1 to 65535"):
        ports.check(given._replace(port=70000))
    for address in ("192.0.2.1", ""):
        with pytest.raises(RuntimeError, match=f"'{address}' is no address of this machine .*--address 0.0.0.0"):
            ports.check(given._replace(address=address))


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


def test_all_addresses_are_reached_here_by_the_loopback_one():
    given = settings.Settings(address="0.0.0.0")
    assert given.bind_url == "http://0.0.0.0:8000" and given.local_url == "http://127.0.0.1:8000"
    assert not given.loopback and "0.0.0.0" not in given.url


@pytest.mark.parametrize(
    ("text", "nbytes"), [("3G", 3e9), ("3gb", 3e9), ("512MB", 512e6), ("0.5T", 5e11), ("1e9", 1e9)]
)
def test_amounts_of_memory(text, nbytes):
    assert command.size(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "3X", "-3G", "3", "0.1G", "nan", "infG", "1e300G"])
def test_what_is_no_amount_of_memory_is_said(text):
    with pytest.raises(argparse.ArgumentTypeError, match="memory|too little"):
        command.size(text)


@pytest.mark.parametrize(
    ("read", "text"),
    [(command.cores, "0.01"), (command.cores, "-1"), (command.cores, "inf"), (command.minutes, "1e7")]
    + [(read, wrong) for read in (command.cores, command.minutes) for wrong in ("nan", "two", "")],
)
def test_what_is_no_number_of_cores_or_minutes_is_said(read, text):
    assert (command.cores("0.5"), command.cores("0"), command.minutes("0")) == (0.5, 0, 0)
    with pytest.raises(argparse.ArgumentTypeError, match="no number of cores|not a number of minutes"):
        read(text)


def test_a_password_is_forgotten_or_all_removed_but_not_both(capsys):
    with pytest.raises(SystemExit):
        cli.main(["hub", "--forget-password", "ada", "--remove", "--state", "/proc/none"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_a_second_ctrl_c_leaves_no_half_of_a_hub(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(leftovers, "clear", lambda given: signal.raise_signal(signal.SIGINT) or ended.append(given))
    given = settings.Settings(state=str(tmp_path))
    hub.Hub(given, None).stop()
    assert ended == [given]
    with pytest.raises(KeyboardInterrupt):  # afterwards it is heeded
        signal.raise_signal(signal.SIGINT)


def test_a_state_folder_that_cannot_be_made_is_named_with_the_remedy():
    with pytest.raises(ValueError, match=r"^/proc/none cannot be made \(No such file or directory\): .* --state$"):
        preparation.make_folders(settings.Settings(state="/proc/none"))

"""Clumsy use of `hpdl hub`, each ended by one sentence; and the life of a hub: killed, started twice, gone on with."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from hpdl_lab import cli
from hpdl_lab.classroom import account_process, accounts, hub, leftovers, limits, ports, preparation, proxy, settings
from hpdl_lab.classroom.attendee import Attendee

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="accounts for attendees need root")
NAME = f"cmd{os.getpid()}"
SHARED = [] if os.geteuid() == 0 else ["--no-isolation"]  # so that every test may run
SECONDS = 100
HPDL_HUB = [sys.executable, "-m", "hpdl_lab", "hub"]


def said(capsys, *arguments):
    """What `hpdl hub` with these arguments says on stderr when it gives up: one line."""
    assert cli.main(["hub", *map(str, arguments)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("hpdl: ") and error.count("\n") == 1, error
    return error


def test_a_users_file_that_is_not_there(capsys, tmp_path):
    assert "there is no users file" in said(capsys, "--users-file", tmp_path / "nobody.txt", "--state", tmp_path / "s")


def test_a_users_file_with_bad_names_makes_nothing(capsys, tmp_path):
    file = tmp_path / "users.txt"
    file.write_text("Ada\nbob\nbob\n")
    assert "line 1: 'Ada' is no name" in said(capsys, "--users-file", file, "--state", tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_without_root_it_says_what_cannot_be_kept_apart(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    error = said(capsys, "--users", 2, "--state", tmp_path / "s")
    assert "each could read and change the files of all, yours too" in error and "--no-isolation" in error


@ROOT
def test_root_does_not_make_attendees_root(capsys, tmp_path):
    assert "attendees would be root" in said(capsys, "--users", 2, "--no-isolation", "--state", tmp_path / "s")


def test_without_the_extra_it_says_how_to_install_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jupyterhub", None)
    error = said(capsys, "--users", 2, "--state", tmp_path / "s")
    assert "JupyterHub is not installed" in error and "make hub" in error


def test_without_a_clone_it_says_that_one_is_needed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "CONFIGURATION", tmp_path / "jupyterhub_config.py")
    assert "started from a clone" in said(capsys, "--users", 2, *SHARED, "--state", tmp_path / "s")


@pytest.mark.parametrize("folder", ["", "jupyterhub"])
def test_packages_that_attendees_cannot_read_are_named_before_any_of_them_comes(tmp_path, monkeypatch, folder):
    (tmp_path / folder).mkdir(exist_ok=True)  # empty, as it is to those who may not look into it
    monkeypatch.setattr(account_process, "command", lambda given, account, argv: [argv[0], "-S", *argv[1:]])
    monkeypatch.setattr(account_process, "environment", lambda given, account: {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(RuntimeError, match=r"could not start a server: ModuleNotFoundError: .* 'jupyterhub'$"):
        preparation.rehearse(settings.Settings(), None)


def test_a_port_in_use_is_named_and_nothing_is_made(capsys, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        error = said(capsys, "--users", 1, *SHARED, "--state", tmp_path / "s", "--port", port)
    assert f"port {port} of 127.0.0.1 cannot be used" in error and "--port" in error
    assert os.listdir(tmp_path) == []


def test_a_certificate_that_is_not_there(capsys, tmp_path):
    options = [*SHARED, "--certificate", "no.pem", "--key", "no.key", "--state", tmp_path / "s"]
    assert "no.pem" in said(capsys, "--users", 1, *options)


@pytest.mark.parametrize("path", ["thesis.tex", "hub/thesis.tex", "homes/me/thesis.tex"])
def test_a_folder_of_something_else_is_neither_taken_nor_removed(capsys, tmp_path, path):
    tmp_path.chmod(0o750)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("years of work")
    assert "is no state folder of a hub: nothing is removed" in said(capsys, "--remove", "--state", tmp_path)
    error = said(capsys, "--users", 1, *SHARED, "--state", tmp_path, "--port", ports.free())
    assert f"{tmp_path} holds other things, such as {path.split('/')[0]}" in error and "name a new folder" in error
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [tmp_path / path]
    assert tmp_path.stat().st_mode & 0o777 == 0o750


def test_what_no_hub_has_laid_into_a_state_folder_stays_when_it_is_removed(tmp_path):
    given = settings.Settings(state=str(tmp_path))
    os.close(preparation.locked(given))
    (tmp_path / "homes" / "ada").mkdir()
    (tmp_path / "thesis.tex").write_text("years of work")
    leftovers.remove(given.state)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_private_hub_that_cannot_be_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "CONFIGURATION", tmp_path / "jupyterhub_config.py")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match="started from a clone"), hub.private([NAME], isolated=os.geteuid() == 0):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("task", [["--remove"], ["--forget-password", "ada"]])
def test_where_no_hub_has_been_there_is_nothing_to_do_and_nothing_is_made(capsys, tmp_path, task):
    assert "is no state folder of a hub" in said(capsys, *task, "--state", tmp_path / "s")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [["--users", "0"], ["--memory", "lots"], ["--idle", "-1"], ["--port", "web"], ["--remove", "--state", ""]],
)
def test_wrong_usage(options, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["hub", *options])
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_proxy_is_nodes_or_the_one_in_python_and_which_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(proxy, "NODE_MODULES", str(tmp_path))
    argv, sentence = proxy.find(path="")
    assert argv[0] == sys.executable and "the one in Python, as there is no Node on this machine" in sentence
    node, script = tmp_path / "node", tmp_path / proxy.NAME
    node.write_text("#!/bin/sh\necho 5.3.0\n")
    node.chmod(0o755)
    assert "npm's configurable-http-proxy is not installed (`make hub` does it)" in proxy.find(path=str(tmp_path))[1]
    script.write_text("#!/usr/bin/env node\n")
    assert proxy.find(path=str(tmp_path)) == ([str(node), str(script)], "Proxy: configurable-http-proxy 5.3.0 on Node.")
    monkeypatch.setattr(proxy, "says_version", lambda argv: "")
    with pytest.raises(RuntimeError, match="there is no configurable-http-proxy, .*make hub"):
        proxy.find(path="")


def test_a_hub_that_is_ended_amid_its_start_leaves_no_proxy(tmp_path, eventually):
    """JupyterHub itself does not end it then."""
    given = settings.Settings(state=str(tmp_path))
    started = hub.Hub(given, preparation.locked(given))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", proxy.NAME]) as process:
        eventually(lambda: proxy.NAME in psutil.Process(process.pid).cmdline())  # which is empty amid exec
        (given.private / "proxy.pid").write_text(str(process.pid))
        started.stop()
        assert process.wait(SECONDS) == -signal.SIGTERM


# -- the life of one hub -----------------------------------------------------------------------------------------------


@pytest.fixture
def place(eventually):
    """(state folder, port, what starts the hub there) with one attendee; everything is ended and removed afterwards."""
    state, users, port = f"/tmp/hpdl-hub-{NAME}", Path(f"/tmp/hpdl-users-{NAME}"), ports.free()
    users.write_text(f"{NAME} sesame street\n")
    started = []

    def start(**how):
        argv = [*HPDL_HUB, "--users-file", users, "--state", state, "--port", str(port)]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how))
        return Command(started[-1])

    def removed():
        with contextlib.suppress(RuntimeError):  # JupyterHub is about to end
            leftovers.remove(state, [NAME])
        return not os.path.exists(state)

    yield state, port, start
    users.unlink()
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
    eventually(lambda: not os.path.exists(state) or removed())


@pytest.fixture
def no_node(tmp_path):
    """An environment without Node, as on many machines."""
    for command in ("useradd", "userdel"):
        (tmp_path / command).symlink_to(f"/usr/sbin/{command}")
    folders = [f for f in os.environ["PATH"].split(os.pathsep) if not os.path.exists(os.path.join(f, "node"))]
    return {**os.environ, "PATH": os.pathsep.join([str(tmp_path), *folders])}


class Command:
    """`hpdl hub`, ready, and what it prints."""

    def __init__(self, process):
        self.process = process
        self.hear("The hub is ready")
        self.hub = next(p for p in psutil.Process(self.process.pid).children() if "jupyterhub" in p.cmdline())

    def hear(self, text):
        """The next line that has this text."""
        heard = []
        for line in self.process.stdout:
            heard.append(line)
            if text in line:
                return "".join(heard)
        raise AssertionError("".join(heard))


@ROOT
@pytest.mark.timeout(400)
def test_a_hub_that_is_killed_with_its_command_goes_on_and_leaves_nothing(place, no_node, until_ended):
    """Where JupyterHub alone is killed, tests/browser/test_hub.py sees the command start it again."""
    state, port, start = place
    first = start(env=no_node)
    given = settings.read(state)
    uid = accounts.of(given, NAME).uid
    assert [p for p in first.hub.children() if proxy.NAME in " ".join(p.cmdline()) and p.exe() == first.hub.exe()]
    with pytest.raises(RuntimeError, match=re.escape(f"a hub runs already on {state}: http://127.0.0.1:{port}")):
        hub.Hub.start(settings.Settings(users=(NAME,), state=state))
    with pytest.raises(RuntimeError, match="a hub runs already"):
        leftovers.remove(state)
    someone = Attendee(given.url, NAME, "sesame street")
    someone.log_in()
    someone.start_server(SECONDS)
    someone.open_notebook("00_engines.ipynb")
    someone.run("x = 42", SECONDS)
    running = set(accounts.processes(uid))
    written = {os.readlink(f"/proc/{pid}/fd/{fd}") for pid in running for fd in (1, 2)}
    assert not any(str(given.private) in path for path in written)  # or attendees could write into the hub's log

    first.hub.suspend()  # so that it cannot end in order when its parent is killed
    first.process.kill()
    first.hub.kill()
    first.process.wait(SECONDS)
    until_ended([first.hub])
    second = start()
    someone.open_notebook("00_engines.ipynb")  # the same kernel, as when a browser connects again
    assert someone.run("print(x)", SECONDS) == "42\n"
    assert running <= set(accounts.processes(uid))
    someone.leave()

    second.process.send_signal(signal.SIGTERM)
    assert "Files, accounts and passwords stay" in second.hear("Files")
    assert second.process.wait(SECONDS) == 0
    assert accounts.processes(uid) == [] and not os.path.exists(accounts.of(given, NAME).run)
    group = limits.of(given)
    assert not group or not any(os.path.exists(folder) for folder in group.folders.values())
    log = Path(given.private, "hub.log").read_text()
    errors = [error.split("\n[")[0] for error in log.split("Traceback")[1:]]  # up to the log's next line
    assert "sesame" not in log
    assert all("jupyterhub_idle_culler" in error for error in errors)  # which asked a hub that was killed just then
    removed = subprocess.run([*HPDL_HUB, "--remove", "--state", state], capture_output=True, text=True)
    assert removed.stdout == f"Removed {state}, and the accounts of its attendees.\n", removed.stderr
    assert not os.path.exists(state)
    with pytest.raises(ValueError, match="has no account"):
        accounts.of(given, NAME)

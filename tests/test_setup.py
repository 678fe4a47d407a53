"""`make lab` and its bad input: every missing thing is named with its remedy, and Ctrl-C stops everything."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from jupyter_client import BlockingKernelClient

from tests.wording import raises

ROOT = Path(__file__).resolve().parent.parent
NEEDS = ROOT / "cluster" / "laptop" / "needs.sh"


def load(path):
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lab = load(ROOT / "cluster" / "laptop" / "lab.py")
install = load(ROOT / "cluster" / "laptop" / "install.py")


# -- system needs: cluster/laptop/needs.sh on machines made of stand-ins -----------------------------------------------


@pytest.fixture
def machine(tmp_path):
    """A PATH with nothing on it but what `machine(name=script)` puts there."""
    tools = tmp_path / "bin"
    tools.mkdir()

    def script(name, text):
        file = tools / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)

    for name in ("sh", "id", "sed", "tr", "uname"):
        script(name, f'exec {shutil.which(name)} "$@"')  # no link: a stand-in must never be written into a real tool

    def make(**scripts):
        for name, text in scripts.items():
            script(name.replace("_", "-"), text)

        def needs(python="python3"):
            environment = {"PATH": str(tools), "HOME": str(tmp_path)}
            return subprocess.run(["sh", NEEDS, python], env=environment, capture_output=True, text=True)

        return needs

    return make


GOOD = f'exec {sys.executable} "$@"'
NO_VENV = f'case "$2" in *ensurepip*) exit 1 ;; esac; exec {sys.executable} "$@"'
NO_HEADERS = f'case "$2" in *Python.h*) exit 1 ;; esac; exec {sys.executable} "$@"'
OLD = 'case "$1" in --version) echo Python 3.9.2 ;; *) exit 1 ;; esac'
SUDO = "" if os.geteuid() == 0 else "sudo "


def test_another_python_than_debians_needs_packages_of_its_own_version(machine):
    needs = machine(**{"python3.12": NO_VENV, "g++": "exit 0", "apt-get": "exit 0"})
    assert f"{SUDO}apt-get install -y python3.12-venv" in needs("python3.12").stderr


def test_nothing_is_said_where_nothing_is_missing(machine):
    done = machine(python3=GOOD, **{"g++": "exit 0"})()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_compiler(machine):
    done = machine(python3=GOOD, apt_get="exit 1")()
    assert done.returncode == 1
    assert "Missing: a C++ compiler." in done.stderr
    assert f"Install with: {SUDO}apt-get update && {SUDO}apt-get install -y g++" in done.stderr


def test_a_compiler_that_does_not_run_is_none(machine):
    """macOS ships a c++ that only asks for the command line tools."""
    done = machine(python3=GOOD, uname="echo Darwin", **{"c++": "exit 1"})()
    assert "Install with: xcode-select --install" in done.stderr


def test_no_venv_no_headers_no_compiler_are_named_at_once(machine):
    script = NO_VENV.replace("*ensurepip*", "*ensurepip*|*Python.h*")
    done = machine(python3=script, dnf="exit 1")()
    assert done.stderr.count("Missing:") == 3
    assert f"Install with: {SUDO}dnf install -y python3 python3-devel gcc-c++" in done.stderr


@pytest.mark.parametrize(("python", "package"), [(NO_VENV, "python3-venv"), (NO_HEADERS, "python3-dev")])
def test_what_debian_splits_from_python(machine, python, package):
    done = machine(python3=python, apt_get="exit 1", **{"c++": "exit 0"})()
    assert done.returncode == 1
    assert re.search(rf"apt-get install -y {package} *$", done.stderr, re.MULTILINE)


def test_no_python_or_an_old_one(machine):
    assert 'there is no "python3" on PATH' in machine()().stderr
    assert "make lab PYTHON=python3.12" in machine(**{"python3.12": GOOD})().stderr
    done = machine(python3=OLD)()
    assert done.returncode == 1
    assert '"python3" is Python 3.9.2' in done.stderr and "make lab PYTHON=python3.12" in done.stderr


# -- serving ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy_port():
    with socket.socket() as server:
        server.bind((lab.HOST, 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_port_in_use_is_named(busy_port):
    with raises(SystemExit, "Port", f"{busy_port}", "PORT="):
        lab.free_port(str(busy_port))


@pytest.mark.parametrize("wanted", ["abc", "0", "70000", "-1"])
def test_a_port_that_is_none(wanted):
    with raises(SystemExit, f"PORT={wanted}", "1024", "65535"):
        lab.free_port(wanted)


def test_no_free_port(monkeypatch):
    monkeypatch.setattr(lab, "why_not", lambda port: "address already in use")
    with raises(SystemExit, "8888", "8987", "PORT=9999"):
        lab.free_port("")


def test_the_first_free_port_is_taken(monkeypatch):
    monkeypatch.setattr(lab, "why_not", lambda port: None if port == 8890 else "address already in use")
    assert lab.free_port("") == 8890


@pytest.mark.parametrize(("wanted", "again"), [([], True), (["--port=8899"], False)])
def test_a_port_that_somebody_takes_meanwhile_is_left_to_him(busy_port, monkeypatch, capsys, wanted, again):
    """Two that start at once see the same free port, seconds before the server listens there."""
    begun = []
    monkeypatch.setattr(sys, "argv", ["lab.py", *wanted])
    monkeypatch.setattr(lab, "free_port", lambda wanted: busy_port)
    monkeypatch.setattr(lab, "serve", lambda options, url: sys.exit(1))  # as jupyter_server does
    monkeypatch.setattr(os, "execv", lambda *command: begun.append(command))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")  # is set back
    with contextlib.nullcontext() if again else pytest.raises(SystemExit):
        lab.main()
    assert begun == [(sys.executable, [sys.executable, "lab.py"])] * again
    assert ("trying the next one" in capsys.readouterr().out) == again


def start_lab(**variables):
    return subprocess.Popen(
        [sys.executable, "cluster/laptop/lab.py", "--browser=no"],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def address(server):
    """The printed address; every line until then."""
    lines = []
    for line in server.stdout:
        lines.append(line)
        found = re.search(r"http://127\.0\.0\.1:\d+/lab/tree/00_why\.ipynb\?token=\w+", line)
        if found:
            return found.group(), "".join(lines)
    raise AssertionError(f"no address was printed: {''.join(lines)}")


@pytest.fixture
def stop():
    servers = []
    yield servers.append
    for server in servers:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.stdout.close()


def assert_answers_on_loopback_only(url):
    with urllib.request.urlopen(url, timeout=300) as page:
        assert b"JupyterLab" in page.read()
    notification = "lab/api/settings/@jupyterlab/apputils-extension:notification"
    with urllib.request.urlopen(url.replace("lab/tree/00_why.ipynb?", f"{notification}?"), timeout=300) as answer:
        properties = json.load(answer)["schema"]["properties"]
    assert properties["fetchNews"]["default"] == "false"  # no question about news in front of the first notebook
    port = int(re.search(r":(\d+)/", url).group(1))
    listening = Path("/proc/net/tcp")
    if listening.exists():
        addresses = [line.split()[1] for line in listening.read_text().splitlines()[1:] if line.split()[3] == "0A"]
        assert {a.split(":")[0] for a in addresses if int(a.split(":")[1], 16) == port} == {"0100007F"}


@pytest.mark.parametrize("signal_name", ["SIGINT", "SIGHUP"])
def test_lab_is_private_and_kernels_and_engines_end_with_it(stop, tmp_path, no_engines_yet, until_ended, signal_name):
    """Ctrl-C; a closed terminal, on which the lab does what it does on SIGTERM: nothing that it has started is left.

    The second one is in a home that cannot be written, which is replaced.
    """
    home = {"SIGINT": no_engines_yet, "SIGHUP": "/proc/none"}[signal_name]
    server = start_lab(HOME=home, STARTED_BY=str(tmp_path))
    stop(server)
    url, said = address(server)
    if home == "/proc/none":
        reason = "cannot be written (No such file or directory)"
        assert f"{home} {reason}: settings and progress go to {sys.prefix}" in said
    assert_answers_on_loopback_only(url)
    base, token = url.split("/lab/tree/00_why.ipynb?token=")
    post = urllib.request.Request(f"{base}/api/kernels", b"{}", {"Authorization": f"token {token}"})
    with urllib.request.urlopen(post, timeout=300) as answer:
        kernel = json.load(answer)["id"]
    arguments = [argument for process in processes_of(tmp_path) for argument in process.cmdline()]
    (connection,) = (argument for argument in arguments if argument.endswith(f"{kernel}.json"))
    client = BlockingKernelClient()
    client.load_connection_file(connection)
    client.start_channels(hb=False)  # a busy machine takes its time, and is not dead
    client.wait_for_ready(timeout=300)
    messages = []
    reply = client.execute_interactive(WORK, timeout=300, output_hook=messages.append)
    assert reply["content"]["status"] == "ok", reply["content"]
    client.stop_channels()
    printed = "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream")
    assert "from a forked child" in printed and "from a pool" in printed
    started = processes_of(tmp_path)
    assert len(started) >= 3  # server, kernel, engine
    port = int(base.rpartition(":")[2])
    assert {(p.pid, c.laddr.port) for p in started for c in listening(p)} == {(server.pid, port)}
    os.killpg(server.pid, getattr(signal, signal_name))
    assert server.wait(50) == 0
    until_ended(started)
    if signal_name == "SIGHUP":  # without a terminal the server ends on SIGINT as it is, and leaves such files
        assert [file.name for file in Path(connection).parent.glob("*-ipc-*")] == []
    assert "TCP" not in said + server.stdout.read()  # as in ipykernel's warning of kernels that others can listen to


WORK = """
import multiprocessing, os
from hpdl_lab.engines.cluster import Cluster

cluster = Cluster.start(1)  # lab.start without pictures and torch
if os.fork() == 0:
    print("from a forked child", flush=True)
    os._exit(0)
os.wait()
with multiprocessing.get_context("fork").Pool(1) as pool:
    pool.apply(print, ["from a pool"], {"flush": True})
"""


def listening(process):
    """The TCP sockets at which it can be reached."""
    return [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def processes_of(folder):
    """Every process that the lab which was started with this has started, and the lab."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("STARTED_BY") == str(folder):
                found.append(process)
    return found


# -- installation: cluster/laptop/install.py ---------------------------------------------------------------------------

PIP = """
import sys
compiles = "-e" in sys.argv
print("an error of the compiler" if compiles else " ".join(sys.argv[1:]), flush=True)
sys.exit({fails!r} == ("module" if compiles else "packages"))
"""


@pytest.mark.parametrize("fails", ["", "module", "packages"])
def test_packages_are_installed_while_the_module_is_compiled(monkeypatch, tmp_path, capfd, fails):
    (tmp_path / "pip.py").write_text(PIP.format(fails=fails))
    monkeypatch.setattr(install, "PIP", [sys.executable, str(tmp_path / "pip.py"), "install"])
    monkeypatch.setattr(install, "FIRST_IMPORTS", (f"import io; open({str(tmp_path / 'imported')!r}, 'w')",))
    assert install.main("hub") == bool(fails)
    assert (tmp_path / "imported").exists() == (not fails)
    packages, module = capfd.readouterr().out.splitlines()
    assert packages.startswith("install cloudpickle>=") and "torch>=" in packages and "jupyterhub>=" in packages
    assert module == "an error of the compiler"


def test_what_a_class_imports_is_compiled_also_in_containers(monkeypatch, tmp_path):
    (tmp_path / "lesson.py").write_text("numbers = 1, 2\n")
    monkeypatch.setattr(install, "FIRST_IMPORTS", ("import lesson",))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    install.import_once()
    assert list(tmp_path.rglob("lesson.*.pyc"))


# -- a source tree that was not installed ------------------------------------------------------------------------------


def test_a_source_tree_without_the_compiled_module_says_so(tmp_path):
    """A flat layout imports the source tree: a copy of it has no compiled module."""
    shutil.copytree(ROOT / "hpdl_lab", tmp_path / "hpdl_lab", ignore=shutil.ignore_patterns("*.so"))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from hpdl_lab import features; features.compiled_module()"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"hpdl_lab.features.NotCompiled: hpdl_lab is imported from {tmp_path}/hpdl_lab, which has no compiled module: "
    )
    assert f"run `make install` in {tmp_path}" in last

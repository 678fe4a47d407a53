"""Command lines and environment of the processes of an engine cluster, and how many engines this machine can hold.

mpiexec is MPICH's forker, of the same Python environment: it starts the ranks of one machine as its own children and talks
to them over socket pairs. (Its hydra sibling listens on all network interfaces; the engines must stay on this machine.)
"""

import os
import sys

from . import session_dir
from .errors import EngineError

ENGINE_NBYTES = 300e6  # resident memory of an engine that has imported torch, most of it its own
MOST_PER_CORE = 64  # beyond that a machine only switches between processes

# Two libraries that want every core each make four engines on two cores run at a tenth of their speed.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# Left by a batch system or an outer mpiexec; a rank that inherits them takes itself for one of theirs.
FOREIGN_PREFIXES = ("PMI_", "PMIX_", "HYDRA_", "MPIEXEC_", "OMPI_", "PRTE_", "JPY_")


def mpiexec():
    """Path of the mpiexec beside this Python. Raises EngineError when there is none."""
    path = os.path.join(os.path.dirname(sys.executable), "mpiexec.gforker")
    if not os.access(path, os.X_OK):
        raise EngineError(
            f"no MPI beside this Python: {path} is missing. Install it with: {sys.executable} -m pip install mpich"
        )
    return path


def check_count(n):
    """Raise ValueError or EngineError unless `n` engines can be started on this machine."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise ValueError(f"the number of engines is a whole number, got {n!r}: lab.start(4)")
    if n < 1:
        raise ValueError(f"{n} engines cannot do anything: start 1 at least, as in lab.start(4)")
    cores, free = len(os.sched_getaffinity(0)), memory_available()
    most = max(1, min(int(free / ENGINE_NBYTES), MOST_PER_CORE * cores))
    if n > most:
        raise EngineError(
            f"{n:,} engines need {n * ENGINE_NBYTES / 1e9:,.0f} GB of memory, and this machine has {free / 1e9:,.1f} GB free "
            f"and {cores} cores: start {most:,} at most, or simulate the ranks: sim.run({n}, fn)"
        )


def memory_available():
    """Bytes that processes can still take without swapping."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def controller_argv():
    """ipyparallel's controller, on the loopback interface, without what a laboratory on one machine does not need."""
    return [
        sys.executable,
        "-m",
        "ipyparallel.controller",
        "--IPController.ip=127.0.0.1",
        "--IPController.use_threads=True",  # schedulers as threads of one process, which fork nothing
        "--TaskScheduler.scheme_name=pure",  # in libzmq, no Python process
        "--IPController.broadcast_scheduler_depth=0",
        "--IPController.db_class=NoDB",
        "--HeartMonitor.period=100",  # ms: the hub announces a new engine at its second heartbeat; the default is 3,000
        "--HeartMonitor.max_heartmonitor_misses=600",  # a minute: sockets, not heartbeats, tell of dead engines
    ]


def engines_argv(path, n):
    """`n` engines under mpiexec, each below a shell that writes its exit status where the notebook can read it."""
    status = session_dir.exit_file("$HPDL_SESSION", "$PMI_RANK")
    command = f'trap : INT QUIT TERM; "$0" "$@"; echo $? > "{status}"'
    return [mpiexec(), "-n", str(n), "/bin/sh", "-c", command, sys.executable, "-m", "hpdl_lab.engines.engine"]


def environment(path, n, keeper_pid):
    """The environment of controller and engines: this process's, less what would mislead them."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_PREFIXES)}
    threads = str(max(1, len(os.sched_getaffinity(0)) // n))
    for variable in THREAD_VARIABLES:
        env.setdefault(variable, threads)
    return env | {
        "HPDL_SESSION": path,
        "HPDL_KEEPER": str(keeper_pid),
        "HPDL_SIZE": str(n),
        "HPDL_BOARD": board_file(path),
        "IPP_PROFILE_DIR": profile_dir(path),
        "IPYTHONDIR": os.path.join(path, "ipython"),  # the home directory may not be writable
        "UCX_TLS": "self,sm",  # MPICH's transport would listen on every network interface
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def board_file(path):
    """Path of the board on which ranks write what they wait for."""
    return os.path.join(path, "board")


def profile_dir(path):
    """ipyparallel's profile directory: its `security` folder holds the connection files."""
    return os.path.join(path, "ipp")


def connection_file(path, kind):
    """Path of the connection file that the controller writes for kind "client" or "engine"."""
    return os.path.join(profile_dir(path), "security", f"ipcontroller-{kind}.json")


def log_file(path, name):
    """Path of what the process `name` ("controller", "engines") prints."""
    return os.path.join(path, f"{name}.log")

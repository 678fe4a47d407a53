"""Command lines and environment of the processes of an engine cluster, and how many engines this machine can hold.

Under MPICH the ranks are started by its forker, not by hydra: the forker makes them its own children and talks to them
over socket pairs, where hydra listens on every network interface, and what serves a notebook must stay on this machine.
"""

import contextlib
import os
import socket
import sys

from .. import features
from . import session_dir
from .errors import EngineError

LOCALHOST = "127.0.0.1"
PORT_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"
CONTROLLER_PORTS = 15  # 8 for engines, 6 for clients, 1 for itself

ENGINE_NBYTES = 300e6  # resident memory of an engine that has imported torch
MOST_PER_CORE = 64  # beyond that a machine only switches between processes

# Libraries that each want every core make four engines on two cores run at a tenth of their speed.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# Left by a batch system or an outer mpiexec: a rank that inherits them takes itself for one of theirs.
FOREIGN_PREFIXES = ("PMI_", "PMIX_", "HYDRA_", "MPIEXEC_", "OMPI_", "PRTE_", "JPY_")

LOOPBACK = {  # the MPI libraries would listen on every network interface
    "UCX_TLS": "self,sm",
    "OMPI_MCA_btl": "self,sm",
}


def mpiexec():
    """Path of the mpiexec that starts the engines. Raises EngineError with the remedy when there is none."""
    try:
        path = features.mpiexec()
    except features.Missing as error:
        raise EngineError(str(error)) from None
    forker = f"{path}.gforker"
    return forker if os.access(forker, os.X_OK) else path


def check_count(n):
    """Raise ValueError or EngineError unless `n` engines can be started on this machine."""
    if isinstance(n, bool) or not isinstance(n, int):
        raise ValueError(f"the number of engines is a whole number, got {n!r}: lab.start(4)")
    if n < 1:
        raise ValueError(f"{n} engines cannot do anything: start at least 1, as in lab.start(4)")
    cores, free = features.cores(), memory_available()
    most = max(1, min(int(free / ENGINE_NBYTES), MOST_PER_CORE * cores))
    if n > most:
        raise EngineError(
            f"{n:,} engines need {n * ENGINE_NBYTES / 1e9:,.0f} GB of memory, this machine has {free / 1e9:,.1f} GB "
            f"free and {cores} cores: start {most:,} at most, or simulate: sim.run({n}, fn)"
        )


def memory_available():
    """Bytes that processes can still take without swapping."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0


def free_ports(count):
    """`count` ports of 127.0.0.1 that nobody uses. Raises EngineError when there are not as many."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        try:
            for each in sockets:
                each.bind((LOCALHOST, 0))
        except OSError as error:
            with open(PORT_RANGE) as file:
                low, high = map(int, file.read().split())
            raise EngineError(
                f"no free port on {LOCALHOST} ({error.strerror}): the engines' controller needs {count}, and the "
                f"{high - low + 1:,} of this system ({low}-{high}) are in use. Close programs, or widen {PORT_RANGE}"
            ) from None
        return [each.getsockname()[1] for each in sockets]


def controller_argv():
    """ipyparallel's controller, with ports that are free: it would itself search for ever where there are none."""
    return [sys.executable, "-m", "hpdl_lab.engines.controller", *map(str, free_ports(CONTROLLER_PORTS))]


def engines_argv(n):
    """`n` engines under mpiexec, each below a shell that writes its exit status where the notebook can read it."""
    status = session_dir.exit_file("$HPDL_SESSION", "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}")
    command = f'trap : INT QUIT TERM; "$0" "$@"; echo $? > "{status}"'
    return [mpiexec(), "-n", str(n), "/bin/sh", "-c", command, sys.executable, "-m", "hpdl_lab.engines.engine"]


def environment(path, n, keeper_pid):
    """The environment of controller and engines: this process's, less what would mislead them."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_PREFIXES)}
    threads = str(max(1, features.cores() // n))
    for variable in THREAD_VARIABLES:
        env.setdefault(variable, threads)
    own = {
        "HPDL_SESSION": path,
        "HPDL_KEEPER": str(keeper_pid),
        "HPDL_SIZE": str(n),
        "HPDL_BOARD": session_dir.board_file(path),
        "IPP_PROFILE_DIR": session_dir.profile_dir(path),
        "IPYTHONDIR": os.path.join(path, "ipython"),  # the home directory may not be writable
        "PRTE_MCA_prte_tmpdir_base": path,  # Open MPI's own files
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    return env | features.launch_environment() | LOOPBACK | own

"""Command lines and environment of the processes of an engine cluster, and how many engines this machine can hold.

Under MPICH the ranks are started by its forker, not by hydra: the forker makes them its own children and talks to them
over socket pairs, where hydra listens on every network interface, and what serves a notebook must stay on this machine.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection

import psutil

from .. import features
from ..comm.errors import name_ranks
from ..features import dev_shm, gpu
from ..symptoms import TABLE, found_in
from ..system import until
from . import hosts, remote, session_dir, slurm
from .errors import EngineError
from .hosts import INTERFACE
from .layout import COMMANDS, Layout, parse_link
from .supervisor_client import SupervisorConnection

START_SECONDS = 60  # a cold disk and a busy machine included


class Launching:
    """The start of what `layout` wants in the session directory `path`, as children of the supervisor."""

    def __init__(self, path: str, layout: Layout, supervisor: SupervisorConnection) -> None:
        self.path, self.layout, self.supervisor = path, layout, supervisor
        self.started: list[str] = []  # names of processes

    def go(self) -> None:
        """Start hosts or a job, if they are wanted, then engines; on other machines, %px's controller as well.

        Raises: EngineError when one of them ends, or has not come so far in time.
        """
        dev_shm.remove_abandoned()
        if self.layout.hosts:
            self.spawn("hosts", hosts_argv(self.path, self.layout))
            self.wait_for([hosts.namespaces_file(self.path)])
        if self.layout.remote:
            remote.wait_for_job(self)
            self.open_px()  # agents want to know its sockets at once
        self.spawn("engines", engines_argv(self.path, self.layout))
        session_dir.write_private_file(session_dir.session_file(self.path), json.dumps(self.layout._asdict()))
        seconds = remote.START_SECONDS if self.layout.remote else START_SECONDS
        self.wait_for([session_dir.engine_socket(self.path, rank) for rank in range(self.layout.n)], seconds)
        self.supervisor.ask("ready")

    def open_px(self) -> None:
        """Start ipyparallel's controller, for %px."""
        self.spawn("controller", [sys.executable, "-m", "hpdl_lab.engines.px_processes"])

    def spawn(self, name: str, argv: list[str], grace: float = 0.0) -> None:
        """Have the supervisor start process `name`. grace: see supervisor.py."""
        env = engine_environment(self.path, self.layout, self.supervisor.pid)
        log = session_dir.log_file(self.path, name)
        self.supervisor.ask("spawn", name=name, argv=argv, env=env, cwd=os.getcwd(), log=log, grace=grace)
        self.started.append(name)

    def wait_for(self, files: list[str], seconds: float = START_SECONDS) -> None:
        """Return when all `files` are there, which the processes make that were started."""
        give_up = time.monotonic() + seconds
        exits = [session_dir.exit_file(self.path, r) for r in range(self.layout.n)]
        while not until(lambda: all(map(os.path.exists, files)), 0.25):
            ended = self.ended()
            if text := remote.ended(self.path):
                raise EngineError(text)
            dead = any(map(os.path.exists, exits))
            if dead:  # the others mostly end of the same cause, a moment later
                until(lambda: all(map(os.path.exists, exits)), 0.5)
            if ended or dead or time.monotonic() > give_up:
                raise EngineError(self.failure(ended, seconds))

    def failure(self, gone: Collection[str], seconds: float) -> str:
        """Return why the start failed: `gone` are the processes that have ended, `seconds` what it was given."""
        path, n = self.path, self.layout.n
        if "hosts" in gone:
            return (
                session_dir.last_line(session_dir.tail(path, "hosts"))
                or "the process that holds the emulated hosts was killed: lab.restart()"
            )
        for name in gone:
            why = cause(session_dir.tail(path, name))
            return f"the {name} ended at the start: {why}. Repair that, then call lab.start({n})"
        engines = session_dir.tail(path, "engines")
        ended = [rank for rank in range(n) if os.path.exists(session_dir.exit_file(path, rank))]
        others = f". {dev_shm.of_others()}".removesuffix(". ")
        if ended:
            why = cause(engines) + (others if "MPIDI_POSIX" in engines else "")
            return f"{name_ranks(ended)} ended at the start: {why}. Repair that, then call lab.start({n})"
        started = sum(os.path.exists(session_dir.engine_socket(path, rank)) for rank in range(n))
        return (
            f"{started} of {n} engines answered within {seconds} s. The machine may be overloaded: start fewer "
            f"engines. The last thing they said: {cause(engines) or 'nothing'}{others}"
        )

    def ended(self) -> list[str]:
        """Return the names of the processes that were started and have ended."""
        running = self.supervisor.ask("status")["running"]
        return [name for name in self.started if name not in running]


FORKER = ".gforker"  # of MPICH: "mpiexec.gforker"

ENGINE_NBYTES = 300e6  # resident memory of an engine that has imported torch
MOST_ENGINES = "HPDL_MOST_ENGINES"  # in the environment of a hub's attendees
MOST_PER_CORE = 64  # beyond that a machine only switches between processes
CORE_SECONDS = 0.5  # that the start of an engine takes
LONG_START = 5.0  # s: a start that takes longer is announced

# Libraries that each want every core make four engines on two cores run at a tenth of their speed.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# Left by a batch system or an outer mpiexec: a rank that inherits them takes itself for one of theirs.
# A notebook's own keys to its hub are not for engines.
FOREIGN_PREFIXES = (
    *(
        "PMI_",
        "PMIX_",
        "HYDRA_",
        "HYDI_",
        "MPI_LOCAL",
        "MPIEXEC_",
        "OMPI_",
        "PRTE_",
        "SLURM_",
        "SLURMD_",
        "SLURMSTEPD_",
    ),
    *("JPY_", "JUPYTERHUB_"),
)
KEPT = ("SLURM_CONF",)  # where Slurm's commands find its controller

LOOPBACK = {  # the MPI libraries would listen on every network interface
    "UCX_TLS": "self,posix,cma",  # "sm" less System V's memory, which is open to the user's group
    "OMPI_MCA_btl": "self,sm",
    "NCCL_SOCKET_IFNAME": "=lo",
}
# TCP by libfabric: with UCX, the other way of MPICH, ranks crash when one is killed amid a message to them. Messages of
# any length are taken before they are asked for: with a FI_TCP_MAX_SAVED_SIZE, two that exchange share half the link.
MPI_BY_TCP = {
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "FI_TCP_MAX_SAVED": str(10**6),  # messages not received yet; beyond its 64, even a barrier would wait
}
BETWEEN_HOSTS = MPI_BY_TCP | {"FI_TCP_IFACE": INTERFACE, "GLOO_SOCKET_IFNAME": INTERFACE}


def _mpiexec() -> str:
    """Return the path of the mpiexec that starts the engines. Raises EngineError with the remedy if there is none."""
    try:
        path = features.mpiexec()
    except features.Missing as error:
        raise EngineError(str(error)) from None
    forker = f"{path}{FORKER}"
    return forker if os.access(forker, os.X_OK) else path


def check_layout(layout: Layout) -> None:
    """Raise EngineError unless this machine can hold the engines of `layout`, and make the hosts that it wants.

    Engines on other machines are held by those.
    """
    if layout.where == "slurm":
        return slurm.require_slurm()
    if layout.remote:
        if (command := COMMANDS.get(layout.where)) and shutil.which(command) is None:
            raise EngineError(
                f'there is no command {command} here: lab.start(where="{layout.where}") works on a machine that has '
                f"it, such as a login node; here there is lab.start({layout.n})"
            )
        return None
    n, cores, free = layout.n, features.cores(), memory_available()
    if n > (given := int(os.environ.get(MOST_ENGINES, n))):
        raise EngineError(
            f"this hub gives each attendee {given} engines, {n:,} were asked for: lab.start({given}), or simulate: "
            f"sim.run({n}, fn)"
        )
    most = max(1, min(int(free / ENGINE_NBYTES), MOST_PER_CORE * cores))
    if n > most:
        raise EngineError(
            f"{n:,} engines need {n * ENGINE_NBYTES / 1e9:,.0f} GB of memory, this machine has {free / 1e9:,.1f} GB "
            f"free and {cores} cores: start {most:,} at most, or simulate: sim.run({n}, fn)"
        )
    try:
        dev_shm.require_room(n)
    except features.Missing as error:
        raise EngineError(str(error)) from None
    if layout.device == "cuda":
        try:
            gpu.require_gpu_transfer()
        except features.Missing as error:
            raise EngineError(f"{layout} cannot start: {error}. Without a GPU: lab.start({n})") from None
    if layout.where == "emulated":
        if not _mpiexec().endswith(FORKER):
            raise EngineError(
                f"emulated hosts need MPICH: {_mpiexec()} is of another MPI, which starts all ranks on one host: "
                "pip install mpich in a new environment"
            )
        argv = hosts_argv("-", layout)
        tried = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if tried.returncode:
            raise EngineError(tried.stderr.strip().rpartition("\n")[2])


def announcement(layout: Layout) -> str:
    """Return what to say before a start that will take long because the engines are many for this machine; else ""."""
    n, cores = layout.n, features.cores()
    seconds = n * CORE_SECONDS / cores
    if layout.remote or seconds < LONG_START:
        return ""
    return (
        f"{n} engines on {cores} cores: their start takes about {seconds:.0f} s, and then each has "
        f"1/{n / cores:.0f} of a core. The stop button ends it; sim.run({n}, fn) simulates as many ranks at once."
    )


def memory_available() -> int:
    """Return the bytes that processes can still take without swapping."""
    return psutil.virtual_memory().available


def hosts_argv(path: str, layout: Layout) -> list[str]:
    """Return the command line that makes and keeps the emulated hosts. Raises EngineError if a command is missing."""
    try:
        commands = features.network_commands()
    except features.Missing as error:
        raise EngineError(str(error)) from None
    bits = parse_link(layout.link).bits
    return [sys.executable, "-m", "hpdl_lab.engines.hosts", path, str(layout.hosts), str(bits), *commands]


def engines_argv(path: str, layout: Layout) -> list[str]:
    """Return the command line of engines under mpiexec, each below a shell that writes its exit status to a file.

    On other machines: of the process that asks the relay for engines, and ends with them.
    """
    if layout.remote:
        return remote.step_argv(path, layout)
    status = session_dir.exit_file("$HPDL_SESSION", "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}")
    command = f'trap : INT QUIT TERM; "$0" "$@"; echo $? > "{status}.new"; mv "{status}.new" "{status}"'
    engine = ["hpdl_lab.engines.hosts", "engine"] if layout.hosts else ["hpdl_lab.engines.engine"]
    shell = ["/bin/sh", "-c", command]
    return [_mpiexec(), "-n", str(layout.n), *shell, sys.executable, "-m", *engine]


def own_variables(path: str, supervisor_pid: int, n: int) -> dict[str, str]:
    """Return the variables by which an engine of `n` finds its session directory, and ipyparallel its files there."""
    return {
        "HPDL_SESSION": path,
        "HPDL_SUPERVISOR": str(supervisor_pid),
        "HPDL_SIZE": str(n),
        "IPP_PROFILE_DIR": session_dir.profile_dir(path),
        "IPYTHONDIR": os.path.join(path, "ipython"),  # the home directory may not be writable
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


def engine_environment(path: str, layout: Layout, supervisor_pid: int) -> dict[str, str]:
    """Return the environment of controller, hosts and engines: this process's, less what would mislead them."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_PREFIXES) or k in KEPT}
    own = own_variables(path, supervisor_pid, layout.n)
    own |= {"HPDL_HOSTS": str(layout.hosts), "HPDL_DEVICE": layout.device}
    if layout.remote:
        return env | own  # the rest is the nodes' own: node_agent.py
    threads = dict.fromkeys(THREAD_VARIABLES, str(max(1, features.cores() // layout.n)))
    cliques = {"MPIR_CVAR_NUM_CLIQUES": str(layout.hosts), "MPIR_CVAR_CLIQUES_BY_BLOCK": "1"}  # hosts, to MPICH
    network = BETWEEN_HOSTS | cliques if layout.hosts else LOOPBACK
    files = {"PRTE_MCA_prte_tmpdir_base": path}  # Open MPI's own
    return threads | env | features.launch_environment() | network | own | files


def cause(log: str) -> str:
    """Return the known symptom in the log, with its fix, as `hpdl doctor` says it; else the log's last line."""
    known = found_in(TABLE, log)
    return str(known[0]) if known else session_dir.last_line(log)

"""The doctor: what this machine and build can do, and which known symptoms it has, each with the line that mends it.

It stands here because engines are among what it looks at. It changes nothing and leaves nothing behind.

It also finds what clusters of this user have left: session directories, processes and shared memory without a
supervisor. The supervisor removes all of them, whatever ends the notebook, unless it was killed itself.
"""

from __future__ import annotations

import fcntl
import glob
import ipaddress
import json
import os
import shutil
import socket
import textwrap
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import psutil

from .. import features
from ..features import Missing, dev_shm
from ..symptoms import TABLE, Diagnosis, Symptom, found, found_in
from . import session_dir, slurm, supervisor

if TYPE_CHECKING:
    from ..features.table import FeatureTable

SETTLE = 0.5  # s: what has just lost its supervisor may be ending
SEGMENTS = ("mpich_", "sm_segment.", "nccl-")  # begin the names of shared memory of MPICH, Open MPI and NCCL
LITTLE = 16 << 20  # bytes of segments that do no harm
AGENT = "hpdl_lab.engines.node_agent"  # in its command line


def leftover_folders() -> list[str]:
    """Return the session directories in which no cluster runs, starts or ends."""
    found: list[str] = []
    for root in session_dir.roots():
        for path in glob.glob(os.path.join(glob.escape(root), f"{session_dir.PREFIX}{os.getuid()}-*")):
            if os.path.isdir(path) and os.lstat(path).st_uid == os.getuid() and not _in_use(path) and path not in found:
                found.append(path)
    return sorted(found)


def _in_use(path: str) -> bool:
    """Return True if this directory has a supervisor, if one is removing it, or if a kernel is about to start one."""
    ender = path.rpartition(".")[2]
    if ender.isdigit():  # a supervisor that ends its cluster moves the directory away, under its own number
        return supervisor.alive(int(ender))
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(session_dir.supervisor_socket(path))
            return True
        except OSError:
            pass
    try:
        handle = session_dir.open_session_dir(path)
    except OSError:
        return True  # gone meanwhile, or another's
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return not os.path.exists(path)


def leftover_processes() -> list[int]:
    """Return the ids of processes that engines, or their programs, have left: their supervisor is gone."""
    found = _without_supervisor()
    if found:
        time.sleep(SETTLE)
        found = [pid for pid in _without_supervisor() if pid in found]
    return found


def _without_supervisor() -> list[int]:
    """Return the ids of processes of this user whose environment names a session here and a supervisor that is gone."""
    found: list[int] = []
    roots = session_dir.roots()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another's
            own = process.environ() if process.uids().real == os.getuid() and _numbered_as_here(process.pid) else {}
            session, owner = own.get("HPDL_SESSION", ""), own.get("HPDL_SUPERVISOR", "")
            # An engine of Slurm has its supervisor on another machine, and Slurm ends what is left of a job.
            if os.path.dirname(session) in roots and owner.isdigit() and "SLURM_JOB_ID" not in own:
                if not _supervises(int(owner), session) and supervisor.alive(process.pid):
                    found.append(process.pid)
    return sorted(found)


def _numbered_as_here(pid: int) -> bool:
    """Return True unless process `pid` is in a container, where processes, and so its supervisor, have other ids."""
    with suppress(OSError):
        return os.path.samefile(f"/proc/{pid}/ns/pid", "/proc/self/ns/pid")
    return False


def leftover_segments(folder: str = dev_shm.PATH) -> list[str]:
    """Return this user's files of shared memory that no process has mapped; [] if they are small."""
    left = dev_shm.abandoned(SEGMENTS, folder)
    return sorted(left) if sum(left.values()) >= LITTLE else []


def _supervises(pid: int, session: str) -> bool:
    """Return True if process `pid` is the supervisor of that session, or the agent of an engine (node_agent.py)."""
    with suppress(psutil.Error):
        command = psutil.Process(pid).cmdline()
        return command[-3:-1] == [supervisor.__file__, session] or AGENT in command
    return False


def _require_none_left() -> None:
    """Raise Missing if earlier engines, or ranks, of this user have left processes, files or shared memory."""
    processes, folders, segments = leftover_processes(), leftover_folders(), leftover_segments()
    pids, files = " ".join(map(str, processes)), [*folders, *segments]
    left = [f"process{'es' * (len(processes) > 1)} {pids}"] * bool(processes) + folders
    if segments:
        left.append(f"{len(segments)} file{'s' * (len(segments) > 1)} in {dev_shm.PATH}, which no process uses")
    fixes = [f"kill -9 {pids}"] * bool(processes) + [f"rm -r {' '.join(files)}"] * bool(files)
    if left:
        raise Missing(f"engines or ranks that were killed have left {', '.join(left)}", "; ".join(fixes))


BATCH = {"SLURM_JOB_ID": "sinfo", "PBS_JOBID": "qsub", "LSB_JOBID": "bsub"}  # a job's variable, a login node's command
REACHABLE = (
    'put c.IPController.ip = "*" and c.IPController.location = "ADDRESS", by which nodes reach its machine, into '
    "ipcontroller_config.py of the profile (or: ipcontroller --ip='*' --location=ADDRESS), and start it again; "
    "`ipcluster list` says what runs"
)


def _require_reachable_controller() -> None:
    """Raise Missing if engines on nodes of a batch system would not find the controller that runs."""
    if not any(name in os.environ or shutil.which(command) for name, command in BATCH.items()):
        return
    if (given := os.environ.get(slurm.ADDRESS)) and all(map(_is_loopback, given.split(","))) and shutil.which("sinfo"):
        if away := [node for node in slurm.node_addresses(None)[: slurm.ASKED] if not _is_here(node)]:
            raise Missing(
                f"{slurm.ADDRESS}={given} sends the engines of node {away[0]} to their own localhost",
                f"unset {slurm.ADDRESS}, or set it to an address of this machine that the nodes reach",
            )
    folder = os.environ.get("IPYTHONDIR") or os.path.expanduser("~/.ipython")
    for path in glob.glob(os.path.join(folder, "profile_*", "security", "ipcontroller*-engine.json")):
        with suppress(OSError, ValueError, KeyError), open(path) as file:
            controller = json.load(file)
            host, location = controller["interface"].removeprefix("tcp://"), controller["location"]
            if _is_loopback(host):
                wrong = f"listens on {host} of {location}, where engines on other nodes never find it"
            elif host in ("*", "0.0.0.0") and _address(location) is None:
                host, wrong = "127.0.0.1", f"sends engines to {location}, a name without an address here"
            else:
                continue
            if location != socket.gethostname() or _answers(host, controller["registration"]) and not _is_local(path):
                raise Missing(f"the controller of {path} {wrong}", REACHABLE)


def _is_local(path: str) -> bool:
    """Return True if the engines of the controller with this connection file are processes of its machine."""
    folder, name = os.path.split(path)
    name = name.removeprefix("ipcontroller-").removesuffix("engine.json").removesuffix("-")
    with suppress(OSError, ValueError, KeyError), open(os.path.join(folder, f"cluster-{name}.json")) as file:
        return json.load(file)["engines"]["class"] == "local"
    return False


def _address(host: str) -> str | None:
    """Return the IP address of a name, which may be one; None if it has none."""
    with suppress(OSError):
        return socket.gethostbyname(host.strip())
    return None


def _is_loopback(host: str) -> bool:
    return (address := _address(host)) is not None and ipaddress.ip_address(address).is_loopback


def _answers(host: str, port: int) -> bool:
    """Return True if the controller that has once written this address still runs."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _is_here(node: str) -> bool:
    """Return True if the name or address is this machine's: what is sent to oneself leaves from the same address."""
    try:
        return slurm.source(node) == socket.gethostbyname(node)
    except OSError:
        return False


def logs() -> str:
    """Return what the processes of the cluster have printed since the last start; "" if there is none."""
    folder = session_dir.find_session_dir()[0]
    return "\n".join(map(session_dir.read_tail, sorted(glob.glob(os.path.join(glob.escape(folder), "*.log")))))


SYMPTOMS = (
    Symptom(
        "controller not reached",
        look=_require_reachable_controller,
        # an engine; a client
        said=r"Registration timed out after|connection file never arrived|Is a controller running\?|"
        r"no Controller could be found|Hub connection request timed out",
        fix=REACHABLE,
    ),
    Symptom("stale cluster", look=_require_none_left),
)

KNOWN = (*TABLE, *SYMPTOMS)
INDENT = " " * 4


class Examination(NamedTuple):
    """The table of features, and the symptoms that are here."""

    report: FeatureTable
    findings: list[Diagnosis]

    @property
    def ok(self) -> bool:
        return self.report.ok and not self.findings

    def __repr__(self) -> str:
        if not self.findings:
            return str(self.report)
        count = f"{len(self.findings)} known symptom{'s' * (len(self.findings) > 1)}"
        end = f"{'' if self.report.ok else self.report.end()} {count}: do what Fix says.".lstrip()
        return "\n\n".join([self.report.rows(), describe_findings(self.findings), end])


def doctor() -> Examination:
    """Return what this machine and build can do, and its known symptoms: an Examination, which prints itself."""
    report = features.feature_table()
    return Examination(report, [*found(KNOWN), *found_in(KNOWN, logs())])


def describe_findings(findings: list[Diagnosis]) -> str:
    """Write a paragraph for each finding: its name, what is wrong, and the fix in one line, to be copied."""
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    wrapper = textwrap.TextWrapper(
        width, initial_indent=INDENT, subsequent_indent=INDENT, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(f"Symptom: {f.name}\n{wrapper.fill(f.what)}\n{INDENT}Fix: {f.fix}" for f in findings)

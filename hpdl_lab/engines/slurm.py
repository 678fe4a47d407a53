"""Engines in a Slurm job, seen from the notebook's machine: relay and job as children of the supervisor, and their end.

    supervisor --- relay        what the nodes connect to (relay.py)
               |-- job          has Slurm start an agent on a node, follows the job, ends it (slurm_job.py)
               |-- controller   as for engines of this machine
               `-- engines      asks the relay for engines, prints what they print

Relay and job outlive `lab.restart()`: new engines in the same job wait in no queue.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..features import Missing
from ..system import until
from . import session_dir, slurm_job, supervisor
from .errors import EngineError
from .layout import Layout

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.display import DisplayHandle

    from .supervisor_client import SupervisorConnection

Json: TypeAlias = dict[str, Any]


class Launching(Protocol):
    """The launch.Launching of engines."""

    path: str
    layout: Layout
    supervisor: SupervisorConnection

    def spawn(self, name: str, argv: list[str], grace: float = 0.0) -> None: ...

    def wait_for(self, files: list[str]) -> None: ...

    def ended(self) -> list[str]: ...

    def failure(self, gone: Collection[str], seconds: float) -> str: ...


class _QueueLine:
    """`with QueueLine() as line: line.show(text)`, again and again while the job waits."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._shown = ""
        self._handle: DisplayHandle | None = None

    def __enter__(self) -> _QueueLine:
        return self

    def show(self, text: str) -> None:
        """Show the sentence `text`, to which the seconds so far are added in a notebook."""
        if not hasattr(ipython(), "kernel"):  # no notebook
            if text != self._shown:
                print(f"{text}. Ctrl-C ends the wait, and the job.", flush=True)
            self._shown = text
            return
        line = f"{text}. {time.monotonic() - self._began:.0f} s so far; the stop button ends the wait, and the job."
        if line == self._shown:
            return
        self._shown = line
        if self._handle is None:
            from IPython.display import display

            self._handle = display({"text/plain": line}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": line}, raw=True)

    def __exit__(self, *exc: object) -> None:
        """Remove the line, in a notebook."""
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)


def ipython() -> InteractiveShell | None:
    """Return the IPython shell of this process; None in a plain script."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


JOB = ("relay", "job")
START_SECONDS = 240  # all nodes read the same files of one file system, some for the first time
RELAY_GRACE, JOB_GRACE = 5.0, 20.0  # s: to remove a folder; for scancel
LOOK = 0.1  # s between two looks at the state of the job
NEWS = 10.0  # s for Slurm to report that a node or a job has gone
LOST = ("vanished", "has gone")  # what is said of an engine that said nothing of its end: by the relay, and here
BY_SLURM = (*LOST, "was killed by signal 15 ")  # scancel, limits and preemption end ranks with SIGTERM first


def require_slurm() -> None:
    """Raise EngineError if this machine knows no Slurm."""
    if shutil.which("sbatch") is None:
        raise EngineError(
            'there is no command sbatch here: lab.start(where="slurm") works where Slurm\'s commands are, '
            "as on a login node, or in a notebook server that is itself a job; here there is lab.start(4)"
        )


def step_argv(path: str, layout: Layout) -> list[str]:
    """Return the command line of the process that asks the relay for engines, and ends with them."""
    request = json.dumps({"n": layout.n})
    return [sys.executable, "-m", "hpdl_lab.engines.slurm", session_dir.relay_socket(path), request]


def wait_for_job(launching: Launching) -> None:
    """Return when a job runs in which engines can be started. Raises EngineError with the reason if none will."""
    path = launching.path
    if "job" not in launching.supervisor.ask("status")["running"]:
        partition = launching.layout.job.get("partition") or ""
        argv = [sys.executable, "-m", "hpdl_lab.engines.relay", path, partition]
        launching.spawn("relay", argv, grace=RELAY_GRACE)
        launching.wait_for([session_dir.relay_file(path)])
        with open(session_dir.relay_file(path)) as file:
            shared = json.load(file)["shared"]
        agent = [sys.executable, "-m", "hpdl_lab.engines.node_agent", shared_relay_file(shared)]
        argv = slurm_job.argv(path, launching.layout.n, launching.layout.job, agent, shared)
        launching.spawn("job", argv, grace=JOB_GRACE)
    with _QueueLine() as line:
        while (job := state(path)).get("state") != "running":
            gone = launching.ended()
            if text := ended(path):  # looked at after `gone`: the process "job" writes it before it ends
                raise EngineError(text)
            if gone:
                raise EngineError(launching.failure(gone, 0))
            if job:
                line.show(job["text"])
            time.sleep(LOOK)


def kept(path: str, running: Collection[str], before: Layout | None, wanted: Layout) -> tuple[str, ...]:
    """Return the names of the processes that go on when engines `before` are replaced by `wanted`.

    running: names of the processes that are alive.
    """
    same = before == wanted and wanted.where == "slurm" and set(JOB) <= set(running)
    return JOB if same and state(path).get("state") == "running" and not _lost_a_node(path, wanted.n) else ()


def _lost_a_node(path: str, n: int) -> bool:
    """Return True if one of `n` engines has vanished: the job can start none there, though Slurm may show no fault."""
    for rank in range(n):
        with suppress(OSError), open(session_dir.exit_file(path, rank)) as file:
            if file.read().startswith(LOST):
                return True
    return False


def state(path: str) -> Json:
    """Return what the process "job" has written last: {"id", "state", "text", ...}; {} when nothing yet."""
    try:
        with open(session_dir.job_file(path)) as file:
            return json.load(file)
    except OSError:
        return {}


def remarks(path: str) -> list[str]:
    """Return remarks on engines in a job: sentences without their full stops."""
    job = state(path)
    return [job["text"]] if job.get("state") == "running" else []


def ended(path: str) -> str | None:
    """Return how the job ended, as a sentence; None while it has not."""
    job = state(path)
    return job["text"] if job.get("state") == "ended" else None


def end_of_job(path: str, endings: Iterable[str]) -> str | None:
    """Return how the job ended, as a sentence without its full stop; None while it runs.

    endings: what is known of the engines that have gone. If Slurm may have ended them, it is given time to say why.
    """
    perhaps = any(ending.startswith(BY_SLURM) for ending in endings)
    text = until(lambda: ended(path), NEWS if perhaps else 0, every=LOOK)
    return text.rstrip(".") if text else None


FOLDER = "HPDL_SHARED"  # environment variable, for nodes that share no home folder
DEFAULT = "~/.hpdl_lab/sessions"


def shared_root() -> str:
    """Return the folder in which such folders are made. Raises Missing if there is none."""
    path = os.path.expanduser(os.environ.get(FOLDER) or DEFAULT)
    remedy = f"set {FOLDER} to a folder that this machine and the nodes share and that you can write"
    if not os.path.isabs(path):
        raise Missing(f"{path} is not an absolute path", remedy)
    try:
        os.makedirs(path, 0o700, exist_ok=True)
    except OSError as error:
        raise Missing(f"there is no folder {path} ({error.strerror})", remedy) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise Missing(f"{path} is not writable", remedy)
    return path


@contextmanager
def shared_folder() -> Generator[str]:
    """Make a folder for the session of this process, and remove it at the end."""
    root = shared_root()
    _sweep(root)
    path = tempfile.mkdtemp(prefix=f"{socket.gethostname()}-{os.getpid()}-", dir=root)  # 0700
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(root: str) -> None:
    """Remove the folders of relays of this machine that were killed."""
    for entry in os.scandir(root):
        host, _, rest = entry.name.rpartition("-")[0].rpartition("-")
        with suppress(OSError):
            if host == socket.gethostname() and rest.isdigit() and not supervisor.alive(int(rest)):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    shutil.rmtree(entry.path)


def shared_relay_file(path: str) -> str:
    """Return the path of the file by which the nodes find the relay: {"addresses", "port", "keys"}."""
    return os.path.join(path, "relay.json")


ADDRESS, PORTS = "HPDL_ADDRESS", "HPDL_PORTS"  # variables that overrule what is found: "10.1.0.5", "60001-60100"
ASKED = 8  # nodes whose routes are looked at: nodes of a partition share a network
ANSWER_SECONDS = 20.0  # for Slurm to answer
CONTROLLER = "see whether its controller runs: scontrol ping"


def addresses(partition: str | None = None) -> list[str]:
    """Return the addresses from which packets to the nodes of `partition` (None: all) leave here, best first.

    Raises: Missing if none is found.
    """
    if given := os.environ.get(ADDRESS):
        return [address.strip() for address in given.split(",")]
    found: list[str] = []
    nodes = node_addresses(partition) or node_addresses(None)  # sbatch says what is wrong with a partition
    for node in nodes[:ASKED]:
        with suppress(OSError):
            found.append(source(node))
    if not found:
        raise Missing(
            f"none of the nodes {', '.join(nodes[:3]) or '(Slurm names none)'} has an address that this machine knows",
            f"set {ADDRESS} to an address of this machine that the nodes reach",
        )
    return list(dict.fromkeys(found))


def node_addresses(partition: str | None) -> list[str]:
    """Return the NodeAddr of each node, as Slurm itself uses it."""
    said = ask_slurm(
        ["sinfo", "--noheader", "--Node", "--format=%o", *(["--partition", partition] if partition else [])]
    )
    return list(dict.fromkeys(said.split()))


def source(node: str) -> str:
    """Return the address of this machine from which packets to `node` leave; none is sent. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(node, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def ports() -> tuple[int, int] | None:
    """Return (first, last) of the ports on which nodes may connect to this machine; None if any will do."""
    said = os.environ.get(PORTS)
    if said is None:
        found = re.search(r"^SrunPortRange\s*=\s*(\S+)", ask_slurm(["scontrol", "show", "config"]), re.M)
        said = found[1] if found else "0-0"
    match = re.fullmatch(r"(\d+)-(\d+)", said)
    if match is None or not int(match[1]) <= int(match[2]) < 1 << 16:
        raise Missing(f"{PORTS}={said!r} is no range of ports", "give one, such as 60001-60100")
    first, last = int(match[1]), int(match[2])
    return (first, last) if first else None


def ask_slurm(argv: list[str]) -> str:
    """Return what a command of Slurm prints. Raises Missing with its complaint if it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_SECONDS, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise Missing(f"there is no command {argv[0]} here", "start where Slurm's commands are: a login node") from None
    except subprocess.TimeoutExpired:
        raise Missing(f"{argv[0]} does not answer within {ANSWER_SECONDS:g} s", CONTROLLER) from None
    if done.returncode:
        said = [*done.stderr.split("\n"), f"exit code {done.returncode}"]
        raise Missing(f"{argv[0]} says {next(line for line in said if line)}", CONTROLLER)
    return done.stdout


def _main() -> None:
    relay = socket.socket(socket.AF_UNIX)
    relay.connect(sys.argv[1])
    relay.sendall(sys.argv[2].encode() + b"\n")
    while output := relay.recv(1 << 16):
        os.write(2, output)


if __name__ == "__main__":
    _main()

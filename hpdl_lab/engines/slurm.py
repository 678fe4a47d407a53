"""Slurm as this machine sees it: how to ask it, and by which addresses and ports its nodes reach a notebook."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress

from ..features import Missing
from . import supervisor
from .errors import EngineError


def require_slurm() -> None:
    """Raise EngineError if this machine knows no Slurm."""
    if shutil.which("sbatch") is None:
        raise EngineError(
            'there is no command sbatch here: lab.start(where="slurm") works where Slurm\'s commands are, '
            "as on a login node, or in a notebook server that is itself a job; here there is lab.start(4)"
        )


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


def ports(in_slurm: bool = True) -> tuple[int, int] | None:
    """Return (first, last) of the ports on which nodes may connect to this machine; None if any will do."""
    said = os.environ.get(PORTS) or (None if in_slurm else "0-0")
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

"""Where the nodes of a Slurm cluster reach this machine: asked of Slurm and of the routing table, not of the user.

An engine on a node connects to the notebook's machine, never the other way: so does every task of `srun`, which makes
it the one direction that a cluster has to allow. Where only some ports are open for that (SrunPortRange), one of those
is taken.
"""

import os
import re
import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager, suppress

from ..features import Missing
from . import keeper

FOLDER = "HPDL_SHARED"  # environment variable: where the nodes share no home folder
DEFAULT = "~/.hpdl_lab/sessions"


def shared_root():
    """Where such folders are made. Raises Missing where there is no place."""
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
def shared_folder():
    """Make a folder for the session of this process, and remove it at the end."""
    place = shared_root()
    sweep(place)
    path = tempfile.mkdtemp(prefix=f"{socket.gethostname()}-{os.getpid()}-", dir=place)  # 0700
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep(place):
    """Remove the folders of relays of this machine that were killed."""
    for entry in os.scandir(place):
        host, _, rest = entry.name.rpartition("-")[0].rpartition("-")
        with suppress(OSError):
            if host == socket.gethostname() and rest.isdigit() and not keeper.alive(int(rest)):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    shutil.rmtree(entry.path)


def shared_relay_file(path):
    """Where the nodes find the relay: {"addresses", "port", "keys"}."""
    return os.path.join(path, "relay.json")


def log_file(path):
    """What the job prints before it has found the relay."""
    return os.path.join(path, "job.log")


ADDRESS, PORTS = "HPDL_ADDRESS", "HPDL_PORTS"  # variables that overrule what is found: "10.1.0.5", "60001-60100"
ASKED = 8  # nodes whose routes are looked at: those of a partition share a network
SECONDS = 20.0  # for Slurm to answer
CONTROLLER = "see whether its controller runs: scontrol ping"


def addresses(partition=None):
    """Addresses of this machine from which packets to the nodes of `partition` (None: all) leave, best first.

    Raises: Missing where none can be told.
    """
    if told := os.environ.get(ADDRESS):
        return [address.strip() for address in told.split(",")]
    found, nodes = [], node_addresses(partition) or node_addresses(None)  # sbatch says what is wrong with a partition
    for node in nodes[:ASKED]:
        with suppress(OSError):
            found.append(source(node))
    if not found:
        raise Missing(
            f"none of the nodes {', '.join(nodes[:3]) or '(Slurm names none)'} has an address that this machine knows",
            f"set {ADDRESS} to an address of this machine that the nodes reach",
        )
    return list(dict.fromkeys(found))


def node_addresses(partition):
    """The NodeAddr of each node, as Slurm itself uses it."""
    said = ask(["sinfo", "--noheader", "--Node", "--format=%o", *(["--partition", partition] if partition else [])])
    return list(dict.fromkeys(said.split()))


def source(node):
    """The address of this machine from which packets to `node` leave; none is sent. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(node, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def ports():
    """(first, last) of the ports on which nodes may connect to this machine; None where any will do."""
    said = os.environ.get(PORTS)
    if said is None:
        found = re.search(r"^SrunPortRange\s*=\s*(\S+)", ask(["scontrol", "show", "config"]), re.M)
        said = found[1] if found else "0-0"
    match = re.fullmatch(r"(\d+)-(\d+)", said)
    if match is None or not int(match[1]) <= int(match[2]) < 1 << 16:
        raise Missing(f"{PORTS}={said!r} is no range of ports", "give one, such as 60001-60100")
    first, last = int(match[1]), int(match[2])
    return (first, last) if first else None


def ask(argv):
    """What a command of Slurm prints. Raises Missing with what it says where it fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise Missing(f"there is no command {argv[0]} here", "start where Slurm's commands are: a login node") from None
    except subprocess.TimeoutExpired:
        raise Missing(f"{argv[0]} does not answer within {SECONDS:g} s", CONTROLLER) from None
    if done.returncode:
        said = [*done.stderr.split("\n"), f"exit code {done.returncode}"]
        raise Missing(f"{argv[0]} says {next(line for line in said if line)}", CONTROLLER)
    return done.stdout

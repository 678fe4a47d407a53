"""The folder that this machine shares with the nodes of a Slurm job: what the job must read, and what it prints.

It lies below the home folder, which nodes usually share, and holds no sockets: those do not work across machines. Only
its user can enter it; the key of the session lies in it. It goes when the gateway ends; one that was left behind by a
killed gateway goes when the next one starts on the same machine.
"""

import os
import shutil
import socket
import tempfile
from contextlib import contextmanager, suppress

from ..features import Missing
from . import keeper

FOLDER = "HPDL_SHARED"  # environment variable: where the nodes share no home folder
DEFAULT = "~/.hpdl_lab/sessions"


def root():
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
def made():
    """Make a folder for the session of this process, and remove it at the end."""
    place = root()
    sweep(place)
    path = tempfile.mkdtemp(prefix=f"{socket.gethostname()}-{os.getpid()}-", dir=place)  # 0700
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep(place):
    """Remove the folders of gateways of this machine that were killed."""
    for entry in os.scandir(place):
        host, _, rest = entry.name.rpartition("-")[0].rpartition("-")
        with suppress(OSError):
            if host == socket.gethostname() and rest.isdigit() and not keeper.alive(int(rest)):
                if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    shutil.rmtree(entry.path)


def gateway_file(path):
    """Where the nodes find the gateway: {"addresses", "port", "key"}."""
    return os.path.join(path, "gateway.json")


def log_file(path):
    """What the job prints before it has found the gateway."""
    return os.path.join(path, "job.log")

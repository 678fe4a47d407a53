"""What clusters of this user have left behind: session directories, processes and shared memory without a keeper.

The keeper ends and removes everything, whatever ends the notebook. This is for where the keeper itself was killed.
"""

import fcntl
import glob
import os
import socket
import time

from ..features import dev_shm
from . import keeper, session_dir

SETTLE = 0.5  # s: what has just lost its keeper may be ending
SEGMENTS = ("mpich_", "sm_segment.", "nccl-")  # shared memory of MPICH, Open MPI and NCCL
YOUNG = 60  # s: a segment that is not that old may be on its way into a process, or out of the way
LITTLE = 16 << 20  # bytes of segments that are in nobody's way


def folders():
    """Session directories in which no cluster runs, starts or ends."""
    found = []
    for root in session_dir.roots():
        for path in glob.glob(os.path.join(glob.escape(root), f"{session_dir.PREFIX}{os.getuid()}-*")):
            if os.path.isdir(path) and os.lstat(path).st_uid == os.getuid() and not in_use(path) and path not in found:
                found.append(path)
    return sorted(found)


def in_use(path):
    """Has this directory a keeper, or one that is removing it, or is a kernel about to start one?"""
    ender = path.rpartition(".")[2]
    if ender.isdigit():  # a keeper that ends its cluster moves the directory away, under its own number
        return keeper.alive(int(ender))
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(session_dir.keeper_socket(path))
            return True
        except OSError:
            pass
    try:
        handle = session_dir.opened(path)
    except OSError:
        return True  # gone meanwhile, or another's
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return not os.path.exists(path)


def processes():
    """Process ids of what engines, or programs that they had started, have left: their keeper is gone."""
    found = without_keeper()
    if found:
        time.sleep(SETTLE)
        found = [pid for pid in without_keeper() if pid in found]
    return found


def without_keeper():
    """Process ids of this user whose environment names a session here and a keeper that is not there any more."""
    found, roots = [], list(map(os.fsencode, session_dir.roots()))
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid != os.getuid():
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = dict(item.partition(b"=")[::2] for item in file.read().split(b"\0"))
        except OSError:
            continue
        session, owner = variables.get(b"HPDL_SESSION", b""), variables.get(b"HPDL_KEEPER", b"")
        # An engine of Slurm has its keeper on another machine, and Slurm ends what is left of a job.
        if os.path.dirname(session) in roots and owner.isdigit() and b"SLURM_JOB_ID" not in variables:
            if not keeps(int(owner), session) and keeper.alive(int(name)):
                found.append(int(name))
    return sorted(found)


def segments(folder=dev_shm.PATH):
    """Files of shared memory of this user that no process has mapped; [] where they are small."""
    found = {}
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        try:
            about = os.stat(os.path.join(folder, name))
        except OSError:
            continue
        if name.startswith(SEGMENTS) and about.st_uid == os.getuid() and time.time() - about.st_mtime > YOUNG:
            found[os.path.join(folder, name)] = about.st_blocks * 512
    if sum(found.values()) < LITTLE:
        return []
    mapped = keeper.shared_memory(filter(str.isdigit, os.listdir("/proc")))
    left = {path: nbytes for path, nbytes in found.items() if path not in mapped}
    return sorted(left) if sum(left.values()) >= LITTLE else []


def keeps(pid, session):
    """Is process `pid` the keeper of that session?"""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"keeper.py\0" + session in file.read()
    except OSError:
        return False

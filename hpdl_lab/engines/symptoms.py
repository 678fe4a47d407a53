"""Symptoms of clusters: what an earlier one has left behind, and a controller that other nodes cannot reach."""

import glob
import ipaddress
import json
import os
import shutil
import socket
from contextlib import suppress

from ..features import Missing, dev_shm
from ..symptoms import Symptom
from . import leftovers, reach, session_dir


def require_none_left():
    """Raise Missing where earlier engines, or ranks, of this user have left processes, files or shared memory."""
    processes, folders, segments = leftovers.processes(), leftovers.folders(), leftovers.segments()
    pids, files = " ".join(map(str, processes)), [*folders, *segments]
    left = [f"process{'es' * (len(processes) > 1)} {pids}"] * bool(processes) + folders
    if segments:
        left.append(f"{len(segments)} file{'s' * (len(segments) > 1)} in {dev_shm.PATH}, which no process uses")
    fixes = [f"kill -9 {pids}"] * bool(processes) + [f"rm -r {' '.join(files)}"] * bool(files)
    if left:
        raise Missing(f"engines or ranks that were killed have left {', '.join(left)}", "; ".join(fixes))


def require_reachable_controller():
    """Raise Missing where engines on nodes of Slurm would look for the controller on their own localhost."""
    if "SLURM_JOB_ID" not in os.environ and shutil.which("sinfo") is None:
        return
    if (told := os.environ.get(reach.ADDRESS)) and all(map(is_loopback, told.split(","))):
        if away := [node for node in reach.node_addresses(None)[: reach.ASKED] if not is_here(node)]:
            raise Missing(
                f"{reach.ADDRESS}={told} sends the engines of node {away[0]} to their own localhost",
                f"unset {reach.ADDRESS}, or set it to an address of this machine that the nodes reach",
            )
    for path in glob.glob(os.path.join(ipython_dir(), "profile_*", "security", "ipcontroller*-engine.json")):
        with suppress(OSError, ValueError, KeyError), open(path) as file:
            told = json.load(file)
            host = told["interface"].removeprefix("tcp://")
            if is_loopback(host) and (told["location"] != socket.gethostname() or answers(host, told["registration"])):
                raise Missing(
                    f"the controller of {path} listens on {host} of {told['location']}, where engines on other nodes "
                    "never find it",
                    'lab.start(4, where="slurm"), or plain ipyparallel with --ip="*" for ipcontroller',
                )


def is_loopback(host):
    try:
        return ipaddress.ip_address(socket.gethostbyname(host.strip())).is_loopback
    except OSError:
        return False


def answers(host, port):
    """Does the controller run that has once written this address?"""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def is_here(node):
    """Does the name or address belong to this machine? What is sent to oneself leaves from the same address."""
    try:
        return reach.source(node) == socket.gethostbyname(node)
    except OSError:
        return False


def ipython_dir():
    return os.environ.get("IPYTHONDIR") or os.path.expanduser("~/.ipython")


def logs():
    """What the engines, and all beside them, have said since their last start; "" where none runs or is left."""
    folder = session_dir.find()[0]
    said = []
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.log"))):
        with suppress(OSError), open(path, errors="replace") as file:
            said.append(file.read()[-8000:])
    return "\n".join(said)


SYMPTOMS = (
    Symptom("controller on localhost", look=require_reachable_controller),
    Symptom("stale cluster", look=require_none_left),
)

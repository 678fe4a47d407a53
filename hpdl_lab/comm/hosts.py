"""The host of a rank, and the machine whose cores it shares with others."""

import os
import secrets
import socket
import tempfile
from collections.abc import Sequence

from ..features import cores

HOST = "HPDL_HOST_ID"  # environment variable: ranks for which it differs share no memory, as if on different hosts
SESSION = "HPDL_SESSION"  # environment variable of engines: their folder, which is removed with them


def host_id() -> str:
    """Return a text that is equal for ranks that may share memory: the names of the host and of its machine."""
    return f"{(os.environ.get(HOST) or socket.gethostname())[:60]} {machine_id()}"


def machine_id() -> str:
    """Return the same text for all hosts that share this machine's cores: containers, and emulated ones."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()[:60]


def shared_file(kind: str) -> str:
    """Return the path of a new file, which only its owner can read, for the ranks of this host to open together.

    On engines it is in their own folder, elsewhere in memory: TMPDIR may be longer than a note that ranks exchange
    (120 bytes), or on NFS without locks. The caller removes the file; engines remove theirs, too.
    """
    places = (os.environ.get(SESSION), "/dev/shm", "/tmp")
    place = next((p for p in places if p and os.access(p, os.W_OK | os.X_OK)), tempfile.gettempdir())
    path = os.path.join(place, f"hpdl-{kind}-{secrets.token_hex(8)}")
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    return path


def core_mask() -> str:
    """Return the cores that this process may use, as hexadecimal digits; mpiexec and srun bind each rank to its own."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return f"{sum(1 << core for core in allowed):x}"


def oversubscribed(hosts: Sequence[str], masks: Sequence[str], rank: int) -> bool:
    """Return True if the machine of `rank` has fewer cores than ranks: spinning keeps a peer from working there.

    hosts, masks: host_id() and core_mask() of every rank. A machine may emulate several hosts.
    """
    machines, together = [host.split()[-1] for host in hosts], 0
    for machine, mask in zip(machines, masks, strict=True):
        together |= int(mask, 16) if machine == machines[rank] else 0
    return machines.count(machines[rank]) > cores(together.bit_count())

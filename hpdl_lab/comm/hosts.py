"""Which ranks are on one host, and which machine's cores they share."""

import os
import socket
from collections.abc import Sequence

from ..features import cores

HOST = "HPDL_HOST_ID"  # environment variable: ranks for which it differs share no memory, as if on different hosts


def host_id() -> str:
    """The same for ranks that may share memory, different for others: the names of the host and of its machine."""
    return f"{(os.environ.get(HOST) or socket.gethostname())[:60]} {machine_id()}"


def machine_id() -> str:
    """The same for all hosts that share this machine's cores: containers, and those that it emulates."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()[:60]


def oversubscribed(hosts: Sequence[str], rank: int) -> bool:
    """Are there more ranks than cores on the machine of `rank`? Who spins there keeps a peer from working.

    hosts: host_id() of every rank. A machine may emulate several hosts.
    """
    machines = [host.split()[-1] for host in hosts]
    return machines.count(machines[rank]) > cores()

"""Ports of a hub: the one for browsers, and two on the loopback address that stay the same over restarts."""

import random
import socket
from pathlib import Path

from ..features import ports as machine
from . import settings

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")  # the first and the last port that the system itself gives


def free(address="127.0.0.1"):
    """A port that nothing listens on now, and that the system gives to nobody who asks for any: it stays free."""
    first = int(GIVEN.read_text().split()[0])
    below = range(max(1024, first // 2), max(2048, first))
    return next(port for port in random.sample(below, len(below)) if not why_not(address, port))


def reserved():
    """A free port that no account but root's can listen on: while the hub is down no attendee can play it."""
    ports = list(range(600, 1024))
    random.shuffle(ports)
    return next((port for port in ports if not why_not("127.0.0.1", port)), 0) or free()


def why_not(address, port):
    """Why this port cannot be listened on, or None."""
    try:
        with socket.socket(family(address)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return None


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def check(given):
    """Raise RuntimeError where browsers could not reach the hub at the port of `given`."""
    if not 1 <= given.port <= 65535:
        raise RuntimeError(f"{given.port} is no port: a number from 1 to 65535 is needed, as in --port 8000")
    if reason := why_not(given.address, 0) if given.address else "it is empty":
        raise RuntimeError(
            f"{given.address!r} is no address of this machine ({reason}): --address 0.0.0.0 is all that it has"
        )
    if reason := why_not(given.address, given.port):
        who = machine.holder(given.port)
        reason = f"{who} has it" if who else reason
        raise RuntimeError(f"port {given.port} of {given.address} cannot be used ({reason}): name another, --port 8001")


def inner(given):
    """`given` with the two inner ports: those of before where a hub has been here, so that running servers find it."""
    try:
        before = settings.read(given.state)
        kept = [before.hub_port, before.proxy_port]
    except (OSError, ValueError, TypeError):
        kept = [0, 0]
    new = reserved if given.isolated else free
    hub, proxy = (port if port and not why_not("127.0.0.1", port) else new() for port in kept)
    return given._replace(hub_port=hub, proxy_port=proxy)

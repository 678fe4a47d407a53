"""At which address ranks of other hosts reach this one. Does not import torch."""

import functools
import os
import socket

LOOPBACK_ADDRESS = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"  # environment variable: through which gloo, and the store, talk to other hosts


@functools.cache
def loopback_interface() -> str:
    """Return "lo", or how this system calls it; it looks for names in all of its networks."""
    return socket.if_nameindex()[0][1]


def own_address() -> str:
    """Return the address at which ranks of other hosts reach this one; hosts need not know each other by name."""
    import psutil

    for address in psutil.net_if_addrs().get(os.environ.get(INTERFACE, ""), []):
        if address.family == socket.AF_INET:
            return address.address
    return socket.gethostname()

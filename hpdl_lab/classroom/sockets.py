r"""The ports of a hub, held open by `hpdl hub` while JupyterHub and its proxy are started again.

    hpdl hub  binds and listens ---- inherits ----> proxy         cluster/hub/proxy.mjs
                                \--- inherits ----> JupyterHub    python -m hpdl_lab.classroom.sockets -f CONFIGURATION

So no attendee can take the place of one that has just died; who connects meanwhile waits.
"""

import json
import os
import socket
import sys
from typing import Any

from ..features import ports as machine

VARIABLE = "HPDL_SOCKETS"  # environment: {port: file descriptor}, as JSON
OTHER = {"127.0.0.1": "::1", "localhost": "::1", "::1": "127.0.0.1"}  # the same name in the other address family
INNER = "127.0.0.1"


class ReservedPort:
    """A port, held in both address families. Raises RuntimeError in one sentence if it cannot be had."""

    def __init__(self, address: str, port: int) -> None:
        if not 0 <= port <= 65535:
            raise RuntimeError(f"{port} is no port: a number from 1 to 65535 is needed, as in --port 8000")
        address = "127.0.0.1" if address == "localhost" else address
        everywhere = address in ("0.0.0.0", "::") and socket.has_dualstack_ipv6()
        try:
            self.socket = socket.socket(socket.AF_INET6 if everywhere or ":" in address else socket.AF_INET)
        except OSError as error:
            raise RuntimeError(_refusal(address, port, error)) from None
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if everywhere:
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self.socket.bind(("::" if everywhere else address, port))
            self.socket.listen(1024)
            self.socket.setblocking(False)
        except OSError as error:
            self.socket.close()
            raise RuntimeError(_refusal(address, port, error)) from None
        self.port = self.socket.getsockname()[1]
        self.other: socket.socket | None = None  # bound, but not answering
        if other := OTHER.get(address):
            try:
                self.other = socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET)
                self.other.bind((other, self.port))
            except OSError as error:
                if self.other is not None:
                    self.other.close()
                    self.other = None
                if port and error.errno == 98:  # EADDRINUSE; else this machine has no such family
                    self.socket.close()
                    raise RuntimeError(_refusal(other, port, error)) from None

    def close(self) -> None:
        for each in filter(None, (self.socket, self.other)):
            each.close()


def _refusal(address: str, port: int, error: OSError) -> str:
    """Return why a port cannot be had, with the remedy."""
    why = (error.strerror or str(error)).lower()
    if not address or error.errno == 99 or isinstance(error, socket.gaierror):  # EADDRNOTAVAIL
        return f"{address!r} is no address of this machine ({why}): --address 0.0.0.0 is all that it has"
    who = machine.listener_at(port)
    return f"port {port} of {address} cannot be used ({f'{who} has it' if who else why}): name another, --port 8001"


def inner(port: int) -> ReservedPort:
    """Hold a port of the loopback address: `port`, at which running servers look, or another one if it is taken."""
    try:
        return ReservedPort(INNER, port)
    except RuntimeError:
        return ReservedPort(INNER, 0)


def _main() -> None:
    """Be JupyterHub, on the socket that it inherits."""
    import tornado.tcpserver
    from jupyterhub.app import main as serve

    inherited = {int(port): fd for port, fd in json.loads(os.environ.pop(VARIABLE)).items()}
    plain = tornado.tcpserver.bind_sockets

    def bind_sockets(port: int, *args: Any, **kwargs: Any) -> list[socket.socket]:
        fd = inherited.get(port)
        return plain(port, *args, **kwargs) if fd is None else [socket.socket(fileno=os.dup(fd))]

    tornado.tcpserver.bind_sockets = bind_sockets
    sys.exit(serve(sys.argv[1:]))


if __name__ == "__main__":
    _main()

"""What one client may take of JupyterHub: the size and the time of a request, and connections of one user id.

The configuration calls `bound_requests` before JupyterHub makes its server.
"""

import resource
import socket
import struct
from ipaddress import ip_address
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream

BODY_BYTES = 2**16  # of one request: the hub's forms and API take 1 kB, and notebooks do not pass it
SILENT_SECONDS = 20  # for a TLS handshake and the headers that follow; then for the body
CONNECTIONS = 64  # of one user id: a server has ten at most
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)  # of this process when it started: (soft, hard)
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 4, 20, 1  # linux/netlink.h, linux/sock_diag.h
UID_OFFSET = 16 + 64  # of idiag_uid in the answer: a struct nlmsghdr, and what stands before it in inet_diag_msg


class BoundedServer(HTTPServer):
    """JupyterHub's HTTP server. A request that is too large or too slow ends with its connection."""

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        bounds = {"max_body_size": BODY_BYTES, "max_buffer_size": 4 * BODY_BYTES}
        times = {"idle_connection_timeout": SILENT_SECONDS, "body_timeout": SILENT_SECONDS}
        super().initialize(*args, **kwargs | bounds | times)
        self._streams: dict[int, list[IOStream]] = {}

    def handle_stream(self, stream: IOStream, address: Any) -> None:
        uid = user_of(stream.socket)
        mine = [other for other in self._streams.get(uid, ()) if not other.closed()]
        if uid and len(mine) >= CONNECTIONS:  # the proxy, of root, comes for everybody
            stream.close()
            return
        self._streams[uid] = [*mine, stream] if uid else []
        super().handle_stream(stream, address)


def bound_requests() -> None:
    """Have JupyterHub serve with the bounds above, and open as many files as it is allowed to."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[1], FILES[1]))
    HTTPServer.configure(BoundedServer)


def user_of(connection: socket.socket) -> int:
    """The user id of the process at the other end, on this machine; 0 if it has gone, or if the kernel does not say."""
    try:
        (theirs, port, *_), (ours, here, *_) = connection.getpeername(), connection.getsockname()
        ends = [ip_address(ip).packed.ljust(16, b"\0") for ip in (theirs, ours)]
        asked = struct.pack("=BBxxI", connection.family, socket.IPPROTO_TCP, 0xFFFFFFFF)
        asked += struct.pack("!HH", port, here) + b"".join(ends) + struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
            kernel.send(struct.pack("=IHHII", 16 + len(asked), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0) + asked)
            return struct.unpack_from("=I", kernel.recv(4096), UID_OFFSET)[0]
    except (OSError, struct.error):
        return 0

"""Bound what one client takes of JupyterHub: size and time of a request, and connections of each user id."""

import os
import resource
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream

from ..features.ports import user_at

BODY_BYTES = 2**16  # of one request: the hub's forms and API take 1 kB, and notebooks do not pass it
SILENT_SECONDS = 20  # for a TLS handshake and the headers that follow; then for the body
CONNECTIONS = 64  # of one user id: a server has ten at most
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)  # of this process when it started: (soft, hard)


class _BoundedServer(HTTPServer):
    """JupyterHub's HTTP server. A request that is too large or too slow ends with its connection."""

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        bounds = {"max_body_size": BODY_BYTES, "max_buffer_size": 4 * BODY_BYTES, "body_timeout": SILENT_SECONDS}
        super().initialize(*args, **kwargs | bounds | {"idle_connection_timeout": SILENT_SECONDS})
        self._streams: dict[int, list[IOStream]] = {}

    def handle_stream(self, stream: IOStream, address: tuple[object, ...]) -> None:
        if (uid := user_at(stream.socket)) not in (0, os.geteuid()):  # the proxy comes for everybody
            mine = self._streams[uid] = [each for each in self._streams.get(uid, ()) if not each.closed()]
            if len(mine) >= CONNECTIONS:
                return stream.close()
            mine.append(stream)
        super().handle_stream(stream, address)


def bound_requests() -> None:
    """Have JupyterHub, which has made no server yet, serve with these bounds, and open as many files as it may."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[1], FILES[1]))
    HTTPServer.configure(_BoundedServer)

"""This kernel's connection to the keeper: starting one, attaching to one that runs, and asking it for things."""

import itertools
import json
import os
import socket
import struct
import subprocess
import sys

from . import keeper, session_dir
from .errors import EngineError

PATIENCE = 30.0  # seconds for an answer: the keeper answers at once unless it kills many processes


class KeeperConnection:
    """Requests to the keeper over `connection`. While it is open, the cluster lives."""

    def __init__(self, connection):
        connection.settimeout(PATIENCE)
        self._connection = connection
        self._received = b""
        self._numbers = itertools.count()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid = struct.unpack("3i", credentials)[0]

    def ask(self, do, **content):
        """The keeper's reply (dict). Raises OSError when it is gone, EngineError when it is mute or could not do it."""
        number = next(self._numbers)
        reply = {}
        try:
            self._connection.sendall(json.dumps({"id": number, "do": do, **content}).encode() + b"\n")
            while reply.get("id") != number:  # an earlier reply may lie there: the stop button broke off its request
                reply = json.loads(self._line())
        except TimeoutError:
            raise EngineError(
                f"the keeper of the engines, process {self.pid}, does not answer within {PATIENCE:g} s: "
                f"end it and the engines with kill -9 {self.pid}, then call lab.start()"
            ) from None
        if "error" in reply:
            raise EngineError(f"cannot start {reply['error']}")
        return reply

    def _line(self):
        while b"\n" not in self._received:
            data = self._connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the keeper has ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def outlast(self):
        """Return when the keeper has ended; until then, what it keeps lives."""
        self._connection.settimeout(None)
        while self._connection.recv(1 << 16):
            pass

    def close(self):
        self._connection.close()


def start(path):
    """Start a keeper of the session directory `path`; it is already connected to this kernel."""
    mine, its = socket.socketpair(socket.AF_UNIX)
    with its, open(session_dir.log_file(path, "keeper"), "ab", opener=session_dir.readable_by_me) as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", keeper.__file__, path, str(its.fileno())],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    connection = KeeperConnection(mine)
    connection.pid = process.pid  # a socket pair knows only who made it
    connection.ask("status")
    return connection


class KeeperEnding(Exception):
    """The keeper is ending its cluster; in a moment its directory will be gone."""


def attach(path):
    """A connection to the keeper of the session directory `path`; None when none is alive. Raises KeeperEnding."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        os.close(session_dir.opened(path))  # what is there from now on, nobody else can replace
        connection.connect(session_dir.keeper_socket(path))
    except OSError:
        connection.close()
        return None
    attached = KeeperConnection(connection)
    try:
        attached.ask("status")
    except BaseException as error:
        attached.close()
        if isinstance(error, OSError):
            raise KeeperEnding from None
        raise
    return attached

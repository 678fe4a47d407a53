"""This kernel's connection to the supervisor: starting one, attaching to one that runs, and asking it for things."""

import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any, TypeAlias, cast

import psutil

from . import session_dir, supervisor
from .errors import EngineError

Reply: TypeAlias = dict[str, Any]
PATIENCE = 30.0  # seconds for an answer: the supervisor answers at once unless it kills many processes


class SupervisorConnection:
    """A connection to the supervisor, for requests. While it is open, the cluster lives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE)
        self._connection = connection
        self._received = b""
        self._numbers = itertools.count()
        self._asking = threading.Lock()  # waits for results of %px ask in the threads they are in
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid = struct.unpack("3i", credentials)[0]

    def ask(self, do: str, **content: object) -> Reply:
        """Return the supervisor's reply. Raises OSError if it is gone, EngineError if it is mute or could not do it."""
        number = next(self._numbers)
        reply: Reply = {}
        try:
            with self._asking:
                self._connection.sendall(json.dumps({"id": number, "do": do, **content}).encode() + b"\n")
                while reply.get("id") != number:  # an earlier one may lie there: the stop button broke off its request
                    reply = json.loads(self._line())
        except TimeoutError:
            raise EngineError(
                f"the supervisor of the engines, process {self.pid}, does not answer within {PATIENCE:g} s: "
                f"end it and the engines with kill -9 {self.pid}, then call lab.start()"
            ) from None
        if "error" in reply:
            raise EngineError(f"cannot start {reply['error']}")
        return reply

    def _line(self) -> bytes:
        while b"\n" not in self._received:
            data = self._connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the supervisor has ended")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def outlast(self) -> None:
        """Return when the supervisor has ended; until then, what it keeps lives."""
        self._connection.settimeout(None)
        while self._connection.recv(1 << 16):
            pass

    def close(self) -> None:
        self._connection.close()


def start(path: str) -> SupervisorConnection:
    """Start a supervisor of the session directory `path`; it is already connected to this kernel."""
    mine, its = socket.socketpair(socket.AF_UNIX)
    with its, open(session_dir.log_file(path, "supervisor"), "ab", opener=session_dir.readable_by_me) as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", supervisor.__file__, path, str(its.fileno())],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    connection = SupervisorConnection(mine)
    connection.pid = process.pid  # a socket pair knows only who made it
    connection.ask("status")
    return connection


class SupervisorEnding(Exception):
    """A supervisor that is ending its cluster; in a moment its directory will be gone."""


def attach(path: str) -> SupervisorConnection | None:
    """Connect to the supervisor of the session at `path`; None if none is alive. Raises SupervisorEnding."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        os.close(session_dir.open_session_dir(path))  # no other process can replace it from now on
        connection.connect(session_dir.supervisor_socket(path))
    except OSError:
        connection.close()
        return None
    attached = SupervisorConnection(connection)
    try:
        attached.ask("status")
    except BaseException as error:
        attached.close()
        if isinstance(error, OSError):
            raise SupervisorEnding from None
        raise
    return attached


def keep_up(path: str) -> None:
    """Start a process that uses the cluster at `path` as a notebook does; return when that lives without this one."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hpdl_lab.engines.supervisor_client", path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # it outlives the terminal
    )
    with cast("IO[bytes]", process.stdout) as said:
        if not said.readline():
            raise RuntimeError(
                f"the engines have ended already: the process that is to keep them up found none in {path}"
            )


def keeps_up(pid: int) -> bool:
    """Return True if process `pid` was started by `keep_up`."""
    with suppress(psutil.Error):
        return "hpdl_lab.engines.supervisor_client" in psutil.Process(pid).cmdline()
    return False


def _main() -> None:
    supervisor = attach(sys.argv[1])
    if supervisor is None:
        return
    print("kept", flush=True)
    supervisor.outlast()


if __name__ == "__main__":
    _main()

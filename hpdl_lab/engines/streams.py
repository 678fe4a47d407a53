"""Messages and streams of bytes between the relay and the node agents, on ZeroMQ with CURVE.

One connection carries JSON messages and any number of streams; each joins two Unix sockets:

    kernel === Unix socket === relay ~~~~ one TCP connection, encrypted ~~~~ node agent === Unix socket === engine

Both ends know each other by keys (CURVE, https://rfc.zeromq.org/spec/26): the relay lets in only who has the client's
key of this session, and an agent talks only to the relay whose public key it was given.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias

import zmq

Message: TypeAlias = dict[str, Any]
MESSAGE, OPEN, DATA, TAKEN, CLOSED, PING = b"m", b"o", b"d", b"t", b"c", b"p"
CHUNK = 1 << 18  # bytes of a stream in one message
WINDOW = 8  # chunks that wait for an end that reads slowly: messages overtake all others
HEARTBEAT, SILENCE = 3_000, 13_000  # ms between two; without any for so long, the other machine is considered dead
HANDSHAKE = 3_000  # ms for the exchange of keys: then a silent peer is dropped
LINGER = 1_000  # ms for what was sent last


def new_keys() -> dict[str, str]:
    """Make the keys of a session: of the relay, public and secret, and the same of its clients."""
    (relay, relay_secret), (client, client_secret) = zmq.curve_keypair(), zmq.curve_keypair()
    keys = {"relay": relay, "relay_secret": relay_secret, "client": client, "client_secret": client_secret}
    return {name: key.decode() for name, key in keys.items()}


def set_socket_options(socket: zmq.Socket, *addresses: str) -> None:
    """Set the options of both ends: no limit, as streams have their window; notice when the other machine dies."""
    socket.sndhwm = socket.rcvhwm = 0
    socket.linger = LINGER
    socket.setsockopt(zmq.IPV6, any(":" in address for address in addresses))
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE)


def endpoint(address: str, port: int | str) -> str:
    """Write an endpoint: "tcp://10.1.0.5:6000", "tcp://[fd00::1]:6000"."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


class Tasks(set[asyncio.Task]):
    """Work in the background, which the event loop itself would forget."""

    def begin(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self.add(task)
        task.add_done_callback(self.discard)

    def cancel(self) -> None:
        for task in list(self):
            task.cancel()


class _Stream:
    """An end of a stream: what has come, and how much may still be sent before the other end has taken some."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.window = asyncio.Semaphore(WINDOW)


class Connection:
    """An end of a connection. post(frames): sends a ZeroMQ message. first: of the numbers of streams opened here."""

    def __init__(self, post: Callable[[list[bytes]], object], first: int) -> None:
        self._post, self._next = post, first
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._streams: dict[int, _Stream] = {}
        self.ended = False

    def send(self, **content: object) -> None:
        """Send one message; nothing happens when the other end has gone, which `receive` says."""
        self._send(MESSAGE, json.dumps(content).encode())

    async def receive(self) -> Message | None:
        """Return the next message; None when the other end has gone."""
        return None if self.ended and self._messages.empty() else await self._messages.get()

    def take(self, frames: list[bytes]) -> None:
        """Take what has arrived."""
        kind, *rest = frames
        if kind == MESSAGE:
            self._messages.put_nowait(json.loads(rest[0]))
        elif kind == OPEN:
            self._streams[int(rest[0])] = _Stream()  # its first data may follow at once
            self._messages.put_nowait(json.loads(rest[1]) | {"open": int(rest[0])})
        elif kind != PING and (stream := self._streams.get(int(rest[0]))) is not None:
            if kind == TAKEN:
                stream.window.release()
            else:
                stream.received.put_nowait(rest[1] if kind == DATA else None)

    def ping(self) -> None:
        """Send what the other end ignores: an error tells that it has gone."""
        self._send(PING)

    def end(self) -> None:
        """End this connection: the other end has gone, or is to be let go."""
        if not self.ended:
            self.ended = True
            self._messages.put_nowait(None)
            for stream in self._streams.values():
                stream.received.put_nowait(None)

    def open(self, **content: object) -> int:
        """Open a stream, which the other end receives as a message {"open": number, **content}; return the number."""
        number, self._next = self._next, self._next + 2
        self._streams[number] = _Stream()
        self._send(OPEN, str(number).encode(), json.dumps(content).encode())
        return number

    async def carry(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Join an open stream with a Unix socket, until either end closes it."""
        stream = self._streams[number]
        pumps = [
            asyncio.create_task(self._outgoing(number, stream, reader)),
            asyncio.create_task(self._incoming(number, stream, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in pumps:
                task.cancel()
            writer.close()  # what has come by then goes out first
            self.close(number)

    def close(self, number: int) -> None:
        """Close a stream."""
        if self._streams.pop(number, None) is not None:
            self._send(CLOSED, str(number).encode())

    async def _outgoing(self, number: int, stream: _Stream, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                await stream.window.acquire()
                self._send(DATA, str(number).encode(), data)

    async def _incoming(self, number: int, stream: _Stream, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while (data := await stream.received.get()) is not None:
                writer.write(data)
                await writer.drain()
                self._send(TAKEN, str(number).encode())

    def _send(self, *frames: bytes) -> None:
        if not self.ended:
            self._post(list(frames))

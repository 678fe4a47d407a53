"""Connections that are joined to one, and messages on those that steer: what gateway, steward and outposts share.

How the two ends of a connection between machines know each other: a shared key, proved over an encrypted channel.

    node                                     gateway
      |  <------- TLS, no certificate ------>   |     encrypted, but with whom?
      |  <------------ nonce G --------------   |
      |  -- nonce N, HMAC(key, "node", G, N, C) |     C: what this TLS channel alone has (its "tls-unique")
      |  <--------- HMAC(key, "gateway", G, N, C)

The key comes from a file that only the user can read. Somebody in the middle would have two channels with two different
C, and somebody without the key no proof. Not a byte of the other end is interpreted before its proof was right.
Ref: RFC 2104 (HMAC), RFC 5929 (channel bindings), RFC 8422 (ECDH_anon).
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import socket
import ssl
from contextlib import suppress

NONCE = 32  # bytes
PROOF = hashlib.sha256().digest_size
SECONDS = 15.0  # for TLS and proofs together: who does not prove itself in time holds no connection
ANONYMOUS = "AECDH-AES256-SHA:@SECLEVEL=0"  # the level refuses whatever has no certificate: the key stands in for it
KEEPALIVE = {  # a machine that has lost its power says no farewell: 13 s without any answer are one
    socket.TCP_KEEPIDLE: 4,
    socket.TCP_KEEPINTVL: 3,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 13_000,
}
LIMIT = 1 << 20  # bytes that wait in memory for an end that reads slowly
UNPROVED, OF_ONE = 512, 256  # connections that have not proved themselves yet: all of them, those of one address
FULL = 0.05  # s until the next try where the system has no place for one more connection


class Stranger(ConnectionError):
    """The other end does not have the key."""


def new_key():
    """A fresh key, as text."""
    return os.urandom(NONCE).hex()


def tls_context(side):
    """The TLS context of "node" or "gateway". Raises OSError where this Python's OpenSSL has no such cipher."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if side == "gateway" else ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.maximum_version = ssl.TLSVersion.TLSv1_2  # 1.3 knows no way without certificates that Python 3.11 could use
    try:
        made.set_ciphers(ANONYMOUS)
    except ssl.SSLError:
        raise OSError(
            f"{ssl.OPENSSL_VERSION} refuses TLS without certificates ({ANONYMOUS}), as in FIPS mode: "
            "engines on other machines need a Python with another OpenSSL"
        ) from None
    made.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    return made


class Entrance:
    """The gateway's side of connections, until they are proved; of too many, the oldest is closed.

    Whoever connects and says nothing takes no place from a node, which proves itself within milliseconds.
    """

    def __init__(self):
        self.unproved = {}  # name of the other end: socket; the oldest first
        self.tasks = set()

    async def serve(self, listener, answer):
        """Encrypt each connection to the listening socket, then call `answer(reader, writer)`; it calls `leave`."""
        loop, tls = asyncio.get_running_loop(), tls_context("gateway")
        listener.setblocking(False)
        while True:
            try:
                connection, peer = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(FULL)
                continue
            of_one = [other for other in self.unproved if other[0] == peer[0]]
            if len(of_one) >= OF_ONE or len(self.unproved) >= UNPROVED:
                self.close(of_one[0] if len(of_one) >= OF_ONE else next(iter(self.unproved)))
            self.unproved[peer] = connection
            task = asyncio.create_task(self.encrypt(connection, peer, answer, tls))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def encrypt(self, connection, peer, answer, tls):
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(LIMIT), answer)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=SECONDS
            )
        except OSError:
            self.leave(peer)

    def close(self, peer):
        """Close the connection; whoever waits for its other end is told."""
        with contextlib.suppress(OSError):  # it is closed
            self.unproved.pop(peer).shutdown(socket.SHUT_RDWR)

    def leave(self, peer):
        """The other end has proved itself, or has gone."""
        self.unproved.pop(peer, None)


async def connect_proved(address, port, key, seconds=SECONDS):
    """(reader, writer) of a connection from a node to the gateway, both proved.

    Raises: OSError, Stranger and TimeoutError among them.
    """
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(address, port, ssl=tls_context("node"), limit=LIMIT)
        try:
            keep_alive(writer)
            theirs, mine = await exactly(reader, NONCE), os.urandom(NONCE)
            writer.write(mine + proof(key, b"node", theirs, mine, writer))
            if not hmac.compare_digest(await exactly(reader, PROOF), proof(key, b"gateway", theirs, mine, writer)):
                raise Stranger(f"{address}:{port} is not the gateway of this session")
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer


async def prove_accepted(reader, writer, key):
    """The gateway's part on a new TLS connection. Raises OSError: closed, too late, or a Stranger."""
    async with asyncio.timeout(SECONDS):
        keep_alive(writer)
        mine = os.urandom(NONCE)
        writer.write(mine)
        theirs = await exactly(reader, NONCE)
        if not hmac.compare_digest(await exactly(reader, PROOF), proof(key, b"node", mine, theirs, writer)):
            raise Stranger(f"{writer.get_extra_info('peername')[0]} does not have the key of this session")
        writer.write(proof(key, b"gateway", mine, theirs, writer))


def proof(key, side, gateway_nonce, node_nonce, writer):
    """What only an end of this very channel that has the key can say."""
    channel = writer.get_extra_info("ssl_object").get_channel_binding("tls-unique")
    return hmac.digest(bytes.fromhex(key), side + gateway_nonce + node_nonce + channel, "sha256")


async def exactly(reader, nbytes):
    try:
        return await reader.readexactly(nbytes)
    except asyncio.IncompleteReadError:
        raise Stranger("the other end has closed the connection before it had proved itself") from None


def keep_alive(writer):
    """Let the system notice when the machine at the other end is gone."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


CHUNK = 1 << 18  # bytes


class Steering:
    """A connection that carries one JSON object per line. Its ends have proved who they are."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def send(self, **content):
        """Send one message; nothing happens when the other end has gone, which `receive` tells."""
        if not self.writer.is_closing():
            self.writer.write(json.dumps(content).encode() + b"\n")

    async def receive(self):
        """The next message (dict); None when the other end has gone."""
        try:
            line = await self.reader.readline()
        except (OSError, ValueError):  # ValueError: a line beyond the limit
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    async def finish(self):
        """Close when all that was sent is out."""
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    def abort(self):
        """Close at once."""
        self.writer.transport.abort()


async def join(one, other):
    """Make one connection of two (reader, writer), until either end closes it."""
    pumps = [asyncio.create_task(pump(one[0], other[1])), asyncio.create_task(pump(other[0], one[1]))]
    try:
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in pumps:
            task.cancel()
        for _, writer in (one, other):
            writer.close()  # what had been read by then goes out first


async def pump(reader, writer):
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()


async def serve_unix(path, answer):
    """Call `answer(reader, writer)` for each connection to the Unix socket `path`; who finds it can connect."""
    server = await asyncio.start_unix_server(answer, f"{path}.new")
    os.rename(f"{path}.new", path)
    return server

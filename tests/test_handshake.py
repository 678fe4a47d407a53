"""Connections between machines: only who has the key gets in, nobody in the middle, and a wiretap reads nothing."""

import asyncio
import contextlib
import json
import os
import resource
import ssl
import subprocess
import sys
import time

import pytest

from hpdl_lab.engines import reach, session_dir, tunnel

KEY, OTHER = tunnel.new_key(), tunnel.new_key()
SECRET = b"what an attendee computes" * 40


class Gateway:
    """Accepts connections as gateway.py does and sends SECRET to whom it accepts."""

    def __init__(self):
        self.accepted, self.refused = 0, []
        self.change = asyncio.Condition()

    async def on_node(self, reader, writer):
        try:
            await tunnel.prove_accepted(reader, writer, KEY)
        except (OSError, TimeoutError) as error:
            self.refused.append(error)
            writer.transport.abort()
        else:
            self.accepted += 1
            writer.write(SECRET)
            await writer.drain()
            writer.close()
        async with self.change:
            self.change.notify_all()

    async def until(self, true):
        """Return when `true()`."""
        async with self.change, asyncio.timeout(30):
            await self.change.wait_for(true)


@contextlib.asynccontextmanager
async def gateway():
    """A (Gateway, port) on the loopback address."""
    one = Gateway()
    server = await asyncio.start_server(
        one.on_node, "127.0.0.1", 0, ssl=tunnel.tls_context("gateway"), ssl_handshake_timeout=30
    )
    async with server:
        yield one, server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def between(port, seen):
    """A port whose bytes pass to `port` and back, and are kept in `seen`."""

    async def copy(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                seen.extend(data)
                writer.write(data)
        writer.close()

    async def on_connection(reader, writer):
        streams = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, streams[1]), copy(streams[0], writer))

    async with await asyncio.start_server(on_connection, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def in_the_middle(port):
    """A port that speaks TLS with either end, without the key, and passes on all that they say."""

    async def copy(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    async def on_node(reader, writer):
        streams = await asyncio.open_connection("127.0.0.1", port, ssl=tunnel.tls_context("node"))
        await asyncio.gather(copy(reader, streams[1]), copy(streams[0], writer))

    context = tunnel.tls_context("gateway")
    async with await asyncio.start_server(on_node, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


def test_who_has_the_key_gets_in_and_a_wiretap_reads_nothing():
    async def both():
        seen = bytearray()
        async with gateway() as (one, port), between(port, seen) as tapped:
            reader, writer = await tunnel.connect_proved("127.0.0.1", tapped, KEY)
            assert await reader.read(-1) == SECRET
            assert writer.get_extra_info("ssl_object").cipher()[2] == 256  # bits
            writer.close()
            assert (one.accepted, one.refused) == (1, [])
        assert len(seen) > len(SECRET)
        assert SECRET[:25] not in seen and KEY.encode() not in seen and bytes.fromhex(KEY) not in seen

    asyncio.run(both())


def test_who_has_another_key_stays_outside():
    async def stranger():
        async with gateway() as (one, port):
            with pytest.raises(tunnel.Stranger):
                await tunnel.connect_proved("127.0.0.1", port, OTHER)
            await one.until(lambda: one.refused)
            assert one.accepted == 0
            assert "does not have the key of this session" in str(one.refused[0])

    asyncio.run(stranger())


def test_a_node_tells_nothing_to_a_gateway_without_the_key():
    async def pretender(reader, writer):
        writer.write(b"n" * tunnel.NONCE)
        await reader.readexactly(tunnel.NONCE + tunnel.PROOF)
        writer.write(b"p" * tunnel.PROOF)

    async def node():
        context = tunnel.tls_context("gateway")
        async with await asyncio.start_server(pretender, "127.0.0.1", 0, ssl=context) as server:
            with pytest.raises(tunnel.Stranger, match="is not the gateway of this session"):
                await tunnel.connect_proved("127.0.0.1", server.sockets[0].getsockname()[1], KEY)

    asyncio.run(node())


def test_nobody_in_the_middle_passes_proofs_on():
    """Both ends have the key; who sits between them has two channels, whose bindings differ."""

    async def both():
        async with gateway() as (one, port), in_the_middle(port) as middle:
            with pytest.raises(tunnel.Stranger):
                await tunnel.connect_proved("127.0.0.1", middle, KEY)
            await one.until(lambda: one.refused)
            assert one.accepted == 0

    asyncio.run(both())


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 400, b""], ids=["http", "noise", "eof"]
)
def test_what_speaks_no_tls_is_let_go(said):
    async def somebody():
        async with gateway() as (one, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(said)
            if not said:
                writer.write_eof()
            with contextlib.suppress(OSError):
                async with asyncio.timeout(30):
                    await reader.read(-1)  # until the gateway closes
            writer.close()
            assert one.accepted == 0

    asyncio.run(somebody())


def test_who_says_nothing_holds_no_connection(monkeypatch):
    monkeypatch.setattr(tunnel, "SECONDS", 0.3)

    async def silent():
        async with gateway() as (one, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tunnel.tls_context("node"))
            await one.until(lambda: one.refused)
            assert isinstance(one.refused[0], TimeoutError) and one.accepted == 0
            writer.transport.abort()

    asyncio.run(silent())


FILES = 700  # that the gateway of these tests may open
SILENT = 1000


@pytest.fixture
def serving(tmp_path, eventually):
    """(port, connect) of a gateway as it runs for a session: connect(seconds) is a node that has the key."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < SILENT + 200:
        pytest.skip(f"a process may open {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    run = tmp_path / "run"
    run.mkdir()
    place = {"HPDL_ADDRESS": "127.0.0.1", "HPDL_PORTS": "0-0", "HPDL_SHARED": str(tmp_path / "shared")}
    limited = ["prlimit", f"--nofile={FILES // 3}:{FILES}", sys.executable]
    command = [*limited, "-m", "hpdl_lab.engines.gateway", run, ""]
    with subprocess.Popen(command, env=os.environ | place, stderr=subprocess.DEVNULL) as gateway:
        eventually(lambda: os.path.exists(session_dir.gateway_file(run)))
        with open(session_dir.gateway_file(run)) as file:
            shared = json.load(file)["shared"]
        with open(reach.shared_gateway_file(shared)) as file:
            told = json.load(file)
        assert resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE) == (FILES, FILES)
        yield told["port"], lambda seconds: tunnel.connect_proved("127.0.0.1", told["port"], told["key"], seconds)
        gateway.terminate()
        assert gateway.wait(30) == 0


async def silent(port, n):
    """Connections that say nothing: `n`, or as many as the gateway takes within 5 s."""
    opened, end = [], time.monotonic() + 5
    while len(opened) < n and time.monotonic() < end:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.5):  # for a SYN to be repeated
                opened.append(await asyncio.open_connection("127.0.0.1", port))
    return [writer.transport for _, writer in opened]


def test_a_thousand_silent_connections_keep_no_node_out(serving, within):
    """Attack: connections that never prove themselves took all files that the gateway may open, for 15 s each."""

    async def node():
        port, connect = serving
        opened = await silent(port, SILENT)
        for _ in range(5):
            t0 = time.monotonic()
            _, writer = await connect(within(8))
            assert time.monotonic() - t0 < within(3)  # one repeated SYN is 1 s
            writer.close()
        for one in opened:
            one.abort()

    asyncio.run(node())


def test_who_is_encrypted_and_silent_makes_room_as_well(serving, within):
    async def attack():
        tls = tunnel.tls_context("node")
        first, *others = [
            await asyncio.open_connection("127.0.0.1", serving[0], ssl=tls) for _ in range(tunnel.OF_ONE + 1)
        ]
        async with asyncio.timeout(within(5)):
            assert len(await first[0].read()) == tunnel.NONCE  # and the end, long before its time is over
        for _, writer in (first, *others):
            writer.transport.abort()

    asyncio.run(attack())


def test_who_has_proved_itself_is_not_closed_for_others(serving, within):
    async def attack():
        port, connect = serving
        reader, node = await connect(within(8))
        opened = await silent(port, SILENT)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await reader.read()
        node.transport.abort()
        for one in opened:
            one.abort()

    asyncio.run(attack())


def test_a_browser_or_a_scanner_finds_no_common_cipher():
    async def scanner():
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        async with gateway() as (one, port):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection("127.0.0.1", port, ssl=context)
            assert one.accepted == 0

    asyncio.run(scanner())

"""Connections between machines: only who has the key gets in, a wiretap reads nothing, streams keep their order."""

import asyncio
import contextlib
import os
import resource
import socket
import time

import pytest
import zmq.asyncio

from hpdl_lab.engines import node_agent, relay, streams

SECRET = "what an attendee computes" * 40
KEYS = streams.new_keys()


class Greeter(relay.Relay):
    """A relay that says SECRET to whoever gets in, and carries a stream to whatever listens at `path`."""

    came = 0

    async def on_node(self, who, connection):
        assert (await connection.receive())["role"] == "test"
        self.came += 1
        connection.send(secret=SECRET)
        while message := await connection.receive():
            ends = await asyncio.open_unix_connection(self.path)
            self.tasks.begin(connection.carry(message["open"], *ends))


@contextlib.asynccontextmanager
async def greeting(path=""):
    """(a Greeter, what a node agent needs to know of it)."""
    context = zmq.asyncio.Context()
    router, port, authenticator = relay.listen(context, KEYS, ["127.0.0.1"])
    greeter = Greeter(path, router)
    for work in (greeter.route(), greeter.ping()):
        greeter.tasks.begin(work)
    yield greeter, {"addresses": ["127.0.0.1"], "port": port, "keys": KEYS}
    for task in list(greeter.tasks):
        task.cancel()
    authenticator.stop()
    context.destroy(linger=0)


def run(test):
    asyncio.run(asyncio.wait_for(test(), 50))


def test_who_has_the_key_gets_in_and_a_wiretap_reads_nothing():
    seen = bytearray()

    async def tapped(reader, writer, port):
        async def copy(reader, writer):
            with contextlib.suppress(OSError):
                while data := await reader.read(1 << 16):
                    seen.extend(data)
                    writer.write(data)
            writer.close()

        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))

    async def test():
        async with greeting() as (greeter, known):
            tap = await asyncio.start_server(lambda *ends: tapped(*ends, known["port"]), "127.0.0.1", 0)
            through = known | {"port": tap.sockets[0].getsockname()[1]}
            async with node_agent.connected(through, role="test") as (_, welcome, own):
                assert welcome == {"secret": SECRET} and own == "127.0.0.1"
            assert greeter.came == 1
        assert len(seen) > len(SECRET)
        assert not any(text.encode() in seen for text in (SECRET[:25], "role", KEYS["client_secret"]))

    run(test)


@pytest.mark.parametrize("whose", ["client", "relay"])
def test_without_the_right_keys_nobody_learns_anything(whose, monkeypatch):
    """An agent of another session; and a relay that only pretends to be the one of this session."""
    monkeypatch.setattr(node_agent, "EACH", 2.0)
    other = {name: key for name, key in streams.new_keys().items() if name.startswith(whose)}

    async def test():
        async with greeting() as (greeter, known):
            with pytest.raises(node_agent.Unreached, match="cannot reach the relay"):
                async with node_agent.connected(known | {"keys": KEYS | other}, role="test"):
                    pass
            assert greeter.came == 0 and greeter.connections == {}

    run(test)


def test_what_speaks_another_protocol_is_let_go_and_a_closed_port_is_named():
    async def test():
        async with greeting() as (greeter, known):
            reader, writer = await asyncio.open_connection("127.0.0.1", known["port"])
            writer.write(b"GET / HTTP/1.1\r\nHost: relay\r\n\r\n" * 10)
            with contextlib.suppress(ConnectionResetError):
                await reader.read()  # until the relay closes
            writer.close()
            assert greeter.came == 0
        with pytest.raises(node_agent.Unreached, match=r"127.0.0.1: .*refused.*HPDL_ADDRESS"):
            async with node_agent.connected(known, role="test"):
                pass

    run(test)


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="too few files may be opened here")
def test_a_thousand_silent_connections_keep_no_node_out(within):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def test():
        async with greeting() as (_, known):
            silent = [socket.create_connection(("127.0.0.1", known["port"])) for _ in range(1000)]
            begin = time.monotonic()
            async with node_agent.connected(known, role="test"):
                assert time.monotonic() - begin < within(3)
            for one in silent:
                one.close()

    run(test)


def test_a_stream_keeps_its_order_and_messages_overtake_it(tmp_path):
    path, sent, taken = str(tmp_path / "s"), os.urandom(40 << 20), bytearray()

    async def slow_reader(reader, writer):
        await asyncio.sleep(0.5)
        while data := await reader.read(1 << 20):
            taken.extend(data)
        writer.write(b"all of it")  # the other end has closed: nobody reads this
        writer.close()

    async def test():
        server = await relay.serve_unix(path, slow_reader)
        async with greeting(path) as (greeter, known), node_agent.connected(known, role="test") as (agent, *_):
            (connection,) = greeter.connections.values()
            number = agent.open()
            mine, theirs = socket.socketpair()
            ends = await asyncio.open_unix_connection(sock=theirs)
            carrying = asyncio.create_task(agent.carry(number, *ends))
            writing = asyncio.create_task(asyncio.to_thread(mine.sendall, sent))
            await asyncio.sleep(0.2)
            connection.send(hello=True)  # while the stream is full
            assert await agent.receive() == {"hello": True} and not writing.done()
            await writing
            mine.close()
            await carrying
            while len(taken) < len(sent):
                await asyncio.sleep(0.01)
            assert taken == sent
        server.close()

    run(test)


def test_both_ends_notice_that_the_other_has_gone():
    async def test():
        async with greeting() as (greeter, known):
            async with node_agent.connected(known, role="test"):
                (connection,) = greeter.connections.values()
            while not connection.ended:
                await asyncio.sleep(0.05)
            async with node_agent.connected(known, role="test") as (agent, *_):
                greeter.router.close(linger=0)
                assert await agent.receive() is None

    run(test)

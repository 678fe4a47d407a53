"""Connections that are joined to one, and messages on those that steer: what gateway, steward and outposts share."""

import asyncio
import json
import os
from contextlib import suppress

CHUNK = 1 << 18  # bytes


class Steering:
    """A connection that carries one JSON object per line. Its ends have proved who they are (handshake.py)."""

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

r"""The gateway: the process by which engines on other machines appear in the session directory as if they were here.

    kernel --- rank-3.sock --\                                    /-- outpost of rank 3 --- engine 3   (node n2)
    step ----- gateway.sock --- gateway === one TCP port, TLS ===-- steward --- mpiexec                (node n1)
    controller --- px:1..15 -/                                    \-- outpost of rank 0 --- engine 0   (node n1)

Everything on this side is a Unix socket or a file of the session directory, as with engines of this machine, so that
kernels, keeper and controller need not know where engines are. Everything on the other side is a connection that a node
has made, encrypted and proved (tunnel.py). Its first message says what it is for:

    {"role": "job", "node"}                     the steward of the job (steward.py): it starts engines, again and again
    {"role": "engine", "step", "rank", "node"}  the outpost of one engine (outpost.py), which lives as long as that
    {"role": "kernel", "number"}                to be joined with the connection of a kernel that waits for it
    {"role": "px", "channel"}                   to be joined with a socket of ipyparallel's controller

The keeper starts it as `python -m hpdl_lab.engines.gateway DIRECTORY PARTITION`. It interprets nothing of what passes
between kernels and engines.
"""

import asyncio
import itertools
import json
import os
import resource
import signal
import sys
from contextlib import suppress

from ..features import Missing
from . import reach, session_dir, tunnel

LOOK, WATCH = 0.02, 0.25  # s between two looks: for a file that is to come, at the state of the job


class Step:
    """The engines of one start: what the notebook's side (step.py) asked for, and the outposts that have come."""

    def __init__(self, number, writer):
        self.number, self.writer = number, writer
        self.outposts = {}  # rank -> Steering
        self.joined = {}  # rank -> writers of the kernels that are connected to it

    def end(self):
        """Let outposts end their engines, and step.py itself."""
        for outpost in self.outposts.values():
            outpost.writer.close()
        self.writer.close()


class Gateway:
    """Serves the session directory `path`; nodes prove that they have `key`."""

    def __init__(self, path, key):
        self.path, self.key = path, key
        self.entrance = tunnel.Entrance()
        self.steward = None  # Steering
        self.steward_came = asyncio.Event()
        self.step = None  # the Step that runs
        self.numbers = itertools.count(1)
        self.waiting = {}  # number -> (rank, reader, writer) of a kernel whose engine shall connect
        self.roles = {"job": self.on_steward, "engine": self.on_outpost, "kernel": self.on_stream, "px": self.on_px}

    # -- from the nodes -----------------------------------------------------------------------------------------------

    async def on_node(self, reader, writer):
        """A node has connected."""
        try:
            await tunnel.prove_accepted(reader, writer, self.key)
        except (OSError, TimeoutError) as error:
            say(f"refused a connection: {error or 'it did not prove itself in time'}")
            return writer.transport.abort()
        finally:
            self.entrance.leave(writer.get_extra_info("peername"))
        peer = tunnel.Steering(reader, writer)
        try:
            if hello := await peer.receive():
                await self.roles[hello.pop("role")](peer, **hello)
        finally:
            writer.close()
        return None

    async def on_steward(self, peer, node):
        """Pass on what the engines of the job print, until the job is over."""
        if self.steward is not None:
            return  # Slurm has started the job a second time: its engines are not wanted any more
        say(f"the job has come, from {node}")
        self.steward = peer
        self.steward_came.set()
        while told := await peer.receive():
            if self.step is not None and told["step"] == self.step.number:
                if "said" in told:
                    self.step.writer.write(told["said"].encode())
                else:
                    self.step.end()
        self.end_of_job("its first process has gone")

    def end_of_job(self, why):
        """No engine of the job will say anything any more: let those go that do not know."""
        say(f"the job has ended: {why}")
        for outpost in self.step.outposts.values() if self.step else ():
            outpost.abort()

    async def watch_job(self):
        """Slurm may know of the end of the job long before a connection to a machine without power breaks."""
        while True:
            await asyncio.sleep(WATCH)
            with suppress(OSError), open(session_dir.job_file(self.path)) as file:
                if (told := json.load(file))["state"] == "ended":
                    return self.end_of_job(told["text"])

    async def on_outpost(self, peer, step, rank, node):
        """Make engine `rank` appear in the session directory, and write there how it ended."""
        if self.step is None or self.step.number != step or rank in self.step.outposts:
            return
        step = self.step
        step.outposts[rank], step.joined[rank] = peer, set()
        connection_file = session_dir.connection_file(self.path, "engine")
        while not os.path.exists(connection_file):
            await asyncio.sleep(LOOK)
            if self.step is not step:
                return
        with open(connection_file) as file:
            peer.send(connection=json.load(file))
        server, ending = None, f"vanished with node {node}"
        while told := await peer.receive():
            if "exit" in told:
                ending = str(told["exit"])
                break
            server = await tunnel.serve_unix(
                session_dir.engine_socket(self.path, rank), lambda *streams: self.on_kernel(step, rank, *streams)
            )
        if self.step is step:  # else it was ended because nobody wants it any more
            session_dir.write(session_dir.exit_file(self.path, rank), ending)
        if server is not None:
            server.close()
        for writer in step.joined.pop(rank):
            writer.close()
        while await peer.receive():  # it stays until the step ends: to mpiexec, it would be a rank that has crashed
            pass

    async def on_stream(self, peer, number):
        """The engine's end of a connection from a kernel."""
        if number in self.waiting:
            _, reader, writer = self.waiting.pop(number)
            await tunnel.join((reader, writer), (peer.reader, peer.writer))

    async def on_px(self, peer, channel):
        """An engine connects to a socket of ipyparallel's controller."""
        if channel not in range(1, session_dir.PX_CHANNELS + 1):
            return
        with suppress(OSError):  # no controller is there: ZeroMQ tries again
            streams = await asyncio.open_unix_connection(f"{session_dir.px_sockets(self.path)}:{channel}")
            await tunnel.join((peer.reader, peer.writer), streams)

    # -- from this machine --------------------------------------------------------------------------------------------

    async def on_kernel(self, step, rank, reader, writer):
        """A kernel has connected to engine `rank`: have its outpost make a connection for it."""
        if rank not in step.joined:
            return writer.close()
        number = next(self.numbers)
        self.waiting[number] = rank, reader, writer
        step.joined[rank].add(writer)
        step.outposts[rank].send(open=number)
        try:
            await writer.wait_closed()
        except OSError:
            pass
        finally:
            self.waiting.pop(number, None)
            step.joined.get(rank, set()).discard(writer)
        return None

    async def on_step(self, reader, writer):
        """step.py asks for engines; they end when it does."""
        request = json.loads(await reader.readline() or "null")
        if request is None:
            return writer.close()
        step = self.step = Step(next(self.numbers), writer)
        started = asyncio.create_task(self.start(step, request))
        with suppress(OSError):
            await reader.read()  # until it ends
        started.cancel()
        if self.step is step:
            self.step = None
            if self.steward is not None:
                self.steward.send(kill=step.number)
        step.end()
        return None

    async def start(self, step, request):
        await self.steward_came.wait()
        self.steward.send(start=step.number, **request)


async def serve(path, partition):
    """Open the port and the sockets, and write where they are; returns on SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    key, addresses = tunnel.new_key(), reach.addresses(partition)
    sockets, port = reach.listeners(addresses, reach.ports())
    gateway = Gateway(path, key)
    doors = [asyncio.create_task(gateway.entrance.serve(opened, gateway.on_node)) for opened in sockets]
    await tunnel.serve_unix(session_dir.gateway_socket(path), gateway.on_step)
    watching = asyncio.create_task(gateway.watch_job())
    with reach.shared_folder() as shared:
        where = {"addresses": addresses, "port": port}
        session_dir.write(reach.shared_gateway_file(shared), json.dumps(where | {"key": key}))
        session_dir.write(session_dir.gateway_file(path), json.dumps(where | {"shared": shared}))
        await ended.wait()
    for task in (watching, *doors):
        task.cancel()


def say(text):
    print(text, file=sys.stderr, flush=True)


def main():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        asyncio.run(serve(sys.argv[1], sys.argv[2] or None))
    except (OSError, Missing) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()

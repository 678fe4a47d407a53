r"""The relay: the process by which engines on other machines appear in the session directory as if they were here.

    kernel --- rank-3.sock --\                                     /-- node agent --- engine 3             (node n2)
    step ----- relay.sock ---- relay === one TCP port, CURVE ======--- job agent --- mpiexec               (node n1)
    controller --- px:1..15 -/                                     \-- node agent --- engine 0             (node n1)

Everything on this side is a Unix socket or a file of the session directory, as with engines of this machine, so that
kernels, supervisor and controller need not know where engines are. Everything on the other side is a connection that a
node has made (streams.py), with one TCP connection for the job and one for each engine. Its first message says which:

    {"role": "job", "node"}                     of the job (node_agent.py): it starts engines, again and again
    {"role": "engine", "step", "rank", "node"}  of one engine, as long as that lives

    {"role": "host", "host", "node"}            of a host of an ipyparallel cluster: it starts the ranks there

The supervisor starts it as `python -m hpdl_lab.engines.relay DIRECTORY WHERE`, WHERE in JSON: {"slurm": partition or
null}, or {"addresses": of this machine}. It interprets nothing of what passes between kernels and engines.
"""

import asyncio
import itertools
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from ..features import Missing
from . import session_dir, slurm, streams

LOOK, WATCH = 0.02, 0.25  # s between two looks: for a file that is to come, at the state of the job
PING = 1.0  # s
TRIES = 50  # ports


class Step:
    """The engines of one start: what the notebook's side (remote.py) asked for, and the agents that have come."""

    def __init__(self, number: int, writer: asyncio.StreamWriter) -> None:
        self.number, self.writer = number, writer
        self.agents: dict[int, streams.Connection] = {}  # by rank
        self.nodes: dict[int, str] = {}  # likewise
        self.kernels: dict[int, set[asyncio.StreamWriter]] = {}  # rank -> of the kernels that are connected to it

    def end(self) -> None:
        """Let agents end their engines, and the process that asked for them."""
        for agent in self.agents.values():
            agent.send(end=True)
        self.writer.close()


class Relay:
    """A relay that serves the session directory `path` on the ROUTER socket `router`."""

    def __init__(self, path: str, router: zmq.asyncio.Socket) -> None:
        self.path, self.router = path, router
        self.connections: dict[bytes, streams.Connection] = {}
        self.tasks = streams.Tasks()
        self.job: streams.Connection | None = None
        self.hosts: dict[int, streams.Connection] = {}  # of an ipyparallel cluster, by number
        self.job_came = asyncio.Event()
        self.step: Step | None = None
        self.numbers = itertools.count(1)

    # -- from the nodes -----------------------------------------------------------------------------------------------

    async def route(self) -> None:
        """Hand what arrives to the connection that it belongs to."""
        while True:
            who, *frames = await self.router.recv_multipart()
            if who not in self.connections:
                connection = streams.Connection(lambda frames, who=who: self.post(who, frames), first=0)
                self.connections[who] = connection
                self.tasks.begin(self.on_node(who, connection))
            self.connections[who].take(frames)

    def post(self, who: bytes, frames: list[bytes]) -> None:
        """Send `frames` to a node; a connection that is not there any more has ended."""

        def sent(future: asyncio.Future[Any]) -> None:
            if not future.cancelled() and future.exception() and who in self.connections:
                self.connections[who].end()

        asyncio.ensure_future(self.router.send_multipart([who, *frames])).add_done_callback(sent)

    async def ping(self) -> None:
        """Notice connections that have gone."""
        while True:
            await asyncio.sleep(PING)
            for connection in list(self.connections.values()):
                connection.ping()

    async def on_node(self, who: bytes, connection: streams.Connection) -> None:
        """Serve a node that has connected, and has the key."""
        hello = await connection.receive() or {}
        role = hello.pop("role", "")
        try:
            if role == "job":
                await self.on_job(connection, **hello)
            elif role == "engine":
                await self.on_agent(connection, **hello)
            elif role == "host":
                await self.on_host(connection, **hello)
        finally:
            connection.send(end=True)  # if it has not gone
            connection.end()
            del self.connections[who]

    async def on_job(self, job: streams.Connection, node: str) -> None:
        """Pass on what the engines of the job print, until the job is over."""
        if self.job is not None:
            return  # Slurm has started the job a second time: its engines are not wanted any more
        _say(f"the job has come, from {node}")
        self.job = job
        job.send(welcome=True)
        self.job_came.set()
        while message := await job.receive():
            if self.step is not None and message["step"] == self.step.number:
                if "output" in message:
                    self.step.writer.write(message["output"].encode())
                elif "launch" in message:
                    if host := self.hosts.get(message["host"]):
                        host.send(launch=message["launch"], step=self.step.number)
                    else:
                        self.step.writer.write(f"host {message['host']} of the cluster has gone\n".encode())
                        self.step.end()
                else:
                    self.step.end()
        self.end_of_job("its first process has gone")

    async def on_host(self, connection: streams.Connection, host: int, node: str) -> None:
        """Take a host on which ranks can be started; when it goes, so do the engines there."""
        self.hosts[host] = connection
        connection.send(welcome=True)
        while (message := await connection.receive()) and "leave" not in message:
            pass
        if self.hosts.get(host) is connection:
            del self.hosts[host]
            if (step := self.step) is not None:
                for rank in (rank for rank, there in step.nodes.items() if there == node):
                    step.agents[rank].send(end=True)  # they end without a trace: mpiexec would kill them
                    step.agents[rank].end()

    def end_of_job(self, why: str) -> None:
        """End the agents that have not noticed that the job is over."""
        _say(f"the job has ended: {why}")
        for agent in self.step.agents.values() if self.step else ():
            agent.send(end=True)
            agent.end()

    async def watch_job(self) -> None:
        """End with the job as Slurm sees it: the connection to a machine without power breaks much later."""
        while True:
            await asyncio.sleep(WATCH)
            with suppress(OSError), open(session_dir.job_file(self.path)) as file:
                if (job := json.load(file))["state"] == "ended":
                    return self.end_of_job(job["text"])

    async def on_agent(self, agent: streams.Connection, step: int, rank: int, node: str) -> None:
        """Make engine `rank` appear in the session directory, and write there how it ended."""
        if self.step is None or self.step.number != step or rank in self.step.agents:
            return
        mine = self.step
        mine.agents[rank], mine.kernels[rank] = agent, set()
        mine.nodes[rank] = node
        connection_file = session_dir.connection_file(self.path, "engine")
        while not os.path.exists(connection_file):
            await asyncio.sleep(LOOK)
            if self.step is not mine:
                return
        with open(connection_file) as file:
            agent.send(welcome=True, connection=json.load(file))
        server, ending = None, f"vanished with node {node}"
        while message := await agent.receive():
            if "exit" in message:
                ending = str(message["exit"])
                break
            if "px" in message:
                self.tasks.begin(self.on_px(agent, message["px"], message["open"]))
            else:
                server = await serve_unix(
                    session_dir.engine_socket(self.path, rank),
                    lambda reader, writer: self.on_kernel(mine, rank, reader, writer),
                )
        if self.step is mine:  # else it was ended because it is not wanted any more
            session_dir.write_private_file(session_dir.exit_file(self.path, rank), ending)
        if server is not None:
            server.close()
        for writer in mine.kernels.pop(rank):
            writer.close()
        while await agent.receive():  # it stays until the step ends: to mpiexec, it would be a rank that has crashed
            pass

    async def on_px(self, agent: streams.Connection, channel: int, number: int) -> None:
        """Connect an engine to a socket of ipyparallel's controller."""
        try:
            if channel not in range(1, session_dir.PX_CHANNELS + 1):
                raise OSError
            ends = await asyncio.open_unix_connection(f"{session_dir.px_sockets(self.path)}:{channel}")
        except OSError:  # no controller is there: ipyparallel tries again
            return agent.close(number)
        return await agent.carry(number, *ends)

    # -- from this machine --------------------------------------------------------------------------------------------

    async def on_kernel(
        self, step: Step, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a kernel that has connected to engine `rank`: have the agent connect to the engine."""
        if rank not in step.kernels:
            return writer.close()
        step.kernels[rank].add(writer)
        agent = step.agents[rank]
        await agent.carry(agent.open(), reader, writer)
        step.kernels.get(rank, set()).discard(writer)
        return None

    async def on_step(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Start engines for remote.py; they end when it does."""
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
            if self.job is not None:
                self.job.send(kill=step.number)
        step.end()
        return None

    async def start(self, step: Step, request: streams.Message) -> None:
        await self.job_came.wait()
        assert self.job is not None
        self.job.send(start=step.number, **request)


async def serve_unix(
    path: str, answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> asyncio.Server:
    """Call `answer(reader, writer)` for each connection to the Unix socket `path`, which appears once it is usable."""
    server = await asyncio.start_unix_server(answer, f"{path}.new")
    os.rename(f"{path}.new", path)
    return server


def listen(
    context: zmq.asyncio.Context, keys: dict[str, str], hosts: list[str], within: tuple[int, int] | None = None
) -> tuple[zmq.asyncio.Socket, int, AsyncioAuthenticator]:
    """Return a ROUTER socket on all addresses `hosts`, for who has the client's key, its port and the authenticator.

    within: (first, last) of the ports that may be taken; None: any. Raises Missing if none is free.
    """
    authenticator = AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", _Allowed(keys["client"]))
    candidates: list[int] = [0] * TRIES
    if within:
        every = range(within[0], within[1] + 1)
        candidates = random.sample(every, min(TRIES, len(every)))
    refused: zmq.ZMQError | None = None
    for port in candidates:
        router = context.socket(zmq.ROUTER)
        streams.set_socket_options(router, *hosts)
        router.router_mandatory = True
        router.curve_server = True
        router.curve_publickey, router.curve_secretkey = keys["relay"].encode(), keys["relay_secret"].encode()
        try:
            for host in hosts:
                router.bind(streams.endpoint(host, port or "*"))
                port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
            return router, port, authenticator
        except zmq.ZMQError as error:
            refused = error
            router.close(linger=0)
    authenticator.stop()
    where = f" from {within[0]} to {within[1]}" if within else ""
    what = f"no port{where} can be had on {', '.join(hosts)} ({refused})"
    raise Missing(what, f"name others in {slurm.PORTS}, or another address in {slurm.ADDRESS}")


class _Allowed:
    """A rule for ZeroMQ's authenticator: who has `key` may connect."""

    def __init__(self, key: str) -> None:
        self.key = key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.key.encode()


async def _serve(path: str, where: dict[str, Any]) -> None:
    """Open the port and the sockets, and write where they are; return on SIGTERM. where: see above."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    keys, in_slurm = streams.new_keys(), "slurm" in where
    addresses = slurm.addresses(where["slurm"]) if in_slurm else where["addresses"]
    context = zmq.asyncio.Context()
    router, port, authenticator = listen(context, keys, addresses, slurm.ports(in_slurm))
    relay = Relay(path, router)
    await serve_unix(session_dir.relay_socket(path), relay.on_step)
    for work in (relay.route(), relay.ping(), relay.watch_job()):
        relay.tasks.begin(work)
    theirs = {name: key for name, key in keys.items() if name != "relay_secret"}
    place = {"addresses": addresses, "port": port, "keys": theirs}
    with slurm.shared_folder() if in_slurm else nullcontext("") as shared:
        if in_slurm:
            session_dir.write_private_file(slurm.shared_relay_file(shared), json.dumps(place))
        session_dir.write_private_file(session_dir.relay_file(path), json.dumps(place | {"shared": shared}))
        await ended.wait()
    relay.tasks.cancel()
    authenticator.stop()
    context.destroy(linger=0)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _main() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        asyncio.run(_serve(sys.argv[1], json.loads(sys.argv[2])))
    except (OSError, Missing) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    _main()

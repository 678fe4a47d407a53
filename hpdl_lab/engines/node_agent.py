"""The agents on other machines: of a Slurm job, of a host of ipyparallel, of each engine, all connected to the relay.

    job agent      the first process of the job; it starts engines in its allocation whenever the notebook asks for some
      `-- mpiexec  of this environment, which has Slurm start its daemons on the other nodes: no PMI of Slurm is needed
            |-- engine agent 0 -- engine 0      on any node: carries the engine's sockets to the relay, and its end
            `-- engine agent 1 -- engine 1

So `lab.restart()` needs no second wait in the queue. An engine finds a session directory as on the notebook's machine;
here it is a folder of the node itself. Agents hold nothing but bytes on their way: they also answer while compiled code
blocks an engine. When the relay has gone, with the notebook's machine or in peace, they end engines and themselves.

Hosts of an ipyparallel cluster know no Slurm that would start ranks there. An agent on each, a child of an engine of
ipyparallel, does it: MPICH's mpiexec, on the first host, prints the command of the proxy that it wants on each host.

    engine of ipyparallel
      `-- host agent 0
            |-- mpiexec -launcher manual          on the first host: what it prints goes by the relay to ...
            `-- hydra_pmi_proxy                   ... the agent of each host, which starts it there
                  `-- engine agent 0 -- engine 0

    python -m hpdl_lab.engines.node_agent RELAY_FILE               the job script starts this one
    python -m hpdl_lab.engines.node_agent RELAY_FILE STEP SIZE     mpiexec starts these
    python -m hpdl_lab.engines.node_agent - HOST                   `begin_agent` starts these
"""

import asyncio
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, NotRequired, TypedDict

import psutil
import zmq
import zmq.asyncio

from .. import features
from ..comm.hosts import HOST, host_id
from . import session_dir, slurm, streams
from .launch import FOREIGN_PREFIXES, KEPT, MPI_BY_TCP, THREAD_VARIABLES, own_variables
from .relay import serve_unix
from .slurm_job import NOT_REACHED, NOT_SHARED
from .supervisor import die_with_parent, mapped_shared_memory

EACH = 8.0  # s for each address of the relay: packets to a closed port may vanish
LEAVE, KILL = 10.0, 3.0  # s for engines to end by themselves, and for mpiexec to end them
LOOK = 0.01  # s between two looks for the engine's socket
JOINED = "joined"  # what the agent of a host prints once it has
LINES = 1 << 16  # bytes of what engines print that are passed on at a time

# -- to the relay ------------------------------------------------------------------------------------------------------


class Unreached(Exception):
    """A relay that cannot be reached; the message is one sentence with the remedy."""


class Rank(TypedDict):
    """The share of a rank, taken from an engine of ipyparallel: the `number` of its host, its cores, its GPUs."""

    number: int
    cores: list[int]
    environment: dict[str, str]


class Host(TypedDict):
    """A host of an ipyparallel cluster, and the address by which the others reach it."""

    node: str
    address: str


class Place(TypedDict):
    """The addresses of the relay, and the keys for it."""

    addresses: list[str]
    port: int
    keys: dict[str, str]
    # Of an ipyparallel cluster:
    session: NotRequired[str]  # whose it is
    hosts: NotRequired[list[Host]]
    ranks: NotRequired[list[Rank]]
    environment: NotRequired[dict[str, str]]  # of the notebook, for ranks


def _node_name() -> str:
    """Return the name of this node: Slurm's, if it has one."""
    return os.environ.get(HOST) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _load(file: str) -> Place:
    """Return where the relay is. Raises OSError if the file is not seen from here."""
    with open(file) as opened:
        return json.load(opened)


@asynccontextmanager
async def connected(relay: Place, **hello: object) -> AsyncGenerator[tuple[streams.Connection, streams.Message, str]]:
    """Yield (connection to the relay on which `hello` has been said, its answer, own address). Raises Unreached."""
    context = zmq.asyncio.Context()
    tried: list[str] = []
    try:
        for address in relay["addresses"]:
            try:
                own = _own_address(address, relay["port"])
                connection, task, welcome = await _dial(context, address, relay["port"], relay["keys"], hello)
            except OSError as error:
                tried.append(f"{address}: {getattr(error, 'strerror', '') or error or f'no answer within {EACH:g} s'}")
                continue
            try:
                yield connection, welcome, own
            finally:
                task.cancel()
            return
        raise Unreached(
            f"node {_node_name()} cannot reach the relay of the notebook at port {relay['port']} ({'; '.join(tried)}): "
            "let nodes connect to that machine, or set HPDL_ADDRESS to an address and HPDL_PORTS to ports that they "
            "may use"
        )
    finally:
        context.destroy(linger=streams.LINGER)


def _own_address(address: str, port: int) -> str:
    """Return the address of this node from which it talks to the relay. Raises OSError with the reason if it cannot."""
    with socket.create_connection((address, port), EACH) as probe:
        return probe.getsockname()[0]


async def _dial(
    context: zmq.asyncio.Context, address: str, port: int, keys: dict[str, str], hello: dict[str, object]
) -> tuple[streams.Connection, asyncio.Future[Any], streams.Message]:
    """Return (Connection, the task that receives for it, the relay's first message)."""
    dealer = context.socket(zmq.DEALER)
    streams.set_socket_options(dealer, address)
    dealer.reconnect_ivl = -1  # what was under way would be lost: a connection that breaks has ended
    dealer.curve_serverkey = keys["relay"].encode()
    dealer.curve_publickey, dealer.curve_secretkey = keys["client"].encode(), keys["client_secret"].encode()
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    connection = streams.Connection(dealer.send_multipart, first=1)
    dealer.connect(streams.endpoint(address, port))

    async def receive() -> None:
        while True:
            connection.take(await dealer.recv_multipart())

    async def watch() -> None:
        await monitor.recv_multipart()
        connection.end()

    receiving = asyncio.gather(receive(), watch())
    receiving.add_done_callback(lambda done: done.cancelled() or done.exception())  # no caller asks how it ended
    connection.send(**hello)
    try:
        async with asyncio.timeout(EACH):
            welcome = await connection.receive()
        if welcome is None:
            raise ConnectionError("it is another session's relay, or does not know this one's key")
    except BaseException:
        receiving.cancel()
        dealer.close(linger=0)
        raise
    return connection, receiving, welcome


# -- the job -----------------------------------------------------------------------------------------------------------


class Launcher:
    """The mpiexec with the engines of step `number`; what it prints, and its end, are sent to the relay.

    manual: it prints first what the hosts of an ipyparallel cluster have to start.
    """

    def __init__(
        self, relay: streams.Connection, number: int, process: asyncio.subprocess.Process, manual: bool
    ) -> None:
        self.relay, self.number, self.process, self.manual = relay, number, process, manual
        self.reporting = asyncio.create_task(self._report())

    @classmethod
    async def start(
        cls, relay: streams.Connection, number: int, argv: list[str], interface: str | None, manual: bool
    ) -> "Launcher":
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=_launch_environment(interface),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        return cls(relay, number, process, manual)

    async def _report(self) -> None:
        assert self.process.stdout is not None
        host = 0
        while self.manual and (line := await self.process.stdout.readline()) and not line.startswith(LAUNCH_END):
            if line.startswith(LAUNCH):
                self.relay.send(step=self.number, host=host, launch=line.removeprefix(LAUNCH).decode())
                host += 1
            else:
                self.relay.send(step=self.number, output=line.decode(errors="replace"))
        while output := await self.process.stdout.read(LINES):
            self.relay.send(step=self.number, output=output.decode(errors="replace"))
        self.relay.send(step=self.number, ended=await self.process.wait())

    async def end(self) -> None:
        """Return when no engine is left: agents end theirs when the relay lets go of them."""
        for seconds, signum in ((LEAVE, signal.SIGTERM), (KILL, signal.SIGKILL)):
            try:
                async with asyncio.timeout(seconds):
                    await self.process.wait()
                return
            except TimeoutError:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signum)
        await self.process.wait()


async def _serve_job(file: str) -> None:
    """Start and end engines as the relay says; return when it has gone."""
    place = _load(file)
    async with connected(place, role="job", node=_node_name()) as (relay, welcome, own):
        launcher = None
        interface = _interface_of(_address_of(place, 0) or own)
        if "welcome" not in welcome:
            return  # Slurm has started the job a second time
        while (message := await relay.receive()) and "end" not in message:
            if launcher is not None:  # "start" as well as "kill": one step at a time
                await launcher.end()
                launcher = None
            if "start" in message:
                step, n = message["start"], message["n"]
                try:
                    argv = _mpiexec_argv(place, file, step, n)
                    launcher = await Launcher.start(relay, step, argv, interface, _is_manual(place))
                except (OSError, features.Missing) as error:
                    relay.send(step=step, output=f"{error}\n")
                    relay.send(step=step, ended=1)
        if launcher is not None:
            await launcher.end()


# -- a host of an ipyparallel cluster ----------------------------------------------------------------------------------

LAUNCH, LAUNCH_END = b"HYDRA_LAUNCH: ", b"HYDRA_LAUNCH_END"  # what mpiexec -launcher manual prints
PROXY = "hydra_pmi_proxy"
GPUS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
# Hosts may have this environment, and folders, in different places: what a rank runs is said by the agent of its host.
RANK_COMMAND = 'cd "$HPDL_FOLDER" && exec "$HPDL_PYTHON" -m hpdl_lab.engines.node_agent "$HPDL_RELAY" "$0" "$1"'
_begun: list[subprocess.Popen[str]] = []  # the agent of this host, in an engine of ipyparallel
_session = ""  # and whose it is


def describe_engine(controller: str) -> dict[str, object]:
    """Describe this process, an engine of ipyparallel, and its host. controller: the address of its controller."""
    mpiexec = ""
    with suppress(features.Missing):
        mpiexec = features.mpiexec()
    addresses = [a.address for found in psutil.net_if_addrs().values() for a in found if a.family == socket.AF_INET]
    with suppress(OSError):
        addresses.insert(0, slurm.source(controller))
    return {
        "host": host_id(),
        "node": _node_name(),
        "addresses": [a for a in dict.fromkeys(addresses) if not a.startswith("127.")],
        "cores": sorted(os.sched_getaffinity(0)),
        "environment": {name: os.environ[name] for name in GPUS if name in os.environ},
        "hydra": os.access(os.path.join(os.path.dirname(mpiexec), PROXY), os.X_OK),
    }


def begin_agent(place: str, number: int) -> str:
    """Start the agent of this host, as a child of this engine of ipyparallel.

    Args:    place: a Place, in JSON. number: of this host in it.
    Returns: "" once it has joined the relay, or why it cannot: one sentence.
    """
    global _session
    wanted: Place = json.loads(place)
    for agent in _begun:
        if agent.poll() is None and _session == wanted["session"]:  # its relay has gone: it is about to end
            with suppress(subprocess.TimeoutExpired):
                agent.wait(LEAVE + KILL)
        if agent.poll() is None:
            return (
                f"the engines on {_node_name()} are the laboratory of {_session}: end it there, lab.stop(), or work "
                "there"
            )
    env = {k: v for k, v in os.environ.items() if not k.startswith((*FOREIGN_PREFIXES, "IPP_")) or k in KEPT}
    own = {"HPDL_PYTHON": sys.executable, "HPDL_FOLDER": os.getcwd(), HOST: wanted["hosts"][number]["node"]}
    agent = subprocess.Popen(
        [sys.executable, "-m", "hpdl_lab.engines.node_agent", "-", str(number)],
        env=env | wanted["environment"] | own,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # an interrupt of ipyparallel is for its engine alone
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),
    )
    assert agent.stdin is not None and agent.stdout is not None
    with suppress(BrokenPipeError), agent.stdin:
        agent.stdin.write(place)
    _begun[:], _session = [agent], wanted["session"]
    threading.Thread(target=agent.wait, daemon=True).start()  # nothing is left of it in the engine's list of children
    with agent.stdout:
        said = agent.stdout.readline().strip()
    return "" if said == JOINED else said or f"the agent on {_node_name()} ended at its start: see the engine's log"


def _is_manual(place: Place) -> bool:
    """Return True if the agents of hosts start the ranks, and not mpiexec."""
    return "hosts" in place and os.access(os.path.join(os.path.dirname(features.mpiexec()), PROXY), os.X_OK)


def _mpiexec_argv(place: Place, file: str, step: int, n: int) -> list[str]:
    """Return the command line of mpiexec for `n` ranks."""
    if "hosts" not in place:
        module = [sys.executable, "-m", "hpdl_lab.engines.node_agent"]
        return [features.mpiexec(), "-n", str(n), *module, file, str(step), str(n)]
    counts = Counter(rank["number"] for rank in place["ranks"])
    names = ",".join(f"host{number}:{count}" for number, count in sorted(counts.items()))
    how = ["-launcher", "manual", "-genvnone", "-wdir", "/", "-hosts", names] if _is_manual(place) else []
    return [features.mpiexec(), *how, "-n", str(n), "/bin/sh", "-c", RANK_COMMAND, str(step), str(n)]


def _address_of(place: Place, number: int) -> str:
    """Return the address by which host `number` is reached from the others; "" if there is no other."""
    hosts = place.get("hosts", [])
    return hosts[number]["address"] if len(hosts) > 1 else ""


async def _serve_host(number: int) -> None:
    """Start the proxies that mpiexec wants here, and on the first host mpiexec; return when the relay has gone."""
    said = sys.stdin.read()
    place: Place = json.loads(said)
    with session_dir.of_an_agent() as folder:
        file = os.path.join(folder, "relay.json")
        session_dir.write_private_file(file, said)
        os.environ["HPDL_RELAY"] = file  # mpiexec hands nothing on: -genvnone
        async with connected(place, role="host", host=number, node=_node_name()) as (relay, _, _):
            print(JOINED, flush=True)
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)

            leaving = asyncio.Event()

            def leave() -> None:
                """End: the engine of ipyparallel has. The relay has the agents of this host end first."""
                leaving.set()
                relay.send(leave=True)
                relay.end()

            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave)
            job = asyncio.create_task(_serve_job(file)) if number == 0 else None
            await _serve_proxies(relay)
            if job is not None:
                if leaving.is_set():
                    job.cancel()  # the relay has not gone: it would go on
                await asyncio.wait([job])


async def _serve_proxies(relay: streams.Connection) -> None:
    """Start each proxy that comes; return when the relay has gone, and no proxy is left."""
    proxy: asyncio.subprocess.Process | None = None
    try:
        while (message := await relay.receive()) and "end" not in message:
            if "launch" in message:
                await _end_proxy(proxy)
                _, *arguments = shlex.split(message["launch"])
                proxy = await asyncio.create_subprocess_exec(
                    *(os.path.join(os.path.dirname(features.mpiexec()), PROXY), *arguments),
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
    finally:
        await _end_proxy(proxy)


async def _end_proxy(proxy: asyncio.subprocess.Process | None) -> None:
    """Return when the proxy has ended: with its mpiexec, or killed."""
    if proxy is None:
        return
    try:
        async with asyncio.timeout(LEAVE + KILL):
            await proxy.wait()
    except (TimeoutError, asyncio.CancelledError):
        with suppress(ProcessLookupError):
            os.killpg(proxy.pid, signal.SIGKILL)
        await proxy.wait()


# -- one engine --------------------------------------------------------------------------------------------------------


class _EngineAgent:
    """The forwarder of the sockets of engine `rank` of `n`, whose files are in the folder `path` of this node."""

    def __init__(self, relay: streams.Connection, rank: int, n: int, path: str) -> None:
        self.relay, self.rank, self.n, self.path = relay, rank, n, path
        self.engine: asyncio.subprocess.Process | None = None
        self.mapped: set[str] = set()  # shared memory of the engine, which cannot be asked for it when it was killed
        self.tasks = streams.Tasks()

    async def serve(self, connection: streams.Message, interface: str | None) -> None:
        """Start the engine; return when the relay lets go. connection: of ipyparallel's controller."""
        await self.open_px(connection)
        self.engine = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hpdl_lab.engines.engine"),
            env=_environment(self.path, self.n, _node_name(), interface),
            close_fds=False,  # MPICH's connection to mpiexec
            preexec_fn=die_with_parent,
        )
        self.tasks.begin(self.report_start())
        self.tasks.begin(self.report_end())
        while (message := await self.relay.receive()) and "end" not in message:
            self.tasks.begin(self.open_stream(message["open"]))

    async def open_px(self, connection: streams.Message) -> None:
        """Let the engine find the controller's sockets in its own folder."""
        file = session_dir.connection_file(self.path, "engine")
        os.makedirs(os.path.dirname(file), 0o700)
        session_dir.write_private_file(
            file, json.dumps(connection | {"interface": f"ipc://{session_dir.px_sockets(self.path)}"})
        )
        for channel in range(1, session_dir.PX_CHANNELS + 1):
            await serve_unix(
                f"{session_dir.px_sockets(self.path)}:{channel}",
                lambda reader, writer, channel=channel: self.carry_px(channel, reader, writer),
            )

    async def carry_px(self, channel: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.relay.carry(self.relay.open(px=channel), reader, writer)

    async def open_stream(self, number: int) -> None:
        """Connect a kernel to the engine."""
        try:
            ends = await asyncio.open_unix_connection(session_dir.engine_socket(self.path, self.rank))
        except OSError:
            return self.relay.close(number)
        return await self.relay.carry(number, *ends)

    async def report_start(self) -> None:
        """Say when the engine takes connections."""
        assert self.engine is not None
        while not os.path.exists(session_dir.engine_socket(self.path, self.rank)):
            await asyncio.sleep(LOOK)
        self.mapped = mapped_shared_memory([self.engine.pid])
        self.relay.send(listening=True)

    async def report_end(self) -> None:
        """Say the exit status of the engine, as a shell writes it."""
        assert self.engine is not None
        code = await self.engine.wait()
        self.relay.send(exit=code if code >= 0 else 128 - code)

    async def close(self) -> None:
        """End the engine, and leave nothing behind on this node."""
        self.tasks.cancel()
        if self.engine is not None and self.engine.returncode is None:
            self.mapped |= mapped_shared_memory([self.engine.pid])
            self.engine.kill()
            await self.engine.wait()
        for file in self.mapped:
            with suppress(OSError):  # another agent of this node was first
                os.unlink(file)
        shutil.rmtree(self.path, ignore_errors=True)


async def _serve_engine(file: str, step: int, n: int) -> None:
    rank = _mpi_rank()
    if rank is None:
        raise Unreached(f"no mpiexec has started {sys.executable}: the variable {RANK[0]} is not set")
    hello = {"role": "engine", "step": step, "rank": rank, "node": _node_name()}
    place = _load(file)
    async with connected(place, **hello) as (relay, welcome, own):
        if "connection" not in welcome:
            return  # this engine is not wanted any more
        if "ranks" in place:
            mine = place["ranks"][rank]
            os.environ.update(mine["environment"])
            with suppress(OSError):  # cores that the first engine of this host may not use
                os.sched_setaffinity(0, mine["cores"])
            own = _address_of(place, mine["number"]) or own
        agent = _EngineAgent(relay, rank, n, session_dir.of_an_engine(rank))
        serving = asyncio.ensure_future(agent.serve(welcome["connection"], _interface_of(own)))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
        try:
            await serving
        except asyncio.CancelledError:
            pass  # Slurm ends the job
        finally:
            await agent.close()


# -- environments ------------------------------------------------------------------------------------------------------

# Of the request for the job. The one task by which mpiexec starts its daemon on a node must not be held to one task's
# share of the node: all ranks of the node are its children.
REQUEST_OF_ONE_TASK = ("SLURM_CPU_BIND", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_CPUS_PER_TASK")
BOOTSTRAP = {
    "SLURM_CPU_BIND": "none",
    "SLURM_MPI_TYPE": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": "node:oversubscribe",  # Open MPI would start all on the first node
}

INTERFACES = ("FI_TCP_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")
RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")  # MPICH, Open MPI, others
RANKS_HERE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")


def _launch_environment(interface: str | None) -> dict[str, str]:
    """Return the environment of mpiexec in the job; see `_environment` for interface."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(REQUEST_OF_ONE_TASK)}
    if interface is not None:
        env.setdefault("HYDRA_IFACE", interface)  # by its address: nodes need not know each other by name
    return env | features.launch_environment() | BOOTSTRAP


def _mpi_rank() -> int | None:
    """Return the MPI rank of this process, before MPI has started in it; None if no mpiexec has started it."""
    return next((int(os.environ[name]) for name in RANK if name in os.environ), None)


def _environment(path: str, n: int, node: str, interface: str | None) -> dict[str, str]:
    """Return the environment of an engine on `node`, one of `n`, with its sockets in the folder `path` of that node.

    interface: the network interface by which this node is joined to the others; None if it has no name.
    """
    here = next((int(os.environ[name]) for name in RANKS_HERE if name in os.environ), 1)
    cores = min(features.cores(), int(os.environ.get("SLURM_CPUS_ON_NODE", features.cores())))  # of the job
    threads = str(max(1, cores // here))
    preset = dict.fromkeys(THREAD_VARIABLES, threads) | MPI_BY_TCP  # unless set in the notebook
    if interface is not None:
        preset |= dict.fromkeys(INTERFACES, interface)
    return preset | os.environ | own_variables(path, os.getpid(), n) | {"HPDL_HOST_ID": node}


def _interface_of(address: str) -> str | None:
    """Return the name of the network interface that has `address`; None if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address == known.address.partition("%")[0] for known in addresses):
            return name
    return None


def _main() -> int:
    os.umask(0o077)
    file, *step = sys.argv[1:]
    try:
        if file == "-":
            asyncio.run(_serve_host(int(step[0])))
        else:
            asyncio.run(_serve_engine(file, *map(int, step)) if step else _serve_job(file))
    except OSError as error:
        print(f"node {_node_name()} does not see {file} ({error})", file=sys.stderr)
        return NOT_SHARED
    except Unreached as error:
        print(error, file=sys.stdout if file == "-" else sys.stderr)
        return NOT_REACHED
    return 0


if __name__ == "__main__":
    sys.exit(_main())

"""The process that holds a cluster of ipyparallel: it finds its hosts, and has an agent on each join the relay.

    supervisor --- ipyparallel_job --- controller --- engines of ipyparallel, wherever a launcher has started them
                       |-- job.json: how they are doing      `-- first one on a host: node agent (node_agent.py)
                       `-- the cluster itself, if lab.start was asked for "pbs", "lsf" or "ssh"

ipyparallel starts, finds and authenticates the engines. Each agent is a child of one of them and ends with it. The
ranks are below the agents, in an MPI job of their own: so `lab.restart()` replaces ranks that hang in compiled code,
and leaves ipyparallel's engines, with all that their user has there, alone.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import ipyparallel
from ipyparallel.cluster.launcher import LauncherError
from ipyparallel.error import RemoteError
from traitlets.config import Config

from .. import features
from ..comm.errors import name_ranks
from ..comm.hosts import machine_id
from ..features import Missing
from ..system import until
from . import launch, layout, session_dir, slurm
from .ipyparallel_client import connection_of, too_few
from .supervisor import die_with_parent

if TYPE_CHECKING:
    from ipyparallel import AsyncResult, Client

Json: TypeAlias = dict[str, Any]

LOOK = 1.0  # s between two looks at the engines
AGAIN = 5.0  # s after which a new client asks who is there: see px.connect
ANSWER = 30.0  # s for engines that import this package, on a slow file system
JOIN = 60.0  # s for agents to reach the relay
CLUSTER = "hpdl"  # as ipyparallel calls a cluster that is started here, in the names of its files
LOST = 3  # looks at a controller that takes no connection, after which it has gone
TRAVEL = ("HPDL_", "MPIR_CVAR_", "FI_", "UCX_", "NCCL_", "GLOO_", "OMP_", "MKL_")  # variables of the notebook
SAME = ("hpdl_lab", "torch", "numpy", "mpi4py", "cloudpickle")  # of one version on all hosts: functions travel

# What an engine of any Python is asked, as text: a function would only travel between equal versions.
WHO = "(__import__('sys').version_info[:2], __import__('sys').executable, __import__('socket').gethostname())"
VERSIONS = (
    "{d.metadata['Name'].lower().replace('-', '_'): d.version "
    f"for name in {SAME} "
    "for d in __import__('importlib.metadata', fromlist=['x']).distributions(name=name)}"
)
AGENT = "__import__('hpdl_lab.engines.node_agent', fromlist=['x'])"


class Refused(Exception):
    """A cluster that cannot become the laboratory; the message is one sentence with the remedy."""


class _Gone(Refused):
    """An engine that has died."""


class Found(NamedTuple):
    """A cluster: the connection file of its controller, and what to call it in sentences.

    ended: of its job, a sentence; "" while there is hope. log: what its engines print.
    """

    connection: Json
    name: str = ""
    ended: Callable[[], str] = lambda: ""
    log: str = ""


class JobStatus:
    """job.json in the session directory `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.written: Json = {}

    def tell(self, state: str, text: str, **more: object) -> None:
        """Write the state "pending", "running" or "ended", and a sentence about it without its full stop."""
        job: Json = {"state": state, "id": "", "text": text, **more}
        if job != self.written:
            self.written = job
            with suppress(FileNotFoundError):  # the session has ended
                session_dir.write_private_file(session_dir.job_file(self.path), json.dumps(job))


# -- a cluster that is started here ------------------------------------------------------------------------------------

PBS = """#!/bin/sh
#PBS -N hpdl
#PBS -j oe
#PBS -o /dev/null
#PBS -l select={nodes}:ncpus={each}:mpiprocs={each}{gpus}
#PBS -l place=scatter
{more}
"""
LSF = """#!/bin/sh
#BSUB -J hpdl
#BSUB -o /dev/null
#BSUB -n {n}
#BSUB -R "span[ptile={each}]"
{more}
"""
# PBS copies its output at the end of a job, to a folder that has gone then, and hands on no environment: options tell
# engines where their connection file is.
OUTPUT = "exec >'{output_file}' 2>&1\n"
ENGINE = "{program_and_args} --profile-dir='{profile_dir}' --cluster-id={cluster_id}\n"
NAMES = {"pbs": "PBS job", "lsf": "LSF job", "ssh": "by ssh"}


def batch_template(where: str, n: int, options: layout.Options) -> str:
    """Return the job script of `n` engines for ipyparallel's launcher, which fills in what is left in braces.

    where: "pbs" or "lsf". options: see layout.checked_job_options.
    """
    nodes = options.get("nodes", 1)
    minutes = layout.minutes(options["time"]) if "time" in options else None
    gpus = options.get("gpus", 0)
    if where == "pbs":
        said = {"-q": options.get("queue"), "-A": options.get("account")}
        if minutes is not None:
            said["-l"] = f"walltime={minutes // 60:02d}:{minutes % 60:02d}:00"
        lines, template, mark = said, PBS, "#PBS"
    else:
        said = {"-q": options.get("queue"), "-P": options.get("account"), "-W": minutes}
        if gpus:
            said["-gpu"] = f'"num={gpus}/task"'
        lines, template, mark = said, LSF, "#BSUB"
    each = -(-n // nodes)
    header = template.format(
        nodes=nodes,
        n=n,
        each=each,
        gpus=f":ngpus={gpus * each}" if gpus else "",
        more="\n".join(f"{mark} {name} {value}" for name, value in lines.items() if value is not None),
    )
    here = f"cd {shlex.quote(os.getcwd())} 2>/dev/null || cd\n"  # where ranks work: the notebook's folder
    return _literal(header) + OUTPUT + _literal(f"{here}{shlex.quote(features.mpiexec())} -n {n} ") + ENGINE


def _literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _has_ended(where: str, number: str) -> bool:
    """Return True if job `number` neither waits nor runs any more."""
    command = ["qstat", number] if where == "pbs" else ["bjobs", "-noheader", "-o", "stat", number]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if where == "pbs":
        return done.returncode in (35, 153)  # "Job has finished", "Unknown Job Id"
    return done.stdout.strip() in ("DONE", "EXIT") or "is not found" in done.stderr


def controller_address(hosts: Sequence[str] = ()) -> str:
    """Return the address at which `hosts`, or any, reach this machine. Raises Missing."""
    if given := os.environ.get(slurm.ADDRESS):
        return given.split(",")[0].strip()
    for host in [*(host.rpartition("@")[2].partition(":")[0] for host in hosts), "192.0.2.1"]:  # or where others are
        with suppress(OSError):
            return slurm.source(host)
    raise Missing("this machine has no network to other hosts", f"set {slurm.ADDRESS} to an address that they reach")


# A controller that ends with this process, and its schedulers, which are forks, with it. Engines miss its heartbeats.
CONTROLLER = """
import os, signal
from hpdl_lab.engines.supervisor import die_with_parent
from ipyparallel.controller.app import main
die_with_parent(signal.SIGTERM)
os.register_at_fork(after_in_child=die_with_parent)
main()
"""


@contextmanager
def _started(wanted: layout.Layout, status: JobStatus) -> Generator[Found]:
    """Start a cluster in a batch system, or by ssh; yield what was found, and end it. Raises Refused."""
    where, n, options = wanted.where, wanted.n, wanted.job
    hosts: list[str] = options.get("hosts", [])
    config = Config()
    if where == "ssh":
        config.SSHEngineSetLauncher.engines = dict(Counter(hosts[i % len(hosts)] for i in range(n)))
        config.SSHLauncher.remote_python = sys.executable
        config.SSHLauncher.ssh_args = ["-o", "BatchMode=yes"]
        config.SSHLauncher.scp_args = ["-o", "BatchMode=yes"]
    else:
        name = {"pbs": "PBS", "lsf": "LSF"}[where]
        config[f"{name}EngineSetLauncher"].batch_template = batch_template(where, n, options)
    config.LocalControllerLauncher.controller_cmd = [sys.executable, "-c", CONTROLLER]
    address = controller_address(hosts)
    with slurm.shared_folder() as folder:
        os.chdir(folder)  # ipyparallel writes its job script here
        cluster = ipyparallel.Cluster(
            engines=where,
            n=n,
            profile_dir=folder,
            cluster_id=CLUSTER,
            controller_ip=address,
            controller_location=address,
            # Not in the environment of a batch job, which others may see: the file is one that only this user can read.
            send_engines_connection_env=False,
            shutdown_atexit=False,
            load_profile=False,
            controller_args=["--IPController.enable_curve=True", "--HeartMonitor.period=1000"],
            config=config,
            delay=0.1,
        )
        file = os.path.join(folder, "security", f"ipcontroller-{CLUSTER}-client.json")
        try:
            status.tell("pending", f"ipyparallel starts a controller at {address}")
            cluster.start_controller_sync()
            if not until(lambda: os.path.exists(file), ANSWER):
                raise Refused(f"the controller of ipyparallel did not start at {address} within {ANSWER:g} s")
            try:
                cluster.start_engines_sync(n)
            except Exception as error:  # of several kinds: of ssh ipyparallel raises no other
                raise Refused(f"{layout.COMMANDS[where]} says: {_said(error, status.path)}") from None
            with open(file) as opened:
                connection = json.load(opened)
            yield _of_job(connection, where, next(iter(cluster.engines.values())))
        finally:
            with suppress(Exception):  # what cannot be ended any more has ended
                cluster.stop_cluster_sync()


def _of_job(connection: Json, where: str, launcher: Any) -> Found:
    """Return what was found of the cluster whose engines `launcher` has started."""
    if where == "ssh":
        return Found(connection, NAMES[where])
    name = f"{NAMES[where]} {launcher.job_id}"

    def ended() -> str:
        return f"{name} has ended" if _has_ended(where, launcher.job_id) else ""

    return Found(connection, name, ended, launcher.output_file)


@contextmanager
def _started_by_profile(name: str, folder: str, n: int, status: JobStatus) -> Generator[Found]:
    """Start the cluster of a profile, with the launchers that its files name; yield what was found, and end it."""
    cluster = ipyparallel.Cluster(profile_dir=folder, n=n, cluster_id="", shutdown_atexit=False)
    try:
        status.tell("pending", f"ipyparallel starts the cluster of {name}")
        try:
            cluster.start_cluster_sync()
            with cluster.connect_client_sync() as client:
                connection = connection_of(client)
        except (OSError, subprocess.CalledProcessError, LauncherError) as error:
            raise Refused(f"the cluster of {name} does not start: {_said(error, status.path)}") from None
        yield Found(connection, name)
    finally:
        with suppress(Exception):  # what cannot be ended any more has ended
            cluster.stop_cluster_sync()


def _said(error: Exception, path: str) -> str:
    """Return the last line of what a command has complained of: on the standard error of this process, mostly."""
    text = "" if isinstance(error, OSError) else session_dir.tail(path, "job")
    return session_dir.last_line(text) or _first_line(error)


# -- the engines that are there ----------------------------------------------------------------------------------------


class Hosts:
    """The hosts of `n` engines of the cluster `found`."""

    def __init__(self, found: Found, n: int, status: JobStatus, wait: float) -> None:
        self.connection, name, self.ended, self.log = found
        self.n, self.status, self.wait = n, status, wait
        self.where = f" ({name})" if name else ""
        self.client: Client = self._connected()
        self.engines: list[int] = []  # by rank
        self.described: list[Json] = []  # likewise
        self.hosts: list[Json] = []  # the first engine on each, as it has described itself
        self.curve = bool(self.connection.get("curve_serverkey"))

    def _connected(self) -> Client:
        try:
            return ipyparallel.Client(self.connection, timeout=10)
        except Exception as error:  # of several kinds: zmq's, TimeoutError, ipyparallel's
            raise Refused(
                f"the controller of ipyparallel at {self.address} does not answer ({_first_line(error)}): see whether "
                "it runs, ipcluster list, and whether this machine reaches that address; "
                "ipcontroller --ip= and --location= set it. One that was started again is another one: "
                "lab.start(client=ipp.Client(...))"
            ) from None

    @property
    def address(self) -> str:
        """The controller's address."""
        return self.connection["interface"].partition("://")[2]

    def gather(self) -> None:
        """Wait for engines, and ask them where they are. Raises Refused."""
        give_up = time.monotonic() + self.wait
        ids: list[int] = []
        described: dict[int, Json] = {}
        while not described:
            ids = self._wait_for_engines(give_up)[: self.n]
            with suppress(_Gone):  # one that had died was still listed
                self._require_equal(ids)
                described = self._ask(dict.fromkeys(ids, f"{AGENT}.describe_engine({self.address!r})"))
        order = list(dict.fromkeys(described[engine]["host"] for engine in ids))
        ids = sorted(ids, key=lambda engine: order.index(described[engine]["host"]))  # neighbors share a host
        self.engines, self.described = ids, [described[engine] for engine in ids]
        seen: dict[str, int] = {}
        for engine in self.described:
            if engine["host"] not in seen:
                seen[engine["host"]] = len(self.hosts)
                self.hosts.append(engine)
            engine["number"] = seen[engine["host"]]
        if len(self.hosts) > 1 and not all(host["hydra"] for host in self.hosts):
            raise Refused(
                "ranks on several hosts of an ipyparallel cluster need MPICH, whose mpiexec lets others start its "
                "ranks: pip install mpich in a new environment there"
            )

    def _wait_for_engines(self, give_up: float) -> list[int]:
        """Return the engines once there are enough. Raises Refused."""
        self._tell_of(len(self.client.ids))
        while len(ids := self._ids()) < self.n:
            self._tell_of(len(ids))
            if text := self.ended():
                hidden = (
                    f"nothing; if its nodes do not see {os.path.dirname(self.log)}, set {slurm.FOLDER} to a folder that"
                )
                said = session_dir.last_line(session_dir.read_tail(self.log)) or f"{hidden} they see"
                raise Refused(f"{text}; its engines said: {said}")
            if time.monotonic() > give_up:
                raise Refused(too_few(len(ids), self.n, self.wait))
        return ids

    def _tell_of(self, count: int) -> None:
        """Say how many engines have come."""
        if count < self.n:
            self.status.tell("pending", f"{count} of {self.n} engines of ipyparallel have come{self.where}")

    def _ids(self) -> list[int]:
        """Return the engines that are there after AGAIN s, or as soon as all are."""
        if not until(lambda: len(self.client.ids) >= self.n, AGAIN, every=0.05):
            self.client.close()
            self.client = self._connected()
        return sorted(self.client.ids)

    def _require_equal(self, ids: list[int]) -> None:
        """Raise Refused if an engine has another Python or another version of a package that matters."""
        mine, python = {name: version(name) for name in SAME}, sys.version_info[:2]
        packages = self._ask(dict.fromkeys(ids, VERSIONS))
        for engine, ((major, minor), executable, host) in self._ask(dict.fromkeys(ids, WHO)).items():
            who = f"engine {engine} on {host}"
            if (major, minor) != python:
                raise Refused(
                    f"{who} runs Python {major}.{minor} ({executable}), this notebook {python[0]}.{python[1]}: start "
                    f"the engines from this environment, {sys.prefix}, or one that equals it"
                )
            theirs = packages[engine]
            for name in SAME:
                if theirs.get(name) != mine[name]:
                    has = f"{name} {theirs[name]}" if name in theirs else f"no {name}"
                    raise Refused(
                        f"{who} has {has} ({executable}), this notebook has {mine[name]}: start the engines from this "
                        f"environment, {sys.prefix}, or one that equals it"
                    )

    def _ask(self, expressions: Mapping[int, str], seconds: float = ANSWER) -> dict[int, Any]:
        """Return {engine: value} of {engine: expression}, which all work out at once.

        Raises: Refused if one does not answer, or raises.
        """
        answers = {engine: self.client[engine].apply_async(eval, text) for engine, text in expressions.items()}
        return {engine: self._value_of(answer, engine, seconds) for engine, answer in answers.items()}

    def _value_of(self, answer: AsyncResult, engine: int, seconds: float) -> Any:
        try:
            if not answer.wait(1.0):
                self.status.tell("pending", f"engine {engine} of ipyparallel is busy, perhaps with a cell of %px")
            return answer.get(timeout=seconds)
        except TimeoutError:
            raise Refused(
                f"engine {engine} of ipyparallel does not answer within {seconds:g} s: it may be busy with a cell, "
                "whose end %px waits for; interrupt it with client.send_signal(2), or restart the engines"
            ) from None
        except RemoteError as error:
            if error.ename == "EngineError":  # the controller says it
                raise _Gone(f"engine {engine} of ipyparallel has gone") from None
            raise Refused(f"engine {engine} of ipyparallel says {error.ename}: {error.evalue}") from None
        except Exception as error:  # EngineError of ipyparallel: it has died meanwhile
            raise _Gone(f"engine {engine} of ipyparallel has gone: {_first_line(error)}") from None

    def relay_addresses(self) -> list[str]:
        """Return the addresses of this machine that the hosts reach, best first. Raises Refused if there is none."""
        if given := os.environ.get(slurm.ADDRESS):
            return [address.strip() for address in given.split(",")]
        found: list[str] = []
        for host in self.hosts:
            if host["host"].split()[-1] == machine_id() and host["node"] == socket.gethostname():
                found.append("127.0.0.1")
            for address in host["addresses"][:1]:
                with suppress(OSError):
                    found.append(slurm.source(address))
        if not found:
            raise Refused(
                f"no address of this machine leads to {self.hosts[0]['node']}: set {slurm.ADDRESS} to one that the "
                "engines reach"
            )
        return list(dict.fromkeys(found))

    def join(self, relay: Json) -> None:
        """Have an agent on each host connect to the relay: {"addresses", "port", "keys"}. Raises Refused."""
        own = launch.own_variables("", 0, 0)
        place = relay | {
            "session": f"{getpass.getuser()} on {socket.gethostname()}, {self.status.path}",
            "hosts": [{"node": host["node"], "address": next(iter(host["addresses"]), "")} for host in self.hosts],
            "ranks": [{name: engine[name] for name in ("number", "cores", "environment")} for engine in self.described],
            "environment": {k: v for k, v in os.environ.items() if k.startswith(TRAVEL) and k not in own},
        }
        firsts = {self.engines[self.described.index(host)]: number for number, host in enumerate(self.hosts)}
        begin = f"{AGENT}.begin_agent({json.dumps(place)!r}"
        said = self._ask({engine: f"{begin}, {number})" for engine, number in firsts.items()}, JOIN)
        if text := next(filter(None, said.values()), ""):
            raise Refused(text)

    def running(self) -> str:
        """Return what to say of them once they have joined."""
        names = ", ".join(host["node"] for host in self.hosts)
        which = name_ranks(self.engines).partition(" ")[2]
        text = f"ranks on {names}, where ipyparallel has started its engines {which}{self.where}"
        if len(self.hosts) > 1:
            text += "; MPI's messages between hosts go by TCP"
        text += "; %%px runs in the ranks, a client's views in those engines"
        local = all(host["host"].split()[-1] == machine_id() for host in self.hosts)
        if not self.curve and not local:
            text += "; ipyparallel's own messages are not encrypted: ipcontroller --IPController.enable_curve=True"
        return text

    def watch(self) -> str:
        """Return how the cluster has ended, as a sentence, once it has."""
        nodes = {engine: about["node"] for engine, about in zip(self.engines, self.described, strict=True)}
        silent = 0
        while True:
            time.sleep(LOOK)
            silent = 0 if self._controller_answers() else silent + 1
            if silent == LOST:
                return f"the controller of ipyparallel at {self.address} has ended"
            if self._lost_a_rank() and (text := self.ended()):
                return text  # ipyparallel waits for ten heartbeats
            for engine, node in nodes.items():
                if engine not in self.client.ids:
                    return self.ended() or f"engine {engine} of ipyparallel on {node} has ended"

    def _lost_a_rank(self) -> bool:
        """Return True if one has ended a moment ago: perhaps with its job."""
        files = [session_dir.exit_file(self.status.path, rank) for rank in range(self.n)]
        with suppress(OSError):  # they are forgotten, by lab.restart()
            return any(os.path.getmtime(file) > time.time() - ANSWER for file in files if os.path.exists(file))
        return False

    def _controller_answers(self) -> bool:
        """Return True if ZeroMQ greets at the controller's port; it is not asked, for it may be busy.

        Its schedulers, which are forks, keep the port open after it was killed: then connections come to nothing.
        """
        if self.connection.get("ssh"):
            return True
        address = (self.address, int(self.connection["registration"]))
        with suppress(OSError), socket.create_connection(address, 5) as probe:
            return bool(probe.recv(1))
        return False


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


@contextmanager
def _found(wanted: layout.Layout, status: JobStatus) -> Generator[Found]:
    """Yield the cluster that is wanted: one that runs, or a new one, which is ended."""
    if "connection" in wanted.job:
        yield Found(wanted.job["connection"], wanted.job.get("name", ""))
    elif "profile" in wanted.job:
        with _started_by_profile(wanted.job["name"], wanted.job["profile"], wanted.n, status) as found:
            yield found
    else:
        with _started(wanted, status) as found:
            yield found


def _hold(path: str, wanted: layout.Layout, status: JobStatus) -> None:
    """Collect the hosts, have them join, and return when the cluster has ended. Raises Refused, Missing."""
    with _found(wanted, status) as found:
        seconds = layout.CLIENT_SECONDS if "connection" in wanted.job else layout.QUEUE_SECONDS
        hosts = Hosts(found, wanted.n, status, wanted.job.get("wait", seconds))
        hosts.gather()
        status.tell("pending", "the hosts join", addresses=hosts.relay_addresses())
        until(lambda: os.path.exists(session_dir.relay_file(path)), JOIN)
        with open(session_dir.relay_file(path)) as file:
            relay = json.load(file)
        hosts.join(relay)
        status.tell("running", hosts.running(), hosts=[host["node"] for host in hosts.hosts])
        status.tell("ended", hosts.watch())


def _main() -> None:
    path = sys.argv[1]
    parent = os.getppid()
    die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return
    os.umask(0o077)
    status = JobStatus(path)

    def end(signum: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one more would end this process half way
        raise SystemExit

    signal.signal(signal.SIGTERM, end)
    with open(session_dir.job_request(path)) as file:
        wanted = layout.Layout(**json.load(file))
    try:
        _hold(path, wanted, status)
    except (Refused, Missing) as error:
        status.tell("ended", str(error))


if __name__ == "__main__":
    _main()

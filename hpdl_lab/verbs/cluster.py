"""The verbs of the engine cluster: start, run, restart, stop."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..comm.base import OnRow, Results, Row
from ..comm.inject import Injection
from ..engines import layout
from ..engines.cluster import Cluster
from ..engines.errors import EngineError
from ..engines.ipyparallel_client import PROFILE, chosen
from ..engines.messages import Function
from ..engines.pool import function_name
from ..plain_source import plain_signature

if TYPE_CHECKING:
    from ..engines.ipyparallel_client import Client
    from ..engines.ipyparallel_client import Cluster as IppCluster

DEFAULT_ENGINES = 4
DEADLINE = 10.0  # s


class _Notebook:
    """The use that this kernel makes of engines: one cluster at most. The verbs below are its methods."""

    def __init__(self) -> None:
        self._cluster: Cluster | None = None
        self._last: Results | None = None
        self._injection = Injection()

    def cluster(self) -> Cluster:
        """Return the engine cluster that this notebook uses. Raises EngineError if there is none."""
        if self._cluster is None or not self._cluster.alive():
            raise EngineError("no engine cluster is running: call lab.start(4)")
        return self._cluster

    def running(self) -> Cluster | None:
        """Return the engine cluster that this notebook uses, or None if there is none."""
        return self._cluster if self._cluster is not None and self._cluster.alive() else None

    def start(
        self,
        n: int | None = None,
        where: str | None = None,
        link: str | None = None,
        hosts: int | Sequence[str] | None = None,
        device: str | None = None,
        client: Client | None = None,
        cluster: IppCluster | None = None,
        profile: str | None = None,
        **job: Any,
    ) -> Cluster:
        """Start `n` MPI engines, or attach to engines that run: another notebook's, or `hpdl cluster`'s.

        Called again it changes nothing; with another number, or place, it replaces the engines, and says so. What is
        not given stays as it runs.

            lab.start(4)                            on this machine
            lab.start(8, where="slurm", nodes=2)    in a job of Slurm
            lab.start(client=ipp.Client())          on the hosts of a cluster that ipyparallel has started

        Args:    n: number of engines, 1 at least; the MPI rank of an engine is its id. Default 4, or all engines of
                 the cluster that is given.
                 where: "local": all on this machine as it is; "emulated": on hosts that this machine emulates, each
                 with a name and a network link of its own, between which messages go by TCP; "slurm", "pbs", "lsf": on
                 nodes that a batch system gives to a job of this user, which ends with the engines; "ssh": on hosts=.
                 Default "local".
                 link: of each emulated host, in both directions, as `tc` spells it: "100mbit", "1gbit" (default).
                 hosts: how many emulated hosts share the engines, default one for each; or a list of names that ssh
                 reaches without a password.
                 device: "cpu" (default) or "cuda" (with gpus=).
                 client, cluster, profile: a cluster of ipyparallel, by one of the three: its ranks run beside the
                 engines that are there, and leave them alone. A profile's cluster that does not run is started, and
                 ends with the ranks. Default: the profile that HPDL_PROFILE names, if it is set.
                 job: what a batch system is asked for: partition="gpu" (PBS, LSF: queue=), nodes=2 (that share the
                 engines evenly), gpus=1 (for each engine), time="1:30:00", account=, qos=, reservation=, wait=600 (s
                 in the queue at most).
        Returns: the Cluster, which shows the host and cores of each rank; `with lab.start(4):` stops it at the end.
        Raises:  ValueError, EngineError: one sentence with the numbers and the remedy.
        """
        asked, usual = n, None
        if self.running() is None and not job and (client, cluster, profile, where, link, hosts) == (None,) * 6:
            profile = usual = os.environ.get(PROFILE) or None
        if client is not None or cluster is not None or profile is not None:
            if where not in (None, "ipyparallel"):
                raise ValueError(f"where={where!r} starts engines anew: leave it out, or client=, cluster=, profile=")
            n, found = chosen(n, client, cluster, profile, job.get("wait") or layout.CLIENT_SECONDS)
            where, job = "ipyparallel", job | found
        how: layout.Options = {"where": where, "link": link, "hosts": hosts, "device": device, **job}
        if self.running() is None:
            self._cluster = Cluster.start(DEFAULT_ENGINES if n is None else n, **how)
            if self._cluster.attached:
                print("Using the engines that another notebook, or `hpdl cluster`, has started.", flush=True)
                n, how = (asked, {"device": device}) if usual else (n, how)  # what was not said stays as it runs
        engines = self.cluster()
        if "profile" in (job := engines.laid_out.job) and job["name"] == how.get("name"):  # it has been started here
            how = {name: value for name, value in how.items() if name not in layout.CLUSTER}
        n = engines.n if n is None else n
        if fault := engines.fault():
            engines.restart(n, announce=f"{fault}. Doing that.", **how)
        elif (wanted := layout.wanted(n, running=engines.layout, **how)) != engines.layout:
            self._replace(engines, wanted)
        engines.activate_px()
        engines.show()
        return engines

    def _replace(self, cluster: Cluster, wanted: layout.Layout) -> None:
        if others := _others_of(cluster):
            raise EngineError(
                f"{others} use what is running, {cluster.layout}: "
                f"take it as it is, lab.start({cluster.n}), or end it first, lab.stop()"
            )
        cluster.restart(announce=f"{cluster.layout} were running: replacing them by {wanted}.", **wanted.asked())

    def run(
        self,
        fn: Function | str | os.PathLike[str],
        *args: object,
        ranks: Iterable[int] | None = None,
        deadline: float = DEADLINE,
        limit: float | None = None,
        on_row: OnRow | None = None,
        **keywords: Any,
    ) -> Results:
        """Call `fn(comm, *args, **keywords)` on every engine, each with its own rank in one fresh communicator.

            lab.run(f, 1, lr=0.1)                   f(comm, 1, lr=0.1)
            lab.run("train.py", "--epochs", 2)      python train.py --epochs 2, on every engine; returns None per rank

        Plain torch works in both: `dist.init_process_group("gloo")`, or "hpdl", or "nccl", finds RANK, WORLD_SIZE,
        LOCAL_RANK, MASTER_ADDR and the like as under torchrun, and a process group that is left behind ends with the
        run. Its waits are reported as waits in `comm` are.

        What the ranks print appears while they run, equal lines once. The stop button of the notebook interrupts the
        ranks and says who waited for whom; Python code and waits in `comm` end within two seconds. Compiled code may
        ignore the interrupt: after 5 seconds the engines are replaced then.

        Args:    fn: a function of the notebook, which travels with the globals that it uses, or of a module; or the
                 path of a file, .py, whose text travels and whose folder is searched for modules.
                 args, keywords: the same on every rank; `PerRank([a, b, c, d])` gives rank i item i.
                 ranks: a list of the ranks that take part; None means all.
                 deadline: the longest that any single wait may block, in seconds.
                 limit: the longest that the whole run may take, computing included, in seconds; None: forever.
                 on_row: called here with each row of `comm.report(...)` as it arrives, while the ranks run.
        Returns: Results: the return values in rank order, with `.events`, `.rows` and `.seconds`.
        Raises:  RunFailed (what the function raised, once per kind), CommTimeout or RankFailed with who waits for whom,
                 CommTimeout at the limit (which ranks still compute, in which line of the cell),
                 RunStopped (the stop button), EngineError (dead engines), TypeError (what cannot travel, or a keyword
                 that both `fn` and this take), FileNotFoundError.
        """
        defaults = {"ranks": None, "deadline": DEADLINE, "limit": None, "on_row": None}
        options: Row = {"ranks": ranks, "deadline": deadline, "limit": limit, "on_row": on_row}
        # `is not`: who hands on the number that is the default has given it, too
        _require_no_clash(
            cast("Function", fn), [name for name, value in options.items() if value is not defaults[name]]
        )
        self._last = self._running().run(fn, *args, **options, **keywords, inject=self._injection)
        return self._last

    def inject(
        self,
        rank: int | None = None,
        delay: float | None = None,
        link: tuple[int, int] | None = None,
        bandwidth: float | None = None,
    ) -> Injection:
        """Slow down one rank or one link in all runs to come; what was slowed down before stays so. `inject()` ends it.

        The slowest sets the pace: `lab.show()` shows the lost time, and who waits because of it.

            lab.inject(rank=2, delay=0.005)              5 ms before each message and each collective of rank 2
            lab.inject(link=(1, 2), bandwidth=1e8)       0.1 GB/s between ranks 1 and 2; collectives in shared memory
                                                         use no link
        Returns: Injection, also for sim.run(..., inject=...).
        Raises:  ValueError with the numbers: no such rank, a delay or a bandwidth that is none, half of a pair.
        """
        wanted = Injection.of(rank, delay, link, bandwidth)
        if wanted and (cluster := self.running()) is not None:
            wanted.check(cluster.n)
        self._injection = self._injection.merged(wanted) if wanted else wanted
        return self._injection

    def injected(self) -> Injection:
        """Return the Injection that `inject` has made."""
        return self._injection

    def last_run(self) -> Results | None:
        """Return the Results of the last `run` that ended well, or None."""
        return self._last

    def _running(self) -> Cluster:
        if self._cluster is None:
            raise EngineError("no engine cluster is running: call lab.start(4)")
        return self._cluster

    def restart(self) -> Cluster:
        """Replace all engines by new ones; the notebook keeps its variables. Returns the Cluster.

        If another notebook has ended them, start them again, or use the engines that it has started since.
        """
        cluster = self._running()
        if not cluster.alive():
            said = cluster.laid_out.asked()
            if "profile" in said:  # its folder there, its name here
                said = {"n": said["n"], "device": said["device"], "profile": said["name"].removeprefix("profile ")}
            return self.start(**said)
        cluster.restart()
        cluster.activate_px()
        cluster.show()
        return cluster

    def stop(self) -> None:
        """End the engines and remove their files, also for other notebooks that use them, whose next run says so."""
        if self._cluster is not None:
            if self.running() is not None and (others := _others_of(self._cluster)):
                print(f"{others} used these engines, too: lab.start() there starts new ones.", flush=True)
            self._cluster.stop()
            self._cluster = None

    def leave(self) -> None:
        """End the cluster at exit if no other kernel uses it."""
        if (cluster := self.running()) is not None and cluster.kernels() == [os.getpid()]:
            cluster.stop()


def _require_no_clash(fn: Function, given: list[str]) -> None:
    """Raise TypeError if `fn` has a parameter that is called as one of lab.run's own keywords that were `given`."""
    taken = getattr(fn, "keywords", {})  # of a functools.partial, which has them already
    try:
        parameters = plain_signature(fn).parameters
    except (TypeError, ValueError):
        return  # no function, or a compiled one
    for name in given:
        if name in parameters and name not in taken:
            raise TypeError(
                f"{name}= is taken by lab.run itself, and {function_name(fn)} has a parameter {name} too: "
                f"lab.run(functools.partial({function_name(fn)}, {name}=...)), or a lambda, hands it to the function"
            )


def _others_of(cluster: Cluster) -> str:
    """Say how many other notebooks use `cluster`, with their names if Jupyter gives them; "" if there are none."""
    pids = cluster.kernels()
    pids.remove(os.getpid())
    names = ", ".join(sorted(filter(None, map(notebook_of, pids))))
    return f"{len(pids)} other notebook(s){names and f' ({names})'}" if pids else ""


def notebook_of(pid: int) -> str:
    """Return the file name of the notebook whose kernel is process `pid`, "" if that is not known."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = [entry.partition(b"=") for entry in file.read().split(b"\0")]
    except OSError:
        return ""
    variables = {name: value for name, _, value in entries}
    return os.path.basename(os.fsdecode(variables.get(b"JPY_SESSION_NAME", b"")))


_notebook = _Notebook()
atexit.register(_notebook.leave)

start, run, restart, stop, cluster, running, last_run, inject, injected = (
    _notebook.start,
    _notebook.run,
    _notebook.restart,
    _notebook.stop,
    _notebook.cluster,
    _notebook.running,
    _notebook.last_run,
    _notebook.inject,
    _notebook.injected,
)

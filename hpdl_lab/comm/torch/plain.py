"""torch.distributed as scripts use it, `dist.init_process_group("gloo")`, in the runs of an engine. Imports no torch.

Ranks meet over the communicator of the run, which reports who does not come. Later they wait in compiled code, where
no interrupt reaches them: a thread of the engine looks at the main thread instead, publishes what it waits in, and
breaks its process groups off to end that.

    main thread     all_reduce: blocked in gloo ................................. RuntimeError -> CommTimeout
    engine's thread           look   look: no CPU time since, it waits   look ... the deadline: break off
"""

from __future__ import annotations

import dis
import functools
import glob
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ...trace import PACKAGE, is_user_code, line_of, now_ns
from ..errors import CommError, CommTimeout, name_ranks
from .address import INTERFACE, LOOPBACK_ADDRESS, loopback_interface, own_address

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

    from ..mpi.session import Session
    from ..real import RealComm

LOOK = 0.2  # s between two looks at the main thread
IDLE = 0.05  # s: for gloo's threads to have nothing to do any more
LATER = 1.0  # s: torch's own time limits end what this cannot, after this would have
MEETINGS = ("init_process_group", "new_group")  # which look again and again for what they wait for
OF_TORCH = (f"{os.sep}torch{os.sep}distributed{os.sep}", f"{os.sep}torch{os.sep}nn{os.sep}parallel{os.sep}")
CALLS, BACKWARD = f"{OF_TORCH[0]}distributed_c10d.py", f"{os.sep}torch{os.sep}autograd{os.sep}graph.py"
BROKEN = re.compile(r"/gloo/|Application timeout caused pair closure|^Wait timeout")  # of a connection, or of time


class _TorchCall(NamedTuple):
    """Say what the main thread does in torch.distributed: the call, the user's line, the rank it needs or -1."""

    op: str
    line: str
    peer: int = -1


@functools.cache
def plain_torch() -> PlainTorch:
    """Return the PlainTorch of this process."""
    return PlainTorch()


class PlainTorch:
    """torch.distributed in this process. comm: the communicator of the run that is under way, or None."""

    def __init__(self) -> None:
        self.comm: RealComm | None = None
        self.address = (LOOPBACK_ADDRESS, 0)  # MASTER_ADDR and MASTER_PORT where rank 0 is here
        self._dist: Any = None  # torch.distributed, once it is imported
        self._environment: dict[str, str | None] = {}  # as it was before the run
        self._before: ProcessGroup | None = None  # the process group that a cell of %px had left to its next one
        # process groups of gloo that were destroyed in this run, or since the last one
        self._kept: list[ProcessGroup] = []
        self._older: list[ProcessGroup] = []  # and those before: see group.last_group
        self._timeout: timedelta | None = None  # torch's own, while there is another one
        self._store_port = 0
        self._lock = threading.Lock()
        self._seen: tuple[_TorchCall | None, int] = (None, 0)
        self._since_ns = 0
        self._ended = ""  # why the wait of the main thread was ended: "deadline", "interrupt"

    # -- of an engine -----------------------------------------------------------------------------------------------

    def open(self, far: bool, create: Callable[..., object]) -> None:
        """Called once by the main thread: take a port, and wait for an import of torch.

        far: there are other hosts. create: makes a process group of the back end "hpdl", of what torch gives it.
        The port is bound and not listened on: no other process gets it, and rank 0 can still open it.
        """
        self._create = create
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("" if far else LOOPBACK_ADDRESS, 0))
        self.address = (own_address() if far else LOOPBACK_ADDRESS, self._port.getsockname()[1])
        self._main = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._main)
        sys.meta_path.insert(0, _AfterImport("torch.distributed", self._imported))

    def tell(self, session: Session, master: tuple[str, int]) -> None:
        """Tell the cells of %px what torchrun would tell; `master`: the address of engine 0."""
        host, hosts = session.hosts[session.rank], session.hosts
        local = hosts[: session.rank].count(host), hosts.count(host)
        os.environ.update(_environment_of(session.rank, session.size, *local, master))

    def _imported(self) -> None:
        dist: Any = sys.modules["torch.distributed"]
        handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
        handlers["env"] = functools.partial(self._meet, handlers["env"])

        module = dist.distributed_c10d
        dist.destroy_process_group = module.destroy_process_group = self._keeping(module.destroy_process_group)
        dist.Backend.register_backend("hpdl", self._create, extended_api=True, devices=["cpu"])
        self._dist = dist
        if self.comm is not None:
            self._limit(self.comm)

    def _keeping(self, destroy: Callable[..., None]) -> Callable[..., None]:
        """torch's destroy_process_group: a gloo group stays until its threads have nothing to do (group.last_group)."""

        @functools.wraps(destroy)
        def destroy_process_group(*args: object, **options: object) -> None:
            if self.comm is not None:
                self._kept += self._groups("gloo")
            else:  # in a cell of %px, where it would keep the store as well, and with it the names of the next group
                time.sleep(IDLE)
            destroy(*args, **options)

        return destroy_process_group

    def _meet(
        self, native: Callable[..., Iterator[tuple[Store, int, int]]], url: str, **options: object
    ) -> Iterator[tuple[Store, int, int]]:
        """Yield what env:// is here: (store, rank, size). Scripts that name other ranks than the run's get torch's."""
        said, comm = dict(re.findall(r"\b(rank|world_size)=(\d+)", url)), self.comm
        if comm is None or said not in ({}, {"rank": str(comm.rank), "world_size": str(comm.size)}):
            if comm is None and not said and os.environ.get("RANK", "0") != "0":
                while not _answers(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])):
                    time.sleep(IDLE)  # torch would try again and again where no interrupt reaches it
            yield from native(url, **options)
            return
        from .group import store_of

        store = store_of(comm, "init_process_group")
        self._store_port = getattr(store, "port", 0)
        yield store, comm.rank, comm.size

    # -- of a run ---------------------------------------------------------------------------------------------------

    def begin(self, comm: RealComm, master: tuple[str, int]) -> None:
        """Begin the run of `comm`: set what torchrun would. master: the address of its rank 0."""
        for group in self._kept:  # the other ranks have left them: what they still do ends
            _break_gloo(group)
        self._older, self._kept = self._kept, []
        self._ended, self._store_port, self._seen = "", 0, (None, 0)
        names = _environment_of(comm.rank, comm.size, comm.node_rank, comm.node_size, master)
        self._environment = {name: os.environ.get(name) for name in names}
        self.comm = comm
        os.environ.update(names)
        if self._dist is not None:
            self._before = self._dist.group.WORLD
            self._limit(comm)

    def _limit(self, comm: RealComm) -> None:
        """Have torch's own time limits come after the deadline of the run."""
        module = self._dist.distributed_c10d
        self._timeout = module.default_pg_timeout
        module.default_pg_timeout = timedelta(seconds=comm.waiting.deadline + LATER)

    def leave(self, failed: bool) -> None:
        """End the run for this rank: the process groups that it has left, and its environment."""
        if self.comm is None:
            return
        for name, value in self._environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        if self._dist is not None:
            if self._timeout is not None:
                self._dist.distributed_c10d.default_pg_timeout, self._timeout = self._timeout, None
            if self._dist.is_initialized() and self._before is None:
                if failed:
                    self._break_off()
                    for group in self._groups("hpdl"):
                        group.abort()
                self._dist.destroy_process_group()
            self._forget_names()
            self._before = None
        with self._lock:
            comm, self.comm = self.comm, None  # last: what an interrupt has cut short is done again
            if not self._ended and not failed:
                self._moved(comm)

    def _forget_names(self) -> None:
        """Have the next process group named as on other ranks, also if some have tried in vain to make one."""
        if not self._dist.is_initialized():
            self._dist.distributed_c10d._world.group_count = 0

    def _groups(self, backend: str) -> list[ProcessGroup]:
        """Return the process groups of this process that work with `backend`."""
        return [
            g for g in self._dist.distributed_c10d._world.pg_map if backend in str(self._dist.get_backend_config(g))
        ]

    def _break_off(self) -> None:
        """End all that is under way in compiled code, in all process groups."""
        for group in self._groups("gloo"):
            _break_gloo(group)
        for group in self._groups("nccl"):
            group.abort()

    # -- what the main thread waits in, seen from another -----------------------------------------------------------

    def look(self) -> None:
        """Publish what the main thread waits in; end that at the deadline. Called every LOOK seconds of a run."""
        with self._lock:
            if self.comm is None or self._dist is None:
                return
            comm, call = self.comm, self._call(sys._current_frames().get(self._main))
            cpu = 0 if call is not None and call.op in MEETINGS else time.clock_gettime_ns(self._clock)
            if call is None or (call, cpu) != self._seen:
                self._moved(comm)
                self._seen, self._since_ns = (call, cpu), now_ns()
                return
            self._publish(comm, call)
            waiting = comm.waiting
            late = not self._ended and now_ns() - self._since_ns > waiting.deadline * 1e9
        if late:
            self.end("deadline")

    def _publish(self, comm: RealComm, call: _TorchCall) -> None:
        """Publish that this rank waits in `call`."""
        members, waiting = comm.members, comm.waiting
        peers = (members[call.peer],) if call.peer >= 0 else waiting.missing(members, call.op)()
        # Ranks that have met do not wait for each other. The first meeting is before any collective: a rank that is
        # still in it contradicts none that has left it.
        facts = {} if call.peer >= 0 else {"nth": 1 if call.op == MEETINGS[0] else 2}
        described = (call.op, peers, 0, self._since_ns, 0, call.line, facts)
        waiting.status.publish(waiting.rank, "waiting", waiting.run, *described)

    def _moved(self, comm: RealComm) -> None:
        """Note that the main thread does not wait there any more."""
        status, rank, call = comm.waiting.status, comm.waiting.rank, self._seen[0]
        slot = status.slot(rank)
        if call is not None and (slot.state, slot.op, slot.since_ns) == ("waiting", call.op, self._since_ns):
            status.publish(rank, "running", comm.waiting.run)
        self._seen = (None, 0)

    def end(self, why: str = "interrupt") -> None:
        """Let what the main thread waits in fail, if that is in torch. Called by another thread."""
        if self._dist is None:
            return
        self._forget_names()
        if self._call(sys._current_frames().get(self._main)) is None:
            return
        self._ended = self._ended or why
        if self.comm is not None:
            self.comm.waiting.status.end_wait(self.comm.waiting.rank)
        self._break_off()
        _cut({self._store_port, int(os.environ.get("MASTER_PORT", 0))} - {0})

    def explained(self, error: BaseException) -> BaseException:
        """Return the error to report for `error`, which has ended the run: if it is torch's, what has led to it."""
        if self.comm is None or self._dist is None or not isinstance(error, RuntimeError):
            return error
        of_network = (self._dist.DistNetworkError, self._dist.DistStoreError)
        if isinstance(error, CommError) or not (isinstance(error, of_network) or BROKEN.search(str(error))):
            return error
        cause: BaseException
        if self._ended == "interrupt":
            cause = KeyboardInterrupt()
        elif self._ended:
            waiting = self.comm.waiting
            (me,) = [wait for wait in waiting.waits() if wait.rank == self.comm.rank]
            whom = f" {me.with_whom}" if me.peers else ""
            cause = CommTimeout(
                f"no answer within {waiting.deadline:g} s: {name_ranks([me.rank])} waits in {me.op}{whom}",
                waiting.waits(),
            )
        else:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if (call := self._call(frame)) is not None:
                self._since_ns = now_ns()
                self._publish(self.comm, call)  # that it failed is a consequence: what it waited in stays to be read
            said = str(error).partition("\n")[0]
            cause = CommError(f"the process group has failed: {said}", self.comm.waiting.waits())
        return cause.with_traceback(error.__traceback__)

    def _call(self, frame: FrameType | None) -> _TorchCall | None:
        """Return what the main thread does in torch.distributed, or None. frame: its innermost one."""
        inner: list[FrameType] = []
        while frame is not None and not is_user_code(frame.f_code.co_filename):
            inner.append(frame)
            frame = frame.f_back
        if inner and inner[0].f_code.co_filename.startswith(PACKAGE):
            return None  # its own waits report themselves
        line = line_of(frame, frame.f_lineno) if frame is not None else ""
        named = [f for f in reversed(inner) if f.f_code.co_filename.endswith(CALLS)]
        for found in named:
            name, values = found.f_code.co_name, found.f_locals
            if not name.startswith("_"):
                peer = {"send": "dst", "recv": "src"}.get(name, "")
                return _TorchCall(name, line, self._rank(values.get(peer)))
        for found in reversed(inner):
            if any(part in found.f_code.co_filename for part in OF_TORCH):
                return _TorchCall(found.f_code.co_qualname.removesuffix(".__init__").rpartition(".")[2], line)
        if not self._dist.is_initialized():
            return None
        if inner and inner[0].f_code.co_filename.endswith(BACKWARD):
            return _TorchCall("backward", line)
        return _TorchCall("wait", line) if not inner and frame is not None and _called_by(frame) == "wait" else None

    def _rank(self, peer: object) -> int:
        return peer if self.comm is not None and isinstance(peer, int) and 0 <= peer < self.comm.size else -1


def _environment_of(rank: int, size: int, local: int, local_size: int, master: tuple[str, int]) -> dict[str, str]:
    """Return what torchrun would put into the environment of a rank, and the interface if all are on one host."""
    values: dict[str, int | str] = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": local_size,
    }
    values |= {"MASTER_ADDR": master[0], "MASTER_PORT": master[1]}
    if local_size == size and INTERFACE not in os.environ:
        values[INTERFACE] = loopback_interface()
    return {name: str(value) for name, value in values.items()}


def _called_by(frame: FrameType) -> str:
    """Return the name of the method that `frame` is calling, "" if it is none."""
    names = [i.argval for i in dis.get_instructions(frame.f_code) if i.offset < frame.f_lasti and "METHOD" in i.opname]
    return names[-1] if names else ""


def _answers(host: str, port: int) -> bool:
    """Return whether somebody listens there."""
    with suppress(OSError), socket.create_connection((host, port), 1):
        return True
    return False


def _break_gloo(group: ProcessGroup) -> None:
    """End all that is under way in a group of gloo."""
    from .messages import break_off

    if group.size() > 1:
        break_off(group, range(group.size()))


def _cut(ports: set[int]) -> None:
    """Break off the connections of this process to `ports`, behind which are stores that torch may wait for."""
    for path in glob.glob("/proc/self/fd/*"):
        with suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(os.path.basename(path)))) as connection:
                    if set(connection.getpeername()[1:2]) & ports:
                        connection.shutdown(socket.SHUT_RDWR)


class _AfterImport(MetaPathFinder):
    """Stands before the others in sys.meta_path, and has then() called when module `name` has been imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                self.then()

            spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec

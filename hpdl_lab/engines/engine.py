"""The process of one engine: an MPI rank that serves the tasks of `lab.run`, and becomes an ipyparallel engine for %px.

mpiexec starts it (launch.py). A thread listens on a Unix socket, so that the main thread, where tasks run (task.py),
can be interrupted: a message, or a kernel that has gone, becomes SIGINT there, which reaches Python code, a wait in
`comm`, and a system call that can be interrupted. The engine exits when the supervisor dies. Most notebooks never use
%px, whose imports take three times as long as all others here: once one does, the engine goes on in px_processes.py.
"""

import ctypes
import fcntl
import functools
import gc
import importlib.util
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, cast

import numpy  # noqa: F401  before this package, after which its own import takes 35 ms more, of memory that comes and goes

from ..comm.errors import CommError
from ..comm.hosts import HOST, machine_id
from ..comm.mpi.session import Session, session_of_this_process
from ..comm.torch.plain import LOOK, plain_torch
from ..features import cores
from ..features.freed_memory import keep_freed_memory
from ..features.torch_compiler import put_off_torch_compiler
from ..trace import now_ns
from . import client, messages, session_dir, task
from .messages import Address, EngineState, Info, RankTask
from .supervisor import mapped_shared_memory
from .task import execute_task, interrupted

if TYPE_CHECKING:
    from tornado.ioloop import IOLoop

    from ..torch_backend.group import HpdlGroup, NewGroup

AGAIN = 0.05  # s, until an interrupt that cannot be served now is looked at again


class _KernelConnection:
    """A kernel's connection to this engine."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.reader = messages.MessageReader()
        self.gone = False
        self._lock = threading.Lock()  # a task may report from threads of its own

    def send(self, kind: int, content: object) -> None:
        """Send one message; nothing happens when the kernel has gone.

        SIGINT waits until the message is out: half a message would end the connection.
        """
        message = messages.pieces(kind, content)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with self._lock:
                for piece in message:
                    self.socket.sendall(piece)
        except OSError:
            self.gone = True
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Server:
    """A server of tasks for one rank, on the Unix socket at `path`. `session` makes a communicator for each task."""

    def __init__(self, session: Session, rank: int, path: str, supervisor_pid: int) -> None:
        self.session = session
        self.rank = rank
        self.path = path
        self.connected = threading.Event()  # set when a first kernel has connected
        self.current: tuple[_KernelConnection, int] | None = None  # (kernel, run) of the task in the main thread
        self.interruptible = False
        self.torch = plain_torch()
        self._supervisor = os.pidfd_open(supervisor_pid)
        self._main = threading.get_ident()
        self._selector = selectors.DefaultSelector()
        # Calls for the main thread; None: %px is wanted.
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._px_wanted = False
        self._loop: IOLoop | None = None
        self._tasks: set[tuple[_KernelConnection, int]] = set()  # (kernel, run) that have arrived and not ended
        self._cancelled: set[tuple[_KernelConnection, int]] = set()  # to be refused when their turn comes

    def listen(self) -> None:
        """Open the socket; tasks that arrive wait for `work`, or `work_in`."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{self.path}.new")
        listener.listen(64)
        try:
            os.link(f"{self.path}.new", self.path)  # it appears when it can be used
        except FileExistsError:
            raise SystemExit(f"a second process wants to be engine {self.rank}: lab.restart()") from None
        finally:
            os.unlink(f"{self.path}.new")
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        self._selector.register(self._supervisor, selectors.EVENT_READ, _end_without_supervisor)
        threading.Thread(target=self._serve, daemon=True, name="tasks").start()

    def submit(self, job: Callable[[], object]) -> None:
        """Have job() called in the main thread, when what has come before is done."""
        self._jobs.put(job)
        if self._loop is not None:  # set before jobs are counted: none is left lying
            self._loop.add_callback(self._work_once)

    def work(self) -> None:
        """Run tasks in this thread, the main one, until a kernel wants %px."""
        while (job := self._jobs.get()) is not None:
            job()

    def work_in(self, loop: "IOLoop") -> None:
        """Run tasks in `loop`, the event loop of the main thread from now on, between the cells of %px."""
        self._loop = loop
        for _ in range(self._jobs.qsize()):  # they have come since `work` ended
            loop.add_callback(self._work_once)

    def on_sigint(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGINT: end the task that runs; amid an import of torch only when that is complete.

        An import of torch that is cut short cannot be made up for: the next one crashes the process, because torch's
        compiled part sets itself up a second time.
        """
        if not self.interruptible:
            return
        if _imports_torch(frame):
            threading.Timer(AGAIN, self._interrupt_again, self.current or (None, None)).start()
        else:
            raise KeyboardInterrupt

    # -- thread -----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        next_look = 0.0
        while True:
            for key, _ in self._selector.select(LOOK if self._tasks else None):
                key.data()
            if self._tasks and time.monotonic() > next_look:
                self.torch.look()
                next_look = time.monotonic() + LOOK

    def _accept(self, listener: socket.socket) -> None:
        kernel = _KernelConnection(listener.accept()[0])
        kernel.send(client.HELLO, _describe(self.rank, self.torch.address))
        self._selector.register(kernel.socket, selectors.EVENT_READ, lambda: self._receive(kernel))
        self.connected.set()

    def _receive(self, kernel: _KernelConnection) -> None:
        try:
            received = kernel.reader.read(kernel.socket)
        except OSError:
            received = None
        if received is None:
            self._selector.unregister(kernel.socket)
            kernel.gone = True
            self._interrupt(kernel, None)
            return
        for kind, content in received:
            if kind == client.TASK:
                self._tasks.add((kernel, content["run"]))
                self.submit(functools.partial(self._run, kernel, content))
            elif kind == client.PX:
                if not self._px_wanted:
                    self._px_wanted = True
                    self.torch.tell(self.session, content)
                    self._jobs.put(None)
            elif kind == client.STATE:
                kernel.send(client.STATE, self._state() | {"asked": content})
            elif kind == client.DEAD:
                self.session.status.mark_dead(content)
            else:
                self._interrupt(kernel, content)

    def _interrupt(self, kernel: _KernelConnection, run: int | None) -> None:
        """End task `run` of `kernel` (any, when None), or refuse it when its turn comes and end what is in its way."""
        if run is None:
            if self.current is None or self.current[0] is not kernel:
                return
        elif (kernel, run) not in self._tasks:
            return
        elif self.current != (kernel, run):
            self._cancelled.add((kernel, run))
        signal.pthread_kill(self._main, signal.SIGINT)
        self.torch.end()

    def _state(self) -> EngineState:
        return task.own_state(self.session.status, self.rank, self._loop is not None)

    def _interrupt_again(self, kernel: _KernelConnection | None, run: int | None) -> None:
        """End task `run` of `kernel`, unless it has ended by itself meanwhile."""
        if self.current == (kernel, run):
            signal.pthread_kill(self._main, signal.SIGINT)

    # -- main thread --------------------------------------------------------------------------------------------------

    def _work_once(self) -> None:
        try:
            job = cast("Callable[[], object]", self._jobs.get_nowait())  # the None has ended `work`
        except queue.Empty:
            return  # asked for twice: by `work_in` and by `submit`
        job()

    def _run(self, kernel: _KernelConnection, task: RankTask) -> None:
        if kernel.gone:
            return
        key = self.current = (kernel, task["run"])
        try:
            outcome = execute_task(self, kernel, task, cancelled=key in self._cancelled)
        except KeyboardInterrupt:  # a second one, while the first was being handled
            outcome = interrupted(self.rank)
        finally:
            self.interruptible = False
            self.current = None
            self._tasks.discard(key)
            self._cancelled.discard(key)
            self._leave(task["run"])
        kernel.send(client.DONE, outcome | {"state": self._state()})

    def _leave(self, run: int) -> None:
        """Close what task `run` has left open, because an interrupt struck amid its start or its end."""
        for comm in [comm for comm in self.session.open if comm.waiting.run == run]:
            comm.close(KeyboardInterrupt())
        slot = self.session.status.slot(self.rank)
        if (slot.run, slot.state) == (run, "running"):
            self.session.status.publish(self.rank, "failed", run)


def _end_without_supervisor() -> None:
    """End this process, and remove the shared memory that it has mapped, as the supervisor would have done."""
    for path in mapped_shared_memory([os.getpid()]):
        with suppress(OSError):  # another rank was faster
            os.unlink(path)
    os._exit(1)


def _imports_torch(frame: FrameType | None) -> bool:
    """Return True if `frame`, or one that led to it, is the top level of the package torch: its import is under way."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            return True
        frame = frame.f_back
    return False


def _describe(rank: int, master: Address) -> Info:
    """Describe this engine, for the table of engines among others."""
    return {
        "rank": rank,
        "pid": os.getpid(),
        "host": os.environ.get(HOST) or socket.gethostname(),
        "machine": machine_id(),
        "cores": sorted(os.sched_getaffinity(0)),
        "gpu": _gpu_of(rank),
        "master": master,
        "now_ns": now_ns(),
    }


def _gpu_of(rank: int) -> str:
    """Return the GPU that serves `rank`, by turns, such as "cuda:0"; "none" if the driver shows none."""
    try:
        count = len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        count = 0
    return f"cuda:{rank % count}" if count else "none"


def _create_group(options: "NewGroup", comm: object) -> "HpdlGroup":
    """Make a process group of the back end "hpdl". Imported when a script asks for one: it takes torch along."""
    from ..torch_backend.group import create

    return create(options, comm)


def main() -> None:
    keep_freed_memory()
    put_off_torch_compiler()
    path, size = os.environ["HPDL_SESSION"], int(os.environ["HPDL_SIZE"])
    try:
        session = session_of_this_process()  # `comm.world()` in a cell of %px uses the same
    except CommError as error:
        raise SystemExit(str(error)) from None
    rank = session.rank
    if session.size != size:
        from ..features import mpiexec

        for path in mapped_shared_memory([os.getpid()]):  # Open MPI, which takes this for its only rank, would leave it
            os.unlink(path)
        raise SystemExit(
            f"mpiexec started {size} engines, but this one is in an MPI job of {session.size}: "
            f"mpi4py has loaded another MPI than {mpiexec()} belongs to"
        )
    server = Server(session, rank, session_dir.engine_socket(path, rank), int(os.environ["HPDL_SUPERVISOR"]))
    server.torch.open(len(set(session.hosts)) > 1, _create_group)
    signal.signal(signal.SIGINT, server.on_sigint)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.environ.get("HPDL_TORCH") != "later":
        threading.Thread(target=import_torch, args=(server, path), daemon=True).start()
    server.listen()
    server.work()
    from . import px_processes

    px_processes.serve_engine(server, session_dir.connection_file(path, "engine"))


def import_torch(server: Server, path: str) -> None:
    """Import torch once a first kernel has connected, while the attendee reads; a task that needs it does not wait.

    On half of the cores at a time: the others are for tasks, which then take 10 ms more meanwhile, and not 80. With
    HPDL_TORCH=later in the environment no engine does: it is of no use to engines that live for seconds.
    """
    server.connected.wait()
    with open(session_dir.torch_lock(path), "w", opener=session_dir.readable_by_me) as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX, 1, server.rank % max(1, cores() // 2))
        gc.disable()  # it would go over all that is imported, again and again: a fifth of the time
        try:
            load_compiled_torch()
            import torch  # noqa: F401
        except ImportError:
            pass  # an exercise that needs it says so itself
        finally:
            gc.enable()
    server.submit(_keep_for_good)


def load_compiled_torch() -> None:
    """Load torch's compiled part while Python goes on: the import would hold Python's lock for 0.2 s of a core."""
    if (torch := importlib.util.find_spec("torch")) is None or not torch.submodule_search_locations:
        return
    library = os.path.join(torch.submodule_search_locations[0], "lib", "libtorch_python.so")
    dlopen = ctypes.CDLL(None).dlopen  # ctypes.CDLL(library) would hold the lock as well
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    dlopen(os.fsencode(library), os.RTLD_NOW)  # if it fails, the import says why


def _keep_for_good() -> None:
    """Spare the collector, in every task to come, all that is there by now, most of it torch."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()

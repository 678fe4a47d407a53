r"""The supervisor: a small process that owns all processes of an engine cluster, and ends them after their last user.

    kernel A --\                                 /-- controller
                >-- supervisor.sock -- supervisor
    kernel B --/                                 \-- mpiexec -- ... -- engines

Every attached kernel stays connected to the supervisor's socket. When the last one is gone (stop, crash, kill -9), or
on SIGTERM, the supervisor kills its descendants, removes the session directory and the shared memory that they had
mapped, and exits. It is the reaper of its descendants, so that none escapes by losing its parent. Should the supervisor
itself be killed, the system kills its children, and the engines exit by themselves (engine.py).

This file runs by itself (`python -I -S supervisor.py DIRECTORY FD`): it imports the standard library only, to start in
milliseconds. Requests and replies are JSON, one per line, each with the "id" of its request:

    {"do": "spawn", "name", "argv", "env", "cwd", "log"}   ->  {"pid"}
                       "grace": seconds from SIGTERM to SIGKILL, for one that has to undo something elsewhere
    {"do": "status"}                                       ->  {"running": {name: pid}, "attached": [pid]}
    {"do": "ready"}    the processes are all there         ->  {}
    {"do": "kill"}     end all processes, keep the session ->  {}
                       "keep": names of processes that go on
    {"do": "stop"}     end the session                     ->  {}
"""

import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
SHARED_MEMORY = "/dev/shm/"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # each ends the session


class _Kernel:
    """An attached kernel: its connection, what arrived of its next request, and a handle on its process."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.pid = struct.unpack("3i", credentials)[0]
        self.process: int | None = None
        try:
            # A process forked by the kernel may hold the connection open after the kernel is dead: watch both.
            self.process = os.pidfd_open(self.pid)
        except OSError:
            pass


class _Supervisor:
    """A server of the kernels that use the session in `directory`; `first` is the connection of the first of them."""

    def __init__(self, directory: str, first: socket.socket) -> None:
        self.directory = directory
        self.closed = False
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.graces: dict[str, float] = {}  # s
        self.mapped: set[str] = set()  # shared memory files of our processes
        self.kernels: list[_Kernel] = []
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(os.path.join(directory, "supervisor.sock"))
        self.listener.listen(64)
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.attach(first)

    def serve(self) -> None:
        """Answer kernels until the last one is gone."""
        while self.kernels:
            for key, _ in self.selector.select(timeout=1.0):
                if key.fileobj in self.selector.get_map():  # not dropped by an earlier event of this round
                    key.data()
            _reap()

    def accept(self) -> None:
        self.attach(self.listener.accept()[0])

    def attach(self, connection: socket.socket) -> None:
        kernel = _Kernel(connection)
        self.kernels.append(kernel)
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.receive(kernel))
        if kernel.process is not None:
            self.selector.register(kernel.process, selectors.EVENT_READ, lambda: self.detach(kernel))

    def detach(self, kernel: _Kernel) -> None:
        self.kernels.remove(kernel)
        self.selector.unregister(kernel.connection)
        kernel.connection.close()
        if kernel.process is not None:
            self.selector.unregister(kernel.process)
            os.close(kernel.process)

    def receive(self, kernel: _Kernel) -> None:
        try:
            data = kernel.connection.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            return self.detach(kernel)
        *requests, kernel.received = (kernel.received + data).split(b"\n")
        for line in requests:
            request = json.loads(line)
            number = request.pop("id")
            reply = {"id": number, **getattr(self, "do_" + request.pop("do"))(**request)}
            try:
                kernel.connection.sendall(json.dumps(reply).encode() + b"\n")
            except OSError:
                return None  # it has gone: the next event says so
        return None

    # -- requests ---------------------------------------------------------------------------------------------------

    def do_spawn(
        self, name: str, argv: list[str], env: dict[str, str], cwd: str, log: str, grace: float = 0.0
    ) -> dict[str, object]:
        self.graces[name] = grace
        try:
            with open(log, "ab") as output:
                self.children[name] = subprocess.Popen(
                    argv,
                    env=env,
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C in a terminal is for the notebook server, not for engines
                    preexec_fn=die_with_parent,
                )
        except OSError as error:
            where = "" if error.filename == argv[0] else f" ({error.filename})"
            return {"error": f"{argv[0]}: {error.strerror}{where}"}
        return {"pid": self.children[name].pid}

    def do_status(self) -> dict[str, object]:
        running = {name: child.pid for name, child in self.children.items() if alive(child.pid)}
        return {"running": running, "attached": [kernel.pid for kernel in self.kernels]}

    def do_ready(self) -> dict[str, object]:
        # A process that is killed later cannot be asked any more what it had mapped.
        self.mapped |= mapped_shared_memory(_descendants())
        return {}

    def do_kill(self, keep: Sequence[str] = ()) -> dict[str, object]:
        self.kill_all(keep)
        self.children = {name: child for name, child in self.children.items() if name in keep}
        return {}

    def do_stop(self) -> dict[str, object]:
        self.close()
        return {}

    def close(self) -> None:
        """End every process of the session and remove its files."""
        if self.closed:
            return
        for signum in SIGNALS:  # one more of them would end this process half way
            signal.signal(signum, signal.SIG_IGN)
        self.closed = True
        self.kill_all()
        # Moved away in one step: a kernel that starts a new cluster meanwhile makes its own directory.
        ended = f"{self.directory}.{os.getpid()}"
        try:
            os.rename(self.directory, ended)
        except OSError:
            ended = self.directory
        shutil.rmtree(ended, ignore_errors=True)
        self.kernels.clear()

    def kill_all(self, keep: Collection[str] = ()) -> None:
        """Kill all descendants but the children `keep`, wait for their end, and remove the memory that they shared.

        Children with a grace are asked first, and spared as long as that lasts.
        """
        kept = {child.pid for name, child in self.children.items() if name in keep}
        asked: dict[int, float] = {}  # pid -> when it is killed
        for name, child in self.children.items():
            if self.graces[name] and child.pid not in kept and alive(child.pid):
                asked[child.pid] = time.monotonic() + self.graces[name]
                child.terminate()
        while pids := _descendants(kept):
            spared = {pid for pid, end in asked.items() if time.monotonic() < end}
            if spared:
                pids = _descendants(kept | spared)
            self.mapped |= mapped_shared_memory(pids)
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            _reap()
            time.sleep(0.002 if pids else 0.02)
        _reap()
        for path in self.mapped:
            try:
                os.unlink(path)
            except OSError:
                pass  # the processes have removed it themselves
        self.mapped.clear()


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Have the system send `signum` to this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def alive(pid: int) -> bool:
    return _stat_of(pid)[0] not in "ZX"


def _stat_of(pid: int | str) -> tuple[str, int]:
    """Return (state letter, parent) of process `pid`; ("X", 0) if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            return state, int(parent)
    except OSError:
        return "X", 0


def _reap() -> None:
    """Collect children that have ended, also those inherited from dead parents."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _descendants(spared: Collection[int] = ()) -> list[int]:
    """Return the ids of all living descendants of this process, but for the children `spared` and theirs."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        state, parent = _stat_of(name)
        if state not in "ZX":
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    todo = [os.getpid()]
    while todo:
        below = [pid for pid in children.get(todo.pop(), []) if pid not in spared]
        found += below
        todo += below
    return found


def mapped_shared_memory(pids: Iterable[int]) -> set[str]:
    """Return the paths of the shared memory files that the processes have mapped."""
    paths: set[str] = set()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/maps") as file:
                paths |= {line[line.index(SHARED_MEMORY) :].rstrip("\n") for line in file if SHARED_MEMORY in line}
        except OSError:
            continue
    return {path for path in paths if not path.endswith(" (deleted)")}


def _main() -> None:
    directory, first = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    os.umask(0o077)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = _Supervisor(directory, first)

    def on_signal(signum: int, frame: object) -> None:
        supervisor.close()
        os._exit(0)

    for signum in SIGNALS:
        signal.signal(signum, on_signal)
    try:
        supervisor.serve()
    finally:  # even if it fails: nothing may be left behind
        supervisor.close()


if __name__ == "__main__":
    _main()

"""The processes of `%px`: an engine (engine.py) that becomes an ipyparallel engine, and ipyparallel's controller.

The tasks of `lab.run` go on between an engine's cells, and nothing of them goes through the controller. An engine
registers under its rank, so that `%%px` and `lab.run` number the engines alike. The controller is started as `python -m
hpdl_lab.engines.px_processes` (launch.py). Its sockets are Unix sockets in the session directory: no other user can
open them, and they reach engines on emulated hosts, which have networks of their own.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ipyparallel.controller.app import IPController
from ipyparallel.engine.app import IPEngine
from tornado.ioloop import PeriodicCallback
from traitlets.config import Config

from ..system import until
from . import session_dir
from .supervisor import die_with_parent

if TYPE_CHECKING:
    from tornado.ioloop import IOLoop
    from zmq.eventloop.zmqstream import ZMQStream

    from ..comm.mpi.session import Session
    from ..comm.torch.plain import PlainTorch

Json: TypeAlias = dict[str, Any]
LOOK_MS = 250  # between looks for engines that have ended
CONTROLLER_SECONDS = 60  # to write its connection file: it and the engines start at the same time


class Server(Protocol):
    """The engine.Server of tasks that is in the same process."""

    rank: int
    session: Session
    torch: PlainTorch

    def work_in(self, loop: IOLoop) -> None: ...


class _Engine(IPEngine):
    """ipyparallel's engine, with this laboratory's signal handling and server of tasks."""

    server: Server

    def init_signal(self) -> None:
        """Leave signals as engine.py has set them; ipykernel puts its own handler of SIGINT around %px."""

    def on_signal_request(self, stream: ZMQStream, ident: list[bytes], parent: Json) -> None:
        """Interrupt the cell, as ipyparallel's nanny would: an interrupted `%px` cell asks its engines for that."""
        number = parent["content"]["sig"]
        signal.pthread_kill(
            threading.main_thread().ident or 0, getattr(signal, number) if isinstance(number, str) else number
        )
        self.server.torch.end()
        self.session.send(stream, "signal_reply", {"status": "ok"}, parent=parent, ident=ident)

    async def on_execute_request(self, stream: ZMQStream, ident: list[bytes], parent: Json) -> None:
        """Run a cell of %px, and go on if it fails.

        If a cell fails or is interrupted, ipykernel drops what has come meanwhile, without a word; it would do so on
        some ranks and not on others, and leave them out of step.
        """
        parent["content"]["stop_on_error"] = False
        await self.kernel.execute_request(stream, ident, parent)

    def keep_names(self) -> None:
        """Let cells know mpi_rank and mpi_size, also after `%reset` and `rc.clear()`."""
        shell, init = self.kernel.shell, self.kernel.shell.init_user_ns
        names = {"mpi_rank": self.server.rank, "mpi_size": self.server.session.size}
        shell.user_ns.update(names)
        shell.init_user_ns = lambda: (init(), shell.user_ns.update(names))

    async def register(self) -> None:
        await super().register()
        self.kernel.control_handlers["signal_request"] = self.on_signal_request
        self.kernel.shell_handlers["execute_request"] = self.on_execute_request
        self.keep_names()
        if self.id != self.server.rank:
            raise SystemExit(f"the controller numbers MPI rank {self.server.rank} as engine {self.id}: lab.restart()")
        self.server.work_in(self.loop)


def serve_engine(server: Server, connection_file: str) -> None:
    """Run cells of %px, and the tasks of `server`, in this thread, the main one."""
    config = Config()
    config.IPEngine.id = server.rank
    config.IPEngine.url_file = connection_file
    config.IPEngine.enable_nanny = False  # a second process per engine; the supervisor and the sockets watch instead
    config.IPEngine.max_heartbeat_misses = 0
    if not until(lambda: os.path.exists(connection_file), CONTROLLER_SECONDS):
        raise SystemExit(f"no connection file {connection_file} after {CONTROLLER_SECONDS} s")
    engine = _Engine.instance(config=config)
    engine.server = server
    engine.initialize([])
    engine.start()


class Controller(IPController):
    """ipyparallel's controller, on Unix sockets."""

    def construct_url(self, kind: str, channel: str, index: int | None = None) -> str:
        """Spell it as clients and engines do: ipyparallel 9.2 itself writes a "-" here where they look for a ":"."""
        info = getattr(self, f"{kind}_info")
        return f"{info['interface']}:{info[channel] if index is None else info[channel][index]}"

    def save_connection_dict(self, fname: str, cdict: Json) -> None:
        """Write all at once: engines read the file as soon as it is there, and ipyparallel itself writes into it."""
        super().save_connection_dict(f"{fname}.new", cdict)
        folder = self.profile_dir.security_dir
        os.rename(os.path.join(folder, f"{fname}.new"), os.path.join(folder, fname))

    def start(self) -> None:
        """Begin, and tell clients of engines that have ended, as ipyparallel's nannies would."""
        PeriodicCallback(self._look, LOOK_MS).start()
        super().start()

    def _look(self) -> None:
        for rank in [*self.hub.engines]:
            if os.path.exists(session_dir.exit_file(os.environ["HPDL_SESSION"], rank)):
                self.hub.unregister_engine(b"", {"content": {"id": rank}})


def _main() -> None:
    """Be the controller, without what a laboratory on one machine does not need."""
    config = Config()
    config.IPController.transport = "ipc"
    config.IPController.ip = session_dir.px_sockets(os.environ["HPDL_SESSION"])
    config.IPController.ports = list(range(1, session_dir.PX_CHANNELS + 1))  # ends of the sockets' names
    config.IPController.use_threads = True  # schedulers as threads of this process, which forks less
    config.IPController.broadcast_scheduler_depth = 0
    config.IPController.db_class = "NoDB"
    config.HeartMonitor.period = 100  # ms: the hub announces an engine at its second heartbeat; the default is 3,000
    config.HeartMonitor.max_heartmonitor_misses = 600  # a minute: sockets, not heartbeats, tell of dead engines
    os.register_at_fork(after_in_child=die_with_parent)  # the heart monitor is a process of its own
    controller = Controller.instance(config=config)
    controller.initialize([])
    controller.start()


if __name__ == "__main__":
    _main()

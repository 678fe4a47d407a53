"""The process of one engine: an MPI rank that is an ipyparallel engine and serves the tasks of `lab.run`.

mpiexec starts it (launch.py). It registers with ipyparallel's controller under its rank, so that `%%px` and `lab.run`
number the engines alike, and then opens the socket on which it takes tasks (server.py). It exits when the keeper dies.
"""

import os
import signal
import sys
import threading
import time

from ipyparallel.engine.app import IPEngine
from traitlets.config import Config

from ..comm.mpi import session_of_this_process
from . import launch, session_dir
from .server import Server


class Engine(IPEngine):
    """ipyparallel's engine, with this laboratory's signal handling and a server of tasks beside it."""

    server = None

    def init_signal(self):
        """SIGINT ends the task that runs, and nothing when none does; ipykernel puts its own handler around %px."""
        signal.signal(signal.SIGINT, self.server.on_sigint)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_signal_request(self, stream, ident, parent):
        """What ipyparallel's nanny would do: an interrupted `%px` cell asks its engines to interrupt it too."""
        number = parent["content"]["sig"]
        signal.pthread_kill(
            threading.main_thread().ident, getattr(signal, number) if isinstance(number, str) else number
        )
        self.session.send(stream, "signal_reply", {"status": "ok"}, parent=parent, ident=ident)

    async def on_execute_request(self, stream, ident, parent):
        """A cell of %px. Where one fails or is interrupted, ipykernel drops what has come meanwhile, without a word; it
        would do so on some ranks and not on others, and leave them out of step.
        """
        parent["content"]["stop_on_error"] = False
        await self.kernel.execute_request(stream, ident, parent)

    async def register(self):
        await super().register()
        self.kernel.control_handlers["signal_request"] = self.on_signal_request
        self.kernel.shell_handlers["execute_request"] = self.on_execute_request
        if self.id != self.server.rank:
            raise SystemExit(f"the controller numbers MPI rank {self.server.rank} as engine {self.id}: lab.restart()")
        self.server.listen(self.loop)


def main():
    path, size = os.environ["HPDL_SESSION"], int(os.environ["HPDL_SIZE"])
    session = session_of_this_process()  # `comm.world()` in a cell of %px uses the same
    rank = session.rank
    if session.size != size:
        raise SystemExit(
            f"mpiexec started {size} engines, but this one is in an MPI job of {session.size}: "
            f"mpi4py has loaded another MPI than {launch.mpiexec()} belongs to"
        )
    config = Config()
    config.IPEngine.id = rank
    config.IPEngine.url_file = session_dir.connection_file(path, "engine")
    config.IPEngine.enable_nanny = False  # a second process per engine; the keeper and the sockets watch instead
    config.IPEngine.max_heartbeat_misses = 0
    wait_for(config.IPEngine.url_file)
    engine = Engine.instance(config=config, user_ns={"mpi_rank": rank, "mpi_size": size})
    engine.server = Server(session, rank, session_dir.engine_socket(path, rank), int(os.environ["HPDL_KEEPER"]))
    engine.initialize([])
    if os.environ.get("HPDL_TORCH") != "later":
        threading.Thread(target=import_torch, args=(engine.server,), daemon=True).start()
    engine.start()


def wait_for(path, seconds=60):
    """Return when the file exists: the controller and the engines start at the same time."""
    give_up = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > give_up:
            raise SystemExit(f"no connection file {path} after {seconds} s")
        time.sleep(0.01)


def import_torch(server):
    """Import torch once a first kernel has been answered, while the attendee reads; who needs it now waits for it.

    With HPDL_TORCH=later in the environment nobody does: engines that live for seconds have no use for it.
    """
    server.answered.wait()
    try:
        import torch  # noqa: F401
    except ImportError:
        pass  # an exercise that needs it says so itself


if __name__ == "__main__":
    sys.exit(main())

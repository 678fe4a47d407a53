"""An engine (engine.py) as an ipyparallel engine, for `%px`; the tasks of `lab.run` go on between its cells.

It registers with ipyparallel's controller under its rank, so that `%%px` and `lab.run` number the engines alike.
"""

import os
import signal
import threading
import time

from ipyparallel.engine.app import IPEngine
from traitlets.config import Config


class Engine(IPEngine):
    """ipyparallel's engine, with this laboratory's signal handling and a server of tasks beside it."""

    server = None

    def init_signal(self):
        """Signals stay as engine.py has set them; ipykernel puts its own handler of SIGINT around %px."""

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
        self.server.work_in(self.loop)


def serve(server, connection_file):
    """Run cells of %px, and the tasks of `server`, in this thread, the main one."""
    config = Config()
    config.IPEngine.id = server.rank
    config.IPEngine.url_file = connection_file
    config.IPEngine.enable_nanny = False  # a second process per engine; the keeper and the sockets watch instead
    config.IPEngine.max_heartbeat_misses = 0
    wait_for(connection_file)
    user_ns = {"mpi_rank": server.rank, "mpi_size": server.session.size}
    engine = Engine.instance(config=config, user_ns=user_ns)
    engine.server = server
    engine.initialize([])
    engine.start()


def wait_for(path, seconds=60):
    """Return when the file exists: the controller and this start at the same time."""
    give_up = time.monotonic() + seconds
    while not os.path.exists(path):
        if time.monotonic() > give_up:
            raise SystemExit(f"no connection file {path} after {seconds} s")
        time.sleep(0.01)

"""The process of ipyparallel's controller, without what a laboratory on one machine does not need.

Started as `python -m hpdl_lab.engines.controller` (launch.py). It serves `%px`; nothing of `lab.run` goes through it.
Its sockets are Unix sockets in the session directory: no other user can open them, and they reach engines on emulated
hosts, which have networks of their own.
"""

import os

from ipyparallel.controller.app import IPController
from traitlets.config import Config

from . import session_dir
from .keeper import die_with_parent


class Controller(IPController):
    """ipyparallel's controller, on Unix sockets."""

    def construct_url(self, kind, channel, index=None):
        """As clients and engines spell it: ipyparallel 9.2 itself writes a "-" here where they look for a ":"."""
        info = getattr(self, f"{kind}_info")
        return f"{info['interface']}:{info[channel] if index is None else info[channel][index]}"

    def save_connection_dict(self, fname, cdict):
        """All at once: engines read the file as soon as it is there, and ipyparallel itself writes into it."""
        super().save_connection_dict(f"{fname}.new", cdict)
        folder = self.profile_dir.security_dir
        os.rename(os.path.join(folder, f"{fname}.new"), os.path.join(folder, fname))


def main():
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
    main()

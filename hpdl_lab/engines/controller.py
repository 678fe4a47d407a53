"""The process of ipyparallel's controller, without what a laboratory on one machine does not need.

Started as `python -m hpdl_lab.engines.controller PORT...` (launch.py). It serves `%px`; nothing of `lab.run` goes
through it.
"""

import os
import sys

from ipyparallel.controller.app import IPController
from traitlets.config import Config

from .keeper import die_with_parent
from .launch import LOCALHOST


def main():
    config = Config()
    config.IPController.ip = LOCALHOST
    config.IPController.ports = [int(port) for port in sys.argv[1:]]
    config.IPController.use_threads = True  # schedulers as threads of this process, which forks less
    config.IPController.broadcast_scheduler_depth = 0
    config.IPController.db_class = "NoDB"
    config.HeartMonitor.period = 100  # ms: the hub announces an engine at its second heartbeat; the default is 3,000
    config.HeartMonitor.max_heartmonitor_misses = 600  # a minute: sockets, not heartbeats, tell of dead engines
    os.register_at_fork(after_in_child=die_with_parent)  # the heart monitor is a process of its own
    controller = IPController.instance(config=config)
    controller.initialize([])
    controller.start()


if __name__ == "__main__":
    main()

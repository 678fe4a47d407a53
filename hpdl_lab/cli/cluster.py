"""`hpdl cluster`: engines on emulated hosts that stay, and shells on them."""

import os
import sys
import time

from .arguments import ranks

HOW_TO_USE = """
In a notebook or a script, by the same user:   from hpdl_lab import lab; lab.start({n}); lab.run(fn, x)
A shell on a host:                             hpdl cluster shell host1    (then: tc -s qdisc show dev net0)
Ctrl-C ends engines and hosts."""


def add(commands):
    clusters = commands.add_parser("cluster", help="emulated hosts").add_subparsers(required=True, metavar="WHAT")
    command = clusters.add_parser(
        "emulate", help="keep engines on emulated hosts until Ctrl-C, for notebooks and shells"
    )
    command.add_argument("--hosts", type=ranks, default=4, help="hosts (4)")
    command.add_argument("--link", default="1gbit", help="of each host, in both directions (1gbit)")
    command.add_argument("--engines", type=ranks, help="engines on all hosts together (one on each)")
    command.set_defaults(command=emulate)
    command = clusters.add_parser("shell", help="a shell on one of the emulated hosts that are up")
    command.add_argument("host", metavar="HOST", help="such as host2")
    command.set_defaults(command=shell)


def emulate(arguments):
    """Keep engines on emulated hosts until Ctrl-C, or until a notebook ends or replaces them."""
    from ..engines.cluster import Cluster

    n = arguments.engines or arguments.hosts
    with Cluster.start(n, where="emulated", link=arguments.link, hosts=arguments.hosts) as cluster:
        if cluster.attached:
            raise RuntimeError(f"{cluster.layout} are up already: end them first, with lab.stop() in a notebook")
        cluster.show()
        print(HOW_TO_USE.format(n=n), flush=True)
        try:
            while cluster.alive():
                time.sleep(0.5)
            print("Ended by a notebook.")
        except KeyboardInterrupt:
            print("\nEnded.")
    return 0


def shell(arguments):
    """Become a shell on an emulated host."""
    from ..engines import host_engine, session_dir

    path, number = session_dir.find()[0], arguments.host.removeprefix("host")
    if number not in map(str, range(host_engine.count(path))):
        raise RuntimeError(f"no emulated host {arguments.host} is up: hpdl cluster emulate makes host0, host1, ...")
    os.execv(sys.executable, [sys.executable, "-m", "hpdl_lab.engines.host_shell", path, number])

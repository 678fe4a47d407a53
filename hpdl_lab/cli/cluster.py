"""`hpdl cluster`: engines that stay up for notebooks: on this machine, in a job, on other or on emulated hosts."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import NoReturn

from .arguments import Commands, ranks

HOW_TO_USE = """
In a notebook or a script, by the same user:   from hpdl_lab import lab; lab.start({n}); lab.run(fn, x)
A shell on a host:                             hpdl cluster shell host1    (then: tc -s qdisc show dev net0)
Ctrl-C ends engines and hosts."""

STAYS = """
In notebooks and scripts of yours on this machine:   from hpdl_lab import lab; lab.start({n}); lab.run(fn, x)
They stay until:                                     hpdl cluster stop"""

WHERE = ["local", "slurm", "pbs", "lsf", "ssh"]  # layout.PLACES that outlive the command; it imports much
NONE_UP = "No engines of yours are up on this machine: hpdl cluster start --engines 4"


def add(commands: Commands) -> None:
    clusters = commands.add_parser("cluster", help="engines that stay up for notebooks")
    clusters = clusters.add_subparsers(required=True, metavar="WHAT")
    _add_start(clusters.add_parser("start", help="start engines and leave them up, here or in a job"))
    command = clusters.add_parser("status", help="which engines are up, where, and which processes use them")
    command.set_defaults(command=status)
    command = clusters.add_parser("stop", help="end the engines, and their job")
    command.set_defaults(command=stop)
    command = clusters.add_parser(
        "emulate", help="keep engines on emulated hosts until Ctrl-C, for notebooks and shells"
    )
    command.add_argument("--hosts", type=ranks, default=4, help="hosts (4)")
    command.add_argument("--link", default="1gbit", help="speed of each host's link, in both directions (1gbit)")
    command.add_argument("--engines", type=ranks, help="engines on all hosts together (one on each)")
    command.set_defaults(command=emulate)
    command = clusters.add_parser("shell", help="a shell on one of the emulated hosts that are up")
    command.add_argument("host", metavar="HOST", help="such as host2")
    command.set_defaults(command=shell)


def _add_start(command: argparse.ArgumentParser) -> None:
    command.add_argument("--engines", type=ranks, help="engines (4, or all of the cluster of --profile)")
    command.add_argument("--where", choices=WHERE, help="on this machine, in a job, or on hosts by ssh (local)")
    command.add_argument("--device", choices=["cpu", "cuda"], help="device of the engines (cpu; cuda with --gpus)")
    command.add_argument("--profile", help="profile of ipyparallel, whose cluster is used, or started")
    command.add_argument("--hosts", type=lambda text: text.split(","), help="of --where ssh, such as n1,n2")
    job = command.add_argument_group(
        "options of the job", "without --where, of a Slurm job; --queue alone, of a PBS job"
    )
    job.add_argument("--partition", help="partition of Slurm, as sinfo names it")
    job.add_argument("--queue", help="queue of PBS or LSF")
    job.add_argument("--nodes", type=ranks, help="nodes that share the engines evenly")
    job.add_argument("--gpus", type=ranks, help="GPUs for each engine")
    job.add_argument("--time", help="time limit of the job: minutes, or such as 1:30:00")
    job.add_argument("--account", help="account that pays")
    job.add_argument("--qos", help="quality of service, of Slurm")
    job.add_argument("--reservation", help="reservation of Slurm, with nodes for the class")
    job.add_argument("--wait", type=ranks, help="seconds that the job may wait in the queue (600)")
    command.set_defaults(command=start)


def start(arguments: argparse.Namespace) -> int:
    """Start engines that stay when this command has returned."""
    from ..engines import layout, supervisor_client
    from ..engines.cluster import Cluster
    from ..engines.ipyparallel_client import chosen

    names = ("where", "device", "hosts", "queue", *layout.NAMES)
    n, how = arguments.engines, {name: getattr(arguments, name) for name in names}
    if arguments.profile:
        if arguments.where:
            raise ValueError(f"--where {arguments.where} starts engines anew: leave it out, or --profile")
        n, found = chosen(n, None, None, arguments.profile, arguments.wait or layout.CLIENT_SECONDS)
        how |= found | {"where": "ipyparallel"}
    cluster = Cluster.start(n or 4, **how)
    if cluster.attached:
        running = cluster.layout
        cluster.detach()
        raise RuntimeError(f"{running} are up already: use them, or end them first: hpdl cluster stop")
    try:
        cluster.show()
        supervisor_client.keep_up(cluster.path)
    except BaseException:
        cluster.stop()
        raise
    cluster.detach()
    print(STAYS.format(n=cluster.n), flush=True)
    return 0


def status(arguments: argparse.Namespace) -> int:
    """Say what is up; exit code 0 if engines are, and are well."""
    from ..engines import remote, supervisor_client
    from ..engines.cluster import Cluster

    cluster = Cluster.find()
    if cluster is None:
        print(NONE_UP)
        return 1
    try:
        job = remote.state(cluster.path).get("text")
        if cluster.layout is None:
            print(f"Engines are being started. {job or ''}".rstrip())
            return 1
        users = [pid for pid in cluster.kernels() if pid != os.getpid() and not supervisor_client.keeps_up(pid)]
        print(f"{cluster.layout}, used by {f'processes {users}' if users else 'no process now'}.")
        if job:
            print(f"{job}.")
        if fault := cluster.fault():
            print(fault)
            return 1
        cluster.show()
    finally:
        cluster.detach()
    return 0


def stop(arguments: argparse.Namespace) -> int:
    """End the engines, whichever notebooks use them."""
    from ..engines.cluster import Cluster

    cluster = Cluster.find()
    if cluster is None:
        print(NONE_UP)
        return 0
    what = cluster.layout or "The engines that were being started"
    cluster.stop()
    print(f"{what}: ended.")
    return 0


def emulate(arguments: argparse.Namespace) -> int:
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


def shell(arguments: argparse.Namespace) -> NoReturn:
    """Become a shell on an emulated host."""
    from ..engines import hosts, session_dir

    path, number = session_dir.find_session_dir()[0], arguments.host.removeprefix("host")
    if number not in map(str, range(hosts.count_hosts(path))):
        raise RuntimeError(f"no emulated host {arguments.host} is up: hpdl cluster emulate makes host0, host1, ...")
    os.execv(sys.executable, [sys.executable, "-m", "hpdl_lab.engines.hosts", "shell", path, number])

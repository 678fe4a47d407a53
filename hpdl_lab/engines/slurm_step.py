"""In a Slurm job of plain ipyparallel (slurm_launchers.py): `slurm_step N ...` on the first node starts mpiexec, which
starts `slurm_step rank ...` on every node, which becomes an ipengine.
"""

import json
import os
import sys
from urllib.parse import urlsplit

from .. import features
from . import far_engines, reach

LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")
LOCAL_SIZE = far_engines.RANKS_HERE
GPUS = "CUDA_VISIBLE_DEVICES"


def interface():
    """The network interface by which this node reaches the controller; None where it has no name."""
    address = urlsplit(json.loads(os.environ["IPP_CONNECTION_INFO"])["interface"]).hostname
    return far_engines.interface_of(reach.source(address))


def share(devices, local_rank, local_size):
    """The part of `devices`, such as "0,1,2,3", that one of the ranks of a node uses; "" of ""."""
    devices = devices.split(",") if devices else []
    each = len(devices) // local_size
    if not each:  # fewer than ranks: they take turns
        return ",".join(devices and [devices[local_rank % len(devices)]])
    return ",".join(devices[local_rank * each : (local_rank + 1) * each])


def first_of(names):
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def become_engine(arguments):
    size = first_of(LOCAL_SIZE) or 1
    own = dict.fromkeys(far_engines.THREAD_VARIABLES, str(max(1, features.cores() // size))) | far_engines.BETWEEN_NODES
    if name := interface():
        own |= dict.fromkeys(far_engines.INTERFACES, name)
    os.environ.update(own | os.environ)
    if GPUS in os.environ:
        os.environ[GPUS] = share(os.environ[GPUS], first_of(LOCAL_RANK) or 0, size)
    from ipyparallel.engine.app import IPEngine

    IPEngine.launch_instance(["--mpi", *arguments])


def main():
    what, *arguments = sys.argv[1:]
    if what == "rank":
        return become_engine(arguments)
    argv = [features.mpiexec(), "-n", what, sys.executable, "-m", "hpdl_lab.engines.slurm_step", "rank", *arguments]
    os.execve(argv[0], argv, far_engines.launch_environment(interface()))


if __name__ == "__main__":
    main()

"""Which communicator a process group of the backend "hpdl" gets, and how torch learns of mpiexec's ranks."""

import os
import socket
from typing import Any

from ..comm import world
from ..comm.base import Comm
from ..comm.launcher import started_by
from ..comm.mpi.session import session_of_this_process
from ..comm.torch.group import LOOPBACK_ADDRESS, gloo_on
from ..comm.torch.transport import from_process_group
from .group import HpdlGroup

ENGINE = "HPDL_SESSION"  # in the environment of engines: what ranks there are is a matter of each run
MEETING = 30.0  # s: for all ranks of mpiexec to import this


def create(options: Any, comm: Comm) -> HpdlGroup:
    """What torch calls for a new process group. Collective over its ranks.

    Args:    options: store, group_rank, group_size, timeout, global_ranks_in_group ([] of the default group).
             comm: pg_options of init_process_group: a communicator of the same ranks, to be used; or None.
    """
    deadline = options.timeout.total_seconds()
    if isinstance(comm, Comm):
        group = HpdlGroup(comm)
    elif comm is not None:
        raise ValueError(f'pg_options of the backend "hpdl" is a communicator or None, not a {type(comm).__name__}')
    elif started_by() == "mpi" and not options.global_ranks_in_group and ENGINE not in os.environ:
        group = HpdlGroup(world(deadline), owned=True)
    else:
        gloo = gloo_on(options.store, options.group_rank, options.group_size, options.timeout)
        group = HpdlGroup(from_process_group(gloo, deadline), owned=True)
    found, asked = (group.comm.rank, group.comm.size), (options.group_rank, options.group_size)
    if found != asked:
        group.abort()
        raise ValueError(f"rank {asked[0]} of {asked[1]} was asked for, but this is rank {found[0]} of {found[1]}")
    return group


def tell_torch_of_mpiexec(environment: Any = os.environ) -> None:
    """Under mpiexec: what torchrun would put into the environment, where nobody has. Collective over all ranks.

    init_process_group reads it, and rank 0 opens its store on that port.
    """
    if started_by(environment) != "mpi" or "RANK" in environment or ENGINE in environment:
        return
    session = session_of_this_process()
    with world(MEETING) as comm:
        mine = ""
        if comm.rank == 0:
            near = comm.node_size == comm.size
            mine = f"{LOOPBACK_ADDRESS if near else socket.gethostname()} {free_port()}"
        address, port = comm.agree("torch", note=mine.encode())[0].decode().split()
    info = {"RANK": session.rank, "WORLD_SIZE": session.size, "MASTER_ADDR": address, "MASTER_PORT": port}
    environment.update({name: str(value) for name, value in info.items()})


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]

"""torch.distributed's process groups of ranks that torchrun has not started: on engines, under mpiexec."""

from __future__ import annotations

import atexit
import collections
import functools
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..hosts import host_id, shared_file
from ..real import RealComm
from .address import INTERFACE, LOOPBACK_ADDRESS, loopback_interface, own_address
from .session import group_of

if TYPE_CHECKING:
    from ..base import Comm

__all__ = ["INTERFACE", "LOOPBACK_ADDRESS", "gloo_on", "last_group", "loopback", "process_group", "store_of"]


@contextmanager
def process_group(comm: Comm, backend: str = "gloo") -> Generator[dist.ProcessGroup]:
    """Within it, torch.distributed's default process group has the ranks of `comm`. Collective, also at the end.

        with process_group(comm):                        lab.run(f): DDP on the engines
            model = DistributedDataParallel(model)

    Args:    comm: of real ranks. backend: "gloo", or "hpdl" (hpdl_lab.torch_backend), which works on `comm` itself.
    Raises:  ValueError on simulated ranks; RuntimeError if this process has a process group already.
    """
    if not isinstance(comm, RealComm):
        raise ValueError("a process has one default process group, and simulated ranks share a process: use lab.run")
    if dist.is_initialized():
        raise RuntimeError("this process has a default process group already: dist.destroy_process_group() ends it")
    options: dict[str, Any] = {"store": store_of(comm), "rank": comm.rank, "world_size": comm.size}
    options |= {"timeout": timedelta(seconds=comm.waiting.deadline)}
    options |= {"pg_options": comm} if backend == "hpdl" else {}
    with loopback(comm.node_size == comm.size):
        dist.init_process_group(backend, **options)
    del options  # and the store with it
    world = group_of()
    last_group().append(world)
    try:
        yield world
    except BaseException:
        world.abort()  # no rank waits for what will not come
        raise
    finally:
        dist.destroy_process_group()


@functools.cache
def last_group() -> collections.deque[dist.ProcessGroup]:
    """Return the process group that was last here, which ends with the next one, or with this process.

    A gloo group waits at its end for threads that may just want the interpreter's lock, to forget a tensor, and holds
    that lock itself. Later they have nothing to do any more.
    """
    return collections.deque(maxlen=1)


def store_of(comm: RealComm, op: str = "process group") -> dist.Store:
    """Return a c10d store of the ranks of `comm`: a file if they are on one machine, else rank 0 serves it. Collective.

    op: the name of the wait meanwhile, for a report.

    The last rank that forgets it removes the file: a rank that looks for it later waits for minutes.
    If a rank was killed, it goes with the engines, or when rank 0 ends.
    """
    near, mine = comm.node_size == comm.size, ""
    timeout = timedelta(seconds=comm.waiting.deadline)
    server = None
    if comm.rank == 0 and near:
        mine = shared_file("store")
        atexit.register(_remove, mine)
    elif comm.rank == 0:
        server = dist.TCPStore(own_address(), 0, comm.size, True, timeout, wait_for_workers=False)
        mine = f"{own_address()} {server.port}"
    text = comm.agree(op, note=mine.encode())[0].decode()
    if near:
        store = dist.FileStore(text, comm.size)
    else:
        address, port = text.split()
        store = server or dist.TCPStore(address, int(port), comm.size, False, timeout)
    return store


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


@contextmanager
def loopback(near: bool) -> Generator[None]:
    """Within it, gloo uses the loopback interface if all ranks are `near`, unless the user has said which."""
    found = near and INTERFACE not in os.environ and loopback_interface()
    if found:
        os.environ[INTERFACE] = found
    try:
        yield
    finally:
        if found:
            del os.environ[INTERFACE]


def gloo_on(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """Return a gloo group that is not registered anywhere, of the ranks that share `store`. Collective.

    torchrun's store outlives a process group, and would give the next one of the same name the address of the last one.
    """
    round_ = (store.add("hpdl arrivals", 1) - 1) // size
    store = dist.PrefixStore(f"hpdl {round_}", store)
    store.set(f"host {rank}", host_id())
    hosts = {store.get(f"host {r}") for r in range(size)}
    with loopback(len(hosts) == 1):
        return dist.ProcessGroupGloo(store, rank, size, timeout)


class TorchrunGroups:
    """The process groups of ranks under torchrun whose group `whole` moves no CPU tensors, such as nccl alone."""

    shares_memory, cuda = False, None

    def __init__(self, whole: dist.ProcessGroup, device: torch.device) -> None:
        self.whole, self.device = whole, device

    def connect(self, comm: RealComm) -> dist.ProcessGroup:
        """Return the process group of the ranks of `comm`. Collective."""
        if not comm.is_part:
            return self.whole
        whole = dist.get_process_group_ranks(self.whole)
        ranks = [whole[member] for member in comm.members]
        config = str(dist.get_backend_config(self.whole))
        order: dict[str, Any] = (
            {} if ranks == sorted(ranks) else {"sort_ranks": False}
        )  # not in older versions of torch
        return group_of(dist.new_group(ranks, backend=config, use_local_synchronization=True, **order))

    def release(self, comm: RealComm) -> None:
        """Do nothing: the process group belongs to the script that made it."""

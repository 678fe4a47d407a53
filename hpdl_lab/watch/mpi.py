"""The hooks into mpi4py: a communicator that notes what is called on it, in place of MPI.COMM_WORLD."""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .collectives import OURS, record_call
from .observer import OBSERVERS, Observer, is_child
from .places import CommCall, place_of

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

MESSAGES = ("Send", "Recv", "send", "recv", "Ssend", "ssend", "Sendrecv", "sendrecv", "Probe", "probe")
COLLECTIVES = (
    "Allreduce",
    "Reduce",
    "Bcast",
    "Allgather",
    "Gather",
    "Scatter",
    "Alltoall",
    "Reduce_scatter",
    "Barrier",
)
COLLECTIVES += ("allreduce", "reduce", "bcast", "allgather", "gather", "scatter", "alltoall", "barrier", "Scan")
OP = {"Barrier": "barrier", "Allreduce": "all_reduce", "Bcast": "broadcast", "bcast": "broadcast"}


def install(folder: Path) -> None:
    """Put a watched communicator in the place of COMM_WORLD."""
    if is_child():
        return
    from mpi4py import MPI

    observer = OBSERVERS[0] if OBSERVERS else Observer(folder)
    observer.begin()
    if not OBSERVERS:
        observer.dump = lambda: list(OURS)
        OBSERVERS.append(observer)
    names = [name for name in (*MESSAGES, *COLLECTIVES) if hasattr(MPI.Intracomm, name)]
    world = MPI.COMM_WORLD
    methods = {name: _noted(getattr(MPI.Intracomm, name), name, observer, world) for name in names}
    watched: type[MPI.Intracomm] = type("Intracomm", (MPI.Intracomm,), methods)
    MPI.COMM_WORLD = watched(world)
    observer.live["rank"] = world.rank
    observer.note("met", rank=world.rank, size=world.size, backend="mpi")
    atexit.register(observer.end)  # before mpi4py's own, which waits for all ranks


def _noted(method: Callable[..., T], name: str, observer: Observer, world: MPI.Comm) -> Callable[..., T]:
    """Return a method of a communicator that notes its call, and that it is under way."""
    op = OP.get(name, name.lower())

    @wraps(method)
    def wrapper(self: MPI.Comm, *args: object, **named: object) -> T:
        place = place_of(sys._getframe(1))
        peer = named.get("dest", named.get("source", args[1] if len(args) > 1 and name in MESSAGES else None))
        arrays = [x[0] if isinstance(x, list | tuple) and len(x) else x for x in args[:2]]
        tensors = [x for x in arrays if hasattr(x, "dtype")][:1] if name[0].isupper() else []
        group = "0" if self.size == world.size else f"{self.size} ranks"
        if name in MESSAGES:
            record_call(op, "messages", tensors, place, True, p2p=True, peer=peer)
        else:
            record_call(op, group, tensors, place, False)
        call: CommCall = {"name": op, "number": OURS[-1]["time_ns"]}
        if isinstance(peer, int) and peer >= 0 and name in MESSAGES:
            call["peer"] = peer
        observer.live["call"] = call
        entry, begun = OURS[-1], time.perf_counter_ns()
        try:
            result = method(self, *args, **named)
        finally:
            entry["done"] = True
            observer.live.pop("call", None)
        observer.waited(time.perf_counter_ns() - begun)
        return result

    return wrapper

"""Every collective as somebody else has written it, to race against: MPI, gloo, and this package's shared memory.

They take a flat vector, as the functions of collectives/table.py: `Implementation("MPI", "all_gather")(comm, x)`. They
need real ranks; what all ranks must agree on is not looked at, since that would be part of the time.
"""

from typing import Any

from ..comm.base import Comm
from ..comm.buffers import is_tensor, new_like
from .chunks import chunk
from .expected import CHUNKED, ROOTED
from .native import gloo_group

SECONDS = 30.0  # the longest that one call in shared memory may last
OUT_OF_PLACE = {  # who: collectives for which source and result must not share memory
    "MPI": ("reduce_scatter", "all_gather", "gather", "scatter"),
    "gloo": CHUNKED,
    "shared memory": (),
}
ONLY_IN_PLACE = {
    "MPI": ("broadcast",),
    "gloo": ("all_reduce", "broadcast", "reduce"),
    "shared memory": ("all_reduce", "broadcast"),
}


def places(who: Any, collective: Any) -> Any:
    """Where `who` can leave the result of `collective`: "in" the vector itself, "out" of it, or either."""
    inside = collective not in OUT_OF_PLACE[who]
    return (*(["out"] if collective not in ONLY_IN_PLACE[who] else []), *(["in"] if inside else []))


class Implementation:
    """One collective of one implementation, as f(comm, x). What else it needs is made when it first meets x."""

    def __init__(self, who: Any, collective: Any) -> None:
        self.who, self.collective = who, collective
        self._comm: Any = None
        self._x: Any = None
        self._call: Any = None
        self._result: Any = None

    def __call__(self, comm: Comm, x: Any) -> Any:
        if self._comm is not comm or self._x is not x:
            out = x if "in" in places(self.who, self.collective) else new_like(x, x.shape)
            self._call, self._result = (
                bind(self.who, comm, self.collective, x, out),
                result_of(self.collective, comm, out),
            )
            self._comm, self._x = comm, x
        self._call()
        return self._result


def bind(who: Any, comm: Comm, collective: Any, x: Any, out: Any) -> Any:
    """A function of no arguments that does it, from `x` to `out`, which is x or as long. Root: rank 0. Collective.

    Raises: ValueError where `who` cannot do it here.
    """
    source = chunk(x, comm.size, comm.rank) if collective in ("all_gather", "gather") else x
    result = result_of(collective, comm, out)
    if comm.rank != 0:  # the root's alone
        source = None if collective == "scatter" else source
        result = None if collective in ("reduce", "gather") else result
    return BINDERS[who](comm, collective, source, result)


def result_of(collective: Any, comm: Comm, out: Any) -> Any:
    """The part of `out` that this rank's result is in."""
    return chunk(out, comm.size, comm.rank) if collective in ("reduce_scatter", "scatter") else out


def arguments(collective: Any, source: Any, result: Any, only_one: Any) -> Any:
    root = (0,) if collective in ROOTED else ()
    return ((source,) if collective in only_one else (source, result)) + root


def shared_memory(comm: Comm, collective: Any, source: Any, result: Any) -> Any:
    shared = comm.shared(collective)
    if not shared:
        raise ValueError("the ranks do not share memory")
    function, oversubscribed = getattr(shared.group, collective), comm.oversubscribed
    args = (*arguments(collective, source, result, ("all_reduce", "broadcast")), SECONDS, oversubscribed)

    def run() -> None:
        if not function(*args):
            raise RuntimeError(f"{collective} in shared memory: no answer within {SECONDS:g} s")

    return run


def mpi(comm: Comm, collective: Any, source: Any, result: Any) -> Any:
    function, group = getattr(comm.core.mpi, collective), comm.transport.group
    args = arguments(collective, source, result, ("broadcast",))
    return lambda: function(group, *args)


def gloo(comm: Comm, collective: Any, source: Any, result: Any) -> Any:
    if not is_tensor(source if source is not None else result):
        raise ValueError("gloo knows torch tensors only")
    import torch.distributed as dist

    group, p, root = gloo_group(comm), comm.size, comm.rank == 0

    def from_root(kind: Any) -> Any:
        options = kind()
        options.rootRank = 0
        return options

    if collective == "all_reduce":
        return lambda: group.allreduce([source]).wait()
    if collective == "broadcast":
        options = from_root(dist.BroadcastOptions)
        return lambda: group.broadcast([source], options).wait()
    if collective == "reduce":
        options = from_root(dist.ReduceOptions)
        return lambda: group.reduce([source], options).wait()
    if collective == "gather":
        options, rows = from_root(dist.GatherOptions), [[chunk(result, p, r) for r in range(p)]] if root else []
        return lambda: group.gather(rows, [source], options).wait()
    if collective == "scatter":
        options, rows = from_root(dist.ScatterOptions), [[chunk(source, p, r) for r in range(p)]] if root else []
        return lambda: group.scatter([result], rows, options).wait()
    if collective == "all_gather":
        return lambda: group._allgather_base(result, source).wait()
    if collective == "reduce_scatter":
        return lambda: group._reduce_scatter_base(result, source).wait()
    return lambda: group.alltoall_base(result, source, [], []).wait()


BINDERS = {"shared memory": shared_memory, "MPI": mpi, "gloo": gloo}

"""The collectives of other libraries, to race against: MPI, gloo; and of this package's shared memory.

They take a flat vector, as the functions of collectives/table.py: `_Implementation("MPI", "all_gather")(comm, x)`. They
need real ranks; that all ranks call the same is not checked, since that would be part of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..comm.base import Comm
from ..comm.buffers import ArrayT, is_tensor, new_like
from .chunks import chunk
from .expected import CHUNKED, ROOTED
from .native import gloo_group, require_real

if TYPE_CHECKING:
    from ..comm.buffers import Array
    from ..comm.mpi.transport import MpiTransport

T = TypeVar("T")

SECONDS = 30.0  # the longest that one call in shared memory may last
OUT_OF_PLACE = {  # who: collectives whose source and result must not share memory
    "MPI": ("reduce_scatter", "all_gather", "gather", "scatter"),
    "gloo": CHUNKED,
    "shared memory": (),
}
ONLY_IN_PLACE = {
    "MPI": ("broadcast",),
    "gloo": ("all_reduce", "broadcast", "reduce"),
    "shared memory": ("all_reduce", "broadcast"),
}


def result_places(who: str, collective: str) -> tuple[str, ...]:
    """Return where `who` can leave the result of `collective`: "in" the vector itself, "out" of it, or either."""
    inside = collective not in OUT_OF_PLACE[who]
    return (*(["out"] if collective not in ONLY_IN_PLACE[who] else []), *(["in"] if inside else []))


class _Implementation:
    """A collective of one implementation, as f(comm, x). What else it needs is made at the first call with x."""

    def __init__(self, who: str, collective: str) -> None:
        self.who, self.collective = who, collective
        self._bound: tuple[Comm, Array, Callable[[], object], Array] | None = None

    def __call__(self, comm: Comm, x: Array) -> Array:
        bound = self._bound
        if bound is None or bound[0] is not comm or bound[1] is not x:
            out = x if "in" in result_places(self.who, self.collective) else new_like(x, x.shape)
            call = bind(self.who, comm, self.collective, x, out)
            bound = self._bound = comm, x, call, result_part(self.collective, comm, out)
        bound[2]()
        return bound[3]


def bind(who: str, comm: Comm, collective: str, x: Array, out: Array) -> Callable[[], object]:
    """Return a function of no arguments that does it, from `x` to `out`: x, or as long. Root: rank 0. Collective.

    Raises: ValueError if `who` cannot do it here.
    """
    source = chunk(x, comm.size, comm.rank) if collective in ("all_gather", "gather") else x
    result = result_part(collective, comm, out)
    root = comm.rank == 0
    return BINDERS[who](
        comm,
        collective,
        source if root or collective != "scatter" else None,
        result if root or collective not in ("reduce", "gather") else None,
    )


def result_part(collective: str, comm: Comm, out: ArrayT) -> ArrayT:
    """Return the part of `out` that this rank's result is in."""
    return chunk(out, comm.size, comm.rank) if collective in ("reduce_scatter", "scatter") else out


def _arguments(collective: str, source: object, result: object, only_one: tuple[str, ...]) -> tuple[object, ...]:
    root = (0,) if collective in ROOTED else ()
    return ((source,) if collective in only_one else (source, result)) + root


def _shared_memory(comm: Comm, collective: str, source: object, result: object) -> Callable[[], None]:
    ranks = require_real(comm)
    shared = ranks.shared(collective)
    if shared is None:
        raise ValueError("the ranks do not share memory")
    function, oversubscribed = shared.collectives[collective], ranks.oversubscribed
    args = (*_arguments(collective, source, result, ("all_reduce", "broadcast")), SECONDS, oversubscribed)

    def run() -> None:
        if not function(*args):
            raise RuntimeError(f"{collective} in shared memory: no answer within {SECONDS:g} s")

    return run


def mpi(comm: Comm, collective: str, source: object, result: object) -> Callable[[], object]:
    ranks = require_real(comm)
    function, group = getattr(ranks.core.mpi, collective), cast("MpiTransport", ranks.transport).group
    args = _arguments(collective, source, result, ("broadcast",))
    return lambda: function(group, *args)


def gloo(comm: Comm, collective: str, source: Any, result: Any) -> Callable[[], object]:
    if not is_tensor(source if source is not None else result):
        raise ValueError("gloo moves torch tensors only")
    import torch.distributed as dist

    group, p, root = gloo_group(comm), comm.size, comm.rank == 0

    def from_root(kind: type[T]) -> T:
        options: Any = kind()
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
        return lambda: group._reduce_scatter_base(result, source).wait()  # pyrefly: ignore[missing-argument]
    return lambda: group.alltoall_base(result, source, [], []).wait()


BINDERS = {"shared memory": _shared_memory, "MPI": mpi, "gloo": gloo}

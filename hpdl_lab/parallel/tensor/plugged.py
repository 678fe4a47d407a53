"""A communicator with other collectives plugged in: an attendee's own ring under a whole tensor-parallel model."""

from ...collectives import ring
from ..reducer import result_of


class Plugged:
    """`comm` in everything but the collectives that are given: Plugged(comm, all_reduce=my_ring).

    all_reduce:     f(comm, x): replaces the flat tensor x by its sum over ranks.
    all_gather:     f(comm, x): the (p, *x.shape) stack of every rank's x.
    reduce_scatter: f(comm, x): row r, on rank r, of the sum of x, whose first dimension is p.
    What is not given is the communicator's own.
    """

    def __init__(self, comm, all_reduce=None, all_gather=None, reduce_scatter=None):
        self._comm = comm
        self._all_reduce, self._all_gather, self._reduce_scatter = all_reduce, all_gather, reduce_scatter

    def __getattr__(self, name):
        if name.startswith("_"):  # not yet set, while this is being copied
            raise AttributeError(name)
        return getattr(self._comm, name)

    def all_reduce(self, x):
        if self._all_reduce is None:
            return self._comm.all_reduce(x)
        return result_of(self._all_reduce, self._comm, x.view(-1)).view(x.shape)

    def all_gather(self, x):
        return self._comm.all_gather(x) if self._all_gather is None else self._all_gather(self._comm, x)

    def reduce_scatter(self, x):
        if self._reduce_scatter is None:
            return self._comm.reduce_scatter(x)
        return self._reduce_scatter(self._comm, x)


def on_a_ring(comm):
    """`comm` with the collectives of collectives/ring.py, which send what invariants of bandwidth are written for."""
    return Plugged(comm, ring.all_reduce, ring_all_gather, ring_reduce_scatter)


def ring_all_gather(comm, x):
    """The (p, *x.shape) stack of every rank's `x`.   Steps: p - 1.   Bytes per rank: (p - 1) * N * itemsize."""
    out = x.new_empty((comm.size, x.numel()))
    out[comm.rank] = x.reshape(-1)
    return ring.all_gather(comm, out.view(-1)).view(comm.size, *x.shape)


def ring_reduce_scatter(comm, x):
    """Row r, on rank r, of the sum of `x` (p, ...).   Steps: p - 1.   Bytes per rank: (p - 1)/p * N * itemsize."""
    return ring.reduce_scatter(comm, x.clone().view(-1)).view(x.shape[1:])

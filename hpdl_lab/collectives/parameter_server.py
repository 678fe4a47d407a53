"""All-reduce through servers: everybody sends everything to them and gets the sums back.

Training with it: parallel/parameter_server.py. A server that takes the step itself: parallel/gradient_descent.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm
from ..comm.buffers import new_like
from .chunks import chunk
from .steps import Round, edges
from .widen import adds_in_float32

if TYPE_CHECKING:
    from torch import Tensor


@adds_in_float32
def all_reduce(comm: Comm, x: Tensor, servers: int = 1) -> Tensor:
    """Add every rank's `x`, leaving the sum on every rank: rank s < servers adds chunk s of `servers` for all.

        one server                      two servers
        1 --x--> 0 --sum--> 1           every rank --lower half--> 0 --its sum--> every rank
        2 --x--> 0 --sum--> 2           every rank --upper half--> 1 --its sum--> every rank
        3 --x--> 0 --sum--> 3

    The links of the servers are the bottleneck: p - 1 vectors go in and out, shared by `servers` links.

    Args:    x: (N,) tensor, different per rank, overwritten with the sum. A server holds p - 1 chunks more.
             servers: from 1 to p, the same on every rank.
    Returns: x, bitwise the same on every rank.
    Raises:  ValueError for another number of servers; CommTimeout if a rank does not answer.
    Steps: 2(p - 1) at a single server.   Bytes per rank: a server sends (p - 1 + servers - 1)/servers * N * itemsize,
    the others N * itemsize.   Ref: Li et al. 2014.
    """
    p, r = comm.size, comm.rank
    _require_servers(p, servers)
    others = [q for q in range(p) if q != r] if r < servers else []
    mine = chunk(x, servers, r) if r < servers else x[:0]
    pushed = [new_like(x, len(mine)) for _ in others]
    works = [comm.irecv(buffer, q) for buffer, q in zip(pushed, others, strict=True)]
    works += [comm.isend(chunk(x, servers, s), s) for s in _around(r, servers) if s != r]
    for work in works:
        work.wait()
    for buffer in pushed:  # in the order of ranks, not of arrival
        mine += buffer
    works = [comm.irecv(chunk(x, servers, s), s) for s in range(servers) if s != r]
    works += [comm.isend(mine, q) for q in _around(r, p) if q != r and r < servers]
    for work in works:
        work.wait()
    return x


def _require_servers(p: int, servers: int) -> None:
    if not 1 <= servers <= p:
        raise ValueError(f"{p} ranks can have 1 to {p} servers, got {servers}")


def _around(r: int, count: int) -> list[int]:
    """Return 0, ..., count - 1, beginning at r: so that not all ranks turn to the same one first."""
    return [(r + i) % count for i in range(count)]


def all_reduce_steps(p: int, n: int, servers: int = 1) -> Iterator[Round]:
    """Yield the schedule of all_reduce for n elements on p ranks: an iterator of two steps.Round, push and pull."""
    _require_servers(p, servers)
    cut = edges(n, servers)
    worker = np.repeat(np.arange(p), servers)
    server = (worker + np.tile(np.arange(servers), p)) % servers
    worker, server = worker[worker != server], server[worker != server]
    yield Round(worker, server, cut[server], cut[server + 1], add=True)
    server = np.repeat(np.arange(servers), p)
    worker = (server + np.tile(np.arange(p), servers)) % p
    worker, server = worker[worker != server], server[worker != server]
    yield Round(server, worker, cut[server], cut[server + 1], add=False)

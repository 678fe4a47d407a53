"""Gossip: ranks average with their neighbors only, and agree in the end without any all-reduce."""

from ..collectives.widen import adds_in_float32
from ..comm.buffers import copy_of, new_like
from .graphs import one_peer_hop


@adds_in_float32
def gossip_step(comm, x, graph):
    """Move `x` towards the neighbors' x: one step, after which the mean over ranks is what it was.

        x_i <- x_i + sum over neighbors j of  W_ij (x_j - x_i)      W_ij = 1 / (1 + max(i's neighbors, j's neighbors))

    Every rank meets its neighbors in rising order. So nobody waits for ever: of all pairs that have not met, the one
    with the lowest ranks has nobody to wait for.

    Args:    x: (N,) float array, different per rank, overwritten. (hpdl_lab's own takes tensors too.)
             graph: graphs.Graph, the same on every rank; the ranks that rank i talks to are graph.neighbors[i], in
             rising order.
    Returns: x.
    Raises:  ValueError if the graph has another number of ranks; CommTimeout if a neighbor does not answer.
    Steps: one per neighbor.   Bytes per rank: neighbors * N * itemsize.   Ref: Xiao & Boyd 2004; Lian et al. 2017.
    """
    require_fit(comm, graph)
    mine = graph.neighbors[comm.rank]
    before, theirs = copy_of(x), new_like(x, x.shape)
    for j in mine:
        comm.sendrecv(before, j, theirs, j)
        x += (theirs - before) / (1 + max(len(mine), len(graph.neighbors[j])))
    return x


@adds_in_float32
def one_peer_step(comm, x, step):
    """Average `x` with one rank only, 1, 2, 4, ... places further on, in turn. Among 2^k ranks k steps give the mean.

        p = 4     step 0: 0 <- 1, 1 <- 2, 2 <- 3, 3 <- 0       step 1: 0 <- 2, 1 <- 3, 2 <- 0, 3 <- 1

    Args:    x: (N,) float tensor, different per rank, overwritten; step: how many have been made before, the same on
             every rank.
    Returns: x.
    Raises:  ValueError if the ranks' sizes differ; CommTimeout if a rank does not answer.
    Steps: 1.   Bytes per rank: N * itemsize.   Ref: Assran et al. 2019; Ying et al. 2021 (one-peer exponential graph).
    """
    p, r, hop = comm.size, comm.rank, one_peer_hop(comm.size, step)
    if p > 1:
        x += comm.sendrecv(copy_of(x), (r - hop) % p, new_like(x, x.shape), (r + hop) % p)
        x /= 2
    return x


def require_fit(comm, graph):
    if graph.n != comm.size:
        raise ValueError(f"a {graph.name} of {graph.n} ranks does not fit {comm.size} ranks")

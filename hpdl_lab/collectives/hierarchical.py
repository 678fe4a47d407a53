"""All-reduce in two levels: a chain inside each node, a tree between the nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..comm.base import Comm
from . import chain, tree
from .part import ranks_of_part
from .steps import Round, among
from .widen import adds_in_float32

if TYPE_CHECKING:
    from torch import Tensor

GROUP = 4  # ranks of a node if the communicator has no node with more than one


@adds_in_float32
def all_reduce(comm: Comm, x: Tensor, group: int | None = None, segments: int = 4) -> Tensor:
    """Add every rank's `x`, leaving the sum on every rank: only one rank of each node sends to other nodes.

        node 0               node 1               node 2             1. chain: reduce to the first rank of the node
        0 <- 1 <- 2 <- 3     4 <- 5 <- 6 <- 7     8 <- 9 <- 10 <- 11    (segments follow each other)
        |                    |                    |                  2. tree: all-reduce among the first ranks
        0 -> 1 -> 2 -> 3     4 -> 5 -> 6 -> 7     8 -> 9 -> 10 -> 11 3. chain: broadcast inside the node

    Args:    x: (N,) tensor, different per rank, overwritten with the sum.
             group: ranks of a node, which are numbered one after the other; the last node may have fewer. None:
             comm.node_size if that is more than 1 (then every node must have as many), else 4.
             segments: of x in a chain; both the same on every rank.
    Returns: x, bitwise the same on every rank.
    Raises:  ValueError for a group or segments below 1; CommTimeout if a rank does not answer.
    Steps: 2(segments + group - 2) + 2 ceil(log2(nodes)).   Bytes per rank: 2 N * itemsize inside a node; between nodes
    rank 0 sends ceil(log2(nodes)) * N * itemsize, the others less.   Ref: Awan et al. 2017 (S-Caffe).
    """
    if group is None:
        group = comm.node_size if comm.node_size > 1 else GROUP
    leaders, nodes = _split(comm.size, group)
    node = ranks_of_part(comm, nodes[comm.rank // group])
    chain.reduce(node, x, segments=segments)
    if node.rank == 0:
        tree.all_reduce(ranks_of_part(comm, leaders), x)
    return chain.broadcast_by_steps(node, x, segments=segments)


def _split(p: int, group: int) -> tuple[range, list[range]]:
    """Return (the first rank of each node, the ranks of each node)."""
    if group < 1:
        raise ValueError(f"a node has at least 1 rank, got group={group}")
    leaders = range(0, p, group)
    return leaders, [range(first, min(first + group, p)) for first in leaders]


def all_reduce_steps(p: int, n: int, group: int = GROUP, segments: int = 4) -> Iterator[Round]:
    """Yield the schedule of all_reduce for n elements on p ranks."""
    leaders, _ = _split(p, group)
    full, rest = divmod(p, group)
    whole_nodes = np.arange(full * group).reshape(full, group)
    last_node = np.arange(full * group, p).reshape(1, rest)
    for members in (whole_nodes, last_node):
        yield from among(chain.reduce_steps(members.shape[1], n, segments=segments), members)
    yield from among(tree.all_reduce_steps(len(leaders), n), np.array([leaders]))
    for members in (whole_nodes, last_node):
        yield from among(chain.broadcast_steps(members.shape[1], n, segments=segments), members)

"""Every collective algorithm as a record: its name, function, schedule, cost and source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from . import (
    chain,
    cost,
    double_tree,
    gather_scatter,
    grid,
    halving_doubling,
    hierarchical,
    pairwise,
    parameter_server,
    recursive_doubling,
    ring,
    segmented_ring,
    swing,
    tree,
)

if TYPE_CHECKING:
    from torch import Tensor

    from .steps import Round


class Algorithm(NamedTuple):
    """A way to do one collective.

    function: function(comm, x) in place, x flat; returns x, or the part of x that holds this rank's result.
    steps:    steps(p, n) -> iterator of steps.Round for n elements: the same messages as data.
    cost:     cost(p, nbytes) -> cost.Cost.
    All three take the same options by keyword, such as segments=8 or root=1, if the function has any; the costs do
    not depend on the root and do not take it.
    """

    name: str
    collective: str
    function: Callable[..., Tensor]
    steps: Callable[..., Iterator[Round]]
    cost: Callable[..., cost.Cost]
    ref: str

    def __str__(self) -> str:
        return self.name if self.collective == "all_reduce" else f"{self.name} {self.collective}"


PATARASUK = "Patarasuk & Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations"
THAKUR = "Thakur, Rabenseifner & Gropp 2005, Optimization of collective communication operations in MPICH"
RABENSEIFNER = "Rabenseifner 2004, Optimization of collective reduction operations"
SANDERS = "Sanders, Speck & Traeff 2009, Two-tree algorithms for full bandwidth broadcast, reduction and scan; NCCL 2.4"
SCAFFE = "Awan et al. 2017, S-Caffe: co-designing MPI runtimes and Caffe for scalable deep learning on GPU clusters"
DE_SENSI = "De Sensi et al. 2024, Swing: short-cutting rings for higher bandwidth allreduce, NSDI"
DDL = "Cho et al. 2017, PowerAI DDL"
LI = "Li et al. 2014, Scaling distributed machine learning with the parameter server"


def _all_reduce(name: str, module: ModuleType, price: Callable[..., cost.Cost], ref: str) -> Algorithm:
    return Algorithm(name, "all_reduce", module.all_reduce, module.all_reduce_steps, price, ref)


ALGORITHMS = (
    _all_reduce("ring", ring, cost.all_reduce, PATARASUK),
    _all_reduce("segmented_ring", segmented_ring, cost.segmented_ring, PATARASUK),
    _all_reduce("tree", tree, cost.tree, THAKUR),
    _all_reduce("recursive_doubling", recursive_doubling, cost.recursive_doubling, THAKUR),
    _all_reduce("halving_doubling", halving_doubling, cost.halving_doubling, RABENSEIFNER),
    _all_reduce("swing", swing, cost.halving_doubling, DE_SENSI),
    _all_reduce("double_tree", double_tree, cost.double_tree, SANDERS),
    _all_reduce("hierarchical", hierarchical, cost.hierarchical, SCAFFE),
    _all_reduce("grid", grid, cost.grid, DDL),
    _all_reduce("parameter_server", parameter_server, cost.parameter_server, LI),
    Algorithm(
        "naive",
        "all_reduce",
        ring.all_reduce_naive,
        ring.all_reduce_naive_steps,
        cost.all_reduce_naive,
        "MPI tutorials",
    ),
    Algorithm("ring", "reduce_scatter", ring.reduce_scatter, ring.reduce_scatter_steps, cost.reduce_scatter, PATARASUK),
    Algorithm("ring", "all_gather", ring.all_gather, ring.all_gather_steps, cost.all_gather, PATARASUK),
    Algorithm("tree", "broadcast", tree.broadcast, tree.broadcast_steps, cost.broadcast, THAKUR),
    Algorithm("chain", "broadcast", chain.broadcast_by_steps, chain.broadcast_steps, cost.chain_broadcast, SCAFFE),
    Algorithm("tree", "reduce", tree.reduce, tree.reduce_steps, cost.reduce, THAKUR),
    Algorithm("chain", "reduce", chain.reduce, chain.reduce_steps, cost.chain_reduce, SCAFFE),
    Algorithm("tree", "gather", gather_scatter.gather, gather_scatter.gather_steps, cost.gather, THAKUR),
    Algorithm("tree", "scatter", gather_scatter.scatter, gather_scatter.scatter_steps, cost.scatter, THAKUR),
    Algorithm("pairwise", "all_to_all", pairwise.all_to_all, pairwise.all_to_all_steps, cost.all_to_all, THAKUR),
)


def find_algorithm(name: str, collective: str = "all_reduce") -> Algorithm:
    """Return the Algorithm of this name. Raises LookupError that lists what there is."""
    for algorithm in ALGORITHMS:
        if (algorithm.name, algorithm.collective) == (name, collective):
            return algorithm
    known = algorithm_names(collective)
    if not known:
        raise LookupError(f"no collective is called {collective!r}: {', '.join(collective_names())}")
    raise LookupError(f"{collective} has no algorithm {name!r}: {', '.join(known)}")


def algorithm_names(collective: str = "all_reduce") -> list[str]:
    """Return the names of the algorithms for one collective."""
    return [algorithm.name for algorithm in ALGORITHMS if algorithm.collective == collective]


def collective_names() -> list[str]:
    """Return the names of the collectives."""
    return list(dict.fromkeys(algorithm.collective for algorithm in ALGORITHMS))

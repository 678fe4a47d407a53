"""The machine under a grid of ranks: how fast a rank computes, how much it holds, what a message costs on each axis."""

import functools
from dataclasses import dataclass

import numpy as np

from ...comm.network import PRESETS, Islands, Network, Switch
from ...mesh import Grid
from ...units import GIB


@dataclass(frozen=True)
class Machine:
    """network: whose routes say what a message costs, and whose flops_per_s how fast a rank computes.

    memory: bytes that a rank can hold. at_once: ranks that compute at full speed at the same time, 0 for all; on a
    laptop these are its cores. source: the origin of the numbers.
    """

    name: str
    network: Network
    memory: int
    at_once: int = 0
    source: str = ""


@functools.lru_cache(maxsize=4096)
def message_cost(network: Network, grid: Grid, axis: str) -> tuple[float, float]:
    """Return (alpha, beta): s per message and s per byte between neighbors on an axis that all send at the same time.

    The slowest pair counts, and if messages share a link, as with few adapters per node, each gets its share.
    Args:    network: a Network; grid: a Grid with its ranks numbered as its axes say; axis: one of these.
    """
    size = grid[axis]
    if size == 1:
        return 0.0, 0.0
    stride = 1
    for name in reversed(grid.axes[grid.axes.index(axis) + 1 :]):
        stride *= grid[name]
    ranks = np.arange(grid.size)
    position = ranks // stride % size
    dest = ranks + np.where(position + 1 < size, stride, -stride * (size - 1))
    route = network.routes(ranks, dest, grid.size)
    shared = np.ones(grid.size)
    for link in route.links:
        link = np.broadcast_to(link, ranks.shape)
        used = link >= 0
        count = np.bincount(link[used], minlength=network.link_count(grid.size))
        shared[used] = np.maximum(shared[used], count[link[used]])
    return float(np.max(route.alpha)), float(np.max(route.beta * shared))


def grid_of(dp: int = 1, pp: int = 1, tp: int = 1, cp: int = 1, ep: int = 1) -> Grid:
    """Return the Grid in the order that all of this counts on: tp varies fastest, inside a node; then cp, ep."""
    return Grid(**{"dp": dp, "pp": pp} | {axis: n for axis, n in (("ep", ep), ("cp", cp)) if n > 1} | {"tp": tp})


def replicas(grid: Grid) -> int:
    """Return how many ranks see other examples or positions with the same dense parameters: dp, ep and cp."""
    return grid["dp"] * grid["ep"] * grid["cp"]


PEAKS = {  # flops/s in 16 bits, without sparsity
    "A100": 312e12,  # NVIDIA, A100 Tensor Core GPU Architecture; 2020
    "H100": 989.4e12,  # of the SXM5 module: NVIDIA, H100 Tensor Core GPU Architecture; 2022
}
EFFICIENCY = 0.5  # an assumption: what layers of a large transformer reach of the peak, without messages and bubble
MACHINES = {
    "laptop": Machine(
        "a laptop of two cores",
        Switch(alpha=30e-6, beta=1 / 4e9, flops_per_s=20e9),
        memory=2 * GIB,
        at_once=2,
        source="assumed, typical of two cores; lab.grid measures yours",
    ),
    "dgx_a100": Machine(
        "DGX A100 nodes",
        Islands(8, PRESETS["nvlink_3"], PRESETS["infiniband_hdr"], nics=8, flops_per_s=EFFICIENCY * PEAKS["A100"]),
        memory=80 * 10**9,
        source="8 GPUs of 80 GB per node on NVLink 3, an HDR adapter for each: comm/network/presets.py; half the peak",
    ),
    "dgx_h100": Machine(
        "DGX H100 nodes",
        Islands(8, PRESETS["nvlink_4"], PRESETS["infiniband_ndr"], nics=8, flops_per_s=EFFICIENCY * PEAKS["H100"]),
        memory=80 * 10**9,
        source="8 GPUs of 80 GB per node on NVLink 4, an NDR adapter for each: comm/network/presets.py; half the peak",
    ),
}

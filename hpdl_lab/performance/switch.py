"""All-reduce with help from the network: switches that add, and adapters with processors that go on with a ring.

A switch or an adapter is a simulated rank of its own. SHARP adds in InfiniBand switches (Graham et al. 2016), NVLS in
the NVSwitch between the GPUs of a node. A DPU (data processing unit) is a network adapter with processor cores, which
can do collectives while the host computes (Bayatpour et al. 2021, BluesMPI, for an all-to-all).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np

from ..collectives import ring
from ..collectives.cost import best_segments
from ..comm import sim
from ..comm.base import Comm
from ..comm.network import PRESETS, Islands, Network, Route, Switch
from ..units import amount_text

NDR: Switch = Switch.of("infiniband_ndr")
ring_all_reduce = cast("Callable[[Comm | Ring, np.ndarray], np.ndarray]", ring.all_reduce)  # takes these as well


class AddingSwitch(Switch):
    """A Switch that is also the last rank, which has one port for each of the others.

    A message to or from it takes alpha + n beta, as one between two others. This is an upper bound, since it crosses
    one cable in place of two.
    """

    def routes(self, source: int | np.ndarray, dest: int | np.ndarray, size: int) -> Route:
        route, switch = super().routes(source, dest, size), size - 1
        out, into = route.links
        return route._replace(links=(np.where(source == switch, -1, out), np.where(dest == switch, -1, into)))


class _Reduction(NamedTuple):
    """An all-reduce on simulated ranks.

    total: of rank 0, in the end; sent: bytes that it sends; seconds: of virtual time, in which ranks also compute;
    hidden: share of the communication that is under way while they compute.
    """

    total: np.ndarray
    sent: int
    seconds: float
    hidden: float = 0.0

    def __str__(self) -> str:
        return f"{amount_text(self.seconds, 's'):>7}, {self.sent:9,} B sent"


def _vector(nbytes: int, rank: int) -> np.ndarray:
    """Return (nbytes / 8,) whole numbers, different per rank: their sums are exact."""
    return np.arange(nbytes // 8, dtype=np.float64) * (rank + 1)


def _simulated(size: int, fn: Callable[[Comm], np.ndarray], network: Network) -> _Reduction:
    """Run fn(comm), which returns the total, on `size` ranks."""
    run = sim.run(size, fn, network=network)
    sent = sum(event.nbytes for event in run.events if event.op == "send" and event.rank == 0)
    return _Reduction(run[0], sent, run.seconds)


def by_ring(ranks: int, nbytes: int, network: Switch = NDR) -> _Reduction:
    """Simulate the ring of notebook 04."""
    return _simulated(ranks, lambda comm: ring_all_reduce(comm, _vector(nbytes, comm.rank)), network)


def by_switch(ranks: int, nbytes: int, network: Switch = NDR) -> _Reduction:
    """Simulate a switch that adds, with as many segments as are fastest."""
    segments = best_segments(1, nbytes, network.alpha, network.beta)

    def all_reduce(comm: Comm) -> np.ndarray:
        return all_reduce_in_switch(comm, _vector(nbytes, comm.rank), segments)

    return _simulated(ranks + 1, all_reduce, AddingSwitch(network.alpha, network.beta))


def all_reduce_in_switch(comm: Comm, x: np.ndarray, segments: int = 1) -> np.ndarray:
    """Add every rank's `x` on the last rank, the switch, which sends the sum back to each of them.

        rank 0 --x0-->          --sum--> rank 0      while the sum of one segment returns,
        rank 1 --x1-->  switch  --sum--> rank 1      the next segment arrives

    Args:    x: (N,), different per rank, overwritten with the sum; of the switch's own, only the shape is used.
    Returns: x.
    Steps: segments + 1.   Bytes per rank: N * itemsize.   Ref: Graham et al. 2016, SHArP.
    """
    switch, total = comm.size - 1, np.empty_like(x)
    mine, sums = np.array_split(x, segments), np.array_split(total, segments)
    if comm.rank < switch:
        works = [comm.isend(part, switch) for part in mine] + [comm.irecv(part, switch) for part in sums]
    else:
        works = []
        for part in sums:
            arrived = [np.empty_like(part) for _ in range(switch)]
            for work in [comm.irecv(theirs, rank) for rank, theirs in enumerate(arrived)]:
                work.wait()
            part[:] = np.sum(arrived, axis=0)
            works += [comm.isend(part, rank) for rank in range(switch)]
    for work in works:
        work.wait()
    x[:] = total
    return x


class Ring:
    """The part of a communicator that ring.all_reduce needs, on each `every`-th rank: on ranks 1, 3, 5 ... for 2.

    slices: s that the host computes: one slice in each step, between the begin of its messages and the wait for them.
    """

    def __init__(self, comm: Comm, every: int = 1, slices: Sequence[float] = ()) -> None:
        self.comm, self.every, self.slices = comm, every, list(slices)
        self.rank, self.size = comm.rank // every, comm.size // every

    def sendrecv(self, x: np.ndarray, dst: int, y: np.ndarray, src: int) -> np.ndarray:
        to, source = ((rank + 1) * self.every - 1 for rank in (dst, src))
        works = self.comm.isend(x, to), self.comm.irecv(y, source)
        if self.slices:
            self.comm.compute(self.slices.pop())
        for work in works:
            work.wait()
        return y


def by_hosts(hosts: int, nbytes: int, compute_s: float, calls: int = 1, network: Switch = NDR) -> _Reduction:
    """Simulate hosts that compute for compute_s, and do a step of the ring in each of `calls` library calls in it."""

    def all_reduce(comm: Comm, seconds: float) -> np.ndarray:
        steps = Ring(comm, slices=[seconds / calls] * calls)
        x = ring_all_reduce(steps, _vector(nbytes, comm.rank))
        comm.compute(sum(steps.slices))
        return x

    return _overlapped(hosts, all_reduce, compute_s, network)


def by_dpus(hosts: int, nbytes: int, compute_s: float) -> _Reduction:
    """Simulate hosts that compute for compute_s, while DPUs do the ring: rank 2i is a host, rank 2i + 1 its DPU.

    A vector goes to the DPU over PCIe 5, around the ring of DPUs over InfiniBand NDR, and back over PCIe 5.
    """

    def all_reduce(comm: Comm, seconds: float) -> np.ndarray:
        x, total = (_vector(nbytes, comm.rank // 2) for _ in range(2))
        if comm.rank % 2:
            comm.recv(x, comm.rank - 1)
            comm.send(ring_all_reduce(Ring(comm, every=2), x), comm.rank - 1)
            return x
        works = comm.isend(x, comm.rank + 1), comm.irecv(total, comm.rank + 1)
        comm.compute(seconds)
        for work in works:
            work.wait()
        return total

    return _overlapped(2 * hosts, all_reduce, compute_s, Islands(2, PRESETS["pcie_5"], PRESETS["infiniband_ndr"]))


def _overlapped(
    size: int, all_reduce: Callable[[Comm, float], np.ndarray], compute_s: float, network: Network
) -> _Reduction:
    """Run all_reduce(comm, seconds to compute) with nothing to compute and with compute_s, and compare the two."""
    alone, both = (_simulated(size, lambda comm, s=s: all_reduce(comm, s), network) for s in (0.0, compute_s))
    return both._replace(hidden=1 - (both.seconds - compute_s) / alone.seconds)

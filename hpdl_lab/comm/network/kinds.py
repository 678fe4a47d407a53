"""The kinds of networks. Each is a frozen record: print it, compare it, keep it with a result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, TypeAlias

import numpy as np

from .links import Link, Ranks, Route, Timetable
from .presets import PRESETS, Interconnect, interconnect

Fields: TypeAlias = dict[str, Any]  # of a kind, by their names

MOST_CABLES = 2**25  # in the routes of the messages of one round on a Ring: 256 MiB


class Network(ABC):
    """A network of any kind.

    alpha:         latency, s per message; also of one step of a barrier.
    beta:          inverse bandwidth, s per byte.
    flops_per_s:   speed of `comm.compute(flops=...)`.
    eager_nbytes:  a send up to this size ends before its receive is posted, as MPI's eager protocol does: its bytes
                   travel at once and wait at the receiver. 0 (the default) makes every send wait for its receive: a
                   program that is right under it never relies on buffering (MPI standard 3.5, "safe" programs).
    """

    if TYPE_CHECKING:  # else they are fields or properties of the kinds

        @property
        def alpha(self) -> float: ...

        @property
        def beta(self) -> float: ...

        @property
        def flops_per_s(self) -> float: ...

        @property
        def eager_nbytes(self) -> int: ...

    @classmethod
    def of(cls, name: str, **more: float | str | Interconnect) -> Self:
        """Return this kind with the published latency and bandwidth of the interconnect `name`, a key of PRESETS."""
        published = interconnect(name)
        fields: Fields = {"alpha": published.alpha, "beta": published.beta, **more}
        return cls(**fields)

    def timetable(self, size: int) -> Timetable:
        """Return the state of this network for one run of `size` ranks."""
        return Timetable(self, size)

    @abstractmethod
    def link_count(self, size: int) -> int:
        """Return the number of links among `size` ranks, which are numbered from 0."""

    @abstractmethod
    def links(self, size: int) -> list[Link]:
        """Return every Link among `size` ranks, in the order of their numbers."""

    @abstractmethod
    def routes(self, source: Ranks, dest: Ranks, size: int) -> Route:
        """Return the Route from rank `source` to rank `dest`, both numbers or both arrays, among `size` ranks."""

    def require_costs(self) -> None:
        """Raise ValueError for a negative cost."""
        for name in ("alpha", "beta", "eager_nbytes"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} of a {type(self).__name__} is at least 0, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Switch(Network):
    """A switch that never blocks, to which every rank has one full-duplex port.

    A message of n bytes takes alpha + n * beta seconds, in which it holds its sender's way out and its receiver's way
    in. Default: 2 us, and the 12.5 GB/s of a 100 Gbit/s port.
    """

    alpha: float = 2e-6
    beta: float = 1 / 12.5e9
    flops_per_s: float = 1e12
    eager_nbytes: int = 0

    def __post_init__(self) -> None:
        self.require_costs()

    def link_count(self, size: int) -> int:
        return 2 * size

    def links(self, size: int) -> list[Link]:
        out = [Link(f"rank {r}", "switch", self.beta) for r in range(size)]
        return out + [Link("switch", f"rank {r}", self.beta) for r in range(size)]

    def routes(self, source: Ranks, dest: Ranks, size: int) -> Route:
        return Route(self.alpha + 0 * source, self.beta + 0 * source, (source, size + dest))


@dataclass(frozen=True)
class Ring(Network):
    """A ring of one router per rank, each wired to its two neighbors by cables that carry both directions at once.

    A message takes the shorter way, or the way up if both are equal, and the routers between pass it on without
    storing it: over h cables it takes h * alpha + n * beta. A rank has a port to its router for each direction, so it
    sends both ways at once. Messages to neighbors share no cable; all others do.
    """

    alpha: float = 2e-6
    beta: float = 1 / 12.5e9
    flops_per_s: float = 1e12
    eager_nbytes: int = 0

    def __post_init__(self) -> None:
        self.require_costs()

    def link_count(self, size: int) -> int:
        return 6 * size

    def links(self, size: int) -> list[Link]:
        out: list[Link] = []
        for source, dest in (("rank", "router"), ("router", "rank")):
            out += 2 * [Link(f"{source} {r}", f"{dest} {r}", self.beta) for r in range(size)]  # up, then down
        for step in (1, -1):
            out += [Link(f"router {r}", f"router {(r + step) % size}", self.beta) for r in range(size)]
        return out

    def routes(self, source: Ranks, dest: Ranks, size: int) -> Route:
        up, down = (dest - source) % size, (source - dest) % size
        hops = np.minimum(up, down)
        most = int(np.max(hops, initial=0))
        if np.size(hops) * most > MOST_CABLES:
            raise ValueError(
                f"{np.size(hops):,} messages over up to {most:,} cables of a ring of {size:,} ranks are more than "
                f"{MOST_CABLES:,} cables at a time: take fewer ranks"
            )
        falls = 1 * (up > down)
        cable = (4 + falls) * size  # the number of rank 0's cable in that direction
        between = [np.where(h < hops, cable + (source + h * (1 - 2 * falls)) % size, -1) for h in range(most)]
        return Route(
            self.alpha * hops, self.beta + 0 * hops, (falls * size + source, *between, (2 + falls) * size + dest)
        )


@dataclass(frozen=True)
class FatTree(Network):
    """Two levels of switches: hosts on leaf switches, every leaf joined by a cable to each spine switch.

        spine 0   spine 1          hosts_per_leaf = 4, oversubscription = 2: four hosts share two cables upwards
          |  \\    /  |
         leaf 0   leaf 1           a message to rank d goes by spine d mod 2
        / | | \\  / | | \\
        0 1 2 3  4 5 6 7

    All cables have the same speed. Which spine a message takes depends on its receiver alone, as with the static routes
    of InfiniBand: two messages of one leaf to receivers with the same spine share a cable, one after the other.

    oversubscription: hosts per leaf over cables from a leaf to the spines; 1 has a cable for every host.
    hop: s more for each further switch: a message to another leaf crosses three instead of one. Default: 110 ns, of an
         Omni-Path edge switch (Dell, "Dell HPC Omni-Path Fabric", 2016).
    Ref: Leiserson 1985, "Fat-Trees"; Zahavi 2010, "D-Mod-K Routing"; Hoefler et al. 2008, "Multistage Switches are not
    Crossbars".
    """

    hosts_per_leaf: int = 16
    oversubscription: int = 1
    alpha: float = 2e-6
    beta: float = 1 / 12.5e9
    hop: float = 110e-9
    flops_per_s: float = 1e12
    eager_nbytes: int = 0

    def __post_init__(self) -> None:
        self.require_costs()
        hosts, over = _whole(self.hosts_per_leaf, "hosts_per_leaf"), _whole(self.oversubscription, "oversubscription")
        if hosts % over:
            raise ValueError(
                f"oversubscription must divide the hosts of a leaf: {hosts} hosts, oversubscription {over}"
            )

    @property
    def spines(self) -> int:
        return self.hosts_per_leaf // self.oversubscription

    def leaves(self, size: int) -> int:
        return -(-size // self.hosts_per_leaf)

    def link_count(self, size: int) -> int:
        return 2 * size + 2 * self.leaves(size) * self.spines

    def links(self, size: int) -> list[Link]:
        hosts = [(f"rank {r}", f"leaf {r // self.hosts_per_leaf}") for r in range(size)]
        cables = [(f"leaf {leaf}", f"spine {s}") for leaf in range(self.leaves(size)) for s in range(self.spines)]
        out: list[Link] = []
        for wires in (hosts, cables):
            out += [Link(low, high, self.beta) for low, high in wires]
            out += [Link(high, low, self.beta) for low, high in wires]
        return out

    def routes(self, source: Ranks, dest: Ranks, size: int) -> Route:
        leaf, their_leaf = source // self.hosts_per_leaf, dest // self.hosts_per_leaf
        far, spine = leaf != their_leaf, dest % self.spines
        cables = self.leaves(size) * self.spines
        up = far * (2 * size + leaf * self.spines + spine + 1) - 1
        down = far * (2 * size + cables + their_leaf * self.spines + spine + 1) - 1
        alpha = self.alpha + 2 * far * self.hop
        return Route(alpha, self.beta + 0 * source, (source, up, down, size + dest))


@dataclass(frozen=True)
class Islands(Network):
    """Islands of `size` ranks with a fast switch inside (a node of GPUs), joined by network adapters to one switch.

    Every rank has a port to its island's switch and another one to an adapter. With fewer adapters than ranks, the
    messages that leave an island share them: rank i of an island uses adapter i * nics // size.

    inside, between: Interconnect records or keys of PRESETS. alpha and beta of the whole network are from `between`.
    nics: network adapters per island.
    """

    size: int = 8
    inside: Interconnect = PRESETS["nvlink_4"]
    between: Interconnect = PRESETS["infiniband_ndr"]
    nics: int = 1
    flops_per_s: float = 1e12
    eager_nbytes: int = 0

    def __post_init__(self) -> None:
        for name in ("inside", "between"):
            object.__setattr__(self, name, interconnect(getattr(self, name)))
        self.require_costs()
        size, nics = _whole(self.size, "size"), _whole(self.nics, "nics")
        if size % nics:
            raise ValueError(f"{size} ranks cannot share {nics} adapters evenly: nics divides size")

    @property
    def alpha(self) -> float:
        return self.between.alpha

    @property
    def beta(self) -> float:
        return self.between.beta

    def adapters(self, size: int) -> int:
        return -(-size // self.size) * self.nics

    def adapter(self, rank: Ranks) -> Ranks:
        """Return the adapter of `rank`, numbered over all islands."""
        return rank // self.size * self.nics + rank % self.size * self.nics // self.size

    def link_count(self, size: int) -> int:
        return 4 * size + 2 * self.adapters(size)

    def links(self, size: int) -> list[Link]:
        fast = [(f"rank {r}", f"island {r // self.size}", self.inside.beta) for r in range(size)]
        slow = [(f"rank {r}", f"adapter {self.adapter(r)}", self.between.beta) for r in range(size)]
        shared = [(f"adapter {a}", "switch", self.between.beta) for a in range(self.adapters(size))]
        out: list[Link] = []
        for wires in (fast, slow, shared):
            out += [Link(low, high, beta) for low, high, beta in wires]
            out += [Link(high, low, beta) for low, high, beta in wires]
        return out

    def routes(self, source: Ranks, dest: Ranks, size: int) -> Route:
        far = source // self.size != dest // self.size
        adapters = self.adapters(size)
        near, far = 1 - 1 * far, 1 * far
        alpha = near * self.inside.alpha + far * self.between.alpha
        beta = near * self.inside.beta + far * self.between.beta
        first = source + far * 2 * size
        up = far * (4 * size + self.adapter(source) + 1) - 1
        down = far * (4 * size + adapters + self.adapter(dest) + 1) - 1
        return Route(alpha, beta, (first, up, down, size + dest + far * 2 * size))

    @classmethod
    def of(cls, name: str, **more: float | str | Interconnect) -> Self:
        """Return islands joined by the interconnect `name`, a key of PRESETS."""
        fields: Fields = {"between": name, **more}
        return cls(**fields)


def _whole(value: SupportsIndex, name: str) -> int:
    """Return `value` as an int of at least 1. Raises ValueError unless it is one."""
    try:
        number = index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} is a whole number of at least 1, got {value!r}")
    return number

"""Networks as data: the links that a message crosses from one rank to another, and their cost.

    Switch()                                           every rank has a port to one switch
    Ring()                                             every rank is wired to its two neighbors
    FatTree(hosts_per_leaf=16, oversubscription=4)     leaf switches joined by spine switches, with too few cables
    Islands(8, "nvlink_4", "infiniband_ndr")           islands of GPUs, joined by network adapters
    Switch.of("ethernet_10")                           with published latency and bandwidth: PRESETS, presets.py

The one rule of contention: a message starts when both its ends are ready and every link of its route is free, and takes
alpha + n * beta seconds. Until it has arrived it holds the first and the last link of its route, which are the ports of
its ends; the links between carry other messages as soon as its bytes have passed, after n * beta. Links are booked in
the order in which messages become ready; at equal times the message goes first whose later end has the lower rank, and
among messages of one rank, the one that it posted first. So a message that waits for a busy link also blocks what is
booked behind it, as in networks that lose nothing (InfiniBand; Ethernet with priority flow control).
"""

from .describe import describe, title
from .kinds import FatTree, Islands, Network, Ring, Switch
from .links import Link, Route, Timetable
from .presets import PRESETS, Interconnect

__all__ = [
    "PRESETS",
    "FatTree",
    "Interconnect",
    "Islands",
    "Link",
    "Network",
    "Ring",
    "Route",
    "Switch",
    "Timetable",
    "describe",
    "title",
]

"""Published latencies and bandwidths of interconnects, with their sources.

Bandwidths are for one direction of one port, as the standard or the vendor states them; software reaches less.
Latencies are for a small message between two ranks, as software sees it: for links between GPUs and for networks with
remote direct memory access (InfiniBand, RoCE, Omni-Path) the ones by which NCCL chooses its algorithms, which has one
latency for all such networks; for Ethernet the one measured through the TCP of Linux on 10 Gbit/s, which is set by the
software and not by the wire. An adapter alone is faster: below 0.6 us for HDR (Lenovo Press LP1195, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

NCCL = "NVIDIA, NCCL 2.30, src/graph/tuning.cc: hwLatencies, ring, LL, {}; 2026"
TCP = "Larsen et al., Architectural Breakdown of End-to-End Latency in a TCP/IP Network; 2009"


@dataclass(frozen=True)
class Interconnect:
    """A published link. alpha: s per message; GBps: 1e9 bytes per s in each direction; sources: who says so, when."""

    name: str
    alpha: float
    GBps: float
    alpha_source: str = field(repr=False)
    GBps_source: str = field(repr=False)

    @property
    def beta(self) -> float:
        """Inverse bandwidth, s per byte."""
        return 1e-9 / self.GBps


def _nccl(name: str, kind: Literal["NVLink", "PCI", "network"], GBps: float, source: str) -> Interconnect:
    """Return an interconnect that has NCCL's latency for links of `kind`."""
    alpha = {"NVLink": 0.6e-6, "PCI": 1.0e-6, "network": 2.7e-6}[kind]
    return Interconnect(name, alpha, GBps, NCCL.format(kind), source)


PRESETS = {
    preset.name: preset
    for preset in (
        _nccl("nvlink_3", "NVLink", 300.0, "NVIDIA, A100 Tensor Core GPU Architecture: 600 GB/s both ways; 2020"),
        _nccl("nvlink_4", "NVLink", 450.0, "NVIDIA, H100 Tensor Core GPU Architecture: 900 GB/s both ways; 2022"),
        _nccl("pcie_4", "PCI", 31.5, "PCI-SIG, PCI Express Base Specification 4.0: 16 lanes of 16 GT/s; 2017"),
        _nccl("pcie_5", "PCI", 63.0, "PCI-SIG, PCI Express Base Specification 5.0: 16 lanes of 32 GT/s; 2019"),
        _nccl("infiniband_hdr", "network", 25.0, "Lenovo Press LP1195, ConnectX-6 HDR/200GbE: 200 Gbit/s; 2024"),
        _nccl("infiniband_ndr", "network", 50.0, "FS, An In-Depth Look at NVIDIA NDR 400G InfiniBand; 2024"),
        _nccl("roce_100", "network", 12.5, "IEEE 802.3ba: 100 Gbit/s Ethernet; 2010"),
        _nccl("roce_200", "network", 25.0, "IEEE 802.3bs: 200 Gbit/s Ethernet; 2017"),
        _nccl("omni_path_100", "network", 12.5, "Cherlopalle and Weage, Dell HPC Omni-Path Fabric: 100 Gbit/s; 2016"),
        Interconnect("ethernet_1", 10e-6, 0.125, TCP, "IEEE 802.3ab: 1 Gbit/s Ethernet; 1999"),
        Interconnect("ethernet_10", 10e-6, 1.25, TCP, "IEEE 802.3ae: 10 Gbit/s Ethernet; 2002"),
        Interconnect("ethernet_25", 10e-6, 3.125, TCP, "IEEE 802.3by: 25 Gbit/s Ethernet; 2016"),
        Interconnect("ethernet_100", 10e-6, 12.5, TCP, "IEEE 802.3ba: 100 Gbit/s Ethernet; 2010"),
    )
}


def interconnect(name: Interconnect | str) -> Interconnect:
    """Return the Interconnect of that name, or a given one as it is. Raises ValueError that lists the names."""
    if isinstance(name, Interconnect):
        return name
    if name not in PRESETS:
        raise ValueError(f"no interconnect is called {name!r}: one of {', '.join(PRESETS)}, or an Interconnect")
    return PRESETS[name]

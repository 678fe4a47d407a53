"""Links as data, from a GPU's memory to Ethernet, and the cheapest one that is fast enough.

Links of comm/network/presets.py are used; others are added here, with the same kind of sources. All bandwidths are
of one direction. The latency of memory is the time of one read, on an H100 PCIe at 1.755 GHz.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from ..comm.network import PRESETS, Interconnect
from ..units import amount_text
from .machines import H100_SOURCE, PROCESSORS

NVLINK, NETWORK = PRESETS["nvlink_4"], PRESETS["infiniband_ndr"]  # NCCL has one latency for each of these kinds
HBM3_LATENCY = "Luo et al. 2024, arXiv:2402.13499: 479 cycles"
NVLINK_5 = "NVIDIA, Blackwell Architecture Technical Brief: 1.8 TB/s both ways; 2024"
SLINGSHOT = "De Sensi et al. 2024, arXiv:2408.14090: network adapters of 200 Gbit/s"
ADDED = (
    Interconnect("hbm3", 479 / 1.755e9, PROCESSORS["H100 SXM"].bandwidth / 1e9, HBM3_LATENCY, H100_SOURCE),
    Interconnect("nvlink_5", NVLINK.alpha, 900.0, NVLINK.alpha_source, NVLINK_5),
    Interconnect("slingshot_11", NETWORK.alpha, 25.0, NETWORK.alpha_source, SLINGSHOT),
    Interconnect("roce_400", NETWORK.alpha, 50.0, NETWORK.alpha_source, "IEEE 802.3bs: 400 Gbit/s Ethernet; 2017"),
)
LINKS = PRESETS | {link.name: link for link in ADDED}
INSIDE = ("hbm3", "nvlink_5", "nvlink_4", "pcie_5")  # a GPU or a node, or a rack with nvlink_5
# This order is an assumption and no list of prices: faster costs more, and Ethernet less than links for HPC alone.
CHEAPEST_FIRST = (
    *("ethernet_1", "ethernet_10", "roce_100", "omni_path_100"),
    *("slingshot_11", "infiniband_hdr", "roce_400", "infiniband_ndr"),
)


def cheapest_link(
    links: Sequence[tuple[str, float, float]],
    gradient_bytes: float,
    ranks: int,
    backward_s: float,
    hidden: float = 0.9,
) -> str | None:
    """Choose the cheapest link that hides enough of the communication under backward.

        backward   |.......|=========================|
                           first gradient is ready
        ring               |=========================|-------|
                            hidden                    exposed

    Each rank has one such link. A ring all-reduce (04) adds the gradients of all ranks.
    In each step of the ring, a rank sends one chunk of the gradients. This message
    takes the latency plus the time of its bytes. The ring starts when the first
    gradient is ready. Until backward ends, the ring is hidden; ranks wait for the rest.

    Args:    links: [(name, bandwidth in bytes/s, latency in s)], cheapest first; a link
             sends and receives at the same time, each at this bandwidth;
             gradient_bytes: all gradients of one rank; ranks: 2 or more;
             backward_s: seconds of backward after the first gradient is ready;
             hidden: the least share of the communication time that has to be hidden.
    Returns: the name of the first link that hides this share, or None if no link does.
    Ref: Patarasuk & Yuan 2009 (the ring).
    """
    for name, bandwidth, latency in links:
        steps = 2 * (ranks - 1)
        communication_s = steps * (latency + gradient_bytes / ranks / bandwidth)
        if hidden * communication_s <= backward_s:
            return name
    return None


def offers(names: Iterable[str] = CHEAPEST_FIRST) -> list[tuple[str, float, float]]:
    """Return (name, bytes/s, latency in s) of these LINKS, in this order, for cheapest_link."""
    return [(name, LINKS[name].GBps * 1e9, LINKS[name].alpha) for name in names]


def ladder(alpha: float, beta: float) -> str:
    """Return all links as lines of text, fastest first, with this machine's: alpha s a message, beta s a byte."""
    here = Interconnect("this machine", alpha, 1e-9 / beta if beta else float("inf"), "measured", "measured")
    rungs = sorted(chain((LINKS[name] for name in (*INSIDE, *CHEAPEST_FIRST)), [here]), key=lambda link: -link.GBps)
    lines = [f"{'':16}{'GB/s':>10}{'latency':>10}{'1 GB takes':>13}{'hbm3 is faster by':>20}"]
    for link in rungs:
        took, factor = amount_text(link.beta * 1e9, "s"), LINKS["hbm3"].GBps / link.GBps
        latency = amount_text(link.alpha, "s")
        lines.append(f"{link.name:16}{link.GBps:10,.4g}{latency:>10}{took:>13}{factor:20,.1f}")
    return "\n".join(lines)

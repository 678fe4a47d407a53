"""A network in words: what joins what, how fast, and which links are shared."""

from __future__ import annotations

import numpy as np

from .kinds import Network
from .links import Link, Seconds


def describe(network: Network, size: int) -> str:
    """Return the network among `size` ranks as lines of text: its record, links by kind, cost of a far message."""
    kinds: dict[tuple[tuple[str, str], float], list[Link]] = {}
    for link in network.links(size):
        low, high = sorted((link.source, link.dest), key=lambda name: name.startswith("rank"), reverse=True)
        kinds.setdefault(((low.split()[0], high.split()[0]), link.beta), []).append(link)
    lines = [f"{network}", f"{size} ranks, {network.link_count(size)} links (both directions of a cable count):"]
    shared = shared_links(network, size)
    numbers = {link: i for i, link in enumerate(network.links(size))}
    for ((low, high), beta), links in kinds.items():
        most = max(shared[numbers[link]] for link in links)
        note = f", shared by up to {most} messages" if most > 1 else ""
        lines.append(f"  {low} - {high}: {len(links)} links of {1e-9 / beta if beta else float('inf'):,.4g} GB/s{note}")
    if size > 1:
        far = network.routes(0, size - 1, size)
        lines.append(f"  rank 0 to rank {size - 1}: {float(far.alpha) * 1e6:.3g} us + n / {bandwidth(far.beta)}")
    return "\n".join(lines)


def title(network: Network) -> str:
    """Return the kind of network and what distinguishes it: "FatTree, hosts per leaf 16, oversubscription 4"."""
    fields = ("hosts_per_leaf", "oversubscription", "size", "nics")
    texts = [f"{name.replace('_', ' ')} {getattr(network, name)}" for name in fields if hasattr(network, name)]
    return ", ".join([type(network).__name__, *texts])


def bandwidth(beta: Seconds) -> str:
    """Return seconds per byte, one number, as people say it: "12.5 GB/s"."""
    return f"{1e-9 / float(beta):.4g} GB/s" if beta else "no limit"


def shared_links(network: Network, size: int) -> np.ndarray:
    """Return (links,) numbers: how many messages can need each link at once if every rank sends and receives one.

    The number is that link's senders or receivers, whichever are fewer: 1 for a port, 0 for a link that nothing uses.
    """
    count = network.link_count(size)
    senders = [np.zeros(0, np.int64)]
    receivers = [np.zeros(0, np.int64)]
    ranks = np.arange(size)
    for source in range(size):
        dest = ranks[ranks != source]
        if not len(dest):
            break
        for link in map(np.asarray, network.routes(np.full(len(dest), source), dest, size).links):
            used = link >= 0
            senders.append(np.unique(link[used]) * size + source)
            receivers.append(link[used] * size + dest[used])
    by_sender = np.bincount(np.unique(np.concatenate(senders)) // size, minlength=count)
    by_receiver = np.bincount(np.unique(np.concatenate(receivers)) // size, minlength=count)
    return np.minimum(by_sender, by_receiver)

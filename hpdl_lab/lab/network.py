"""`lab.network`: a network as a picture, and in words."""

from ..comm.network import Network, Switch, describe
from ..plots import network as drawing
from .picture import picture


def network(net, ranks=16):
    """Draw which links join the ranks, and which of them are shared. Returns Picture, with all figures in its text.

        lab.network(FatTree(4, oversubscription=2))      a network of comm.network
        lab.network("infiniband_ndr")                    a switch with the published figures of comm.network.PRESETS

    Args:    net: a Network, or the name of a preset; ranks: how many are joined, at least 1.
    """
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"a network joins a whole number of ranks, at least 1, got {ranks!r}")
    net = Switch.of(net) if isinstance(net, str) else net
    if not isinstance(net, Network):
        raise TypeError(f"one of comm.network is needed, such as Switch() or FatTree(16, 4), or a name, got {net!r}")
    return picture(drawing.draw, net, ranks, text=describe(net, ranks), height=drawing.height(net, ranks))

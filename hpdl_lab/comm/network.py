"""Networks as data: what a message costs between two simulated ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Switch:
    """Every rank has one full-duplex port to a switch that never blocks.

    A message of n bytes takes alpha + n * beta seconds, in which it holds its sender's way out and its receiver's way
    in; messages that need the same port go one after another, in the order in which both ends were ready.

    alpha:         latency, s per message (default: 2 us).
    beta:          inverse bandwidth, s per byte (default: 12.5 GB/s, a 100 Gbit/s port).
    flops_per_s:   speed of `comm.compute(flops=...)`.
    eager_nbytes:  a send up to this size ends before its receive is posted, as MPI's eager protocol does. 0 (the
                   default) makes every send wait for its receive: a program that is right under it never relies on
                   buffering (MPI standard 3.5, "safe" programs).
    """

    alpha: float = 2e-6
    beta: float = 1 / 12.5e9
    flops_per_s: float = 1e12
    eager_nbytes: int = 0

    def ports(self, size):
        """The state of this network for one run of `size` ranks."""
        return _Ports(self, size)


class _Ports:
    """When each rank's way out and way in become free, in s."""

    def __init__(self, switch, size):
        self.alpha, self.beta = switch.alpha, switch.beta
        self.out_free = [0.0] * size
        self.in_free = [0.0] * size

    def transfer(self, source, dest, nbytes, ready):
        """Book the message; returns when it has arrived."""
        start = max(ready, self.out_free[source], self.in_free[dest])
        end = start + self.alpha + nbytes * self.beta
        self.out_free[source] = self.in_free[dest] = end
        return end

"""Where a verb runs: on the engine cluster when one is up, else on simulated ranks, and the picture says which."""

from dataclasses import dataclass

from ..comm import sim
from ..comm.network import Network, Ring, Switch, title
from ..engines import layout
from ..engines.crew import check_deadline
from .cluster import injected, run, running

SIMULATED_DEADLINE = 600.0  # s of real time: a deadlock is proved at once, this only ends loops that never end
DEFAULT_RANKS = 4  # where no engines run and nothing is said


@dataclass(frozen=True)
class Place:
    """ranks: how many; simulated: whether they are coroutines with virtual time, or engines.

    network: of simulated ranks, None for the default one; link: of emulated hosts with one engine each, such as
    "1gbit", else ""; device: "cpu" or "cuda".
    """

    ranks: int
    simulated: bool
    network: Network | None = None
    link: str = ""
    device: str = "cpu"

    def __str__(self):
        kind = "simulated rank" if self.simulated else "engine"
        where = f" on emulated hosts at {self.link}" if self.link else ""
        return f"{self.ranks:,} {kind}{'s' if self.ranks > 1 else ''}{where}"

    @property
    def link_GBps(self):
        """What a link between two ranks carries, where that is known: 0.125 for 1gbit; else None."""
        return layout.parse_link(self.link).bandwidth / 1e9 if self.link else None

    @property
    def alike(self):
        """Whether a message costs the same between all neighbors on a ring: what ranks 0 and 1 measure is then true."""
        return self.network is None or isinstance(self.network, Switch | Ring)

    @property
    def remark(self):
        """What to say about times that were measured here; empty where they are real."""
        if not self.simulated:
            return ""
        if self.network is not None:
            return f"{title(self.network)}: virtual time, in which arithmetic is free."
        return "Simulated ranks: virtual time, in which arithmetic is free. lab.start(4) makes real ones."

    def run(self, fn, *args, deadline=10.0, on_row=None, threads=False):
        """Call `fn(comm, *args)` on every rank; returns Results.

        threads: whether fn waits for other ranks inside autograd's backward, for which simulated ranks must be threads.
        """
        check_deadline(deadline)
        if self.simulated:
            told = {"deadline": SIMULATED_DEADLINE, "on_row": on_row, "inject": injected(), "threads": threads}
            return sim.run(self.ranks, fn, *args, network=self.network, **told)
        return run(fn, *args, ranks=range(self.ranks), deadline=deadline, on_row=on_row)


def place(ranks=None, network=None):
    """The engines, all or the first `ranks` of them; simulated ranks where no engines run, or on `network`.

    Raises:  ValueError for more ranks than engines, or for none.
    """
    if ranks is not None and (not isinstance(ranks, int) or ranks < 1):
        raise ValueError(f"ranks must be a whole number of at least 1, got {ranks!r}")
    if network is not None:
        if not isinstance(network, Network):
            raise TypeError(f"network={network!r}: one of comm.network is needed, such as Switch() or FatTree(16, 4)")
        return Place(ranks or DEFAULT_RANKS, simulated=True, network=network)
    engines = running()
    if engines is None:
        return Place(ranks or DEFAULT_RANKS, simulated=True)
    if ranks is not None and ranks > engines.n:
        raise ValueError(
            f"{ranks} ranks were asked for and {engines.n} engines run: lab.stop(), lab.start({ranks}), "
            "or simulate them: network=Switch()"
        )
    own_hosts = engines.where == "emulated" and engines.layout.hosts == engines.n
    link_speed = engines.link if own_hosts else ""
    return Place(ranks or engines.n, simulated=False, link=link_speed, device=engines.device)

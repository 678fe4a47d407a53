"""The ranks of a verb: engines if some are up, else simulated ranks; the picture says which."""

from dataclasses import dataclass

from ..comm import sim
from ..comm.base import OnRow, Results
from ..comm.network import Network, Ring, Switch, title
from ..engines import layout
from ..engines.messages import Function
from ..units import counted, require_int, require_number
from .cluster import injected, run, running

SIMULATED_DEADLINE = 600.0  # s of real time: a deadlock is proved at once, this only ends loops that never end
DEFAULT_RANKS = 4  # if no engines run and nothing is said


@dataclass(frozen=True)
class World:
    """The ranks that a verb uses.

    ranks: their number; simulated: True for coroutines with virtual time, False for engines.

    network: of simulated ranks, None for the default one; link: of emulated hosts with one engine each, such as
    "1gbit", else ""; device: "cpu" or "cuda".
    """

    ranks: int
    simulated: bool
    network: Network | None = None
    link: str = ""
    device: str = "cpu"

    def __str__(self) -> str:
        ranks = counted(self.ranks, "simulated rank" if self.simulated else "engine")
        return f"{ranks} on emulated hosts at {self.link}" if self.link else ranks

    @property
    def link_GBps(self) -> float | None:
        """The bandwidth of a link between two ranks, if that is known: 0.125 for 1gbit; else None."""
        return layout.parse_link(self.link).bandwidth / 1e9 if self.link else None

    @property
    def alike(self) -> bool:
        """True if a message costs the same between all neighbors on a ring: what ranks 0 and 1 measure is then true."""
        return self.network is None or isinstance(self.network, Switch | Ring)

    @property
    def remark(self) -> str:
        """A sentence about times that were measured here; empty if they are real."""
        if not self.simulated:
            return ""
        if self.network is not None:
            return f"{title(self.network)}: virtual time, in which arithmetic is free."
        return "Simulated ranks: virtual time, in which arithmetic is free. lab.start(4) makes real ones."

    def run(
        self,
        fn: Function,
        *args: object,
        deadline: float = 10.0,
        on_row: OnRow | None = None,
        threads: bool = False,
    ) -> Results:
        """Call `fn(comm, *args)` on every rank; returns Results.

        threads: whether fn waits for other ranks inside autograd's backward, for which simulated ranks must be threads.
        """
        require_number("deadline", deadline, above=0)
        if not self.simulated:
            return run(fn, *args, ranks=range(self.ranks), deadline=deadline, on_row=on_row)
        return sim.run(
            self.ranks,
            fn,
            *args,
            on_row=on_row,
            network=self.network,
            deadline=SIMULATED_DEADLINE,
            inject=injected(),
            threads=threads,
        )


def asked_network(network: Network | None) -> None:
    """Raise TypeError unless `network` is one, or None."""
    if network is not None and not isinstance(network, Network):
        raise TypeError(f"network={network!r}: one of comm.network is needed, such as Switch() or FatTree(16, 4)")


def world_of(ranks: int | None = None, network: Network | None = None) -> World:
    """Return the engines, all or the first `ranks` of them; simulated ranks if no engines run, or on `network`.

    Raises:  ValueError for more ranks than engines, or for none.
    """
    asked_network(network)
    if ranks is not None:
        require_int("ranks", ranks, 1)
    engines = running() if network is None else None
    if engines is None:
        return World(ranks or DEFAULT_RANKS, simulated=True, network=network)
    if ranks is not None and ranks > engines.n:
        raise ValueError(
            f"{ranks} ranks were asked for and {engines.n} engines run: lab.stop(), lab.start({ranks}), "
            "or simulate them: network=Switch()"
        )
    own_hosts = engines.where == "emulated" and engines.laid_out.hosts == engines.n
    link = engines.link if own_hosts else ""
    return World(ranks or engines.n, simulated=False, link=link, device=engines.device)

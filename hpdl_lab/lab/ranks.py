"""Where a verb runs: on the engine cluster when one is up, else on simulated ranks, and the picture says which."""

from dataclasses import dataclass

from ..comm import sim
from .cluster import run, running

SIMULATED_DEADLINE = 600.0  # s of real time: a deadlock is proved at once, this only ends loops that never end
DEFAULT_RANKS = 4  # where no engines run and nothing is said


@dataclass(frozen=True)
class Place:
    """ranks: how many; simulated: whether they are coroutines with virtual time, or engines."""

    ranks: int
    simulated: bool

    def __str__(self):
        kind = "simulated rank" if self.simulated else "engine"
        return f"{self.ranks} {kind}{'s' if self.ranks > 1 else ''}"

    @property
    def remark(self):
        """What to say about times that were measured here; empty where they are real."""
        return (
            "Simulated ranks: virtual time, in which arithmetic is free. lab.start(4) makes real ones."
            if self.simulated
            else ""
        )

    def run(self, fn, *args, deadline=10.0, on_row=None):
        """Call `fn(comm, *args)` on every rank; returns Results."""
        if self.simulated:
            return sim.run(self.ranks, fn, *args, deadline=SIMULATED_DEADLINE, on_row=on_row)
        return run(fn, *args, ranks=range(self.ranks), deadline=deadline, on_row=on_row)


def place(ranks=None):
    """The engines, all or the first `ranks` of them; simulated ranks where no engines run.

    Raises:  ValueError for more ranks than engines, or for none.
    """
    if ranks is not None and (not isinstance(ranks, int) or ranks < 1):
        raise ValueError(f"ranks must be a whole number of at least 1, got {ranks!r}")
    engines = running()
    if engines is None:
        return Place(ranks or DEFAULT_RANKS, simulated=True)
    if ranks is not None and ranks > engines.n:
        raise ValueError(f"{ranks} ranks were asked for and {engines.n} engines run: lab.stop(), lab.start({ranks})")
    return Place(ranks or engines.n, simulated=False)

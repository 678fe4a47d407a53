"""`lab.gossip`: how fast ranks on several graphs come to agree, against the promise of the second eigenvalue."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..comm import PerRank, sim
from ..comm.base import Comm
from ..engines.messages import Function
from ..parallel import gossip as topologies
from ..parallel.gossip import gossip_step, one_peer_step
from ..plots import graph as drawing
from ..plots import live
from ..plots.style import Figure
from ..trace import number_text
from ..units import require_int, require_number
from .result import Result, text_table

ONE_PEER = "one_peer"  # the exponential graph; every step uses one neighbor
NUMBERS = 32  # in the vector of every rank
FRAMES = 20  # pictures while the steps are drawn
MOST_GOSSIPING = 64  # ranks


@dataclass(frozen=True, repr=False)
class GossipResult(Result):
    """Result of `lab.gossip`.

    errors: {graph: (steps + 1,) disagreement of the ranks}; lambda2: {graph: second eigenvalue of its weights}.
    """

    n: int
    errors: dict[str, np.ndarray]
    lambda2: dict[str, float | None]
    figure: Figure = field(repr=False)

    def __repr__(self) -> str:
        rows = []
        for name, error in self.errors.items():
            steps, second = len(error) - 1, self.lambda2[name]
            gap, most = ("", "") if second is None else (f"{1 - second:.6f}", number_text(second**steps))
            rows.append((name, gap, number_text(error[-1] / (error[0] or 1.0)), most))
        return "\n".join(text_table((f"graph of {self.n}", "gap 1 - λ₂", "apart after", "promised at most"), rows))


def gossip(
    graphs: str | Iterable[str] = ("ring", "wheel", "star", "exponential"),
    n: int = 16,
    steps: int = 20,
    step: Function = gossip_step,
    prediction: dict[str, float] | None = None,
) -> GossipResult:
    """Let n simulated ranks gossip on each graph, and draw how far they are apart after every step.

    Args:    graphs: names of parallel.gossip.GRAPHS, and "one_peer": one neighbor of the exponential graph per step.
             n: ranks, 2 to 64; steps: how many, at least 1.
             step: f(comm, x, graph), one step, such as parallel.gossip.gossip_step.
             prediction: {graph: how far apart after 20 steps}; at the start they are 1 apart.
    Returns: GossipResult.
    """
    require_int("n, a number of ranks,", n, 2, MOST_GOSSIPING)
    require_int("steps", steps, 1)
    names = [graphs] if isinstance(graphs, str) else list(dict.fromkeys(graphs))
    if not names:
        raise ValueError("no graph to gossip on: give some, such as ('ring', 'star')")
    guesses = prediction or {}
    for name, apart in guesses.items():
        require_number(f"how far apart ranks on a {name} are", apart, above=0)
    x = np.random.default_rng(0).normal(size=(n, NUMBERS))
    errors: dict[str, np.ndarray] = {}
    promises: dict[str, float | None] = {}
    for name in names:
        if name == ONE_PEER:
            walks, promises[name] = sim.run(n, _walk, PerRank(list(x)), one_peer_step, list(range(steps))), None
        else:
            graph = topologies.graph(name, n)
            walks = sim.run(n, _walk, PerRank(list(x)), step, [graph] * steps)
            promises[name] = topologies.lambda2(topologies.metropolis(graph))
        errors[name] = np.array([topologies.disagreement(states) for states in zip(*walks, strict=True)])
    title = f"Gossip of {n} ranks"
    plot = live.Live(drawing.draw_gossip, alt="disagreement against gossip steps")
    for k in range(1, steps + 1, max(1, steps // FRAMES)) if plot.shown else ():
        plot.update({name: error[:k] for name, error in errors.items()}, promises, steps, title, guesses)
        plot.rest()
    return GossipResult(n, errors, promises, plot.finish(errors, promises, steps, title, guesses))


def _walk(comm: Comm, x: np.ndarray, step: Function, arguments: Sequence[object]) -> list[np.ndarray]:
    """Return [x before the first step, and after each]: step(comm, x, argument) for every one of `arguments`."""
    states = [x.copy()]
    for argument in arguments:
        step(comm, x, argument)
        states.append(x.copy())
    return states

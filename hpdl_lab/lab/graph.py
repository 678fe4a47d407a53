"""`lab.graph`: who gossips with whom; `lab.gossip`: how fast several graphs bring agreement, beside the promise."""

import time
from dataclasses import dataclass, field

import numpy as np

from ..comm import PerRank, sim
from ..parallel import gossip as topologies
from ..parallel.gossip import gossip_step, one_peer_step
from ..plots import graph as drawing
from ..plots import live
from ..trace import number_text
from .picture import WithFigure, picture

ONE_PEER = "one_peer"  # the exponential graph, of which every step uses one neighbor
NUMBERS = 32  # in the vector of every rank
MOST_GOSSIPING = 64  # ranks
STEP_SECONDS = 0.08  # from step to step, of which every second or third one is drawn


@dataclass(frozen=True)
class GossipResult(WithFigure):
    """errors: {graph: (steps + 1,) disagreement of the ranks}; lambda2: {graph: second eigenvalue of its weights}."""

    n: int
    errors: dict
    lambda2: dict
    figure: object = field(repr=False)

    def __repr__(self):
        lines = [f"{'graph of ' + str(self.n):<16}{'gap 1 - λ₂':>12}{'apart after':>14}{'promised at most':>18}"]
        for name, error in self.errors.items():
            steps, second = len(error) - 1, self.lambda2[name]
            gap, most = ("", "") if second is None else (f"{1 - second:.6f}", number_text(second**steps))
            lines.append(f"{name:<16}{gap:>12}{number_text(error[-1] / (error[0] or 1.0)):>14}{most:>18}")
        return "\n".join(lines)


def graph(name, n=8, seed=0):
    """Draw a graph of ranks with the weights of one gossip step, and its spectral gap. Returns Picture.

    Args:    name: "ring", "wheel", "star", "random", "exponential" or "complete"; n: ranks, 2 to 32; seed: of "random".
    """
    require_ranks(n, drawing.MOST_RANKS)
    weights = topologies.metropolis(topologies.graph(name, n, seed))
    text = f"{name} of {n} ranks, {drawing.mixing(topologies.lambda2(weights))}"
    return picture(drawing.draw, name, weights, text=text)


def gossip(graphs=("ring", "wheel", "star", "exponential"), n=16, steps=20, step=gossip_step, seed=0):
    """Let n simulated ranks gossip on each graph, and draw how far they are apart after every step.

    Args:    graphs: names that lab.graph knows, and "one_peer": one neighbor of the exponential graph per step.
             n: ranks, 2 to 64; steps: how many, at least 1; seed: of the numbers, and of the random graph.
             step: f(comm, x, graph), one step, such as parallel.gossip.gossip_step.
    Returns: GossipResult.
    """
    require_ranks(n, MOST_GOSSIPING)
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}")
    names = [graphs] if isinstance(graphs, str) else list(dict.fromkeys(graphs))
    if not names:
        raise ValueError("no graph to gossip on: give some, such as ('ring', 'star')")
    x = np.random.default_rng(seed).normal(size=(n, NUMBERS))
    errors, promises = {}, {}
    for name in names:
        if name == ONE_PEER:
            walks, promises[name] = sim.run(n, walk, PerRank(list(x)), one_peer_step, list(range(steps))), None
        else:
            graph = topologies.graph(name, n, seed)
            walks, promises[name] = sim.run(n, walk, PerRank(list(x)), step, [graph] * steps), lambda2_of(graph)
        errors[name] = np.array([topologies.disagreement(states) for states in zip(*walks, strict=True)])
    title = f"Gossip of {n} ranks"
    plot = live.Live(drawing.draw_gossip, alt="disagreement against gossip steps")
    for k in range(1, steps + 1) if plot.shown else ():
        plot.update({name: error[:k] for name, error in errors.items()}, promises, steps, title)
        time.sleep(STEP_SECONDS)
    return GossipResult(n, errors, promises, plot.finish(errors, promises, steps, title))


def walk(comm, x, step, arguments):
    """[x before the first step, and after each]: step(comm, x, argument) for every one of `arguments`."""
    states = [x.copy()]
    for argument in arguments:
        step(comm, x, argument)
        states.append(x.copy())
    return states


def lambda2_of(graph):
    return topologies.lambda2(topologies.metropolis(graph))


def require_ranks(n, most):
    if not isinstance(n, int) or not 2 <= n <= most:
        raise ValueError(f"n must be a whole number of ranks from 2 to {most}, got {n!r}")

"""`lab.designs`: what strategies do with the same training step, one timeline under the other, in virtual time."""

import math
from dataclasses import dataclass, field
from numbers import Real

import torch
from torch.nn.functional import cross_entropy

from ..comm import sim
from ..comm.network import Network, Switch
from ..models.mlp import mlp
from ..parallel.data_parallel import Strategy
from ..parallel.scaffe import SCaffe, SCaffeOverlappedPropagation, SCaffeOverlappedReduction, step_seconds
from ..parallel.scaling.accounting import account, spending
from ..plots import designs as drawing
from ..trace import seconds_text
from .picture import WithFigure, picture

LAYERS, WIDTH = 4, 256  # equal layers: 65,792 float32 each
NETWORK = Switch(alpha=2e-6, beta=1.5e-9)  # on which an all-reduce of a layer takes about 0.6 ms
SCAFFES = {  # design: (its name in the paper, its formula)
    SCaffe: ("SC-B", "Σb + Σf + ΣB + Σr"),
    SCaffeOverlappedPropagation: ("SC-OB", "(b ∥ f) + ΣB + Σr"),
    SCaffeOverlappedReduction: ("SC-OBR", "(b ∥ f) + (B ∥ r)"),
}


@dataclass(frozen=True)
class Design:
    """seconds of rank 0's step; exposed: share of the step in which ranks do nothing but wait for messages.

    formula, predicted: seconds of the step in letters and by arithmetic; "" and None where there is no formula.
    """

    name: str
    seconds: float
    exposed: float
    formula: str
    predicted: float | None
    events: list = field(repr=False)


@dataclass(frozen=True)
class Designs(WithFigure):
    """One Design for each strategy, in the order given."""

    designs: list
    figure: object = field(repr=False)

    def __getitem__(self, index):
        return self.designs[index]

    def __repr__(self):
        width = max(len(d.name) for d in self.designs)
        lines = []
        for d in self.designs:
            told = f"{d.name:<{width}}  {seconds_text(d.seconds):>8} a step, {d.exposed:>4.0%} of it exposed"
            lines.append(told + (f"; its formula says {seconds_text(d.predicted)}" if d.predicted else ""))
        return "\n".join(lines)


def designs(*strategies, ranks=4, network=NETWORK, forward=3e-3, backward=6e-3):
    """Take the same training step with each strategy on simulated ranks, and draw what rank 0 does.

        lab.designs(DataParallel(ring.all_reduce), DataParallelOverlapped(ring.all_reduce, bucket_nbytes=300_000))

    The network has four equal layers of 263,168 bytes. Its arithmetic takes virtual time, and so do messages.

    Args:    strategies: parallel.data_parallel.Strategy, one or more. ranks: 2 or more; network: of comm.network.
             forward, backward: s of virtual time for all layers together.
    Returns: Designs.
    Raises:  ValueError, also where the all_reduce of a strategy does not add up; TypeError.
    """
    if not strategies:
        raise ValueError("lab.designs needs a strategy, such as DataParallel(): see parallel/data_parallel.py")
    for strategy in strategies:
        if not isinstance(strategy, Strategy):
            got = getattr(strategy, "__name__", repr(strategy))
            raise TypeError(
                f"lab.designs got {got}: an object of one of the strategies is needed, such as DataParallel()"
            )
        if not strategy.synchronous:
            raise ValueError(f"{strategy} is asynchronous: its ranks take no step together that could be drawn")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2:
        raise ValueError(f"ranks={ranks!r}: at least 2 are needed, for one rank has nobody to talk to")
    if not isinstance(network, Network):
        raise TypeError(f"network={network!r}: one of comm.network is needed, such as Switch(alpha=2e-6, beta=1.5e-9)")
    for name, seconds in (("forward", forward), ("backward", backward)):
        if not isinstance(seconds, Real) or not 0 <= seconds < math.inf:
            raise ValueError(f"{name}={seconds!r}: seconds of virtual time, at least 0, are needed")
    found = [design_of(strategy, ranks, network, forward, backward) for strategy in strategies]
    title = f"The same step on {ranks} ranks: what rank 0 does"
    shown = picture(drawing.draw, found, title, text=title, height=drawing.height(len(found)))
    return Designs(found, shown.figure)


def design_of(strategy, ranks, network, forward, backward):
    run = sim.run(ranks, step_with, strategy, forward, backward, network=network, threads=True)
    begin = max(run)
    events = [e for e in run.events if e.t0_ns >= begin]
    told = account(events)
    mine = [e._replace(t0_ns=e.t0_ns - begin, t1_ns=e.t1_ns - begin) for e in events if e.rank == 0]
    seconds = max(e.t1_ns for e in mine) / 1e9
    kind = type(strategy)
    if kind not in SCAFFES:
        return Design(kind.__name__, seconds, told.exposed, "", None, mine)
    predicted = seconds_by_formula(kind, ranks, network, forward, backward)
    return Design(f"{kind.__name__}, {SCAFFES[kind][0]}", seconds, told.exposed, SCAFFES[kind][1], predicted, mine)


def step_with(comm, strategy, forward, backward):
    """One training step on this rank; returns when it began, in ns."""
    model = mlp((WIDTH,) * (LAYERS + 1))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(comm.rank))
    y = torch.arange(4)
    with spending(comm, model, forward, backward):
        strategy.start(comm, model)
        strategy.require_sums(comm)
        comm.barrier()
        begin = comm.trace.clock()
        with comm.trace.span("forward"):
            loss = cross_entropy(model(x), y, reduction="sum") / (4 * comm.size)
        with comm.trace.span("backward"):
            loss.backward()
        with comm.trace.span("add gradients"):
            strategy.add_gradients(comm, model)
        with comm.trace.span("update"):
            pass
        strategy.stop()
    return begin


def seconds_by_formula(design, ranks, network, forward, backward):
    """step_seconds of one of S-Caffe's designs, with the time that one broadcast and one reduction of a layer take."""
    layer = torch.zeros(WIDTH * (WIDTH + 1))
    b, r = (
        sim.run(ranks, lambda comm, x, op=op: getattr(comm, op)(x), layer, network=network).seconds
        for op in ("broadcast", "reduce")
    )
    return step_seconds(design, [b] * LAYERS, [forward / LAYERS] * LAYERS, [backward / LAYERS] * LAYERS, [r] * LAYERS)

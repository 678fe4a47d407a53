"""`lab.designs`: what strategies do with the same training step, one timeline under the other, in virtual time."""

from dataclasses import dataclass, field
from typing import cast

import torch
from torch.nn.functional import cross_entropy

from ..comm import sim
from ..comm.base import Comm
from ..comm.network import Switch
from ..models.mlp import mlp
from ..parallel.data_parallel import Strategy
from ..parallel.scaffe import SCaffe, SCaffeOverlappedPropagation, SCaffeOverlappedReduction, step_seconds
from ..parallel.scaling.accounting import Account, account, spending
from ..plots import timeline as drawing
from ..plots.style import Figure
from ..trace import Event, bytes_sent, seconds_text
from ..units import require_int, require_number
from .choice import asked_strategy
from .result import Result, picture, text_table

LAYERS, WIDTH = 4, 256  # equal layers: 65,792 float32 each
NETWORK = Switch(alpha=2e-6, beta=1.5e-9)  # on which an all-reduce of a layer takes about 0.6 ms
FORWARD, BACKWARD = 3e-3, 6e-3  # s of virtual time for all layers together
SCAFFES: dict[type, tuple[str, str]] = {  # design: (its name in the paper, its formula)
    SCaffe: ("SC-B", "Σb + Σf + ΣB + Σr"),
    SCaffeOverlappedPropagation: ("SC-OB", "(b ∥ f) + ΣB + Σr"),
    SCaffeOverlappedReduction: ("SC-OBR", "(b ∥ f) + (B ∥ r)"),
}


@dataclass(frozen=True)
class _Design:
    """A training step with one strategy.

    seconds of rank 0's step; exposed: share of the step in which ranks do nothing but wait for messages.

    sent: bytes that rank 0 sends in the step; held: {"parameters", "gradients", "optimizer": bytes} that rank 0 holds
    when gradients have been added, with the states of Adam.
    formula, predicted: seconds of the step in letters and by arithmetic; "" and None if there is no formula.
    """

    name: str
    seconds: float
    exposed: float
    formula: str
    predicted: float | None
    events: list[Event] = field(repr=False)
    sent: int
    held: dict[str, int]


@dataclass(frozen=True, repr=False)
class Designs(Result):
    """The Design of each strategy, in the order given."""

    designs: list[_Design]
    figure: Figure = field(repr=False)

    def __getitem__(self, index: int) -> _Design:
        return self.designs[index]

    def __repr__(self) -> str:
        names = ("strategy", "a step", "exposed", "bytes sent", "bytes held", "by its formula")
        shown = len(names) if any(d.predicted for d in self.designs) else -1
        return "\n".join(text_table(names[:shown], [_row_of(d)[:shown] for d in self.designs]))


def _row_of(d: _Design) -> tuple[str, ...]:
    """Return a design as a row of a table, in text."""
    formula = seconds_text(d.predicted) if d.predicted else ""
    return d.name, seconds_text(d.seconds), f"{d.exposed:.0%}", f"{d.sent:,}", f"{sum(d.held.values()):,}", formula


def designs(*strategies: Strategy, ranks: int = 4, prediction: float | None = None) -> Designs:
    """Take the same training step with each strategy on simulated ranks, and draw what rank 0 does.

        lab.designs(DataParallel(ring.all_reduce), DataParallelOverlapped(ring.all_reduce, bucket_nbytes=300_000))

    The model has four equal layers of 263,168 bytes. Its arithmetic takes virtual time, 3 ms forward and 6 ms
    backward, and so do messages.

    Args:    strategies: parallel.data_parallel.Strategy, one or more. ranks: 2 or more.
             prediction: what share of the time that the first strategy exposes the last one still exposes, you think.
    Returns: Designs.
    Raises:  ValueError, also if the all_reduce of a strategy does not add up; TypeError.
    """
    require_int("ranks", ranks, 2)
    if not strategies:
        raise ValueError("lab.designs needs a strategy, such as DataParallel(): see parallel/data_parallel.py")
    for strategy in strategies:
        if not asked_strategy(strategy, None).synchronous:
            raise ValueError(f"{strategy} is asynchronous: its ranks take no step together that could be drawn")
    if prediction is not None:
        require_number("the share that you guess", prediction, 0, 1)
    found = [_design_of(strategy, ranks) for strategy in strategies]
    first = found[0]
    guess = None if prediction is None else first.seconds * (1 - first.exposed * (1 - prediction))
    title = f"The same step on {ranks} ranks: what rank 0 does"
    height = drawing.designs_height(len(found))
    return Designs(found, picture(drawing.draw_designs, found, title, guess, text=title, height=height).figure)


def _design_of(strategy: Strategy, ranks: int) -> _Design:
    """Take the step with a strategy; returns its Design."""
    run = sim.run(ranks, _step_with, strategy, network=NETWORK, threads=True)
    begin, held = max(begin for begin, _ in run), run[0][1]
    events = [e for e in run.events if e.t0_ns >= begin]
    found = cast(Account, account(events))  # there is a step in them
    mine = [e._replace(t0_ns=e.t0_ns - begin, t1_ns=e.t1_ns - begin) for e in events if e.rank == 0]
    seconds = max(e.t1_ns for e in mine) / 1e9
    kind, sent = type(strategy), bytes_sent(mine).get(0, 0)
    if kind not in SCAFFES:
        return _Design(kind.__name__, seconds, found.exposed, "", None, mine, sent, held)
    name, formula = SCAFFES[kind]
    predicted = _seconds_by_formula(kind, ranks)
    return _Design(f"{kind.__name__}, {name}", seconds, found.exposed, formula, predicted, mine, sent, held)


def _step_with(comm: Comm, strategy: Strategy) -> tuple[int, dict[str, int]]:
    """Take one training step on this rank; returns (when it began in ns, the bytes held, see Design)."""
    model = mlp((WIDTH,) * (LAYERS + 1))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(comm.rank))
    y = torch.arange(4)
    with spending(comm, model, FORWARD, BACKWARD):
        strategy.start(comm, model)
        strategy.require_sums(comm)
        optimizer = strategy.optimizer(model, torch.optim.Adam)
        comm.barrier()
        begin = comm.trace.clock()
        with comm.trace.span("forward"):
            loss = cross_entropy(model(x), y, reduction="sum") / (4 * comm.size)
        with comm.trace.span("backward"):
            loss.backward()
        with comm.trace.span("add gradients"):
            strategy.add_gradients(comm, model)
        held = strategy.held(model, optimizer)
        with comm.trace.span("update"):
            optimizer.step()
        held["optimizer"] = strategy.held(model, optimizer)["optimizer"]
        strategy.stop()
    return begin, held


def _seconds_by_formula(design: type, ranks: int) -> float:
    """Return step_seconds of an S-Caffe design, with the time that one broadcast and one reduction of a layer take."""
    layer = torch.zeros(WIDTH * (WIDTH + 1))
    b, r = (
        sim.run(ranks, lambda comm, x, op=op: getattr(comm, op)(x), layer, network=NETWORK).seconds
        for op in ("broadcast", "reduce")
    )
    return step_seconds(design, [b] * LAYERS, [FORWARD / LAYERS] * LAYERS, [BACKWARD / LAYERS] * LAYERS, [r] * LAYERS)

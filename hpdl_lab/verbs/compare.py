"""`lab.compare`: one training with one strategy after the other: bytes, steps and accuracy in one picture."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..comm import sim
from ..comm.sim.torch_state import one_thread
from ..data.dataset import Dataset
from ..models import batch_norm
from ..parallel.compression import Cast, DataParallelCompressed, PowerSGD, TopK
from ..parallel.data_parallel import DataParallel, Strategy
from ..parallel.local_sgd import ONE_PEER, DiLoCo, Gossip, LocalSGD, Tournament
from ..parallel.training import Recipe
from ..parallel.training import train as train_on_rank
from ..plots import live
from ..plots.compare import draw
from ..plots.style import Figure
from ..trace import Event
from ..units import amount_text, require_int, require_number
from .choice import Fields, asked_strategy, model_and_data
from .result import Result, text_table
from .world import SIMULATED_DEADLINE

TALKS = ("add gradients", "meet")  # spans of a step in which strategies send
RECIPE: Fields = {"steps": 120, "lr": 0.2, "momentum": 0.0}
HELD_OUT = 8  # of so many training examples one is held out for the tournament


@dataclass(frozen=True)
class Compared:
    """A strategy in the comparison.

    nbytes: that a rank sends in all steps, the mean over ranks; losses: of the global batch, per step;
    test_accuracy: 0 to 1.
    """

    name: str
    nbytes: float
    losses: list[float] = field(repr=False)
    test_accuracy: float


@dataclass(frozen=True, repr=False)
class CompareResult(Result):
    """The Compared of each strategy, by its name, in the order given."""

    rows: dict[str, Compared]
    figure: Figure = field(repr=False)

    def __getitem__(self, name: str) -> Compared:
        return self.rows[name]

    def __repr__(self) -> str:
        first = next(iter(self.rows.values()))
        lines = [
            (
                row.name,
                amount_text(row.nbytes / len(row.losses)),
                f"{row.nbytes / first.nbytes:.1%}" if first.nbytes else "",
                f"{row.losses[-1]:.3f}",
                f"{row.test_accuracy:.1%}",
            )
            for row in self.rows.values()
        ]
        return "\n".join(text_table(("strategy", "sent per step", "of the first", "last loss", "test accuracy"), lines))


def fewer_bytes(data: Dataset) -> tuple[dict[str, Strategy], Dataset]:
    """Return the strategies of notebook 07 by name, and the data set without what the tournament holds out."""
    held = slice(None, None, HELD_OUT)
    rest = [i for i in range(len(data.train_y)) if i % HELD_OUT]
    strategies: dict[str, Strategy] = {
        "data parallel": DataParallel(),
        "fp16": DataParallelCompressed(Cast("float16")),
        "bf16": DataParallelCompressed(Cast("bfloat16")),
        "top-k, 1%": DataParallelCompressed(TopK(0.01)),
        "PowerSGD, rank 2": DataParallelCompressed(PowerSGD(2)),
        "local SGD, H = 10": LocalSGD(10),
        "DiLoCo, H = 10": DiLoCo(10),
        "gossip, ring": Gossip("ring"),
        "gossip, wheel": Gossip("wheel"),
        "gossip, random": Gossip("random"),
        "gossip, exponential": Gossip(ONE_PEER),
        "tournament, K = 10": Tournament(data.train_x[held], data.train_y[held], 10),
    }
    return strategies, data._replace(train_x=data.train_x[rest], train_y=data.train_y[rest])


def compare(
    strategies: dict[str, Strategy] | None = None,
    *,
    model: str | nn.Module | None = None,
    data: str | Dataset | None = None,
    ranks: int = 8,
    prediction: dict[str, float] | None = None,
    **recipe: Any,
) -> CompareResult:
    """Train with each strategy from the same start on simulated ranks, and draw bytes, steps and accuracy.

        lab.compare()                                                           all strategies of notebook 07
        lab.compare({"all": DataParallel(), "1%": DataParallelCompressed(TopK(0.01))}, steps=100)

    The training is real, with the same batches for all; messages are counted, without the ones that give
    all ranks the same model in the beginning and in the end. Rates are not tuned for each strategy.

    Args:    strategies: {name: parallel.data_parallel.Strategy}; default: see `fewer_bytes`.
             model, data: as in lab.train, by default the mlp of lesson 04 on handwritten digits.
             ranks: 2 to 64; prediction: {name: test accuracy, 0 to 1, that you expect}, drawn as stars.
             recipe: fields of parallel.training.Recipe; default 120 steps of plain SGD with a rate of 0.2.
    Returns: CompareResult.
    Raises:  ValueError, TypeError in one sentence; what a strategy raises.
    """
    require_int("ranks", ranks, 2, 64)
    model, data, what, _ = model_and_data(model, data)
    if strategies is None:
        strategies, data = fewer_bytes(data)
    if not isinstance(strategies, dict) or not strategies:
        raise TypeError(
            f"strategies={strategies!r}: names and strategies are needed, such as {{'mine': DataParallel()}}"
        )
    guesses = prediction or {}
    for name, accuracy in guesses.items():
        if name not in strategies:
            raise ValueError(f"a guess for {name!r}: the strategies are {', '.join(strategies)}")
        require_number(f"the accuracy that you expect of {name}", accuracy, 0, 1)
    options = Recipe(**{**RECIPE, **recipe})
    plot = live.Live(draw, height=4.2, alt="bytes, steps and accuracy")
    rows: dict[str, Compared] = {}

    def state() -> tuple[object, ...]:
        return list(rows.values()), options.steps, f"{what}, {ranks} simulated ranks", guesses

    for name, given in strategies.items():
        strategy = asked_strategy(given, None)
        threads = batch_norm.talks(model) or strategy.talks_in_backward
        work = train_on_rank, model, strategy, data, options
        with one_thread(torch):  # the small tensors of eight ranks that take turns need no more
            run = sim.run(ranks, *work, deadline=SIMULATED_DEADLINE, threads=threads)
        rows[name] = Compared(name, _sent_in_steps(run.events) / ranks, run[0].losses, run[0].test_accuracy)
        plot.update(*state())
    return CompareResult(rows, plot.finish(*state()))


def _sent_in_steps(events: list[Event]) -> int:
    """Count the bytes that all ranks send in spans of TALKS: the latest span that a send begins in counts."""
    total = 0
    within: dict[int, str] = {}
    for e in sorted(events, key=lambda e: (e.rank, e.step)):
        if e.op == "send":
            total += e.nbytes * (within.get(e.rank, "") in TALKS)
        elif e.peer < 0 and e.op != "barrier":
            within[e.rank] = e.op
    return total

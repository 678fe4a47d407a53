"""`lab.serve`: requests arrive at random, faster and faster; throughput against latency, drawn while it goes."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn

from ..comm.base import Row
from ..inference import load as loads
from ..inference import weights
from ..inference.engine import require_decoder
from ..inference.scheduler import schedule
from ..plots import live
from ..plots.serving import draw
from ..plots.style import Figure
from ..trace import number_text, seconds_text
from ..units import require_int, require_number
from .result import Result, text_table
from .world import world_of

Scheduler: TypeAlias = Callable[[Sequence[int], Sequence[int], int, int], list[int]]  # as inference.scheduler.schedule
VIRTUAL = "Simulated ranks: virtual time, in which a step takes what its bytes and FLOPs do on paper."


@dataclass(frozen=True, repr=False)
class ServeResult(Result):
    """Result of `lab.serve`.

    rows: one per rate, of inference.load.serve_rates. model: inference.load.StepModel of rank 0, and line: its
    [(tokens/s, s between two tokens)] for 1, 2, ... `slots` requests that run all the time."""

    where: str
    rows: list[Row]
    model: loads.StepModel
    line: list[tuple[float, float]]
    figure: Figure = field(repr=False)

    @property
    def throughput(self) -> float:
        """The most tokens per s that were generated."""
        return max(row["throughput"] for row in self.rows)

    def __repr__(self) -> str:
        head = ["requests/s", "tokens/s", "first token (95%)", "between two (95%)", "running", "idle slots"]
        cells = [
            [
                f"{r['rate']:g}",
                f"{r['throughput']:,.0f}",
                f"{seconds_text(r['first_s'])} ({seconds_text(r['first_p95_s'])})",
                f"{seconds_text(r['between_s'])} ({seconds_text(r['between_p95_s'])})",
                number_text(r["running"]),
                number_text(r["idle_slots"]),
            ]
            for r in self.rows
        ]
        most, between = self.line[-1]
        model = f"The model says at most {most:,.0f} tokens/s, {seconds_text(between)} between two tokens."
        return "\n".join([f"served on {self.where}", *text_table(head, cells), model])


def serve(
    rates: Sequence[float] | None = None,
    *,
    model: str | nn.Module = "moby_dick",
    slots: int = 8,
    requests: int = 24,
    prompts: tuple[int, int] = (8, 64),
    new: tuple[int, int] = (16, 48),
    ranks: int = 1,
    prediction: float | None = None,
    schedule: Scheduler = schedule,
    seed: int = 0,
    deadline: float = 10.0,
) -> ServeResult:
    """Serve requests that arrive by a Poisson process; throughput against latency is drawn while it goes.

        lab.serve()                              the Moby-Dick GPT on one engine, or on one simulated rank
        lab.serve(ranks=2, prediction=3000)      its heads on two, and the most tokens/s that you expect
        lab.serve(schedule=schedule)             your scheduler of exercise 13.3

    Args:    rates: requests per s on average, one point each; default shares of what the model says is possible.
             model: a name of inference.weights.TRAINED, or a GPT or LLaMA of models/, which each rank has a part of.
             slots: requests that run at once; requests: for each rate; prompts, new: tokens of a prompt, and tokens to
             generate, (least, most). prediction: tokens/s, the most that you expect.
             schedule: f(running, waiting, slots, budget) -> tokens that each reads, as inference.scheduler.schedule.
             deadline: s, the longest that a rank may wait.
    Returns: ServeResult.
    """
    if isinstance(rates, int | float):
        raise TypeError(f"rates={rates!r}: a list of requests per s is needed, such as [{rates!r}]")
    rates = None if rates is None else [*rates]
    for rate in rates or ():
        require_number("a rate, in requests per s,", rate, above=0)
    if not isinstance(model, str):
        require_decoder(model)
    if prediction is not None:
        require_number("prediction, in tokens per s,", prediction, above=0)
    require_int("slots", slots, 1)
    world = world_of(ranks)
    served = weights.load(model) if isinstance(model, str) else copy.deepcopy(model).eval()
    load = loads.Load(loads.corpus_of(served), requests, prompts, new, seed)
    title = f"{model if isinstance(model, str) else type(model).__name__} on {world}, {slots} slots"
    plot = live.Live(draw, alt="throughput against latency")
    rows: list[Row] = []
    line: list[tuple[float, float]] = []

    def state() -> tuple[object, ...]:
        return rows, line, prediction, title, VIRTUAL if world.simulated else ""

    def on_row(row: Row) -> None:
        if "line" in row:
            line[:] = row["line"]
        else:
            rows[:] = [r for r in rows if r["rate"] != row["rate"]] + [row]
        plot.update(*state())

    try:
        found = world.run(loads.serve_rates, served, load, rates, slots, schedule, deadline=deadline, on_row=on_row)
    except BaseException:
        if rows:
            plot.finish(*state())
        raise
    return ServeResult(str(world), rows, found[0], line, plot.finish(*state()))

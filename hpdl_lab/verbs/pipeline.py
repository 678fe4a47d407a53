"""`lab.pipeline`: a schedule carried out, its measured timeline under the planned one while it grows."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral
from statistics import fmean
from typing import NamedTuple, TypeAlias

from torch import nn

from .. import schedules
from ..comm.base import Results, Row
from ..engines.messages import Function
from ..parallel.pipeline.reports import model_step, sleeping_step
from ..parallel.pipeline.run_schedule import timed_actions
from ..parallel.pipeline.split import Partition, partition
from ..plots import live
from ..plots import schedule as drawing
from ..plots.style import Figure
from ..schedules import Action, Evaluation, Pair, Schedule, TimedAction
from ..schedules.schedule import apart
from ..schedules.strings import parse
from ..trace import Event, seconds_text
from ..units import counted, require_int, require_number
from .choice import model_and_data
from .result import Result, text_table
from .world import DEFAULT_RANKS, world_of

MOST_SECONDS = 60.0  # that a planned step may take
EXAMPLES = 4  # of each micro-batch of a real model
SECONDS = {"F": 0.02, "B": 0.04, "I": 0.02, "W": 0.02}  # that the stages of a rank sleep together


Item: TypeAlias = str | Pair | tuple[int, str, int]  # of a row: "2F5", or an Action, as a tuple if you like


class _Outcome(NamedTuple):
    """The times of a schedule in short.

    makespan: s; bubble: share of the ranks' time in which they wait; live: the most that each rank holds at once.

    times: the schedules.Evaluation behind it.
    """

    makespan: float
    bubble: float
    live: list[int]
    times: Evaluation

    @classmethod
    def of(cls, times: Evaluation) -> _Outcome:
        """Return the Outcome of an Evaluation."""
        return cls(float(times.makespan), float(times.bubble), list(times.peak), times)


@dataclass(frozen=True, repr=False)
class PipelineRun(Result):
    """Result of `lab.pipeline`.

    predicted: by arithmetic, measured: from the events; guess: {"makespan": s, "bubble": share, "live": n} or None.

    chunks: stages that a rank holds.
    """

    where: str
    predicted: _Outcome
    measured: _Outcome
    guess: dict[str, float] | None
    chunks: int
    events: list[Event] = field(repr=False)
    figure: Figure = field(repr=False)

    def __repr__(self) -> str:
        mine = self.guess and ("you", self.guess["makespan"], self.guess["bubble"], f"{self.guess.get('live', '')}")
        rows = [mine] if mine else []
        for name, outcome in (("planned", self.predicted), ("measured", self.measured)):
            rows.append((name, outcome.makespan, outcome.bubble, ", ".join(map(str, outcome.live))))
        cells = [(name, seconds_text(seconds), f"{bubble:.1%}", live) for name, seconds, bubble, live in rows]
        lines = text_table((self.where, "makespan", "bubble", "live activations at most"), cells)
        if self.chunks > 1:
            lines.append(f"live: activations of stages 1/{self.chunks} as long as with one stage per rank")
        return "\n".join(lines)


def pipeline(
    schedule: str | Schedule | Function = "1f1b",
    micro_batches: int = 8,
    ranks: int | None = None,
    model: str | nn.Module | None = None,
    prediction: float | dict[str, float] | None = None,
    partition: Partition = partition,
    deadline: float = 10.0,
) -> PipelineRun:
    """Carry out a pipeline schedule, and draw what ranks do under what they should do.

        lab.pipeline("1f1b", micro_batches=8, prediction=0.3)      stages that sleep; you expect a bubble of 30%
        lab.pipeline(my_row)                                       your function f(rank, ranks, micro_batches)
        lab.pipeline("gpipe", model="gpt")                         stages of a real model

    Stages that sleep, 20 ms for a forward and 40 ms for a backward of a rank, take no core, so that four of them behave
    on two cores as they would on four.

    Args:    schedule: a name of schedules.CATALOG, a Schedule, or a function that makes the row of one rank.
             ranks: default all engines, or 4 simulated ranks.
             model: as of lab.train; real stages in place of those, whose plan counts with what they took in the step
             before. partition: f(costs, stages) -> how many of the model's layers each stage gets.
             prediction: the bubble that you expect, 0 to 1; or {"bubble": ..., "live": ...}, with the micro-batches
             whose activations you expect rank 0 to hold at once. deadline: s, the longest that a rank may wait.
    Returns: PipelineRun.
    Raises:  ValueError, one sentence, before anything runs, for a schedule that would deadlock or lose a micro-batch.
    """
    plan = asked_schedule(schedule, ranks or world_of(ranks).ranks or DEFAULT_RANKS, micro_batches)
    world = world_of(plan.ranks)
    sleeps = {kind: [cost / plan.chunks] * plan.stages for kind, cost in SECONDS.items()}
    planned = schedules.Evaluation((), 0.0, 0.0, (), ())
    fn: Function = sleeping_step
    work: tuple[object, ...]
    if model is None:
        planned = schedules.evaluate(plan, sleeps["F"], sleeps["B"], sleeps["I"], sleeps["W"])
        work, what = (plan, sleeps, not world.simulated), "stages that sleep"
    elif world.simulated:
        raise ValueError(f"real stages need engines, whose time is real: lab.start({plan.ranks}) first")
    else:
        fn, (work, what) = model_step, _real_work(plan, model, partition)
    if planned.makespan > MOST_SECONDS:
        raise ValueError(f"this step would take {planned.makespan:,.0f} s: take fewer ranks or micro-batches")
    guess = _expected(prediction, planned)  # raises, before anything runs
    batches = counted(plan.micro_batches, "micro-batch", "micro-batches")
    title = f"{plan.name}, {batches} on {world}: {'virtual time' if world.simulated else what}"
    plot = live.Live(drawing.draw_run, height=drawing.run_height(plan), alt=f"{plan.name}, planned and measured")
    reports: list[Row] = []

    def on_row(row: Row) -> None:
        reports.append(row)
        if planned.rows:
            plot.update(plan, planned, _so_far(reports, plan.ranks), guess, title)

    results = world.run(fn, *work, deadline=deadline, on_row=on_row)
    foot = ""
    if not planned.rows:
        costs = _measured_costs(results, plan)
        planned = schedules.evaluate(plan, costs["F"], costs["B"], costs["I"], costs["W"])
        foot = "Planned with what the stages took in the step before; ranks that share cores hold each other up."
    measured = schedules.summary(timed_actions(results.events, plan.ranks))
    guess = _expected(prediction, planned)
    figure = plot.finish(plan, planned, measured, guess, title, foot)
    outcomes = _Outcome.of(planned), _Outcome.of(measured)
    return PipelineRun(str(world), *outcomes, guess, plan.chunks, results.events, figure)


def _expected(prediction: float | dict[str, float] | None, planned: Evaluation) -> dict[str, float] | None:
    """Return {"makespan": s, "bubble": share, "live": n} as the attendee expects: ranks are busy as long as planned."""
    if prediction is None:
        return None
    guess = prediction if isinstance(prediction, dict) else {"bubble": prediction}
    if set(guess) - {"live"} != {"bubble"}:
        raise ValueError(f'a prediction is a bubble, or {{"bubble": 0.3, "live": 4}}, got {prediction!r}')
    require_number("the live micro-batches that you expect", guess.get("live", 0), 0)
    bubble = guess["bubble"]
    if require_number("the bubble that you expect", bubble, 0, 1) == 1:
        raise ValueError("the bubble that you expect is less than 1: ranks also work")
    busy = float(planned.makespan) * (1 - float(planned.bubble))
    return {"makespan": busy / (1 - bubble)} | guess if planned.rows else None  # there is no plan yet


def _real_work(plan: Schedule, model: str | nn.Module, partition: Partition) -> tuple[tuple[object, ...], str]:
    """Return (arguments of model_step, the model in words) for a step of a real model."""
    choice = model_and_data(model)
    n = EXAMPLES * plan.micro_batches
    x, y = choice.data.train_x[:n], choice.data.train_y[:n]
    if len(x) < n:
        raise ValueError(f"{plan.micro_batches} micro-batches of {EXAMPLES} need {n} examples, the data has {len(x)}")
    return (choice.model, plan, x.clone(), y.clone(), False, partition), choice.words


def _measured_costs(results: Results, plan: Schedule) -> dict[str, list[float]]:
    """Return {kind: [s of every stage of the model]} of F, B, I and W, as ranks have measured them."""
    found: dict[tuple[str, int], list[float]] = {}
    for rank in results:
        for (stage, kind), seconds in rank.items():
            found.setdefault((kind, stage % plan.stages), []).append(seconds)
    return {kind: [fmean(found.get((kind, stage), [0.0])) for stage in range(plan.stages)] for kind in SECONDS}


def _so_far(reports: list[Row], ranks: int) -> Evaluation:
    """Return the Evaluation of the actions that have been reported."""
    origin = min(row["t0_ns"] for row in reports)
    rows: list[list[TimedAction]] = [[] for _ in range(ranks)]
    for row in sorted(reports, key=lambda row: row["t0_ns"]):
        action = Action(row["stage"], row["kind"], row["micro_batch"])
        rows[row["rank"]].append(TimedAction(action, (row["t0_ns"] - origin) / 1e9, (row["t1_ns"] - origin) / 1e9))
    return schedules.summary(rows)


# -- which schedule is meant ------------------------------------------------------------------------------------------


def asked_schedule(
    schedule: str | Schedule | Function, ranks: int, micro_batches: int, chunks: int | None = None
) -> Schedule:
    """Return the Schedule that is meant, which is valid. Raises ValueError, TypeError in one sentence."""
    if isinstance(schedule, str):
        schedule = schedules.build(schedule, ranks, micro_batches, chunks)
    elif callable(schedule):
        schedule = _schedule_of(schedule, ranks, micro_batches, chunks)
    if not isinstance(schedule, Schedule):
        known = ", ".join(schedules.CATALOG)
        raise TypeError(f"{schedule!r} is no schedule: a name ({known}), a Schedule or a function of a row is needed")
    return schedules.validate(schedule)


def _schedule_of(row: Function, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """Return the Schedule of a function f(rank, ranks, micro_batches), or f(..., chunks): one row for each rank."""
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks or 1)):
        require_int(f"{what} of a schedule", number, 1)
    name = getattr(row, "__name__", "your schedule")
    try:
        takes = inspect.signature(row).parameters
    except ValueError:  # of some functions that are written in C
        raise TypeError(f"{name} is no function of a row: f(rank, ranks, micro_batches) is needed") from None
    chunks = chunks or (2 if "chunks" in takes else 1)
    more = (chunks,) if "chunks" in takes else ()
    rows = [_actions_of(row(rank, ranks, micro_batches, *more), name, rank) for rank in range(ranks)]
    return Schedule.of(name, ranks * chunks, micro_batches, 1, rows)


def _actions_of(row: Iterable[Item], name: str, rank: int) -> list[Action | Pair]:
    """Return the row that the function has made for one rank: of Actions and Pairs, or texts as torch writes them."""
    actions: list[Action | Pair] = []
    try:
        for place, item in enumerate(row):
            if isinstance(item, str):
                actions += parse(item, rank, place)
            else:
                actions.append(item if isinstance(item, Pair) else Action(*item))
        good = all(isinstance(n, Integral) for a in apart(actions)[0] for n in (a.stage, a.micro_batch))
    except TypeError:
        good = False
    if not good:
        wanted = "a list of Action(stage, kind, micro_batch) is needed"
        raise TypeError(f"{name}({rank}, ...) returned {row!r:.80}: {wanted}")
    return actions

"""`lab.pipeline`: a schedule carried out, its measured timeline under the planned one while it grows."""

from dataclasses import dataclass, field
from numbers import Real
from statistics import fmean
from typing import NamedTuple

from .. import schedules
from ..parallel.pipeline.reports import model_step, sleeping_step
from ..parallel.pipeline.run_schedule import timed_actions
from ..parallel.pipeline.split import partition
from ..plots import live
from ..plots import pipeline as drawing
from ..plots.style import counted
from ..schedules import Action, Evaluation, Timed
from ..trace import seconds_text
from .choice import model_and_data
from .picture import WithFigure
from .ranks import DEFAULT_RANKS, place
from .schedule import asked_schedule

MOST_SECONDS = 60.0  # that a planned step may take
EXAMPLES = 4  # of each micro-batch of a real model


class Outcome(NamedTuple):
    """makespan: s; bubble: share of the ranks' time in which they wait; live: the most that each rank holds at once.

    times: the schedules.Evaluation behind it.
    """

    makespan: float
    bubble: float
    live: list
    times: Evaluation

    @classmethod
    def of(cls, times):
        return cls(float(times.makespan), float(times.bubble), list(times.peak), times)

    def __str__(self):
        live = ", ".join(map(str, self.live))
        return f"{seconds_text(self.makespan):>10}  {self.bubble:>7.1%}  {live}"


@dataclass(frozen=True)
class PipelineRun(WithFigure):
    """predicted: by arithmetic, measured: from the events; guess: {"makespan": s, "bubble": share} or None.

    chunks: stages that a rank holds.
    """

    where: str
    predicted: Outcome
    measured: Outcome
    guess: dict | None
    chunks: int
    events: list = field(repr=False)
    figure: object = field(repr=False)

    def __repr__(self):
        lines = [f"{self.where:<30}{'makespan':>10}  {'bubble':>7}  live activations at most"]
        if self.guess:
            lines.append(f"{'you':<30}{seconds_text(self.guess['makespan']):>10}  {self.guess['bubble']:>7.1%}")
        lines += [f"{'planned':<30}{self.predicted}", f"{'measured':<30}{self.measured}"]
        if (chunks := self.chunks) > 1:
            lines.append(f"live: activations of stages 1/{chunks} as long as those of a schedule with one per rank")
        return "\n".join(lines)


def pipeline(
    schedule="1f1b",
    micro_batches=8,
    ranks=None,
    seconds=(0.02, 0.04),
    model=None,
    data=None,
    size="tiny",
    prediction=None,
    chunks=None,
    recompute=False,
    partition=partition,
    deadline=10.0,
):
    """Carry out a pipeline schedule, and draw what ranks do under what they should do.

        lab.pipeline("1f1b", micro_batches=8, prediction=0.3)      stages that sleep; you expect a bubble of 30%
        lab.pipeline(my_row, seconds=(0.01, 0.02))                 your function f(rank, ranks, micro_batches)
        lab.pipeline("gpipe", model="gpt")                         stages of a real model

    Stages that sleep take no core, so that four of them behave on two cores as they would on four.

    Args:    schedule, chunks: as of lab.schedule; ranks: default all engines, or 4 simulated ranks.
             seconds: of forward and backward of a micro-batch on a rank, which the stages sleep; each a number, or one
             for every stage; (tf, tb, ti, tw) says what the halves of backward take, too.
             model, data, size: as of lab.train; real stages in place of those.
             The plan of a real model counts with what its stages took in the step before.
             prediction: the bubble that you expect, 0 to 1, or {"bubble": share}, or {"makespan": s}.
             recompute: activation checkpointing of a real model; partition: f(costs, stages) -> how many of its layers
             each stage gets, such as parallel.partition.partition. deadline: s, the longest that a rank may wait.
    Returns: PipelineRun.
    Raises:  ValueError, one sentence, before anything runs, for a schedule that would deadlock or lose a micro-batch.
    """
    where = place(ranks)
    plan = asked_schedule(schedule, ranks or where.ranks or DEFAULT_RANKS, micro_batches, chunks)
    where = place(plan.ranks)
    costs = asked_seconds(seconds, plan)
    if model is None and data is None:
        planned = schedules.evaluate(plan, **by_name(costs))
        work = (sleeping_step, plan, costs, not where.simulated)
        what = "stages that sleep" if not where.simulated else "virtual time"
    else:
        if where.simulated:
            raise ValueError(f"real stages need engines, whose time is real: lab.start({plan.ranks}) first")
        work, what = real_work(plan, model, data, size, recompute, partition)
        planned = schedules.Evaluation((), 0.0, 0.0, (), ())
    if planned.makespan > MOST_SECONDS:
        raise ValueError(f"this step would take {planned.makespan:,.0f} s: make seconds={seconds} smaller")
    guess = asked_prediction(prediction, planned)  # raises, before anything runs
    batches = counted(plan.micro_batches, "micro-batch", "micro-batches")
    title = f"{plan.name}, {batches} on {where}: {what}"
    plot = live.Live(drawing.draw, height=drawing.height(plan), alt=f"{plan.name}, planned and measured")
    reports = []

    def on_row(row):
        reports.append(row)
        if planned.rows:
            plot.update(plan, planned, so_far(reports, plan.ranks), guess and guess["makespan"], title)

    results = where.run(*work, deadline=deadline, on_row=on_row)
    foot = ""
    if not planned.rows:
        planned = schedules.evaluate(plan, **by_name(measured_costs(results, plan)))
        foot = "Planned with what the stages took in the step before; ranks that share cores hold each other up."
    measured = schedules.summary(timed_actions(results.events, plan.ranks))
    guess = asked_prediction(prediction, planned)
    figure = plot.finish(plan, planned, measured, guess and guess["makespan"], title, foot)
    return PipelineRun(
        str(where), Outcome.of(planned), Outcome.of(measured), guess, plan.chunks, results.events, figure
    )


def asked_seconds(seconds, plan):
    """{kind: [s of every stage of the model]} of F, B, I and W. Raises ValueError."""
    if not isinstance(seconds, tuple | list) or len(seconds) not in (2, 4):
        raise ValueError(f"seconds are those of forward and backward, such as (0.02, 0.04), got {seconds!r}")
    costs = {}
    for kind, cost in zip("FBIW", (*seconds, *seconds[1:], *seconds[1:]), strict=False):
        each = [cost / plan.chunks] * plan.stages if isinstance(cost, Real) else cost
        listed = isinstance(each, tuple | list) and len(each) == plan.stages
        if not listed or not all(isinstance(s, Real) and 0 < s < MOST_SECONDS for s in each):
            raise ValueError(
                f"seconds={seconds!r}: a number above 0, or one for each of {plan.stages} stages, is needed"
            )
        costs[kind] = [s / 2 for s in each] if kind in "IW" and len(seconds) == 2 else list(each)
    return costs


def asked_prediction(prediction, planned):
    """{"makespan": s, "bubble": share} that the attendee expects, the one following from the other. Raises ValueError.

    Ranks are busy as long as they are planned to be; so a bubble says when the step ends, and the other way round.
    """
    if prediction is None:
        return None
    told = prediction if isinstance(prediction, dict) else {"bubble": prediction}
    kinds = [name for name in ("bubble", "makespan") if isinstance(told.get(name), Real)]
    if not kinds or set(told) - {"bubble", "makespan"} or not 0 <= told.get("bubble", 0) < 1:
        raise ValueError(f'a prediction is a bubble from 0 to 1, or {{"makespan": s}}, got {prediction!r}')
    if not 0 < told.get("makespan", 1) < float("inf"):
        raise ValueError(f"a step takes more than 0 s, got makespan={told['makespan']!r}")
    if not planned.rows:
        return None  # there is no plan yet
    busy = float(planned.makespan) * (1 - float(planned.bubble))
    makespan = told.get("makespan", busy / (1 - told.get("bubble", 0)))
    return {"makespan": makespan, "bubble": told.get("bubble", max(0.0, 1 - busy / makespan))}


def real_work(plan, model, data, size, recompute, partition):
    """(function for every rank with its arguments, what it is in words) of a step of a real model."""
    choice = model_and_data(model, data, size)
    n = EXAMPLES * plan.micro_batches
    x, y = choice.data.train_x[:n], choice.data.train_y[:n]
    if len(x) < n:
        raise ValueError(f"{plan.micro_batches} micro-batches of {EXAMPLES} need {n} examples, the data has {len(x)}")
    return (model_step, choice.model, plan, x.clone(), y.clone(), recompute, partition), choice.words


def by_name(costs):
    """The arguments of schedules.evaluate for {kind: [s of every stage]}."""
    return {name: costs[kind] for name, kind in zip(("forward", "backward", "input", "weight"), "FBIW", strict=True)}


def measured_costs(results, plan):
    """{kind: [s of every stage of the model]}, as ranks have measured them."""
    found = {}
    for table in results:
        for (stage, kind), seconds in table.items():
            found.setdefault((kind, stage % plan.stages), []).append(seconds)
    return {kind: [fmean(found.get((kind, stage), [0.0])) for stage in range(plan.stages)] for kind in "FBIW"}


def so_far(reports, ranks):
    """The Evaluation of the actions that have been reported."""
    origin = min(row["t0_ns"] for row in reports)
    rows = [[] for _ in range(ranks)]
    for row in sorted(reports, key=lambda row: row["t0_ns"]):
        action = Action(row["stage"], row["kind"], row["micro_batch"])
        rows[row["rank"]].append(Timed(action, (row["t0_ns"] - origin) / 1e9, (row["t1_ns"] - origin) / 1e9))
    return schedules.summary(rows)

"""`lab.race`: a plan of a training and the time that it will take, against the time that it takes."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median

from ..comm.base import Row
from ..engines.errors import RunFailed
from ..engines.messages import Function
from ..parallel.grid.machine import grid_of
from ..parallel.grid.model import Prediction
from ..parallel.hybrid.model import train_on_mesh
from ..parallel.training import train as train_on_rank
from ..plots import grid as grid_drawing
from ..plots import live
from ..plots.race import draw_here, draw_simulated
from ..plots.style import Figure
from ..race import here, simulated
from ..race.here import HerePlan
from ..race.plan import Disqualified, Entry, plan_of, read_plan, require_memory, score
from ..race.simulated import REFERENCE, SimulatedPlan
from ..trace import duration_text, seconds_text
from ..units import require_int
from .cluster import running
from .progress import progress
from .result import Result, draw_picture, text_table
from .world import world_of

LEAGUES = {"simulated": SimulatedPlan, "here": HerePlan}
DIVERGED = "it diverges: a loss or a gradient is no number"
PASS = 1.5  # times the score of the reference


@dataclass(frozen=True, repr=False)
class RaceResult(Result):
    """An attempt. valid: it counts; why: if not, the reason.

    plan: its entries; seconds: taken, in virtual time or the median of the rounds; 0 if it did not run.
    expected_s: what the plan says; score: time x (1 + prediction error), in s; reference_s: the reference's score.
    loss: on hidden text, the median of the rounds; parts: {what: s} of the simulated league.
    """

    league: str
    seed: int
    plan: dict[str, Entry]
    valid: bool
    why: str
    expected_s: float
    seconds: float
    score: float
    reference_s: float
    loss: float
    parts: dict[str, float]
    figure: Figure = field(repr=False)

    @property
    def passed(self) -> bool:
        """True if the score is at most 1.5 times the reference's."""
        return self.valid and self.score <= PASS * self.reference_s

    def __repr__(self) -> str:
        head, took = f"{self.league} league, seed {self.seed}", duration_text(self.seconds)
        if not self.valid:
            ran = f" It took {took}." if self.seconds else ""
            return f"{head}: disqualified. {self.why[:1].upper()}{self.why[1:]}.{ran}"
        off = abs(self.expected_s - self.seconds) / self.seconds
        rows = [[part, duration_text(seconds), f"{seconds / self.seconds:.1%}"] for part, seconds in self.parts.items()]
        mark, outcome = PASS * self.reference_s, "passed" if self.passed else "not passed"
        loss = f", loss {self.loss:.3f} on hidden text" if self.league == "here" else ""
        lines = [
            f"{head}: {took}{loss}; you expected {duration_text(self.expected_s)}, {off:.1%} off",
            f"score {duration_text(self.score)}; the reference has {duration_text(self.reference_s)}, the pass mark is "
            f"{duration_text(mark)}: {outcome}",
        ]
        return "\n".join([*lines, *(text_table(("part", "time", "share"), rows) if rows else [])])


def race(
    plan: str | Path | Mapping[str, Entry],
    league: str = "simulated",
    *,
    seed: int | None = None,
    rounds: int = 3,
    deadline: float = 30.0,
) -> RaceResult:
    """Race with a plan: score = time x (1 + prediction error), and least wins.

        lab.race("plan.toml")                     64 simulated ranks, from the table [simulated]
        lab.race("plan.toml", "here", seed=7)     the engines of this machine, from the table [here]

    Args:    plan: a TOML file with a table for the league, or its entries; see race.simulated.SimulatedPlan and
             race.here.HerePlan. A plan that cannot be, that does not fit into memory, or that misses the loss, is
             disqualified, with the reason.
             league: "simulated" or "here"; seed: of the random choices: the moment of the failure; the hidden
             text and the order of the examples. Default: drawn now.
             rounds: trainings of the league here; the median counts. deadline: s, the longest that a rank may wait.
    Returns: RaceResult, which is kept with your progress.
    Raises:  ValueError for an unknown league, a file that cannot be read, or too few engines.
    """
    if league not in LEAGUES:
        raise ValueError(f"no league is called {league!r}: {', '.join(LEAGUES)}")
    require_int("rounds", rounds, 1)
    entries = dict(plan) if isinstance(plan, Mapping) else _table_of(plan, league)
    drawn_seed = secrets.randbelow(1_000_000) if seed is None else require_int("seed", seed, 0)
    if league == "simulated":
        found = _race_simulated(entries, drawn_seed)
    else:
        found = _race_here(entries, drawn_seed, rounds, deadline)
    row = {name: getattr(found, name) for name in KEPT}
    progress().add("race", **row)
    return found


KEPT = ("league", "seed", "plan", "valid", "why", "expected_s", "seconds", "score", "reference_s", "loss")


def _table_of(path: str | Path, league: str) -> dict[str, Entry]:
    """Return the entries of a league in a file. Raises ValueError if it has none."""
    tables = read_plan(path)
    if league not in tables:
        raise ValueError(f"{path} has no table [{league}]: it has {', '.join(tables)}")
    return tables[league]


def _disqualified(
    league: str, seed: int, entries: dict[str, Entry], error: Disqualified, priced: Prediction | None = None
) -> RaceResult:
    """Return the result of a plan that cannot race, with its ledger if that was made."""
    title = f"The {league} league: disqualified"
    figure = draw_picture(
        grid_drawing.draw, priced, None, str(error), title, text=title, height=grid_drawing.HEIGHT
    ).figure
    live.show_figure(figure, alt=title)
    expected = entries.get("expected_s")
    expected_s = float(expected) if isinstance(expected, int | float) and 0 < expected < 1e12 else 0.0
    kept: dict[str, Entry] = {}  # as JSON can have it
    for name, value in entries.items():
        plain = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
        kept[name] = value if plain else str(value)
    return RaceResult(league, seed, kept, False, str(error), expected_s, 0.0, 0.0, 0.0, 0.0, {}, figure)


def _race_simulated(entries: dict[str, Entry], seed: int) -> RaceResult:
    """Race in virtual time."""
    priced: Prediction | None = None
    try:
        plan = plan_of(SimulatedPlan, entries)
        priced = simulated.ledger(plan)
        lap, reference = simulated.drive(plan, seed), simulated.drive(REFERENCE, seed)
    except Disqualified as error:
        return _disqualified("simulated", seed, entries, error, priced)
    laps = {"your plan": lap.parts, "reference": reference.parts}
    expected = {"your plan": plan.expected_s, "reference": REFERENCE.expected_s}
    title = (
        f"The simulated league: {duration_text(lap.seconds)} for {lap.steps:,.0f} steps of {seconds_text(lap.step_s)}"
    )
    foot = f"Stars: expected. Seed {seed}. Virtual time; nothing is measured."
    plot = live.Live(draw_simulated, alt="where the hours of a plan go")
    figure = plot.finish(laps, expected, title, foot)
    own, best = score(lap.seconds, plan.expected_s), score(reference.seconds, REFERENCE.expected_s)
    args = True, "", plan.expected_s, lap.seconds, own, best, simulated.TARGET, dict(lap.parts), figure
    return RaceResult("simulated", seed, asdict(plan), *args)


def _race_here(entries: dict[str, Entry], seed: int, rounds: int, deadline: float) -> RaceResult:
    """Race on the engines: the reference once, then the plan as often as there are rounds."""
    data, priced = here.hidden(seed), None
    try:
        plan = plan_of(HerePlan, entries)
        priced = here.ledger(plan, data)
        require_memory(priced)
    except Disqualified as error:
        return _disqualified("here", seed, entries, error, priced)
    engines = running()
    if engines is None or engines.n < plan.ranks:
        there = "none run" if engines is None else f"{engines.n} run"
        raise ValueError(f"this plan needs {plan.ranks} engines and {there}: lab.start({plan.ranks})")
    reference = here.reference(plan.ranks)
    curves: list[tuple[str, list[float], list[float]]] = []
    plot = live.Live(draw_here, alt="loss against seconds in the race")
    took: list[float] = []
    losses: list[float] = []
    title = f"The league of this machine: loss {here.TARGET} on {plan.ranks} engines"
    foot = f"Seed {seed}. The hidden text counts, not the loss of a batch."

    def on_row(row: Row) -> None:
        curves[-1][1].append(step_s(row, curves[-1][0]))
        curves[-1][2].append(row["loss"])
        plot.update(*state())

    def step_s(row: Row, name: str) -> float:
        batch = reference.batch if name == "reference" else plan.batch
        return batch / row["samples_per_s"] if row["samples_per_s"] else 0.0

    def state() -> tuple[object, ...]:
        drawn_curves = [(name, list(accumulate(seconds)), values) for name, seconds, values in curves]
        return drawn_curves, here.TARGET, plan.expected_s, title, foot

    for i, (name, of) in enumerate([("reference", reference), *[("your plan", plan)] * rounds]):
        curves.append((name, [], []))
        model = here.model_for(data, seed + i)
        recipe = of.recipe(seed + i)
        train: Function = train_on_rank
        work: tuple[object, ...] = (model, of.strategy, data, recipe)
        if of.on_mesh:
            train, work = train_on_mesh, (model, grid_of(of.dp, of.pp, of.tp), data, recipe, of.schedule, False)
        try:
            trained = world_of(of.ranks).run(train, *work, deadline=deadline, on_row=on_row)[0]
        except RunFailed as error:
            if "FloatingPointError" not in str(error):  # of a gradient that is no number
                raise
            return _disqualified("here", seed, entries, Disqualified(DIVERGED), priced)
        took.append(trained.seconds)
        losses.append(trained.test_loss)
    figure = plot.finish(*state())
    seconds, loss = median(took[1:]), median(losses[1:])
    if not all(map(math.isfinite, losses)):
        losses, loss = [], 0.0
        why = DIVERGED
    else:
        why = f"the loss on hidden text is {loss:.3f} after {plan.steps:,} steps, and {here.TARGET} is the target"
    if not losses or loss > here.TARGET:
        args = False, why, plan.expected_s, seconds, 0.0, took[0], loss, {}, figure
        return RaceResult("here", seed, asdict(plan), *args)
    own = score(seconds, plan.expected_s)
    args = True, "", plan.expected_s, seconds, own, took[0], loss, {}, figure
    return RaceResult("here", seed, asdict(plan), *args)

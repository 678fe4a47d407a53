"""Hybrid grids: their subject, one setting of it, and `lab.search`, which prices all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypedDict, cast

from torch import Tensor, nn

from ..comm import sim
from ..comm.network import Switch
from ..mesh import Grid
from ..parallel.grid import search as grid_search
from ..parallel.grid.machine import MACHINES, Machine, grid_of
from ..parallel.grid.measure import measured, spec_of
from ..parallel.grid.model import Prediction, predict_step
from ..parallel.grid.search import every_grid, grids
from ..parallel.grid.spec import SPECS, Spec
from ..plots import grid as drawing
from ..plots.style import Figure
from ..schedules import CATALOG
from ..trace import seconds_text
from ..units import amount_text, parse_bytes, require_int, require_number
from .choice import model_and_data
from .cluster import run, running
from .result import Result, picture, text_table
from .world import DEFAULT_RANKS

AXES = ("dp", "pp", "tp")
ALL_AXES = (*AXES, "cp", "ep")  # the last two are 1 unless they are asked for
FEW = 8  # examples with which the machine is measured
BATCHES = {  # sequences: from the sources that SPECS names
    "gpt3": 1536, "llama3_70b": 2048, "llama3_405b": 2048, "llama3_405b_long": 128, "deepseek_v3": 15360,
}  # fmt: skip
PUBLISHED_RANKS, PUBLISHED_MACHINE = 1024, "dgx_a100"
MOST_RANKS = 2**20  # whose grids are listed in a tenth of a second
PER_RANK = 8  # examples of a batch, if nothing is said
MICRO_BATCHES = (4, 2, 1)  # of a replica, the first number that its share of the batch allows
NODE = 8  # GPUs that share fast links
SHOWN = 8  # rows of the printed table


# -- what a grid is picked for ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """A model, and the ranks and the machine that a grid is picked for.

    spec: of the model; limit: bytes per rank; model, x, y: what really runs, None if there is only a spec.
    """

    spec: Spec
    ranks: int
    batch: int
    limit: int
    machine: Machine
    model: nn.Module | None = field(default=None, repr=False, compare=False)
    x: Tensor | None = field(default=None, repr=False, compare=False)
    y: Tensor | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.spec.name}, {self.ranks:,} ranks, batch of {self.batch:,}"

    def predict(self, setting: Setting) -> Prediction:
        """Predict what a step of this setting costs. Raises ValueError if the grid cannot be."""
        how = setting.options
        return predict_step(self.spec, setting.grid, **how, machine=self.machine, batch=self.batch, limit=self.limit)


def subject_of(
    model: str | nn.Module | Spec = "gpt",
    ranks: int | None = None,
    batch: int | None = None,
    limit: int | str | None = None,
    machine: str | Machine | None = None,
) -> Subject:
    """Return the Subject that is meant.

    Args:    model: a name of grid.spec.SPECS, a Spec; or a name of models.MODELS, or an nn.Module, which can run.
             machine: a name of MACHINES, a Machine; by default this machine, measured, or DGX nodes for a mere spec.
    Raises:  ValueError, TypeError, LookupError in one sentence.
    """
    if ranks is not None:
        require_int("ranks", ranks, 1, MOST_RANKS)
    if batch is not None:
        require_int("batch", batch, 1)
    nbytes = None if limit is None else parse_bytes(limit, "limit")
    if isinstance(machine, str) and machine not in MACHINES:
        raise ValueError(f"no machine is called {machine!r}: {', '.join(MACHINES)}")
    if machine is not None and not isinstance(machine, str | Machine):
        raise TypeError(f"machine={machine!r}: a name ({', '.join(MACHINES)}) or a Machine is needed")
    machine = MACHINES[machine] if isinstance(machine, str) else machine
    meant = SPECS.get(model, model) if isinstance(model, str) else model
    if isinstance(meant, Spec):
        machine = machine or MACHINES[PUBLISHED_MACHINE]
        ranks = ranks or PUBLISHED_RANKS
        batch = batch or BATCHES.get(model if isinstance(model, str) else "", PER_RANK * ranks)
        return Subject(meant, ranks, batch, nbytes or machine.memory, machine)
    choice = model_and_data(meant)
    engines = running()
    ranks = ranks or (engines.n if engines is not None else DEFAULT_RANKS)
    batch = batch or PER_RANK * ranks
    x, y = (t[:batch].clone() for t in (choice.data.train_x, choice.data.train_y))
    if len(x) < batch:
        raise ValueError(f"a batch of {batch:,} is more than the {len(x):,} examples that there are")
    spec = spec_of(choice.model, x[:2], name=choice.words)
    machine = machine or _this_machine(choice.model, x[:FEW], y[:FEW], spec.flops)
    return Subject(spec, ranks, batch, nbytes or machine.memory, machine, choice.model, x, y)


def _this_machine(model: nn.Module, x: Tensor, y: Tensor, flops: float) -> Machine:
    """Return the Machine under the engines, or under this process with the laptop's network if none run."""
    if running() is not None:
        return run(measured, model, x.clone(), y.clone(), None, flops)[0]
    here, laptop = sim.run(1, measured, model, x, y, None, flops)[0], MACHINES["laptop"]
    network = replace(cast(Switch, laptop.network), flops_per_s=here.network.flops_per_s)
    return replace(here, network=network, at_once=laptop.at_once)


# -- one setting ------------------------------------------------------------------------------------------------------


class Options(TypedDict):
    """The options of grid.model.predict_step and of HybridParallel."""

    schedule: str
    micro_batches: int
    recompute: bool
    zero: int


class Setting(NamedTuple):
    """Sizes of axes, whose product is the number of ranks; micro_batches of each replica; zero: stage of ZeRO."""

    dp: int
    pp: int
    tp: int
    micro_batches: int
    recompute: bool = False
    schedule: str = "1f1b"
    cp: int = 1
    ep: int = 1
    zero: int = 0

    @property
    def grid(self) -> Grid:
        return grid_of(self.dp, self.pp, self.tp, self.cp, self.ep)

    @property
    def options(self) -> Options:
        """The fields that are no axes."""
        return {
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "recompute": self.recompute,
            "zero": self.zero,
        }

    def __str__(self) -> str:
        more = "".join(f", {axis}={self.grid[axis]}" for axis in ("cp", "ep") if self.grid[axis] > 1)
        return f"dp={self.dp}, pp={self.pp}, tp={self.tp}{more}{f', ZeRO-{self.zero}' if self.zero else ''}"


def nearest_setting(setting: Setting, ranks: int, **wanted: Any) -> Setting:
    """Return the setting nearest to `setting` that has what is wanted (any of its fields), on `ranks` ranks.

    dp, pp and tp, if not said, follow what is, so that the product stays right: as little as can be, in factors.
    Raises:  ValueError with the numbers if no grid of so many ranks has these axes.
    """
    if unknown := set(wanted) - set(Setting._fields):
        raise ValueError(f"a grid has no {', '.join(sorted(unknown))}: {', '.join(Setting._fields)} can be set")
    for name in (*ALL_AXES, "micro_batches"):
        require_int(name, wanted.get(name, 1), 1)
    require_int("zero", wanted.get("zero", 0), 0, 3)
    if (name := wanted.get("schedule", "1f1b")) not in CATALOG:
        raise ValueError(f"no schedule is called {name!r}: {', '.join(CATALOG)}")
    if not isinstance(wanted.get("recompute", False), bool):
        raise ValueError(f"recompute must be True or False, got {wanted['recompute']!r}")
    axes = {axis: wanted[axis] for axis in ALL_AXES if axis in wanted}
    cp, ep = (axes.get(axis) or getattr(setting, axis) for axis in ("cp", "ep"))
    fitting = [g for g in every_grid(ranks, (cp,), (ep,)) if all(g[axis] == size for axis, size in axes.items())]
    if not fitting:
        product = " x ".join(f"{axis}={size}" for axis, size in (axes | _others_of(cp, ep)).items())
        raise ValueError(f"{product} does not fit {ranks:,} ranks: the product of all axes must be {ranks:,}")
    nearest = min(fitting, key=lambda g: sum(abs(math.log2(g[axis] / getattr(setting, axis))) for axis in AXES))
    sizes: dict[str, Any] = {axis: nearest[axis] for axis in ALL_AXES}
    return setting._replace(**wanted | sizes)


def _others_of(cp: int, ep: int) -> dict[str, int]:
    """Return {axis: size} of the axes that are longer than 1."""
    return {axis: size for axis, size in (("cp", cp), ("ep", ep)) if size > 1}


def followed(before: Setting, after: Setting, moved: Iterable[str]) -> str:
    """Return the sentence about axes that changed because another one was moved; "" if none did."""
    others = [axis for axis in AXES if axis not in moved and getattr(before, axis) != getattr(after, axis)]
    if not others:
        return ""
    text = " and ".join(f"{axis} {getattr(before, axis)} -> {getattr(after, axis)}" for axis in others)
    sizes = (after.dp, after.pp, after.tp, *_others_of(after.cp, after.ep).values())
    return f"{text}, so that {' x '.join(map(str, sizes))} = {after.grid.size:,} ranks"


def first(subject: Subject) -> Setting:
    """Return the first setting of a picker, a grid that can be: only replicas of a model that runs here; of a mere spec
    tp inside a node, and as few stages as memory allows."""
    every, runs, possible = grids(subject.ranks), subject.model is not None, None
    for dp, pp, tp in every if runs else sorted(every, key=lambda grid: (grid[2] != NODE, grid[1])):
        share = subject.batch // dp
        few = MICRO_BATCHES if runs else (share,)
        setting = Setting(dp, pp, tp, next((m for m in few if share and share % m == 0), 1))
        try:
            fits = subject.predict(setting).fits
        except ValueError:
            continue
        if fits or runs:
            return setting
        possible = possible or setting
    return possible or Setting(subject.ranks, 1, 1, 1)


# -- all of them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Searched(Result):
    """Result of `lab.search`.

    rows: grid.model.Predictions, fastest first; best: the fastest that fits, None if none does.

    guess: the row of the grid that the attendee expected, or None.
    """

    rows: list[Prediction] = field(repr=False)
    best: Prediction | None
    guess: Prediction | None
    figure: Figure = field(repr=False)

    def __repr__(self) -> str:
        fitting = [row for row in self.rows if row.fits]
        ways = (
            f"{len(self.rows)} ways to share out the ranks, with and without recomputation: {len(fitting)} of them fit"
        )
        shown = fitting[:SHOWN] + ([self.guess] if self.guess and self.guess not in fitting[:SHOWN] else [])
        cells = []
        for row in shown:
            mark = "best" if row is self.best else "yours" if row is self.guess else ""
            how = f"{row.schedule}{', recomputed' if row.recompute else ''}, micro-batches of {row.micro_batch}"
            how += f", ZeRO-{row.zero}" if row.zero else ""
            held = amount_text(row.memory.total) + ("" if row.fits else " (too much)")
            name = drawing.grid_name(row)
            cells.append((name, seconds_text(row.seconds), held, f"{abs(row.bubble):.1%}", how, mark))
        lines = [ways, *text_table(("grid", "a step", "memory", "bubble", "", ""), cells)]
        if not fitting:
            least = amount_text(min(row.memory.total for row in self.rows))
            lines.append(f"none fits into {amount_text(self.rows[0].limit)} per rank: the least is {least}")
        return "\n".join(lines)


def search(
    model: str | nn.Module | Spec = "gpt",
    *,
    ranks: int | None = None,
    batch: int | None = None,
    limit: int | str | None = None,
    machine: str | Machine | None = None,
    prediction: dict[str, float] | None = None,
    cp: Sequence[int] = (1,),
    ep: Sequence[int] = (1,),
    zero: Sequence[int] = (0,),
) -> Searched:
    """Price every dp x pp x tp of so many ranks, with and without recomputation, and draw step time against memory.

        lab.search("gpt", ranks=8, limit="2 MB")
        lab.search("gpt3", prediction={"dp": 8, "pp": 16, "tp": 8})       1,024 GPUs
        lab.search("deepseek_v3", ranks=2048, ep=(8, 16, 32, 64), zero=(0, 1))

    Args:    model, ranks, batch, limit, machine: as of lab.grid.
             prediction: {"dp":, "pp":, "tp":} of the grid that you expect to be the best; what is not said is 1. And
             "seconds" of its step, if you like.
             cp, ep: sizes of these axes to try; zero: stages of ZeRO to try.
    Returns: Searched.
    Raises:  ValueError in one sentence, also if no grid can be at all.
    """
    subject = subject_of(model, ranks, batch, limit, machine)
    if machine is None and subject.model is not None:  # it is measured on cores that ranks share
        here = replace(subject.machine, at_once=0, name=f"{subject.machine.name}, with a core for each rank")
        subject = replace(subject, machine=here)
    for name, sizes in (("cp", cp), ("ep", ep), ("zero", zero)):
        for size in sizes if isinstance(sizes, Sequence) else [sizes]:
            require_int(name, size, int(name != "zero"), 3 if name == "zero" else MOST_RANKS)
        if not isinstance(sizes, Sequence):
            raise ValueError(f"{name}={sizes!r}: what to try is a sequence, such as ({sizes},)")
    expected = _asked_guess(prediction, subject.ranks)
    rows = grid_search.search_grids(
        subject.spec,
        subject.ranks,
        limit=subject.limit,
        machine=subject.machine,
        batch=subject.batch,
        recompute=(False, True),
        cp=cp,
        ep=ep,
        zero=zero,
    )
    best = grid_search.best(rows) if any(row.fits for row in rows) else None
    mine = [row for row in rows if expected == tuple(row.grid[axis] for axis in ALL_AXES)]
    if expected is not None and not mine:
        raise ValueError(f"{prediction} cannot be: heads, layers or the batch do not divide")
    guess = min(mine, key=lambda row: (not row.fits, row.seconds)) if mine else None
    title = f"{subject}: {sum(row.fits for row in rows)} of {len(rows)} ways fit"
    args = rows, best, guess, title, subject.machine.name, (prediction or {}).get("seconds")
    shown = picture(drawing.draw_search, *args, text=title, height=drawing.SEARCH_HEIGHT)
    return Searched(rows, best, guess, shown.figure)


def _asked_guess(prediction: dict[str, float] | None, ranks: int) -> tuple[int, ...] | None:
    """Return (dp, pp, tp, cp, ep), or None. Raises ValueError unless their product is the ranks."""
    if prediction is None:
        return None
    if not isinstance(prediction, dict) or set(prediction) - {*ALL_AXES, "seconds"}:
        raise ValueError(f'a prediction is a grid such as {{"dp": 2, "pp": 2}}, got {prediction!r}')
    sizes = tuple(require_int(f"the size of {axis}", prediction.get(axis, 1), 1) for axis in ALL_AXES)
    require_number("the seconds that you expect", prediction.get("seconds", 1), above=0)
    if math.prod(sizes) != ranks:
        product = " x ".join(map(str, (*sizes[:3], *_others_of(*sizes[3:]).values())))
        raise ValueError(f"the grid that you expect has {product} places, and there are {ranks:,} ranks")
    return sizes

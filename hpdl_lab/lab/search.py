"""`lab.search`: every grid of so many ranks, its step time against its memory, and the best that fits, drawn."""

from dataclasses import dataclass, field, replace

from .. import schedules as known
from ..parallel.grid import search as grid_search
from ..parallel.grid.model import Prediction
from ..plots import grid_search as drawing
from ..plots.grid import bytes_amount
from ..trace import seconds_text
from .grid_setting import AXES
from .grid_subject import subject_of
from .picture import WithFigure, picture

SHOWN = 8  # rows of the printed table


@dataclass(frozen=True)
class Searched(WithFigure):
    """rows: grid.model.Predictions, fastest first; best: the fastest that fits, None where none does.

    guess: the row of the grid that the attendee expected, or None.
    """

    rows: list = field(repr=False)
    best: Prediction | None
    guess: Prediction | None
    figure: object = field(repr=False)

    def __repr__(self):
        fitting = [row for row in self.rows if row.fits]
        lines = [
            f"{len(self.rows)} ways to share out the ranks, with and without recomputation: {len(fitting)} of them fit"
        ]
        shown = fitting[:SHOWN] + ([self.guess] if self.guess and self.guess not in fitting[:SHOWN] else [])
        for row in shown:
            more = f"{row.schedule}{', recomputed' if row.recompute else ''}, micro-batches of {row.micro_batch}"
            held, bubble = bytes_amount(row.memory.total), abs(row.bubble)
            told = f"{seconds_text(row.seconds):>8} a step, {held:>8}, bubble {bubble:>5.1%}"
            mark = "   best" if row is self.best else "   yours" if row is self.guess else ""
            lines.append(f"  {drawing.name_of(row):<20}{told}, {more}{'' if row.fits else ', too much'}{mark}")
        if not fitting:
            least = min(row.memory.total for row in self.rows)
            lines.append(
                f"none fits into {bytes_amount(self.rows[0].limit)} per rank: the least is {bytes_amount(least)}"
            )
        return "\n".join(lines)


def search(
    model="gpt",
    *,
    data=None,
    size="tiny",
    ranks=None,
    batch=None,
    limit=None,
    machine=None,
    schedules=("1f1b",),
    recompute=(False, True),
    prediction=None,
):
    """Price every dp x pp x tp of so many ranks, and draw step time against memory.

        lab.search("gpt", ranks=8, limit="2 MB")
        lab.search("gpt3", prediction={"dp": 8, "pp": 16, "tp": 8})       1,024 GPUs

    Args:    model, data, size, ranks, batch, limit, machine: as of lab.grid. schedules: names of those to try.
             recompute: whether activations are recomputed: which of both to try.
             prediction: {"dp":, "pp":, "tp":} of the grid that you expect to be the best; what is not said is 1.
    Returns: Searched.
    Raises:  ValueError in one sentence, also where no grid can be at all.
    """
    schedules = require_schedules(schedules)
    recompute = (recompute,) if isinstance(recompute, bool) else recompute
    if not isinstance(recompute, tuple | list) or not recompute or not all(isinstance(r, bool) for r in recompute):
        raise ValueError(f"recompute is True, False, or (False, True) to try both, got {recompute!r}")
    subject = subject_of(model, data, size, ranks, batch, limit, machine)
    if machine is None and subject.model is not None:  # it is measured on cores that ranks share
        here = replace(subject.machine, at_once=0, name=f"{subject.machine.name}, with a core for each rank")
        subject = replace(subject, machine=here)
    expected = asked_guess(prediction, subject.ranks)
    told = {"limit": subject.limit, "machine": subject.machine, "batch": subject.batch}
    rows = grid_search.search(subject.spec, subject.ranks, schedules=schedules, recompute=recompute, **told)
    best = grid_search.best(rows) if any(row.fits for row in rows) else None
    mine = [row for row in rows if expected == tuple(row.grid[axis] for axis in AXES)]
    if expected is not None and not mine:
        raise ValueError(
            f"{dict(zip(AXES, expected, strict=True))} cannot be: heads, layers or the batch do not divide"
        )
    guess = min(mine, key=lambda row: (not row.fits, row.seconds)) if mine else None
    title = f"{subject}: {sum(row.fits for row in rows)} of {len(rows)} ways fit"
    shown = picture(drawing.draw, rows, best, guess, title, subject.machine.name, text=title, height=drawing.HEIGHT)
    return Searched(rows, best, guess, shown.figure)


def asked_guess(prediction, ranks):
    """(dp, pp, tp), or None. Raises ValueError unless their product is the ranks."""
    if prediction is None:
        return None
    if not isinstance(prediction, dict) or set(prediction) - set(AXES):
        raise ValueError(f'a prediction is a grid such as {{"dp": 2, "pp": 2}}, got {prediction!r}')
    sizes = tuple(prediction.get(axis, 1) for axis in AXES)
    if wrong := [n for n in sizes if isinstance(n, bool) or not isinstance(n, int) or n < 1]:
        raise ValueError(f"the size of an axis is a whole number of at least 1, got {wrong[0]!r} in {prediction!r}")
    if sizes[0] * sizes[1] * sizes[2] != ranks:
        told = " x ".join(map(str, sizes))
        raise ValueError(f"the grid that you expect has {told} places, and there are {ranks:,} ranks")
    return sizes


def require_schedules(names):
    """A tuple of names of schedules. Raises ValueError."""
    names = tuple(names) if isinstance(names, tuple | list) else (names,)
    if not names or (unknown := [name for name in names if name not in known.CATALOG]):
        raise ValueError(f"no schedule is called {unknown[0] if names else ''!r}: {', '.join(known.CATALOG)}")
    return names

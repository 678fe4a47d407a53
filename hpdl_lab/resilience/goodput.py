"""Goodput that is measured: ranks of a real training are killed, and each second of the wall time is accounted for.

|--steps--|save|--steps--|save|--steps X........|.........|--steps--|save|
 useful    write useful    write repeated notice  restart   useful    write        X: a rank is killed
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..comm.base import Comm, Row
from ..data.dataset import Dataset
from ..data.loading import Batch, Reader
from ..parallel.data_parallel import DataParallel
from ..parallel.training import Recipe, Trained, train
from ..units import require_int, require_number
from .kills import KillAt

ENDLESS = sys.maxsize  # steps of a training that is killed before its end
PARTS = ("useful", "write", "repeated", "notice", "restart")


class Interval(NamedTuple):
    """Steps with no checkpoint between them: number of the first one, time of its begin, time of each step's end."""

    step: int
    begun: float
    ended: list[float]


class Life(NamedTuple):
    """Training from a start to a failure: the time of a rank's death, and of its notice; 0: it came to its end."""

    intervals: list[Interval]
    died: float = 0.0
    noticed: float = 0.0


@dataclass(frozen=True)
class _Measured:
    """The parts of the wall time, from the first step to the last, in s; failures: how many; losses: of kept steps.

    useful_s: the kept steps; write_s: checkpoints; repeated_s: from the last checkpoint to a failure; notice_s: from a
    failure until the notebook notices it; restart_s: from then to the next step.
    """

    wall_s: float
    useful_s: float
    write_s: float
    repeated_s: float
    notice_s: float
    restart_s: float
    failures: int
    writes: int
    losses: list[float] = field(repr=False)

    @property
    def goodput(self) -> float:
        return self.useful_s / self.wall_s

    def __str__(self) -> str:
        parts = (f"{name} {getattr(self, f'{name}_s') / self.wall_s:.1%}" for name in PARTS)
        return f"{len(self.losses):,} steps in {self.wall_s:.1f} s, {self.failures} failed: {', '.join(parts)}"


@dataclass(frozen=True)
class _Clocked(Reader):
    """A reader that reports, on rank 0, the begin of the first step after a start, or after a checkpoint."""

    every: int = 1  # steps from checkpoint to checkpoint

    def shards(
        self, comm: Comm, x: Tensor, y: Tensor, schedule: Iterable[tuple[int, Tensor]], seed: int = 0
    ) -> Generator[Batch]:
        def reported() -> Iterator[tuple[int, Tensor]]:
            for step, indices in schedule:
                if comm.rank == 0 and step % self.every == 0:
                    comm.report(first=step, begun=time.time())
                yield step, indices

        yield from super().shards(comm, x, y, reported(), seed)


class _Timed(DataParallel):
    """Data parallelism that reports the end of each step."""

    def facts(self) -> dict[str, float]:
        return super().facts() | {"ended": time.time()}


def _train_timed(comm: Comm, model: nn.Module, data: Dataset, recipe: Recipe, killer: KillAt) -> Trained:
    """Train on one rank until the end, or until `killer` kills a rank."""
    if killer.after_s < math.inf and not 0 < killer.rank < comm.size:
        raise ValueError(f"rank={killer.rank} of {comm.size} ranks: one from 1 on is needed, because rank 0 reports")
    return train(comm, model, _Timed(killer), data, recipe, _Clocked(every=recipe.checkpoint_every))


def divide_wall_time(lives: Sequence[Life], losses: Sequence[float] = ()) -> _Measured:
    """Divide the wall time of a job into parts. lives: in order; a life without intervals had no step.

    Steps after the last checkpoint before a failure are not useful: the next life begins with them.
    """
    spent, writes = dict.fromkeys(PARTS, 0.0), 0
    failures = sum(life.died > 0 for life in lives)
    lives = [*dropwhile(lambda life: not life.intervals, lives)]
    start = at = lives[0].intervals[0].begun  # the time from start to `at` is accounted for
    for number, life in enumerate(lives):
        goes_on = next((later.intervals[0].step for later in lives[number + 1 :] if later.intervals), math.inf)
        last = "restart"  # the part that ends with a failure
        for step, begun, ended in life.intervals:
            spent["write" if last == "write" else "restart"] += begun - at
            at, last = begun, "repeated"
            if step < goes_on:
                spent["useful"] += ended[-1] - begun
                at, last = ended[-1], "write"
        writes += sum(step < goes_on for step, _, _ in life.intervals) - (not life.died)
        if life.died:
            died = max(at, life.died)  # a rank may die a moment before rank 0 begins with the same step
            spent[last] += died - at
            spent["notice"] += life.noticed - died
            at = life.noticed
    parts = {f"{part}_s": seconds for part, seconds in spent.items()}
    return _Measured(at - start, **parts, failures=failures, writes=writes, losses=[*losses])


def measure_goodput(
    run: Callable[..., object],
    restart: Callable[[], object],
    model: nn.Module,
    data: Dataset,
    *,
    checkpoint_every: int,
    steps: int | None = None,
    failures: int = 1,
    every_s: float | Callable[[], float] = 120.0,
    rank: int = 2,
    deadline: float = 10.0,
    **recipe: Any,
) -> _Measured:
    """Train on engines of this machine, kill a rank every `every_s` seconds, and measure the goodput.

        measure(lab.run, lab.restart, model, data, checkpoint_every=100)

    A failure comes `every_s` after a start of the training; a function draws new seconds for each failure. Then
    all engines are replaced, and the training goes on from its last checkpoint, or begins again if there is none.

    Args:    steps: at which the training ends; if more are done at the last failure, it ends one checkpoint later.
             None: as many steps after the last failure as on average before each failure.
             rank: that is killed by signal 9, not 0; deadline: s, the longest that a rank may wait.
             recipe: batch, lr, optimizer, ...: other fields of parallel.training.Recipe.
    Returns: Measured, by the clock of this machine.
    Raises:  ValueError for numbers that cannot be; if no rank was killed on purpose, the error of `run`.
    """
    require_int("checkpoint_every", checkpoint_every, 1)
    require_int("failures", failures, 0)
    if steps is not None or not failures:
        require_int("steps", steps, 1)
    lives: list[Life] = []
    losses: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "checkpoint.pt")
        for left in reversed(range(failures + 1)):
            intervals: list[Interval] = []
            after_s = every_s() if callable(every_s) else every_s
            killer = KillAt(rank, after_s=require_number("every_s", after_s, above=0) if left else math.inf)
            done = len(losses)
            until = ENDLESS if left else max(steps or done + done // failures, done + checkpoint_every)
            plan = Recipe(
                until, resume=file.exists(), checkpoint=str(file), checkpoint_every=checkpoint_every, **recipe
            )
            try:
                run(_train_timed, model, data, plan, killer, deadline=deadline, on_row=partial(note, intervals, losses))
                lives.append(Life(intervals))
            except Exception:
                noticed = time.time()
                with suppress(RuntimeError):
                    lives.append(Life(intervals, noticed - killer.seconds_ago(), noticed))
                if len(lives) != failures - left + 1:
                    raise
                print(f"rank {rank} was killed after {len(losses):,} steps; new engines go on", flush=True)
                restart()
    return divide_wall_time(lives, [losses[step] for step in range(len(losses))])


def note(intervals: list[Interval], losses: dict[int, float], row: Row) -> None:
    """Keep the times and the loss of a row. A step that is repeated keeps its last loss."""
    if "begun" in row:
        intervals.append(Interval(row["first"], row["begun"], []))
    else:
        intervals[-1].ended.append(row["ended"])
        losses[row["step"]] = row["loss"]

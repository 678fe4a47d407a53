"""`lab.waterfall`: where the time of a training step goes, on the engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from ..comm.base import Comm
from ..performance.gpt_step import gpt_step
from ..performance.profile_step import Recorder, Recording, mean_bars, report_text
from ..plots import live
from ..plots.style import Figure
from ..plots.waterfall import draw
from ..trace import seconds_text
from .result import Result, draw_picture
from .world import world_of

SLOWEST_S = 60.0  # of one step, with the profiler


@dataclass(frozen=True, repr=False)
class Waterfall(Result):
    """Result of `lab.waterfall`.

    bars: seconds per step, the mean of all ranks; step_s: of steps without a profiler.
    """

    bars: dict[str, float]
    step_s: float
    ranks: list[Recording] = field(repr=False)
    figure: Figure = field(repr=False)

    @property
    def unexplained_s(self) -> float:
        """Seconds by which the step is longer than the sum of its bars; below 0 if the sum is longer."""
        return self.step_s - sum(self.bars.values())

    @property
    def explained(self) -> float:
        """The share of the step that the bars explain: 1 less the distance of their sum."""
        return 1 - abs(self.unexplained_s) / self.step_s

    def share(self, bar: str) -> float:
        """Return the share of the step that a bar takes."""
        return self.bars[bar] / self.step_s

    def __repr__(self) -> str:
        return report_text(self.ranks)


def waterfall(
    make: Callable[..., Callable[[], object]] = gpt_step,
    *args: object,
    ranks: int | None = None,
    before: Waterfall | None = None,
) -> Waterfall:
    """Measure where the time of a training step goes, and draw it.

    Args:    make: make(comm, *args) is called on every engine, within a process group of torch.distributed (gloo), and
             returns a function that makes one step; the default is a small GPT that is slow for six reasons.
             ranks: how many, default all engines. before: an earlier result, drawn in gray.
    Returns: bars in seconds per step, and the share of the step that they explain.
    Raises:  ValueError on simulated ranks, whose time is virtual; TypeError if make makes no function.
    """
    if not callable(make):
        raise TypeError(f"lab.waterfall needs a function make(comm), which returns a step, not {type(make).__name__}")
    if before is not None and not isinstance(before, Waterfall):
        raise TypeError(f"before must be what lab.waterfall has returned, not {type(before).__name__}")
    world = world_of(ranks)
    if world.simulated:
        raise ValueError("lab.waterfall measures real steps, and no engines run: lab.start(2)")
    recordings = [Recording(*rank) for rank in world.run(_record, make, args, deadline=SLOWEST_S)]
    bars, step_s = mean_bars(recordings), fmean(rank.step_s for rank in recordings)
    rows = {**bars, "unexplained": step_s - sum(bars.values()), "whole step": step_s}
    earlier = before and {**before.bars, "unexplained": before.unexplained_s, "whole step": before.step_s}
    title = f"Where the time of a step goes, on {world}"
    text = f"{1 - abs(rows['unexplained']) / step_s:.0%} of {seconds_text(step_s)} explained"
    foot = f"{text}; gray: before, {seconds_text(before.step_s)}" if before else text
    figure = draw_picture(draw, rows, earlier, title, foot, text=text).figure
    live.show_figure(figure, alt=text)
    return Waterfall(bars, step_s, recordings, figure)


def _record(comm: Comm, make: Callable[..., Callable[[], object]], args: tuple[object, ...]) -> tuple[object, ...]:
    """Make and record steps on one rank; returns the fields of its Recording."""
    from ..comm.torch.group import process_group

    with process_group(comm):
        step = make(comm, *args)
        if not callable(step):
            raise TypeError(f"make(comm) returned {type(step).__name__}: it has to return a function that makes a step")
        recorder = Recorder()
        while True:
            step()
            if recorder.boundary():
                return tuple(recorder.result())

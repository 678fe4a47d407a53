"""`lab.grid`: pick a hybrid grid with sliders, see at once what it costs, and run it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

from torch import nn

from .. import features, schedules
from ..comm.base import Row
from ..engines.errors import EngineError
from ..parallel.grid.machine import Machine
from ..parallel.grid.measure import bytes_over_axes, grid_steps, last_step, rows_over_pp
from ..parallel.grid.memory import Memory
from ..parallel.grid.model import Prediction
from ..parallel.grid.simulation import simulate_step
from ..parallel.grid.spec import Spec
from ..plots import grid as drawing
from ..plots.colors import VERMILION
from ..plots.style import Figure, new_figure, style_context
from ..trace import seconds_text
from ..units import amount_text, counted
from .adjustable import Adjustable, Control, RunButton, said_html
from .cluster import run, running
from .explore import show_sliders
from .grid import ALL_AXES, AXES, Setting, Subject, first, followed, nearest_setting, subject_of
from .plain import plainly, sentence
from .result import text_table

MEANING = {
    "dp": "replicas, each with its share of the batch",
    "pp": "stages of each replica",
    "tp": "ranks that share every layer",
    "cp": "ranks that share each sequence",
    "ep": "ranks that share the experts of a layer",
    "zero": "stage of ZeRO: what replicas share out",
}
STEPS = 5
POLL = 0.1  # s: how soon a simulation sees that it was stopped
DEADLINE = 30.0  # s: engines that share few cores import torch's tracer first


# -- one run of a setting ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridTimes:
    """A run of a grid, as far as it is known.

    seconds: of a step; bubble, memory (of the fullest rank), links: as of a Prediction; None if not known.

    kind: "measured" or "simulated"; how: in words.
    """

    kind: str
    how: str
    seconds: float
    bubble: float | None = None
    memory: Memory | None = None
    links: dict[str, float] | None = None


class GridRun:
    """A run of a setting, on the engines, or in virtual time if it needs more ranks; another thread may stop it.

    tell: f(text), called with what goes on. show: f(GridTimes), called after every step with what is known so far.
    """

    def __init__(
        self, subject: Subject, setting: Setting, tell: Callable[[str], None], show: Callable[[GridTimes], None] | None
    ) -> None:
        self.subject, self.setting, self.tell, self.show = subject, setting, tell, show
        self.stopped = self.simulates = False

    def result(self) -> GridTimes | None:
        """Take the steps; returns GridTimes, None if stopped. Raises what lab.run raises, ValueError as simulate."""
        ranks, engines = self.subject.ranks, running()
        if self.subject.model is not None and (engines is None or engines.n >= ranks):
            return self.measured()
        there = f"{engines.n} run" if engines is not None else "none run"
        self.tell(f"This grid needs {ranks:,} engines and {there}: simulating it instead, which may take a minute.")
        self.simulates = True
        return self.simulated()

    def stop(self) -> None:
        """End it, from another thread."""
        self.stopped = True
        if not self.simulates and (engines := running()) is not None:
            engines.interrupt()

    def measured(self) -> GridTimes:
        """Take a few steps on the engines."""
        subject, setting = self.subject, self.setting
        times: list[float] = []
        cores = features.cores()
        share = f", which share {cores} cores" if cores < subject.ranks else ""
        how = f"{STEPS} steps on {subject.ranks} engines{share}"

        def on_row(row: Row) -> None:
            if self.stopped:  # before the engines were free, so that there was no run to interrupt
                raise EngineError("stopped")
            times.append(row["seconds"])
            if self.show is not None:
                self.show(GridTimes("measured", f"the first {len(times)} of {how}", median(times)))

        costs = [layer.flops for layer in subject.spec.layers]  # the cuts that were predicted, whatever is measured
        args = (subject.model, setting.grid, subject.x, subject.y, {**setting.options, "costs": costs}, STEPS)
        self.tell(f"Running {setting} on {subject.ranks} engines.")
        results = run(grid_steps, *args, ranks=range(subject.ranks), deadline=DEADLINE, on_row=on_row)
        return GridTimes(
            "measured",
            f"median of {how}",
            median(times),
            schedules.summary(rows_over_pp(last_step(results), setting.grid)).bubble,
            max((rank.held for rank in results), key=lambda held: held.total),
            bytes_over_axes(results, setting.grid),
        )

    def simulated(self) -> GridTimes | None:
        """Take a step in virtual time, in a thread that a stop leaves alone."""
        subject = self.subject
        grid, how = self.setting.grid, self.setting.options
        found: Future[float] = Future()

        def alone() -> None:
            try:
                found.set_result(simulate_step(subject.spec, grid, **how, machine=subject.machine, batch=subject.batch))
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=alone, daemon=True).start()
        text = f"one step of {subject.ranks:,} simulated ranks on {subject.machine.name}, in virtual time"
        while not self.stopped:
            with suppress(TimeoutError):
                return GridTimes("simulated", text, found.result(POLL))
        return None


# -- what is picked ---------------------------------------------------------------------------------------------------


class Picker(Adjustable):
    """A grid that is picked: what it costs, and what it took when it ran.

    setting: dp, pp, tp, cp, ep, micro_batches, recompute, schedule, zero. prediction: of grid.model, None if the grid
    cannot be. measured: of the present setting.
    """

    def __init__(self, subject: Subject, axes: Sequence[str] = AXES) -> None:
        self.subject, self.setting = subject, first(subject)
        sizes = {axis: (0, 1, 2, 3) if axis == "zero" else _divisors(subject.ranks) for axis in axes}
        start = self.setting._asdict()
        super().__init__(
            {
                **{axis: Control(sizes[axis], start[axis], meaning=MEANING[axis]) for axis in axes},
                "micro_batches": Control(_divisors(subject.batch), start["micro_batches"]),
                "schedule": Control(tuple(schedules.CATALOG), start["schedule"]),
                "recompute": Control((False, True), start["recompute"], label="checkpoint activations"),
            }
        )
        self.taken: dict[Setting, GridTimes] = {}
        self.under_way: GridRun | None = None
        self.actions = (
            RunButton("Run it", "play", self.start, lambda: self.prediction is not None and self.under_way is None),
            RunButton("Stop", "stop", self.stop, lambda: self.under_way is not None),
        )
        self._lock = threading.Lock()
        self._predict()

    @property
    def measured(self) -> GridTimes | None:
        return self.taken.get(self.setting)

    @partial(plainly, owner="picker")
    def set(self, **wanted: int | str) -> Picker:
        """Pick: `picker.set(dp=2, pp=2)`. Axes that are not said follow, so that the product stays the ranks.

        Raises:  ValueError with the numbers if that cannot be; then nothing has changed.
        """
        before = self.setting
        self.setting = nearest_setting(before, self.subject.ranks, **wanted)
        self.values = {key: getattr(self.setting, key) for key in self.controls}
        self._predict()
        self.say(followed(before, self.setting, wanted))
        return self

    def _predict(self) -> None:
        self.prediction: Prediction | None
        try:
            self.prediction, self.why = self.subject.predict(self.setting), ""
        except ValueError as error:
            self.prediction, self.why = None, str(error)

    # -- run it

    @partial(plainly, owner="picker")
    def run(self) -> GridTimes | None:
        """Take a few steps on the engines, or simulate one; returns GridTimes, None if it was stopped.

        Raises:  ValueError for a grid that cannot be, EngineError without engines or with dead ones, what lab.run does.
        """
        return self._run(self._begin())

    def start(self) -> None:
        """Begin `run` in a thread of its own; its end is in `said`. Raises as `run`, if it cannot begin."""
        under_way = self._begin()

        def alone() -> None:
            with suppress(BaseException):  # a thread has no caller to catch it: `said` tells
                self._run(under_way)

        threading.Thread(target=alone, daemon=True).start()

    def stop(self) -> None:
        """End the run that is under way."""
        under_way = self.under_way
        self.say("Nothing of this picker is running." if under_way is None else "Stopping.")
        if under_way is not None:
            under_way.stop()

    def _begin(self) -> GridRun:
        with self._lock:
            if self.under_way is not None:
                raise EngineError("this grid is running already: wait for its end, or press Stop")
            if self.prediction is None:
                raise ValueError(f"this grid cannot run: {self.why}")
            self.under_way = GridRun(self.subject, self.setting, self.say, self._so_far)
            return self.under_way

    def _run(self, under_way: GridRun) -> GridTimes | None:
        said = "Stopped."
        try:
            measured = under_way.result()
            if measured is not None:
                self.taken[under_way.setting] = measured
                said = f"{under_way.setting}: {measured.kind} {seconds_text(measured.seconds)} a step."
            return measured
        except BaseException as error:
            self.taken.pop(under_way.setting, None)  # half a measurement is none
            said = said if under_way.stopped else sentence(error)
            raise
        finally:
            self.under_way = None
            self.say(said)

    def _so_far(self, measured: GridTimes) -> None:
        if self.under_way is not None:
            self.taken[self.under_way.setting] = measured
        self.say(self.said)

    # -- how it shows

    @property
    def state(self) -> tuple[object, ...]:
        return self.setting, self.measured, self.why

    @property
    def sharp(self) -> bool:
        return self.under_way is None

    def figure(self) -> Figure:
        """Draw what is picked and measured."""
        figure, title = new_figure(height=drawing.HEIGHT), f"{self.subject.spec.name} on {self.setting}"
        with style_context():
            drawing.draw(figure, self.prediction, self.measured, self.why, title, self.subject.spec.training)
        return figure

    def html(self) -> str:
        line = said_html(f"This grid cannot be: {self.why}." if self.why else "", self.said, height_em=1.4)
        row = self.prediction
        if row is None:
            return line
        line += f"<b>predicted</b> {seconds_text(row.seconds)} a step, bubble {row.bubble:.1%}, "
        line += f"{amount_text(row.memory.total)} of {amount_text(self.subject.limit)}"
        line += "" if row.fits else f' <b style="color: {VERMILION}">does not fit</b>'
        if self.measured is not None:
            line += f"; <b>{self.measured.kind}</b> {seconds_text(self.measured.seconds)} a step"
        return line

    def __repr__(self) -> str:
        batches = counted(self.setting.micro_batches, "micro-batch", "micro-batches")
        how = f"{self.setting.schedule}{', activations recomputed' if self.setting.recompute else ''}"
        head = [f"{self.subject}; {self.subject.machine.name}", f"{self.setting}, {batches}, {how}"]
        if self.prediction is None:
            return "\n".join([*head, f"cannot be: {self.why}"])
        columns = {"predicted": _numbers_of(self.prediction)}
        if self.measured is not None:
            columns[self.measured.kind] = _numbers_of(self.measured)
        rows = [[name, *(column.get(name, "") for column in columns.values())] for name in columns["predicted"]]
        limit = amount_text(self.subject.limit)
        fits = f"fits into {limit} per rank" if self.prediction.fits else f"does NOT fit into {limit} per rank"
        return "\n".join(line for line in (*head, *text_table(["", *columns], rows), fits, self.said) if line)


@cache
def _divisors(n: int) -> tuple[int, ...]:
    """Return the divisors of n, in rising order."""
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def _numbers_of(r: Prediction | GridTimes) -> dict[str, str]:
    """Return the rows of the table, of a Prediction or of GridTimes, in which some may be missing."""
    memory = {} if r.memory is None else {**r.memory._asdict(), "total": r.memory.total}
    links = {} if r.links is None else drawing.sent_over(r.links)
    rows = {"seconds of a step": seconds_text(r.seconds), "bubble": "" if r.bubble is None else f"{r.bubble:.1%}"}
    for name in ("parameters", "gradients", "optimizer", "activations", "total"):
        rows[f"{name} of the fullest rank"] = amount_text(memory[name]) if memory else ""
    axes = ("tp", "pp", "dp", *(axis for axis in ("cp", "ep") if links.get(axis)))
    return rows | {f"bytes sent over {axis}": amount_text(links[axis]) if links else "" for axis in axes}


PICKERS: dict[tuple[object, ...], Picker] = {}  # of this notebook: a cell that runs again shows what was picked there


def grid(
    model: str | nn.Module | Spec = "gpt",
    *,
    ranks: int | None = None,
    batch: int | None = None,
    limit: int | str | None = None,
    machine: str | Machine | None = None,
    axes: Sequence[str] = AXES,
) -> Picker:
    """Pick how a model is shared by ranks: sliders for dp, pp, tp, micro-batches; memory, bubble, bytes, seconds.

        lab.grid()                                       the small GPT on the engines that run
        lab.grid("gpt", limit="2 MB", batch=32)
        lab.grid("gpt3")                                 175 billion parameters on 1,024 GPUs
        lab.grid("deepseek_v3", ranks=2048, axes=("dp", "pp", "tp", "ep", "zero"))

    "Run it" takes a few steps on the engines and lays them over the prediction; what needs more engines than
    run is simulated. The cell may be run again: what was picked and measured stays. In a plain terminal a table is
    printed, and `picker.set(dp=2, pp=2)`, `picker.run()` do what sliders and button do.

    Args:    model: "gpt", "mlp", "cnn", "vit", "llama", "deepseek", an nn.Module; or "gpt3", "llama3_70b",
             "llama3_405b", "deepseek_v3", or a grid.spec.Spec, which are simulated.
             ranks: default all engines, or 4; batch: examples of a step, default 8 per rank.
             limit: what a rank may hold, in bytes or as "2 MB"; default the machine's memory.
             machine: default this one, measured; a name of grid.machine.MACHINES, or a Machine.
             axes: which of dp, pp, tp, cp, ep and zero have a slider; picker.set knows all of them.
    Returns: Picker, with .setting, .prediction, .measured, .set(...), .run().
    Raises:  ValueError, TypeError, LookupError in one sentence.
    """
    if unknown := sorted({*axes} - {*ALL_AXES, "zero"}):
        raise ValueError(f"no slider is for {', '.join(map(repr, unknown))}: {', '.join((*ALL_AXES, 'zero'))}")
    asked = (*axes, *(x if isinstance(x, str) else id(x) for x in (model, machine)), ranks, batch, limit)
    picker, engines = PICKERS.get(asked), running()
    outdated = picker and ranks is None and picker.subject.model is not None and engines is not None
    if picker is None or (outdated and engines.n != picker.subject.ranks):
        picker = PICKERS[asked] = Picker(subject_of(model, ranks, batch, limit, machine), axes)
    show_sliders(picker)
    return picker

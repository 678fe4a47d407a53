"""`lab.grid`: pick a hybrid grid with sliders, see at once what it costs, and run it.

The Picker holds what is picked and what was measured, and knows no widget: it works the same in a plain terminal.
grid_widgets.py shows it in a notebook.
"""

import threading
from contextlib import suppress
from functools import partial

from ..comm.errors import CommError
from ..engines.errors import EngineError
from ..parallel.grid.model import predict
from ..plots import grid as drawing
from ..plots import live
from ..plots.style import counted, look, new_figure
from ..trace import seconds_text
from .cluster import running
from .grid_run import GridRun
from .grid_setting import changed, followed
from .grid_start import first
from .grid_subject import subject_of
from .plain import plainly

FAR = 1.5  # times the prediction


class Picker:
    """A grid that is picked: what it costs, and what it took when it ran.

    setting: dp, pp, tp, micro_batches, recompute, schedule. prediction: of grid.model, None where the grid cannot be.
    why: the sentence about that, else "". said: what the last action has to say. measured: of the present setting.
    """

    def __init__(self, subject):
        self.subject = subject
        self.setting = first(subject)
        self.said = ""
        self.taken = {}  # Setting -> Measured
        self.under_way = None  # GridRun
        self.changed = []  # functions to call when something has changed
        self.panel = None  # its widgets, once a notebook shows it
        self._lock = threading.Lock()
        self._predict()

    # -- what is picked -----------------------------------------------------------------------------------------------

    @property
    def grid(self):
        return self.setting.grid

    @property
    def measured(self):
        return self.taken.get(self.setting)

    @partial(plainly, owner="picker")
    def set(self, **wanted):
        """Pick: `picker.set(dp=2, pp=2)`. Axes that are not said follow, so that the product stays the ranks.

        Raises:  ValueError with the numbers where that cannot be; then nothing has changed.
        """
        before = self.setting
        self.setting = changed(before, self.subject.ranks, **wanted)
        self.said = followed(before, self.setting, wanted)
        self._predict()
        self._tell()
        return self

    def _predict(self):
        subject, setting = self.subject, self.setting
        try:
            told = {**setting.options, "machine": subject.machine, "batch": subject.batch, "limit": subject.limit}
            self.prediction, self.why = predict(subject.spec, setting.grid, **told), ""
        except ValueError as error:
            self.prediction, self.why = None, str(error)

    def outdated(self, ranks):
        """Whether it was made for all engines, and other engines run now."""
        engines = running()
        return ranks is None and self.subject.model is not None and engines is not None and engines.n != self.ranks

    @property
    def ranks(self):
        return self.subject.ranks

    # -- run it -------------------------------------------------------------------------------------------------------

    @partial(plainly, owner="picker")
    def run(self):
        """Take a few steps on the engines, or simulate one; returns Measured, None where it was stopped.

        Raises:  ValueError for a grid that cannot be, EngineError without engines or with dead ones, what lab.run does.
        """
        return self._run(self._begin())

    def start(self):
        """Begin `run` in a thread of its own; how it ends is in `said`. Raises as `run`, where it cannot begin."""
        under_way = self._begin()
        threading.Thread(target=self._run_alone, args=[under_way], daemon=True).start()

    def stop(self):
        """End the run that is under way."""
        under_way = self.under_way
        self.say("Nothing of this picker is running." if under_way is None else "Stopping.")
        if under_way is not None:
            under_way.stop()

    def _begin(self):
        with self._lock:
            if self.under_way is not None:
                raise EngineError("this grid is running already: wait for its end, or press Stop")
            if self.prediction is None:
                raise ValueError(f"this grid cannot run: {self.why}")
            self.under_way = GridRun(self.subject, self.setting, self.say, self._so_far)
            self.under_way.predicted = self.prediction.seconds
        return self.under_way

    def _run(self, under_way):
        try:
            measured = under_way.result()
            if measured is not None:
                self.taken[under_way.setting] = measured
                self.said = f"{under_way.setting}: {measured.kind} {seconds_text(measured.seconds)} a step."
                self.said += far(measured, under_way.predicted)
            else:
                self.said = "Stopped."
            return measured
        except BaseException as error:
            self.taken.pop(under_way.setting, None)  # half a measurement is none
            self.said = "Stopped." if under_way.stopped else sentence(error)
            raise
        finally:
            self.under_way = None
            self._tell()

    def _run_alone(self, under_way):
        with suppress(BaseException):  # a thread has nobody who would catch it: `said` tells
            self._run(under_way)

    def _so_far(self, measured):
        self.taken[self.under_way.setting] = measured
        self._tell()

    # -- how it shows -------------------------------------------------------------------------------------------------

    def say(self, text):
        self.said = text
        self._tell()

    def _tell(self):
        for call in self.changed:
            call()

    def figure(self):
        """What is picked and measured, as a picture."""
        figure = new_figure(height=drawing.HEIGHT)
        with look():
            drawing.draw(
                figure, self.prediction, self.measured, self.why, f"{self.subject.spec.name} on {self.setting}"
            )
        return figure

    def save(self, path):
        live.save(self.figure(), path)

    def show(self):
        """Sliders and pictures in a notebook; in a plain terminal print the table."""
        if not live.in_notebook():
            print(self, flush=True)
            return
        from . import grid_widgets

        grid_widgets.show(self)

    def _ipython_display_(self):
        """At the end of a cell: lab.grid has shown it already."""

    def __repr__(self):
        batches = counted(self.setting.micro_batches, "micro-batch", "micro-batches")
        told = f"{self.subject}; {self.subject.machine.name}\n{self.setting}, {batches}"
        told += f", {self.setting.schedule}{', activations recomputed' if self.setting.recompute else ''}"
        if self.prediction is None:
            return f"{told}\ncannot be: {self.why}"
        rows = [("", "predicted", self.measured.kind if self.measured else "")]
        for name, of in LINES:
            rows.append((name, of(self.prediction), of(self.measured) if self.measured else ""))
        table = "\n".join(f"  {name:<31}{one:>12}{two:>12}".rstrip() for name, one, two in rows)
        limit = drawing.bytes_amount(self.subject.limit)
        fits = f"fits into {limit} per rank" if self.prediction.fits else f"does NOT fit into {limit} per rank"
        return "\n".join(filter(None, [told, table, fits, self.said]))


def far(measured, predicted):
    """A sentence where a measurement is FAR from what was predicted and its cores were shared, else ""."""
    times = measured.seconds / predicted
    if 1 / FAR < times < FAR or not measured.busy:
        return ""
    return f" That is {times:.1f} times what was predicted: {measured.busy}."


def of_memory(name):
    return lambda r: "" if r.memory is None else drawing.bytes_amount(getattr(r.memory, name))


def of_links(axis):
    return lambda r: "" if r.links is None else drawing.bytes_amount(drawing.sent_over(r.links)[axis])


LINES = (
    ("seconds of a step", lambda r: seconds_text(r.seconds)),
    ("bubble", lambda r: "" if r.bubble is None else f"{r.bubble:.1%}"),
    *((f"{name} of the fullest rank", of_memory(name)) for name in ("parameters", "gradients", "optimizer")),
    ("activations", of_memory("activations")),
    ("all of it", of_memory("total")),
    *((f"bytes sent over {axis}", of_links(axis)) for axis in ("tp", "pp", "dp")),
)


class _Shelf:
    """The pickers of this notebook: running a cell again shows what was picked and measured there."""

    def __init__(self):
        self.pickers = {}

    def grid(
        self, model="gpt", *, data=None, size="tiny", ranks=None, batch=None, limit=None, machine=None, fresh=False
    ):
        """Pick how a model is shared by ranks: sliders for dp, pp, tp, micro-batches; memory, bubble, bytes, seconds.

            lab.grid()                                       the small GPT on the engines that run
            lab.grid("gpt", limit="2 MB", batch=32)
            lab.grid("gpt3")                                 175 billion parameters on 1,024 GPUs

        "Run it" takes a few steps on the engines and lays them beside the prediction; what needs more engines than
        run is simulated. The cell may be run again: what was picked and measured stays. In a plain terminal a table is
        printed, and `picker.set(dp=2, pp=2)`, `picker.run()` do what sliders and button do.

        Args:    model: "gpt", "mlp", "cnn", "vit", an nn.Module; or "gpt3", or a grid.spec.Spec, which are simulated.
                 ranks: default all engines, or 4; batch: examples of a step, default 8 per rank.
                 limit: what a rank may hold, in bytes or as "2 MB"; default the machine's memory.
                 machine: default this one, measured; a name of grid.machine.MACHINES, or a Machine.
                 fresh: forget what was picked and measured.
        Returns: Picker, with .setting, .prediction, .measured, .set(...), .run().
        Raises:  ValueError, TypeError, LookupError in one sentence.
        """
        asked = (*(x if isinstance(x, str) else id(x) for x in (model, data, machine)), size, ranks, batch, limit)
        picker = None if fresh else self.pickers.get(asked)
        if picker is None or picker.outdated(ranks):
            picker = self.pickers[asked] = Picker(subject_of(model, data, size, ranks, batch, limit, machine))
        picker.show()
        return picker


grid = _Shelf().grid


def sentence(error):
    """What an error says, in its first line."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0].strip() if lines else "no reason was given"
    if isinstance(error, EngineError | CommError | ValueError | KeyboardInterrupt):
        return text
    return f"{type(error).__name__}: {text}"

"""A setting of the picker, carried out: on the engines, or in virtual time where it needs more ranks than there are."""

import os
import threading
from dataclasses import dataclass
from statistics import median

from .. import features, schedules
from ..engines.errors import EngineError
from ..parallel.grid.memory import Memory
from ..parallel.grid.simulated_grid import SimulatedGrid
from ..parallel.grid.steps import bytes_over_axes, grid_steps, last_step, rows_over_pp
from ..plots.style import counted
from .cluster import run, running

STEPS = 5
DEADLINE = 30.0  # s: engines that share few cores import torch's tracer first


@dataclass(frozen=True)
class Measured:
    """seconds: of a step; bubble, memory (of the fullest rank), links: as of a Prediction; None where not known.

    kind: "measured" or "simulated"; how: in words; busy: what ranks shared their cores with, in words, "" for nothing.
    """

    kind: str
    how: str
    seconds: float
    bubble: float | None = None
    memory: Memory | None = None
    links: dict | None = None
    busy: str = ""


class GridRun:
    """One run of a setting, which another thread may stop.

    tell: f(text), called with what goes on. say: f(Measured), called after every step with what is known so far.
    """

    def __init__(self, subject, setting, tell, say):
        self.subject, self.setting, self.tell, self.say = subject, setting, tell, say
        self.stopped = False
        self.simulation = None
        self.lock = threading.Lock()  # between the begin of a simulation and its stop

    def result(self):
        """The Measured at the end, None if it was stopped. Raises what lab.run raises, ValueError as simulate."""
        ranks, engines = self.subject.ranks, running()
        if self.subject.model is None or (engines is not None and engines.n < ranks):
            there = f"{engines.n} run" if engines is not None else "none run"
            self.tell(f"This grid needs {ranks:,} engines and {there}: simulating it instead, which may take a minute.")
            return self.simulated()
        return self.measured()

    def stop(self):
        """End it, from another thread."""
        with self.lock:
            self.stopped = True
            if self.simulation is not None:
                self.simulation.stop()
                return
        if running() is not None:
            running().interrupt()

    def measured(self):
        """A few steps on the engines."""
        subject, setting, times = self.subject, self.setting, []
        cores = features.cores()
        crowd = f", which share {cores} cores" if cores < subject.ranks else ""
        how = f"{STEPS} steps on {subject.ranks} engines{crowd}"
        busy = shared_by(subject.ranks, cores, os.getloadavg()[0])

        def on_row(row):
            if self.stopped:  # before the engines were free, so that there was no run to interrupt
                raise EngineError("stopped")
            times.append(row["seconds"])
            self.say(Measured("measured", f"the first {len(times)} of {how}", median(times)))

        costs = [layer.flops for layer in subject.spec.layers]  # the cuts that were predicted, whatever is measured
        options = {**setting.options, "costs": costs}
        args = (subject.model, setting.grid, subject.x, subject.y, options, STEPS)
        self.tell(f"Running {setting} on {subject.ranks} engines.")
        results = run(grid_steps, *args, ranks=range(subject.ranks), deadline=DEADLINE, on_row=on_row)
        events = last_step(results)
        return Measured(
            "measured",
            f"median of {how}",
            median(times),
            schedules.summary(rows_over_pp(events, setting.grid)).bubble,
            max((taken.held for taken in results), key=lambda held: held.total),
            bytes_over_axes(results, setting.grid),
            busy,
        )

    def simulated(self):
        """A step in virtual time, in a process of its own."""
        subject, setting = self.subject, self.setting
        with self.lock:
            if self.stopped:
                return None
            told = {**setting.options, "machine": subject.machine, "batch": subject.batch}
            self.simulation = SimulatedGrid(subject.spec, setting.grid, **told)
        seconds = self.simulation.seconds()
        if seconds is None:
            return None
        how = f"one step of {subject.ranks:,} simulated ranks on {subject.machine.name}, in virtual time"
        return Measured("simulated", how, seconds)


def shared_by(ranks, cores, load):
    """What the ranks' cores are shared with, "" for nothing. load: programs that ran or wanted to, before the run."""
    told = [f"{ranks} engines share {counted(cores, 'core', 'cores')}"] if ranks > cores else []
    if load >= 1:
        told.append(f"a load of {load:.1f} on {counted(cores, 'core', 'cores')} was there in the minute before it")
    return ", and ".join(told)

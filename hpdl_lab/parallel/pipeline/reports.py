"""A stage that computes nothing and takes its time: to see a schedule at work without a model.

A step of a pipeline that tells about every action as it ends, so that a notebook can draw it meanwhile.
"""

import time
from statistics import median

import torch

from ...mesh import DeviceMesh
from ..hybrid.model import HybridParallel
from .run_schedule import run_schedule
from .split import partition
from .stage import Spec


class TimedStage:
    """Has the methods of stage.Stage, and passes on tensors of zeros.

    spend:   f(seconds): comm.compute on simulated ranks, time.sleep on real ones.
    forward, backward, input, weight: seconds of an F, B, I, W.
    shape:   of the one float32 tensor that passes between stages.
    """

    def __init__(self, spend, forward=1.0, backward=2.0, input=1.0, weight=1.0, shape=(1,)):
        self.spend, self.seconds = spend, (forward, backward, input, weight)
        self.takes = self.gives = (Spec(tuple(shape), torch.float32, True),)

    def forward(self, micro_batch, inputs, loss=None):
        self.spend(self.seconds[0])
        return self._tensors()

    def backward(self, micro_batch, gradients=()):
        self.spend(self.seconds[1])
        return self._tensors()

    def input_gradient(self, micro_batch, gradients=()):
        self.spend(self.seconds[2])
        return self._tensors()

    def weight_gradient(self, micro_batch):
        self.spend(self.seconds[3])

    def forget(self):
        """Nothing is under way."""

    def _tensors(self):
        return tuple(torch.zeros(spec.shape) for spec in self.takes)


WARM_UP = 2  # steps of a real model before the one that is drawn: the first one allocates


class Reported:
    """Has the methods of stage.Stage, and reports {stage, kind, micro_batch, t0_ns, t1_ns} after each of them.

    tell: f(**row), such as comm.report. seconds: {kind: [s of each]} so far.
    """

    def __init__(self, stage, number, clock, tell):
        self.stage, self.number, self.clock, self.tell = stage, number, clock, tell
        self.seconds = {}

    def __getattr__(self, name):  # takes, gives, module, saved, forget
        return getattr(self.stage, name)

    def forward(self, micro_batch, inputs, loss=None):
        return self.timed("F", micro_batch, inputs, loss)

    def backward(self, micro_batch, gradients=()):
        return self.timed("B", micro_batch, gradients)

    def input_gradient(self, micro_batch, gradients=()):
        return self.timed("I", micro_batch, gradients)

    def weight_gradient(self, micro_batch):
        return self.timed("W", micro_batch)

    def timed(self, kind, micro_batch, *args):
        method = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}[kind]
        t0 = self.clock()
        made = getattr(self.stage, method)(micro_batch, *args)
        t1 = self.clock()
        self.seconds.setdefault(kind, []).append((t1 - t0) / 1e9)
        self.tell(stage=self.number, kind=kind, micro_batch=micro_batch, t0_ns=t0, t1_ns=t1)
        return made


def sleeping_step(comm, schedule, seconds, asleep):
    """One step of `schedule` whose stages only take their time.

    Args:    seconds: {kind: [s of every stage of the model]} of F, B, I and W.
             asleep: whether that is real time, in which the rank sleeps; else virtual time.
    """
    spend = time.sleep if asleep else comm.compute
    stages = {}
    for n in schedule.stages_of(comm.rank):
        stage = TimedStage(spend, *(seconds[kind][n % schedule.stages] for kind in "FBIW"))
        stages[n] = Reported(stage, n, comm.trace.clock, reporter(comm))
    comm.barrier()
    run_schedule(comm, schedule, stages)


def model_step(comm, model, schedule, x, y, recompute=False, partition=partition):
    """Some steps of a real model, of which the last one is reported and traced.

    Args:    x, y: the whole batch, the same on every rank; partition: see Pipeline.
    Returns: {(stage, kind): median s} of this rank's actions in the step before that.
    """
    traced, comm.trace.enabled = comm.trace.enabled, False
    mesh = DeviceMesh(comm, pp=comm.size)
    pipeline = HybridParallel(model, mesh, x, schedule=schedule, recompute=recompute, partition=partition)
    plain = pipeline.stages
    for _ in range(WARM_UP):
        silent = {n: Reported(stage, n, comm.trace.clock, lambda **row: None) for n, stage in plain.items()}
        pipeline.stages = silent
        pipeline.step(x, y)
    pipeline.stages = {n: Reported(stage, n, comm.trace.clock, reporter(comm)) for n, stage in plain.items()}
    comm.barrier()
    comm.trace.enabled = traced
    pipeline.step(x, y)
    return {(n, kind): median(times) for n, stage in silent.items() for kind, times in stage.seconds.items()}


def reporter(comm):
    """f(**row) that adds the rank to the row."""
    return lambda **row: comm.report(rank=comm.rank, **row)

"""A step of a pipeline that reports every action as it ends: of a model, or of stages that only take their time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from ...comm.base import Comm
from ...mesh import DeviceMesh
from ...schedules import Action, Schedule
from ..hybrid.model import HybridParallel
from .run_schedule import OnAction, run_schedule
from .split import Partition, partition
from .stage import Loss, Spec


class TimedStage:
    """A stand-in for stage.Stage that passes on tensors of zeros.

    spend:   f(seconds): comm.compute on simulated ranks, time.sleep on real ones.
    forward, backward, input, weight: seconds of an F, B, I, W.
    shape:   of the one float32 tensor that passes between stages.
    """

    def __init__(
        self,
        spend: Callable[[float], None],
        forward: float = 1.0,
        backward: float = 2.0,
        input: float = 1.0,
        weight: float = 1.0,
        *,
        shape: Sequence[int] = (1,),
    ) -> None:
        self.spend, self.seconds = spend, (forward, backward, input, weight)
        self.takes = self.gives = (Spec(tuple(shape), torch.float32, True),)

    def forward(self, micro_batch: int, inputs: Sequence[Tensor], loss: Loss | None = None) -> tuple[Tensor, ...]:
        self.spend(self.seconds[0])
        return self._tensors()

    def backward(self, micro_batch: int, gradients: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        self.spend(self.seconds[1])
        return self._tensors()

    def input_gradient(self, micro_batch: int, gradients: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        self.spend(self.seconds[2])
        return self._tensors()

    def weight_gradient(self, micro_batch: int) -> None:
        self.spend(self.seconds[3])

    def forget(self) -> None:
        """Drop nothing: nothing is under way."""

    def _tensors(self) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(spec.shape) for spec in self.takes)


WARM_UP = 2  # steps of a real model before the one that is drawn: the first one allocates


def _reporter(comm: Comm) -> OnAction:
    """Return f(action, t0_ns, t1_ns) that reports {rank, stage, kind, micro_batch, t0_ns, t1_ns}."""
    return lambda action, t0, t1: comm.report(rank=comm.rank, **action._asdict(), t0_ns=t0, t1_ns=t1)


def sleeping_step(comm: Comm, schedule: Schedule, seconds: dict[str, list[float]], asleep: bool) -> None:
    """Take one step of `schedule` whose stages only take their time, and report every action.

    Args:    seconds: {kind: [s of every stage of the model]} of F, B, I and W.
             asleep: whether that is real time, in which the rank sleeps; else virtual time.
    """
    spend = time.sleep if asleep else comm.compute
    stages = {
        n: TimedStage(spend, *(seconds[kind][n % schedule.stages] for kind in "FBIW"))
        for n in schedule.stages_of(comm.rank)
    }
    comm.barrier()
    run_schedule(comm, schedule, stages, on_action=_reporter(comm))


def model_step(
    comm: Comm,
    model: nn.Module,
    schedule: Schedule,
    x: Tensor,
    y: Tensor,
    recompute: bool = False,
    partition: Partition = partition,
) -> dict[tuple[int, str], float]:
    """Take some steps of a real model; the last one is reported and traced.

    Args:    x, y: the whole batch, the same on every rank; partition: see HybridParallel.
    Returns: {(stage, kind): median s} of this rank's actions in the step before that.
    """
    traced, comm.trace.enabled = comm.trace.enabled, False
    mesh = DeviceMesh(comm, pp=comm.size)
    pipeline = HybridParallel(model, mesh, x, schedule=schedule, recompute=recompute, partition=partition)
    seconds: dict[tuple[int, str], list[float]] = {}
    for _ in range(WARM_UP):
        seconds = {}

        def note(action: Action, t0: int, t1: int, seconds: dict[tuple[int, str], list[float]] = seconds) -> None:
            seconds.setdefault((action.stage, action.kind), []).append((t1 - t0) / 1e9)

        pipeline.step(x, y, on_action=note)
    comm.barrier()
    comm.trace.enabled = traced
    pipeline.step(x, y, on_action=_reporter(comm))
    return {key: median(times) for key, times in seconds.items()}

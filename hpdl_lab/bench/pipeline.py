"""`hpdl bench pipeline`: a step of the same stages by our executor and by torch.distributed.pipelining on gloo.

Both have the same stages, schedule and micro-batches, and must come to the same gradients first. Then they take turns,
and are compared round by round. Memory is measured in processes of its own for each, as what was in use once stays in
the books.
"""

from __future__ import annotations

import contextlib
import copy
import os
import resource
import tempfile
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .. import models, schedules
from ..comm.torch.group import process_group
from ..mesh import DeviceMesh
from ..models.gpt import GPT
from ..parallel.grid.memory import SavedBytes
from ..parallel.hybrid.model import HybridParallel
from ..parallel.pipeline.split import Layers
from . import launch
from .report import Column, Report, Row, Table, field, with_memory
from .timing import quartiles, sample, slowest

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..comm.base import Comm
    from ..schedules import Schedule


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble_h1")
CHECKED_STEPS = 3
TOLERANCE = 1e-4  # of a parameter's largest gradient: torch divides by the micro-batches last, we first
QUARTILES = ("p25", "p75")
TABLE = Table(
    [
        field("schedule", width=15, left=True),
        field("name", width=6, left=True),
        *(Column(n, lambda row, i=i: f"{row['step_ms'][i]:.2f}", "ms") for i, n in enumerate(("step", *QUARTILES))),
        *(
            Column(n, lambda row, i=i: f"{row['of_torch'][i]:.2f}" if row["of_torch"] else "")
            for i, n in enumerate(("of torch", *QUARTILES))
        ),
        Column("saved", lambda row: " / ".join(f"{mib:.1f}" for mib in row["saved_MiB"]), "MiB by rank", 24),
        Column("peak memory", lambda row: " / ".join(f"{mib:.0f}" for mib in row["peak_MiB"]), "MiB by rank", 20),
        field("#wrong", "wrong", width=7),
    ]
)


# -- before the ranks start ------------------------------------------------------------------------------------------


def race_pipelines(
    ranks: int,
    size: str,
    batch: int,
    micro_batches: int,
    rounds: int,
    names: tuple[str, ...] = SCHEDULES,
    report: Report = Report(),  # noqa: B008
) -> list[Row]:
    """Race the candidates for every schedule, print the table; returns the rows.

    Args:    ranks: stages of the pipeline, interleaved has two per rank; size: of the GPT, a name in models/gpt.py;
             batch: examples a step; rounds: in which every candidate takes one step.
    Raises:  ValueError for arguments that make no sense; RuntimeError if the ranks end with an error.
    """
    if batch % micro_batches:
        raise ValueError(f"a batch of {batch} cannot be shared by {micro_batches} micro-batches of equal size")
    layers = models.module_of("gpt").SIZES[size].layers + 4  # two tables, a norm and the head are layers, too
    for name in names:
        stages = schedules.build(name, ranks, micro_batches).stages
        if stages > layers:
            raise ValueError(f"the {size} gpt has {layers} layers, too few for the {stages} stages of {name}")
    launch.warn_of_too_many(ranks)
    task = [size, batch, micro_batches]

    def memory(row: Row) -> Row:
        messages = launch.on_ranks(ranks, "pipeline_memory", [[*task, row["schedule"], row["name"]]])
        return next(message for message in messages if "peak_MiB" in message)

    messages = launch.on_ranks(ranks, "pipeline", [[*task, name, rounds] for name in names])
    title = f"gpt {size}, {batch} examples in {micro_batches} micro-batches on {ranks} ranks"
    return TABLE.tell(title, with_memory(messages, memory), _verdicts, report)


def _verdicts(rows: list[Row]) -> list[str]:
    """Return a sentence for each schedule: how ours compares with torch's."""
    return [f"{rows[0]['parameters']:,} parameters."] + [
        f"{row['schedule']}: our step takes {row['of_torch'][0]:.2f} times as long as torch's, median of the rounds."
        for row in rows
        if row["of_torch"]
    ]


# -- on every rank ---------------------------------------------------------------------------------------------------


def on_ranks(comm: Comm, size: str, batch: int, micro_batches: int, name: str, rounds: int) -> None:
    """Check, then time both candidates in turns; rank 0 reports a row for each."""
    with _candidates(comm, size, batch, micro_batches, name) as steps:
        wrong = _check(comm, steps)
        times: dict[str, list[float]] = {who: [] for who in steps}
        for i in range(rounds):
            for who in list(steps) if i % 2 else list(reversed(steps)):  # who is first changes
                times[who].append(sample(comm, steps[who]) / 1e6)
        for who in steps:
            times[who] = slowest(comm, times[who]).tolist()
        if comm.rank == 0:
            ratios = [ours / theirs for ours, theirs in zip(times["ours"], times["torch"], strict=True)]
            parameters = sum(p.numel() for p in steps["ours"].task.model.parameters())
            for who in steps:
                comm.report(
                    schedule=name,
                    name=who,
                    parameters=parameters,
                    step_ms=quartiles(times[who]),
                    of_torch=quartiles(ratios) if who == "ours" else None,
                    wrong=wrong[who],
                )


def memory_on_ranks(comm: Comm, size: str, batch: int, micro_batches: int, name: str, who: str) -> None:
    """Report on rank 0, for each rank, the most MiB that autograd kept at once and that the process had."""
    with _candidates(comm, size, batch, micro_batches, name, only=who) as steps:
        saved = SavedBytes(steps[who].params.values())
        for _ in range(CHECKED_STEPS):
            with saved:
                steps[who]()
    mine = [saved.most / 2**20, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    everybodys = np.asarray(comm.all_gather(np.array(mine)))
    if comm.rank == 0:
        comm.report(saved_MiB=everybodys[:, 0].round(3).tolist(), peak_MiB=everybodys[:, 1].round(1).tolist())


@contextlib.contextmanager
def _candidates(
    comm: Comm, size: str, batch: int, micro_batches: int, name: str, only: str | None = None
) -> Generator[dict[str, _Ours | _Torchs]]:
    """Yield {"torch": step, "ours": step}, or one of them; steps are called without arguments."""
    task = Task(size, batch, schedules.build(name, comm.size, micro_batches))
    ours = _Ours(comm, task)
    if only == "ours":
        yield {"ours": ours}
        return
    with process_group(comm, "gloo") as gloo:
        theirs = _Torchs(comm, task, ours, gloo)
        yield {"torch": theirs} if only else {"torch": theirs, "ours": ours}


def _check(comm: Comm, steps: dict[str, _Ours | _Torchs]) -> dict[str, int]:
    """Return {who: parameters, on all ranks together, whose gradient differs from torch's after a few steps}."""
    for step in steps.values():
        for _ in range(CHECKED_STEPS):
            step()
    wrong = 0
    for name, param in steps["ours"].params.items():
        theirs = cast(Tensor, steps["torch"].params[name].grad)
        mine = cast(Tensor, param.grad)
        wrong += int(((mine - theirs).abs() > TOLERANCE * theirs.abs().max()).sum())
    return {"torch": 0, "ours": int(comm.all_reduce(torch.tensor([wrong])))}


# -- the candidates ---------------------------------------------------------------------------------------------------


def _loss_of(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (b, s, V) and y (b, s)."""
    return cross_entropy(logits.flatten(0, -2), y.flatten())


class Task:
    """The task of both candidates: a GPT, a batch, a schedule.

    costs: of its layers, their parameters: measured ones would cut it otherwise in every run.
    """

    def __init__(self, size: str, batch: int, schedule: Schedule) -> None:
        generator = torch.Generator().manual_seed(0)
        self.model, self.schedule = cast(GPT, models.build("gpt", size)), schedule
        tokens = torch.randint(80, (batch, self.model.block + 1), generator=generator)
        self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.example = self.x[: batch // schedule.micro_batches]
        layers = Layers(self.model, self.example)
        self.costs = [sum(p.numel() for p in layer.parameters()) for layer in layers.stages([1] * len(layers))]


class _Ours:
    """A step of HybridParallel on `comm`, with stages only."""

    def __init__(self, comm: Comm, task: Task) -> None:
        mesh = DeviceMesh(comm, pp=comm.size)
        self.pipeline = HybridParallel(task.model, mesh, task.x, schedule=task.schedule, costs=task.costs)
        self.params, self.task = self.pipeline.named_parameters(), task

    def __call__(self) -> object:
        return self.pipeline.step(self.task.x, self.task.y)


class _Torchs:
    """torch.distributed.pipelining on a gloo group, with copies of the stages of `ours`.

    Tied weights are added as ours are: torch leaves them alone.
    """

    def __init__(self, comm: Comm, task: Task, ours: _Ours, group: dist.ProcessGroup) -> None:
        from torch.distributed.pipelining import PipelineStage

        self.comm, self.task, device = comm, task, torch.device("cpu")
        modules = {number: copy.deepcopy(stage.module) for number, stage in ours.pipeline.stages.items()}
        named = [pair for module in modules.values() for pair in module.named_parameters()]
        self.params = dict(named)
        names = {id(p): name for name, p in ours.params.items()}
        self.shared = [
            (group.comm, [self.params[names[id(p)]] for p in group.params])
            for group in ours.pipeline.gradients.groups
            if group.comm.size > 1
        ]
        total = task.schedule.stages
        stages = [PipelineStage(_OneTensor(m), n, total, device, group=group) for n, m in modules.items()]
        self.first, self.last = 0 in modules, total - 1 in modules
        self.run = _schedule_of(task.schedule, stages)

    def __call__(self) -> float | None:
        for param in self.params.values():
            param.grad = None
        x = (self.task.x,) if self.first else ()
        target, losses = (self.task.y, []) if self.last else (None, None)
        self.run.step(*x, target=target, losses=losses, return_outputs=False)
        for comm, params in self.shared:
            total = comm.all_reduce(torch.cat([cast(Tensor, p.grad).reshape(-1) for p in params]))
            for param, grad in zip(params, total.split([p.numel() for p in params]), strict=True):
                param.grad = grad.view(param.shape)
        return sum(loss.item() for loss in losses) / len(losses) if losses else None


class _OneTensor(nn.Module):
    """A stage whose only output is not in a tuple, as torch wants it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = self.module(*inputs)
        return outputs[0] if len(outputs) == 1 else outputs


def _schedule_of(schedule: Schedule, stages: list[Any]) -> Any:
    """Return torch's schedule of the same name; if it has none, its runtime with ours, as a file of strings."""
    from torch.distributed.pipelining import schedules as torch_schedules

    kinds = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}
    if schedule.name in kinds:
        return kinds[schedule.name](stages[0], schedule.micro_batches, loss_fn=_loss_of)
    if schedule.name == "interleaved":
        return torch_schedules.ScheduleInterleaved1F1B(stages, schedule.micro_batches, loss_fn=_loss_of)
    runtime = torch_schedules._PipelineScheduleRuntime(stages, schedule.micro_batches, loss_fn=_loss_of)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "schedule.csv")
        schedules.to_csv(schedule, path)
        runtime._load_csv(path)
    return runtime

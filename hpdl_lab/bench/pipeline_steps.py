"""The contenders of `hpdl bench pipeline`: one step of the same stages, by our executor and by torch's."""

import copy
import os
import tempfile

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from .. import models, schedules
from ..parallel.pipeline.model import Pipeline, Shared, add_shared_gradients
from ..parallel.pipeline.split import Layers

OURS, TORCHS = "ours", "torch"


def loss_of(logits, y):
    """Mean cross-entropy of logits (b, s, V) and y (b, s)."""
    return cross_entropy(logits.flatten(0, -2), y.flatten())


class Task:
    """What both contenders work on: a GPT, a batch, a schedule.

    costs: of its layers, their parameters: measured ones would cut it otherwise in every run.
    """

    def __init__(self, size, batch, schedule):
        generator = torch.Generator().manual_seed(0)
        self.model, self.schedule = models.build("gpt", size), schedule
        tokens = torch.randint(80, (batch, self.model.block + 1), generator=generator)
        self.x, self.y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.example = self.x[: batch // schedule.micro_batches]
        layers = Layers(self.model, self.example)
        self.costs = [sum(p.numel() for p in layer.parameters()) for layer in layers.stages([1] * len(layers))]


class Ours:
    """Pipeline.step on `comm`."""

    def __init__(self, comm, task):
        self.pipeline = Pipeline(comm, task.model, task.schedule, task.example, costs=task.costs)
        self.params, self.task = self.pipeline.named_parameters(), task

    def __call__(self):
        for param in self.params.values():
            param.grad = None
        return self.pipeline.step(self.task.x, self.task.y, loss_of)


class Torchs:
    """torch.distributed.pipelining on a gloo group, with copies of the stages of `ours`.

    Tied weights are added as ours are: torch leaves them alone.
    """

    def __init__(self, comm, task, ours, group):
        from torch.distributed.pipelining import PipelineStage

        self.comm, self.task, device = comm, task, torch.device("cpu")
        modules = {number: copy.deepcopy(stage.module) for number, stage in ours.pipeline.stages.items()}
        named = [pair for module in modules.values() for pair in module.named_parameters()]
        self.params = dict(named)
        names = {id(p): name for name, p in ours.params.items()}
        self.shared = [
            Shared(ranks, [self.params[names[id(p)]] for p in params]) for ranks, params in ours.pipeline.shared
        ]
        total = task.schedule.stages
        stages = [PipelineStage(OneTensor(m), n, total, device, group=group) for n, m in modules.items()]
        self.first, self.last = 0 in modules, total - 1 in modules
        self.run = schedule_of(task.schedule, stages)

    def __call__(self):
        for param in self.params.values():
            param.grad = None
        x = (self.task.x,) if self.first else ()
        target, losses = (self.task.y, []) if self.last else (None, None)
        self.run.step(*x, target=target, losses=losses, return_outputs=False)
        add_shared_gradients(self.comm, self.shared)
        return sum(loss.item() for loss in losses) / len(losses) if losses else None


class OneTensor(nn.Module):
    """A stage whose only output is not in a tuple, as torch wants it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        outputs = self.module(*inputs)
        return outputs[0] if len(outputs) == 1 else outputs


def schedule_of(schedule, stages):
    """torch's schedule of the same name; where it has none, its runtime with ours, as a file of strings."""
    from torch.distributed.pipelining import schedules as theirs

    kinds = {"gpipe": theirs.ScheduleGPipe, "1f1b": theirs.Schedule1F1B}
    if schedule.name in kinds:
        return kinds[schedule.name](stages[0], schedule.micro_batches, loss_fn=loss_of)
    if schedule.name == "interleaved":
        return theirs.ScheduleInterleaved1F1B(stages, schedule.micro_batches, loss_fn=loss_of)
    runtime = theirs._PipelineScheduleRuntime(stages, schedule.micro_batches, loss_fn=loss_of)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "schedule.csv")
        schedules.to_csv(schedule, path)
        runtime._load_csv(path)
    return runtime
